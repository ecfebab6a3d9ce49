"""Column sums against one fp64 softmax per row, chunk by chunk, and against two other ways to the same sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.column_sums import column_sums, reference
from tests.kernels.tensors import LargestTensor, error, random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rows", "keys", "dim", "local_rows"),
    [
        (4, 2, 100, 100, 16, 0),
        (7, 1, 63, 63, 5, 8),  # odd group and head size
        (2, 2, 300, 300, 8, 7),  # more rows than a block, the boundary of the window inside one
        (8, 2, 129, 129, 24, 129),  # the window is everything
        (4, 1, 40, 513, 16, 11),  # the last rows of a longer sequence
        (4, 2, 1, 1, 16, 1),
        (2, 1, 1, 77, 16, 0),
        (200, 1, 3, 5, 4, 1),  # a group larger than a product's rows
    ],
)
def test_equals_the_reference(dtype, q_heads, kv_heads, rows, keys, dim, local_rows):
    """Inputs are rounded before either form sees them, so that the tolerance is fp32's whatever their dtype."""
    q, k = random(q_heads, rows, dim, dtype=dtype), random(kv_heads, keys, dim, dtype=dtype, seed=1)
    total, local = column_sums(q, k, 0.3, local_rows)
    expected_total, expected_local = reference.column_sums(q, k, 0.3, local_rows)
    assert total.dtype == local.dtype == torch.float32
    assert error(total, expected_total) < 2e-6
    if local_rows:
        assert error(local, expected_local) < 2e-6
    else:
        assert torch.equal(local, torch.zeros(q_heads, keys))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_of_chunks_add_up(data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    num_tokens = sum(lengths)
    q, k = random(kv_heads * group, num_tokens, 8), random(kv_heads, num_tokens, 8, seed=1)
    whole, _ = column_sums(q, k, 0.5)
    added, end = torch.zeros_like(whole), 0
    for length in lengths:
        end += length
        total, local = column_sums(q[:, end - length : end], k[:, :end], 0.5, local_rows=length)
        assert error(local, total) < 2e-6
        added[:, :end] += total
    assert error(added, whole) < 2e-6


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 200), earlier=st.integers(0, 50), local_rows=st.integers(0, 250))
def test_every_row_gives_one(rows, earlier, local_rows):
    q, k = random(4, rows, 8) * 5, random(2, rows + earlier, 8, seed=1)
    total, local = column_sums(q, k, 1.0, local_rows)
    assert torch.allclose(total.sum(dim=1), torch.full((4,), float(rows)), rtol=1e-5)
    assert torch.allclose(local.sum(dim=1), torch.full((4,), float(min(rows, local_rows))), rtol=1e-5)
    assert (local <= total).all()


def test_no_rows_give_nothing():
    for sums in column_sums(random(4, 0, 8), random(2, 9, 8), 1.0):
        assert torch.equal(sums, torch.zeros(4, 9))


def test_large_logits_do_not_overflow():
    q, k = random(2, 50, 8) * 100, random(1, 50, 8, seed=1) * 10
    total, _ = column_sums(q, k, 1.0)
    expected, _ = reference.column_sums(q, k, 1.0)
    assert error(total, expected) < 1e-3  # logits of several thousand, of which fp32 has 5e-4


def test_sums_of_a_long_sequence_keep_growing():
    """A sink that takes all mass: a bf16 accumulator would stop at 256, fp16 logits would overflow."""
    q, k = torch.ones(1, 1500, 4, dtype=torch.bfloat16) * 8, torch.zeros(1, 1500, 4, dtype=torch.bfloat16)
    k[:, 0] = 8
    total, _ = column_sums(q, k, 1.0)
    assert float(total[0, 0]) == pytest.approx(1500)


def test_strided_input_is_not_changed():
    q, k = (random(70, 4, 16, seed=s).transpose(0, 1) for s in (1, 2))  # token-major memory, as models give it
    before = q.clone(), k.clone()
    total, _ = column_sums(q, k[:2], 0.25)
    expected, _ = column_sums(q.contiguous(), k[:2].contiguous(), 0.25)
    assert torch.equal(total, expected)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_memory_is_bounded_by_a_block_of_rows():
    q, k = random(4, 1000, 8), random(2, 1000, 8, seed=1)
    with LargestTensor() as largest:
        column_sums(q, k, 1.0, local_rows=300)
    assert 0 < largest.numel <= 128 * 1000
