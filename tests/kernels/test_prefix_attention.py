"""Attention of flat batches over each kind of prefix, and mixtures of them, against one naive softmax per token."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.native import library
from kvshelf.kernels.prefix_attention import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    PrefixWeights,
    StackedPrefix,
    StreamedPrefix,
    SuffixRows,
    attention_by_document,
    causal_attention,
    eager,
    native,
    prefix_attention,
)
from kvshelf.kernels.prefix_attention import attend as attend_module
from kvshelf.kernels.prefix_attention.attend import attend, attend_in_blocks, combine
from kvshelf.kernels.prefix_attention.eager import attend_prefix
from kvshelf.kernels.quantize.rows import QuantizedRows
from tests.amounts import amount, in_turn, pairwise
from tests.kernels.references import prefix_attention as reference
from tests.kernels.tensors import TOLERANCE, LargestTensor, error, random

CPU = torch.device("cpu")


def packed(lengths, dim, value_dim, dtype=torch.float32, seed=0, bits=None, group=8):
    keys = random(sum(lengths), dim, dtype=dtype, seed=seed)
    values = random(sum(lengths), value_dim, dtype=dtype, seed=seed + 100)
    if bits is None:
        return PackedPrefix(keys, values, tuple(lengths))
    return PackedPrefix(
        QuantizedRows.quantize(keys, lengths, bits=bits, group=group, axis="tokens"),
        QuantizedRows.quantize(values, lengths, bits=bits, group=group, axis="channels"),
        tuple(lengths),
    )


def pruned(lengths, dim, value_dim, kept, dtype=torch.float32, seed=0, bits=None, group=8):
    """Keys with `kept` of the queries' `dim` channels, others in each head."""
    generator = torch.Generator().manual_seed(seed)
    channels = [torch.randperm(dim, generator=generator)[:kept].sort().values for _ in lengths]
    return replace(
        packed(lengths, kept, value_dim, dtype, seed, bits, group), channels=torch.stack(channels).to(torch.int32)
    )


def zero_filled(prefix, dim):
    """The same entries with keys of all channels, and zeros in those that were pruned."""
    heads = []
    for (keys, _), channels in zip(prefix.heads, prefix.channels, strict=True):
        keys = keys[:]
        heads.append(keys.new_zeros(len(keys), dim))
        heads[-1][:, channels.long()] = keys
    return PackedPrefix(torch.cat(heads), torch.cat([values[:] for _, values in prefix.heads]), prefix.lengths)


class Rows:
    """A `Block` over tensors that remembers its requests, and poisons the copies that it gave out before."""

    def __init__(self, prefix):
        self.heads = prefix.heads
        self.requests = []
        self.copies = []

    def __call__(self, head, start, stop):
        for tensor in self.copies:
            tensor.fill_(torch.nan)
        self.requests.append((head, start, stop))
        self.copies = [states[start:stop].clone() for states in self.heads[head]]
        return tuple(self.copies)


def streamed(lengths, dim, value_dim, dtype=torch.float32, seed=0):
    return StreamedPrefix(tuple(lengths), Rows(packed(lengths, dim, value_dim, dtype, seed)))


def stacked(lengths, dim, value_dim, dtype=torch.float32, seed=0):
    """Views of longer buffers, as a prefill in chunks has them."""
    longest = max(lengths)
    keys = random(len(lengths), longest + 3, dim, dtype=dtype, seed=seed)
    values = random(len(lengths), longest + 3, value_dim, dtype=dtype, seed=seed + 100)
    return StackedPrefix(keys[:, :longest], values[:, :longest])


def merged(classes, slots, dim, value_dim, dtype=torch.float32, seed=0, bits=None):
    whole = packed(classes, dim, value_dim, dtype, seed, bits)
    generator = torch.Generator().manual_seed(seed)
    slots = [n if c else 0 for n, c in zip(slots, classes, strict=True)]
    slot_classes = [torch.randint(max(c, 1), (n,), generator=generator) for c, n in zip(classes, slots, strict=True)]
    scales = torch.rand(sum(slots), generator=generator) * 3
    return MergedPrefix(whole.keys, whole.values, whole.lengths, scales, torch.cat(slot_classes).int(), tuple(slots))


def states(layout, kv_heads, dim, value_dim, dtype=torch.float32, spare=3):
    """Suffix tensors with room to spare, which holds large numbers: whoever read it would be far off."""
    made = []
    for i, rows in enumerate(layout.suffixes):
        shape = (len(rows.first), kv_heads, max(rows.lengths) + spare)
        keys = random(*shape, dim, dtype=dtype, seed=20 + i)
        values = random(*shape, value_dim, dtype=dtype, seed=40 + i)
        for r, length in enumerate(rows.lengths):
            keys[r, :, length:], values[r, :, length:] = 50.0, 1000.0
        made.append((keys, values))
    return made


def one_document(tokens, length=None, rows=1):
    """`rows` rows of equal length on one document, each with `tokens` new tokens."""
    length = length or tokens
    suffix = SuffixRows((length,) * rows, tuple(range(0, rows * tokens, tokens)), tokens)
    return BatchLayout((rows * tokens,), (suffix,), CPU)


def check(queries, prefixes, layout, kv_heads, value_dim, scale=0.3, tolerance=None):
    suffixes = states(layout, kv_heads, queries.shape[2], value_dim, queries.dtype)
    ours = prefix_attention(queries, prefixes, suffixes, layout, LogitRules(scale))
    assert ours.dtype == queries.dtype
    expected = reference.prefix_attention(queries, prefixes, suffixes, layout, LogitRules(scale))
    assert error(ours, expected) < (tolerance or TOLERANCE[queries.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "q_heads", "new", "length", "prefix", "dim", "value_dim"),
    [
        (1, 4, 1, 1, [37, 37], 16, 16),
        (1, 4, 5, 5, [63], 16, 16),
        (2, 6, 3, 9, [17, 5], 24, 24),  # ragged heads, a question after an earlier turn
        (1, 8, 1, 12, [9, 0, 3, 1], 8, 8),  # a head that keeps nothing
        (1, 2, 4, 4, [0, 0], 16, 16),  # an empty prefix
        (2, 4, 3, 3, [11, 29], 16, 40),  # values wider than keys: the generic path
        (1, 3, 600, 640, [7], 5, 5),  # more queries than a block, odd head size
    ],
)
def test_packed_prefixes(dtype, rows, q_heads, new, length, prefix, dim, value_dim):
    q = random(rows * new, q_heads, dim, dtype=dtype, seed=1)
    document = (packed(prefix, dim, value_dim, dtype),)
    check(q, [document], one_document(new, length, rows), len(prefix), value_dim)


def test_strided_input():
    q = random(4, 5, 16, seed=1).transpose(0, 1)  # as models give it
    document = (stacked([33, 33], 16, 16),)
    check(q, [document], one_document(5), 2, 16)


@pairwise(
    {
        "dtype": TOLERANCE,
        "num_rows": [0, 1, 5, 1023, 1024, 1025, 2048, 3001],
        "dim, value_dim": [(16, 16), (5, 9)],
    }
)
def test_streamed_prefix_is_made_in_blocks(dtype, num_rows, dim, value_dim):
    q = random(3, 4, dim, dtype=dtype, seed=1)
    part = streamed([num_rows, 0], dim, value_dim, dtype)
    layout = one_document(3)
    suffixes = states(layout, 2, dim, value_dim, dtype)
    ours = prefix_attention(q, [(part,)], suffixes, layout, LogitRules(0.3))
    blocks = [(start, stop) for head, start, stop in part.block.requests if head == 0]
    assert max(stop - start for start, stop in blocks) <= 1024
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(num_rows))
    expected = reference.prefix_attention(q, [(part,)], suffixes, layout, LogitRules(0.3))
    assert error(ours, expected) < TOLERANCE[dtype]


@pairwise(
    {
        "dtype": TOLERANCE,
        "new": [1, amount(20, 200)],
        "classes, slots, dim, value_dim": [
            (7, 29, 16, 16),
            (1, 1, 16, 16),
            (1, 50, 3, 5),
            (40, 7, 16, 16),
            (12, 12, 8, 24),
            (130, 700, 64, 64),
            (5, 0, 8, 8),
            (0, 0, 8, 8),
        ],
    }
)
def test_merged_prefix(dtype, new, classes, slots, dim, value_dim):
    q = random(2 * new, 4, dim, dtype=dtype, seed=1)
    document = (merged([classes, classes], [slots, slots], dim, value_dim, dtype),)
    check(q, [document], one_document(new, new + 1, rows=2), 2, value_dim)


def test_merged_prefix_with_a_slot_of_scale_one_per_class_is_packed():
    q, whole = random(1, 1, 4, 16, seed=1), packed([33], 16, 16)
    part = MergedPrefix(whole.keys, whole.values, (33,), torch.ones(33), torch.arange(33).int(), (33,))
    for ours, expected in zip(
        attend_prefix(q, part, LogitRules(0.3)), attend_prefix(q, whole, LogitRules(0.3)), strict=True
    ):
        assert error(ours, expected) < 2e-6


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.skipif(library() is None, reason="not compiled")
def test_c_attends_to_classes_by_itself(new, monkeypatch):
    monkeypatch.setattr(eager, "attend_share", None)
    layout, part = one_document(new), merged([40, 0, 3], [130, 0, 29], 64, 64)
    queries, suffixes = random(new, 6, 64, seed=1), states(layout, 3, 64, 64)
    out = native.prefix_attention(queries, [(part,)], suffixes, layout, LogitRules(0.3, softcap=5.0))
    expected = reference.prefix_attention(queries, [(part,)], suffixes, layout, LogitRules(0.3, softcap=5.0))
    assert error(out, expected) < TOLERANCE[torch.float32]


def test_merged_prefix_takes_rows_in_blocks(monkeypatch):
    monkeypatch.setattr(attend_module, "_LOGITS_PER_BLOCK", 100)  # 3 rows of 29 slots
    check(random(5, 4, 16, seed=1), [(merged([7], [29], 16, 16),)], one_document(5), 1, 16)


def test_merged_prefix_makes_nothing_of_slots_times_head_size():
    part, q = merged([10], [5000], 64, 64), random(1, 1, 4, 64, seed=1)
    assert part.heads  # the classes as indices are made once, not per call
    with LargestTensor() as largest:
        attend_prefix(q, part, LogitRules(0.3))
    assert largest.numel == 4 * 5000


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quantized_prefix(dtype, bits):
    """Ragged heads, groups that do not divide them, classes under a codec, and plain entries beside them."""
    q = random(6, 4, 24, dtype=dtype, seed=1)
    document = (
        packed([37, 5], 24, 24, dtype, bits=bits),
        merged([9, 4], [20, 3], 24, 24, dtype, seed=7, bits=bits),
        packed([3, 0], 24, 24, dtype, seed=9),
    )
    check(q, [document], one_document(3, rows=2), 2, 24)


@pairwise(
    {
        "dtype": TOLERANCE,
        "bits": [2, 3, 4, 8],
        "dim, group": [(16, 16), (64, 32), (80, 48), (128, 64), (256, 160)],
        "tokens": [1, 3, 17],
    }
)
def test_quantized_rows_of_whole_vectors(dtype, bits, dim, group, tokens):
    """Several runs of a head, the last tile and the last group of each cut short."""
    document = packed([1100, 0, 33], dim, dim, dtype, bits=bits, group=group)
    q = random(tokens, 6, dim, dtype=dtype, seed=1)
    check(q, [(document,)], one_document(tokens), 3, dim, scale=dim**-0.5)


@in_turn(
    {
        "dtype": TOLERANCE,
        "bits": [None, 2, 3, 4, 8],
        "dim, kept": [(64, 39), (64, 48), (64, 64), (16, 1), (128, 77), (256, 155), (24, 15), (80, 33)],
        "tokens": [1, 3, 17],
        "form": ["chosen", "eager"],
    }
)
def test_pruned_keys_are_keys_with_zeros(dtype, bits, dim, kept, tokens, form):
    """Several runs of a head, an empty one, rows that are no whole vectors, and other entries beside them: in C on this
    CPU, and in torch's operations."""
    document = pruned([1100, 0, 33], dim, dim, kept, dtype, bits=bits, group=32)
    beside = packed([5, 3, 0], dim, dim, dtype, seed=7)
    q, layout, rules = random(tokens, 6, dim, dtype=dtype, seed=1), one_document(tokens), LogitRules(dim**-0.5)
    suffixes = states(layout, 3, dim, dim, dtype)
    attend = prefix_attention if form == "chosen" else eager.prefix_attention
    ours = attend(q, [(document, beside)], suffixes, layout, rules)
    expected = reference.prefix_attention(q, [(zero_filled(document, dim), beside)], suffixes, layout, rules)
    assert error(ours, expected) < TOLERANCE[dtype]
    same = reference.prefix_attention(q, [(document, beside)], suffixes, layout, rules)
    assert error(same, expected) < 1e-12


@pytest.mark.parametrize("bits", [None, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c_reads_nothing_behind_pruned_keys(dtype, bits, guarded):
    """The last row of the last head ends where memory ends."""
    document = pruned([33, 40], 64, 64, 39, dtype, bits=bits, group=32)
    keys = document.keys
    at_end = (
        guarded(keys)
        if bits is None
        else replace(keys, **{name: guarded(getattr(keys, name)) for name in ("codes", "scales", "zeros")})
    )
    q, layout = random(2, 4, 64, dtype=dtype, seed=1), one_document(2)
    suffixes = states(layout, 2, 64, 64, dtype)
    arguments = [(replace(document, keys=at_end),)], suffixes, layout, LogitRules(0.1)
    assert error(prefix_attention(q, *arguments), reference.prefix_attention(q, *arguments)) < TOLERANCE[dtype]


@pytest.fixture
def guarded():
    """Copies a tensor to the end of a page behind which no memory can be read."""
    libc, maps = ctypes.CDLL(None, use_errno=True), []

    def copied(tensor):
        page, size = mmap.PAGESIZE, tensor.nbytes
        whole = -(-size // page) * page
        memory = mmap.mmap(-1, whole + page)
        maps.append(memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(base + whole), ctypes.c_size_t(page), 0) == 0
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=whole - size)
        flat.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return flat.view(tensor.dtype).view(tensor.shape)

    yield copied
    for memory in maps:
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(memory)), 3) == 0


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quantized_rows_are_attended_to_a_block_at_a_time(bits):
    part, q = packed([3000], 64, 64, bits=bits, group=32), random(1, 1, 4, 64, seed=1)
    with LargestTensor() as largest:
        out, lse = attend_prefix(q, part, LogitRules(0.3))
    assert largest.bytes == 1024 * 64 * 4  # of 3000 rows
    whole = PackedPrefix(part.keys.dequantize(), part.values.dequantize(), (3000,))
    expected_out, expected_lse = attend_prefix(q, whole, LogitRules(0.3))
    assert error(out, expected_out) < 2e-6
    assert error(lse, expected_lse) < 2e-6


def test_large_logits_do_not_overflow():
    q = random(2, 2, 16, seed=1) * 100  # logits to about 1000, of which fp32 has 6e-5
    document = (merged([7], [29], 16, 16), streamed([1500], 16, 16), packed([3], 16, 16))
    check(q, [document], one_document(2), 1, 16, tolerance=2e-4)


@st.composite
def batches(draw):
    """Any number of documents, of any parts, and rows on them in any state, some of whose places take no part."""
    dim, value_dim = draw(st.sampled_from([(8, 8), (3, 7), (16, 16)]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 40), min_size=kv_heads, max_size=kv_heads)

    def part(seed):
        match draw(st.sampled_from(["packed", "quantized", "pruned", "streamed", "stacked", "merged"])):
            case "packed":
                return packed(draw(sizes), dim, value_dim, seed=seed)
            case "pruned":
                kept, bits = draw(st.integers(1, dim)), draw(st.sampled_from([None, 2, 3, 4, 8]))
                return pruned(draw(sizes), dim, value_dim, kept, seed=seed, bits=bits)
            case "quantized":
                bits, group_size = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([8, 16]))
                return packed(draw(sizes), dim, value_dim, seed=seed, bits=bits, group=group_size)
            case "streamed":
                return streamed(draw(sizes), dim, value_dim, seed=seed)
            case "stacked":
                return stacked([draw(st.integers(0, 40))] * kv_heads, dim, value_dim, seed=seed)
            case _:
                return merged(draw(sizes), draw(sizes), dim, value_dim, seed=seed)

    shares, prefixes, single, several = [], [], [], []
    first = 0
    for document in range(draw(st.integers(1, 4))):
        prefixes.append(tuple(part(100 * document + i) for i in range(draw(st.integers(0, 3)))))
        shares.append(0)
        for _ in range(draw(st.integers(1, 3))):
            new = draw(st.sampled_from([1, 1, 2, 5]))
            length = new + draw(st.integers(0, 9))
            (single if new == 1 else several).append((first, length, new))
            first += new
            shares[-1] += new
    suffixes = [SuffixRows((length,), (start,), new) for start, length, new in several]
    while single:
        size = draw(st.integers(1, len(single)))
        rows = [(start, length) for start, length, _ in single[:size]]
        single = single[size:]
        for _ in range(draw(st.integers(0, 2))):
            rows.insert(draw(st.integers(0, len(rows))), (-1, 1))
        suffixes.append(SuffixRows(tuple(length for _, length in rows), tuple(start for start, _ in rows)))
    layout = BatchLayout(tuple(shares), tuple(suffixes), CPU)
    return random(first, kv_heads * group, dim, seed=1), prefixes, layout, kv_heads, value_dim


@settings(max_examples=amount(40, 120), deadline=None)
@given(batches())
def test_any_batch(batch):
    # With the scale of the other tests a merged prefix has logits of 20 and more, and float32's rounding of such a
    # logit alone moves a weight by the tolerance: one draw in some thousands failed.
    check(*batch, scale=0.1)


@settings(max_examples=amount(20, 40), deadline=None)
@given(batches(), st.data())
def test_neighbours_change_nothing(batch, data):
    """What others ask, and what their documents and suffixes hold, is nothing to a token."""
    queries, prefixes, layout, kv_heads, value_dim = batch
    suffixes = states(layout, kv_heads, queries.shape[2], value_dim)
    before = prefix_attention(queries, prefixes, suffixes, layout, LogitRules(0.3))
    chosen = data.draw(st.sampled_from([(rows, r) for rows in layout.suffixes for r in range(len(rows.first))]))
    rows, r = chosen
    if rows.first[r] < 0:
        return
    mine = slice(rows.first[r], rows.first[r] + rows.new)
    others = queries + 1
    others[mine] = queries[mine]
    for part, (keys, values) in zip(layout.suffixes, suffixes, strict=True):
        for row in range(len(part.first)):
            if (part, row) != (rows, r):
                keys[row] += 1
                values[row] -= 1
    after = prefix_attention(others, prefixes, suffixes, layout, LogitRules(0.3))
    assert error(after[mine], before[mine]) < 2e-6


@pytest.mark.parametrize(
    "part",
    [packed([0], 8, 8), streamed([0], 8, 8), merged([0], [0], 8, 8), merged([3], [0], 8, 8)],
    ids=["packed", "streamed", "merged", "classes-without-slots"],
)
def test_an_empty_prefix_has_no_mass(part):
    out, lse = attend_prefix(random(1, 1, 5, 8), part, LogitRules(0.3))
    assert torch.equal(out, torch.zeros(1, 1, 5, 8))
    assert torch.equal(lse, torch.full((1, 1, 5), -torch.inf))


def test_combine_of_two_empty_sets_is_empty():
    nothing = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    out, lse = combine(*nothing, *nothing)
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])


def test_generic_attention_equals_the_cpu_operation():
    q, k, v = random(1, 2, 130, 16), random(1, 2, 77, 16, seed=1), random(1, 2, 77, 16, seed=2)
    mask = torch.zeros(1, 1, 130, 77).masked_fill_(random(1, 1, 130, 77, seed=3) > 1, -torch.inf)
    for ours, expected in zip(
        attend_in_blocks(q, k, v, LogitRules(0.2), mask), attend(q, k, v, LogitRules(0.2), mask), strict=True
    ):
        assert error(ours, expected) < 2e-6


@pytest.mark.parametrize(
    ("queries", "problem"),
    [
        (random(3, 4, 16), "a batch of 2 tokens"),  # more tokens than the layout has
        (random(2, 3, 16), "q_heads"),  # no multiple of the KV heads
        (random(2, 4, 8), "q_heads"),  # another head size
        (random(2, 4, 16, dtype=torch.bfloat16), "one dtype"),
        (random(2, 4, 16).double(), "float32, bfloat16 or float16"),
        (random(2, 16, 4).transpose(1, 2), "contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(queries, problem):
    layout = one_document(2)
    with pytest.raises(InvalidTensor, match=problem) as refused:
        prefix_attention(queries, [()], states(layout, 2, 16, 16), layout, LogitRules(0.3))
    assert str(list(queries.shape)) in refused.value.message


RULES = {
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": [0.5, -3.0, 40.0, -torch.inf]},
    "window": {"window": 11},
    "chunk": {"chunk": 11},
    "all": {"softcap": 0.7, "sinks": [0.5, -3.0, 4.0, 1.0], "window": 11},
    "all with chunks": {"softcap": 0.7, "sinks": [0.5, -3.0, 4.0, 1.0], "chunk": 7},
}


def rules_of(*, softcap=0.0, sinks=None, window=None, chunk=None):
    """Of 4 query heads."""
    return LogitRules(0.3, softcap, None if sinks is None else torch.tensor(sinks), window, chunk)


@pairwise({"fields": [*RULES.values()], "dtype": [*TOLERANCE], "kept": [3, 10, 700]})
def test_softcaps_sinks_windows_and_chunks(dtype, fields, kept):
    """Three documents, one with two rows; tokens that see all of a prefix, its end, and nothing of it any more."""
    rows = SuffixRows((3, 1, 25), (0, -1, 1)), SuffixRows((9,), (2,)), SuffixRows((40,), (3,), 40)
    layout = BatchLayout((2, 1, 40), rows, CPU, starts=(1003, 1010, 1000))
    prefixes = [(packed([kept] * 2, 16, 16, dtype, seed=i),) for i in range(3)]
    queries = random(43, 4, 16, dtype=dtype, seed=1) * 2
    suffixes = states(layout, 2, 16, 16, dtype)
    rules = rules_of(**fields)
    ours = prefix_attention(queries, prefixes, suffixes, layout, rules)
    expected = reference.prefix_attention(queries, prefixes, suffixes, layout, rules)
    assert error(ours, expected) < TOLERANCE[dtype]
    assert error(ours, reference.prefix_attention(queries, prefixes, suffixes, layout, LogitRules(0.3))) > 0.01


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize(("new", "length"), [(9, 9), (3, 9), (1, 9), (600, 640)])
def test_hidden_suffix_tokens_are_seen_by_themselves_alone(new, length, softcap):
    """In each row and KV head others, and none of a prefix."""
    layout = one_document(new, length, rows=2)
    queries, ((keys, values),) = random(2 * new, 4, 16, seed=1), states(layout, 2, 16, 16)
    hidden = torch.rand(2, 2, keys.shape[2], generator=torch.Generator().manual_seed(3)) < 0.5
    (rows,) = layout.suffixes
    layout, prefix = replace(layout, suffixes=(replace(rows, hidden=hidden),)), packed([37, 5], 16, 16)
    ours = prefix_attention(queries, [(prefix,)], [(keys, values)], layout, rules_of(softcap=softcap))
    for row, token, head in product(range(2), range(0, new, 1 + new // 9), range(4)):
        own, at, place = head // 2, length - new + token, row * new + token
        seen = [before for before in range(at + 1) if before == at or not hidden[row, own, before]]
        pairs = zip(prefix.heads[own], (keys, values), strict=True)
        all_keys, all_values = (torch.cat([before, suffix[row, own, seen]]).double() for before, suffix in pairs)
        logits = all_keys @ queries[place, head].double() * 0.3
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        torch.testing.assert_close(ours[place, head].double(), logits.softmax(0) @ all_values, rtol=1e-5, atol=1e-5)


def test_what_hides_tokens_stays_small():
    """Of 4,096 tokens and 4 heads no mask and no logits of 512 rows are there at once, which would be 8 million."""
    layout = one_document(4096)
    (rows,) = layout.suffixes
    suffixes = states(layout, 2, 16, 16, spare=0)
    layout = replace(layout, suffixes=(replace(rows, hidden=torch.rand(1, 2, 4096) < 0.5),))
    with LargestTensor() as largest:
        prefix_attention(random(4096, 4, 16), [()], suffixes, layout, LogitRules(0.3))
    assert largest.numel <= 1 << 22


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (SuffixRows((9,), (0,), 2), (1, 4, 12)),  # of query heads
        (SuffixRows((9,), (0,), 2), (1, 2, 9)),  # without the spare room
        (SuffixRows((9, 7), (0, 1)), (2, 2, 12)),  # other lengths
        (SuffixRows((9, 9), (0, 1), observed=(True, False)), (2, 2, 12)),  # weights are wanted
    ],
)
def test_hidden_tokens_that_no_form_can_hide_are_refused(rows, shape):
    hiding = replace(rows, hidden=torch.zeros(shape, dtype=torch.bool))
    layout = BatchLayout((2,), (hiding,), CPU)
    with pytest.raises(InvalidTensor, match=r"hidden.* \[rows, kv_heads, capacity\]"):
        prefix_attention(random(2, 4, 16), [()], states(layout, 2, 16, 16), layout, LogitRules(0.3))


@pytest.mark.parametrize("fields", [{"softcap": 0.7}, {"sinks": RULES["all"]["sinks"]}], ids=["softcap", "sinks"])
@pytest.mark.parametrize("kind", ["ragged", "int4", "merged", "streamed"])
def test_softcaps_and_sinks_of_every_kind_of_prefix(fields, kind):
    part = {
        "ragged": lambda: packed([40, 7], 16, 16),
        "int4": lambda: packed([1100, 7], 16, 16, bits=4),
        "merged": lambda: merged([7, 5], [29, 8], 16, 16),
        "streamed": lambda: streamed([1100, 3], 16, 16),
    }[kind]()
    layout = one_document(5, rows=2)
    rules = rules_of(**fields)
    queries, suffixes = random(10, 4, 16, seed=1), states(layout, 2, 16, 16)
    ours = prefix_attention(queries, [(part,)], suffixes, layout, rules)
    if kind == "streamed":
        part = streamed([1100, 3], 16, 16)
    assert (
        error(ours, reference.prefix_attention(queries, [(part,)], suffixes, layout, rules)) < TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_documents_of_whole_chunks_leave_no_entries(dtype):
    """A prefix without entries beside one of an unfinished chunk."""
    rows = SuffixRows((3, 9), (0, 1)), SuffixRows((9,), (2,), 9)
    layout = BatchLayout((1, 1, 9), rows, CPU, starts=(55, 58, 66))
    prefixes = [(packed([kept] * 2, 16, 16, dtype, seed=kept),) for kept in (0, 3, 0)]
    queries, suffixes = random(11, 4, 16, dtype=dtype, seed=1) * 2, states(layout, 2, 16, 16, dtype)
    ours = prefix_attention(queries, prefixes, suffixes, layout, rules_of(chunk=11))
    expected = reference.prefix_attention(queries, prefixes, suffixes, layout, rules_of(chunk=11))
    assert error(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tokens", [1, 30, 600])
def test_causal_attention_by_rules(fields, tokens):
    """A document: its softmax has the log-sum-exps that policies read."""
    layout = replace(one_document(tokens), starts=(0,))
    rules = rules_of(**fields)
    queries = random(1, 4, tokens, 16, seed=1) * 2
    (states_of,) = states(layout, 2, 16, 16, spare=0)
    out, lse = causal_attention(queries, *states_of, rules)
    expected = reference.prefix_attention(queries[0].transpose(0, 1), [()], [states_of], layout, rules)
    assert error(out[0].transpose(0, 1), expected) < TOLERANCE[torch.float32]
    logits = rules.scale * torch.einsum(
        "htd,hkd->htk", queries[0].double(), states_of[0][0].double().repeat_interleave(2, 0)
    )
    if rules.softcap:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    places = torch.arange(tokens)
    begin = places // rules.chunk * rules.chunk - 1 if rules.chunk else places - (rules.window or tokens)
    logits.masked_fill_((places > places[:, None]) | (places <= begin[:, None]), -torch.inf)
    if rules.sinks is not None:
        logits = torch.cat([logits, rules.sinks.double()[:, None, None].expand(-1, tokens, 1)], dim=2)
    assert error(lse[0], logits.logsumexp(2)) < TOLERANCE[torch.float32]


@in_turn(
    {
        "rows_at_once": [1, 21, 2048],
        "dtype": [*TOLERANCE],
        "fields": [{}, {"softcap": 0.7, "sinks": RULES["all"]["sinks"]}],
    }
)
def test_masses_of_documents_are_those_of_one_softmax(fields, rows_at_once, dtype, monkeypatch):
    """Documents of every kind of prefix, one of two prefixes and one without entries, a few at a time or all."""
    monkeypatch.setattr(eager, "_ROWS_OF_DOCUMENTS", rows_at_once)
    documents = [
        (packed([40, 7], 16, 16, dtype),),
        (packed([1100, 7], 16, 16, dtype, seed=2, bits=4), packed([0, 3], 16, 16, dtype, seed=3)),
        (packed([0, 0], 16, 16, dtype, seed=5),),
        (merged([7, 5], [29, 8], 16, 16, dtype, seed=6),),
        (packed([9, 9], 16, 16, dtype, seed=4),),
    ]
    layout = one_document(7, length=10)
    queries, suffixes = random(7, 4, 16, dtype=dtype, seed=1) * 2, states(layout, 2, 16, 16, dtype)
    out, masses = attention_by_document(queries, documents, suffixes, layout, rules_of(**fields))
    whole = [tuple(prefix for document in documents for prefix in document)]
    expected = reference.prefix_attention(queries, whole, suffixes, layout, rules_of(**fields))
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(masses, masses_of(queries, documents, suffixes[0][0], rules_of(**fields))) < TOLERANCE[dtype]
    assert masses[2].max() == 0


def masses_of(queries, documents, suffix, rules):
    """`[documents, N, q_heads]` fp64: the 7 queries are the last of a suffix of 10."""
    masses = torch.zeros(len(documents), *queries.shape[:2], dtype=torch.float64)
    for t, h in product(range(7), range(4)):
        keys = [torch.cat([reference.token_states(p, h // 2)[0] for p in document]) for document in documents]
        own = suffix[0, h // 2, : 10 - 7 + t + 1].double()
        logits = rules.scale * torch.cat([*keys, own]) @ queries[t, h].double()
        if rules.softcap:
            logits = rules.softcap * torch.tanh(logits / rules.softcap)
        sinks = [] if rules.sinks is None else [rules.sinks[h : h + 1].double()]
        weights = torch.softmax(torch.cat([logits, *sinks]), dim=0)[: len(logits)]
        masses[:, t, h] = torch.stack([part.sum() for part in weights.split([*map(len, keys), len(own)])])[:-1]
    return masses


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [packed, merged, streamed])
@pytest.mark.parametrize(
    "fields", [{}, {"softcap": 0.7}, {"sinks": RULES["all"]["sinks"]}], ids=["none", "cap", "sinks"]
)
def test_weights_of_suffix_tokens_are_those_of_one_softmax(fields, kind, dtype):
    """Of the rows that ask, and the output is what it is without."""
    made = kind([9, 70], [30, 90], 32, 32, dtype) if kind is merged else kind([9, 70], 32, 32, dtype)
    rules = rules_of(**fields)
    rows = SuffixRows((40, 7, 5), (1, 0, 2), 1, observed=(True, True, False)), SuffixRows((50,), (3,), 4)
    layout = BatchLayout((7,), rows, CPU)
    suffixes, queries = states(layout, 2, 32, 32, dtype), random(7, 4, 32, dtype=dtype)
    weights = torch.full((3, 4, 43), torch.nan)
    out = prefix_attention(queries, [[made]], suffixes, layout, rules, [weights, None])
    assert torch.equal(out, prefix_attention(queries, [[made]], suffixes, layout, rules))
    for row, (token, length) in enumerate(((1, 40), (0, 7))):
        keys = suffixes[0][0][row, :, :length].double()
        for head in range(4):
            before, _ = reference.token_states(made, head // 2)
            logits = rules.scale * torch.cat([before, keys[head // 2]]) @ queries[token, head].double()
            if rules.softcap:
                logits = rules.softcap * torch.tanh(logits / rules.softcap)
            if rules.sinks is not None:
                logits = torch.cat([rules.sinks[head : head + 1].double(), logits])
            expected = torch.softmax(logits, 0)[-length:]
            assert torch.allclose(weights[row, head, :length].double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", ["none", "cap", "sinks", "streamed"])
def test_weights_of_a_prefix_are_those_of_one_softmax(form, dtype):
    """Of one that the token of one row alone sees, as long as weights are told at all."""
    rules = rules_of(**{"cap": {"softcap": 0.7}, "sinks": {"sinks": RULES["all"]["sinks"]}}.get(form, {}))
    shared = (streamed if form == "streamed" else packed)([40, 12], 32, 32, dtype, seed=7)
    own = replace(packed([33, 33], 32, 32, dtype), weights=PrefixWeights())
    layout = BatchLayout((1, 1), (SuffixRows((40, 7), (1, 0), observed=(False, True)),), CPU)
    suffixes, queries = states(layout, 2, 32, 32, dtype), random(2, 4, 32, dtype=dtype)
    arguments = queries, [[shared, own], [shared]], suffixes, layout, rules
    out = prefix_attention(*arguments)
    assert own.weights.of_token is None
    assert torch.equal(prefix_attention(*arguments, [torch.full((2, 4, 43), torch.nan)]), out)
    for head in range(4):
        rows = own.heads[head // 2][0].double(), reference.token_states(shared, head // 2)[0]
        keys = torch.cat([*rows, suffixes[0][0][1, head // 2, :7].double()])
        logits = rules.scale * keys @ queries[0, head].double()
        if rules.softcap:
            logits = rules.softcap * torch.tanh(logits / rules.softcap)
        if rules.sinks is not None:
            logits = torch.cat([logits, rules.sinks[head : head + 1].double()])
        weights = own.weights.of_token[head // 2, head % 2].double()
        assert torch.allclose(weights, torch.softmax(logits, 0)[:33], rtol=1e-4, atol=1e-7)
