"""Attention over each kind of prefix, and mixtures of them, against one naive softmax over all their tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.prefix_attention import DensePrefix, MergedPrefix, StreamedPrefix, prefix_attention, reference
from kvshelf.kernels.prefix_attention import attend as attend_module
from kvshelf.kernels.prefix_attention.attend import attend, attend_in_blocks, combine
from kvshelf.kernels.quantize import dequantize_channels, dequantize_tokens, quantize_channels, quantize_tokens
from tests.kernels.tensors import TOLERANCE, LargestTensor, error, random


def dense(num_rows, dim, value_dim, dtype=torch.float32, seed=0):
    return DensePrefix(
        random(num_rows, dim, dtype=dtype, seed=seed), random(num_rows, value_dim, dtype=dtype, seed=seed + 100)
    )


class Rows:
    """A `Block` over tensors that remembers what was asked of it, and poisons what it gave out before."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.asked = []
        self.given = []

    def __call__(self, start, stop):
        for tensor in self.given:
            tensor.fill_(torch.nan)
        self.asked.append((start, stop))
        self.given = [self.keys[start:stop].clone(), self.values[start:stop].clone()]
        return tuple(self.given)


def streamed(num_rows, dim, value_dim, dtype=torch.float32, seed=0):
    whole = dense(num_rows, dim, value_dim, dtype, seed)
    return StreamedPrefix(num_rows, Rows(whole.keys, whole.values))


def merged(num_classes, num_slots, dim, value_dim, dtype=torch.float32, seed=0):
    classes = dense(num_classes, dim, value_dim, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    slot_classes = (
        torch.randint(num_classes, (num_slots,), generator=generator) if num_classes else torch.empty(0).long()
    )
    slot_scales = torch.rand(num_slots, generator=generator) * 3
    return MergedPrefix(num_classes, Rows(classes.keys, classes.values), slot_scales, slot_classes)


def suffix(batch, kv_heads, length, dim, value_dim, dtype=torch.float32):
    return (
        random(batch, kv_heads, length, dim, dtype=dtype, seed=2),
        random(batch, kv_heads, length, value_dim, dtype=dtype, seed=3),
    )


def check(queries, prefix, keys, values, scale=0.3, tolerance=None):
    ours = prefix_attention(queries, prefix, keys, values, scale)
    assert ours.dtype == queries.dtype
    expected = reference.prefix_attention(queries, prefix, keys, values, scale)
    assert error(ours, expected) < (tolerance or TOLERANCE[queries.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "queries", "length", "prefix", "dim", "value_dim"),
    [
        (1, 4, 2, 1, 1, [37, 37], 16, 16),
        (1, 4, 1, 5, 5, [63], 16, 16),
        (2, 6, 2, 3, 9, [17, 5], 24, 24),  # ragged heads, a question after an earlier turn
        (1, 8, 4, 1, 12, [9, 0, 3, 1], 8, 8),  # a head that keeps nothing
        (1, 2, 2, 4, 4, [0, 0], 16, 16),  # an empty prefix
        (2, 4, 2, 3, 3, [11, 29], 16, 40),  # values wider than keys: the generic path
        (1, 3, 1, 600, 640, [7], 5, 5),  # more queries than a block, odd head size
    ],
)
def test_dense_prefixes(dtype, batch, q_heads, kv_heads, queries, length, prefix, dim, value_dim):
    q = random(batch, q_heads, queries, dim, dtype=dtype, seed=1)
    heads = [[dense(n, dim, value_dim, dtype, seed=h)] for h, n in enumerate(prefix)]
    check(q, heads, *suffix(batch, kv_heads, length, dim, value_dim, dtype))


def test_strided_input():
    q, keys, values = (random(1, 5, 4, 16, seed=s).transpose(1, 2) for s in (1, 2, 3))  # as models give them
    packed = random(2 * 33, 16), random(2 * 33, 16, seed=5)
    heads = [[DensePrefix(*kv)] for kv in zip(*(states.view(2, 33, 16) for states in packed), strict=True)]
    check(q, heads, keys[:, :2], values[:, :2], 0.25)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 1023, 1024, 1025, 2048, 3001])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (5, 9)])
def test_streamed_prefix_is_made_in_blocks(dtype, num_rows, dim, value_dim):
    q = random(1, 4, 3, dim, dtype=dtype, seed=1)
    part = streamed(num_rows, dim, value_dim, dtype)
    ours = prefix_attention(q, [[part], []], *suffix(1, 2, 4, dim, value_dim, dtype), 0.3)
    asked = list(part.block.asked)
    assert max(stop - start for start, stop in asked) <= 1024
    assert [row for start, stop in asked for row in range(start, stop)] == list(range(num_rows))
    expected = reference.prefix_attention(q, [[part], []], *suffix(1, 2, 4, dim, value_dim, dtype), 0.3)
    assert error(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [1, 200])
@pytest.mark.parametrize(
    ("classes", "slots", "dim", "value_dim"),
    [(7, 29, 16, 16), (1, 1, 16, 16), (1, 50, 3, 5), (40, 7, 16, 16), (12, 12, 8, 24), (5, 0, 8, 8), (0, 0, 8, 8)],
)
def test_merged_prefix(dtype, queries, classes, slots, dim, value_dim):
    q = random(2, 4, queries, dim, dtype=dtype, seed=1)
    heads = [[merged(classes, slots, dim, value_dim, dtype, seed=h)] for h in range(2)]
    check(q, heads, *suffix(2, 2, queries + 1, dim, value_dim, dtype))


def test_merged_prefix_with_a_slot_of_scale_one_per_class_is_dense():
    q, states = random(4, 16, seed=1), dense(33, 16, 16)
    part = MergedPrefix(33, Rows(states.keys, states.values), torch.ones(33), torch.arange(33))
    for ours, expected in zip(part.attend(q, 0.3), states.attend(q, 0.3), strict=True):
        assert error(ours, expected) < 2e-6


def test_merged_prefix_takes_rows_in_blocks(monkeypatch):
    monkeypatch.setattr(attend_module, "_LOGITS_PER_BLOCK", 100)  # 3 rows of 29 slots
    check(random(1, 4, 5, 16, seed=1), [[merged(7, 29, 16, 16)]], *suffix(1, 1, 5, 16, 16))


def test_merged_prefix_makes_nothing_of_slots_times_head_size():
    part, q = merged(10, 5000, 64, 64), random(4, 64, seed=1)
    with LargestTensor() as largest:
        part.attend(q, 0.3)
    assert largest.numel == 4 * 5000


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_rows_are_attended_to_a_block_at_a_time(bits):
    states, q = dense(3000, 64, 64), random(4, 64, seed=1)
    keys, values = quantize_tokens(states.keys, bits, 32), quantize_channels(states.values, bits, 32)

    def block(start, stop):
        return (
            dequantize_tokens(*keys, bits, 32, 64, torch.float32, start, stop),
            dequantize_channels(*values, bits, 32, 64, torch.float32, start, stop),
        )

    with LargestTensor() as largest:
        out, lse = StreamedPrefix(3000, block).attend(q, 0.3)
    assert largest.bytes == 1024 * 64 * 4  # of 3000 rows
    expected_out, expected_lse = DensePrefix(*block(0, 3000)).attend(q, 0.3)
    assert error(out, expected_out) < 2e-6
    assert error(lse, expected_lse) < 2e-6


def test_large_logits_do_not_overflow():
    q = random(1, 2, 2, 16, seed=1) * 100  # logits to about 1000, of which fp32 has 6e-5
    prefix = [[merged(7, 29, 16, 16), streamed(1500, 16, 16), dense(3, 16, 16)]]
    check(q, prefix, *suffix(1, 1, 2, 16, 16), tolerance=2e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mixture_of_prefixes(data):
    """Ragged heads of any number of parts of any kind and size, empty ones included."""
    dim, value_dim = data.draw(st.sampled_from([(8, 8), (3, 7)]))
    sizes = st.integers(0, 40)

    def part(seed):
        match data.draw(st.sampled_from(["dense", "streamed", "merged"])):
            case "dense":
                return dense(data.draw(sizes), dim, value_dim, seed=seed)
            case "streamed":
                return streamed(data.draw(sizes), dim, value_dim, seed=seed)
            case _:
                classes = data.draw(sizes)
                return merged(classes, data.draw(sizes) if classes else 0, dim, value_dim, seed=seed)

    kv_heads, group, batch = (data.draw(st.integers(1, 3)) for _ in range(3))
    heads = [[part(10 * h + i) for i in range(data.draw(st.integers(0, 3)))] for h in range(kv_heads)]
    new = data.draw(st.integers(1, 4))
    length = new + data.draw(st.integers(0, 3))
    q = random(batch, kv_heads * group, new, dim, seed=1)
    check(q, heads, *suffix(batch, kv_heads, length, dim, value_dim))


@pytest.mark.parametrize("part", [dense(0, 8, 8), streamed(0, 8, 8), merged(0, 0, 8, 8), merged(3, 0, 8, 8)], ids=repr)
def test_an_empty_prefix_has_no_mass(part):
    out, lse = part.attend(random(5, 8), 0.3)
    assert torch.equal(out, torch.zeros(5, 8))
    assert torch.equal(lse, torch.full((5,), -torch.inf))


def test_combine_of_two_empty_sets_is_empty():
    nothing = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    out, lse = combine(*nothing, *nothing)
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])


def test_generic_attention_equals_the_cpu_operation():
    q, k, v = random(1, 2, 130, 16), random(1, 2, 77, 16, seed=1), random(1, 2, 77, 16, seed=2)
    mask = torch.zeros(130, 77).masked_fill_(random(130, 77, seed=3) > 1, -torch.inf)
    for ours, expected in zip(attend_in_blocks(q, k, v, 0.2, mask), attend(q, k, v, 0.2, mask), strict=True):
        assert error(ours, expected) < 2e-6
