"""The fused kernels under Triton's interpreter against one naive softmax per token, and compiled for GPUs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvshelf.kernels.choose import Chosen
from kvshelf.kernels.prefix_attention import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    SelectedPrefix,
    SuffixRows,
    eager,
    prefix_attention,
    work,
)
from kvshelf.kernels.prefix_attention import triton as fused
from kvshelf.kernels.prefix_attention.heads import PrefixKind, RowKind, fold
from kvshelf.kernels.quantize.rows import QuantizedRows
from tests.amounts import SOAK, amount, in_turn
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import prefix_attention as reference
from tests.kernels.tensors import TOLERANCE, error, random
from tests.kernels.test_choose import choice_of, units
from tests.kernels.test_prefix_attention import (
    CPU,
    batches,
    merged,
    one_document,
    packed,
    pruned,
    stacked,
    states,
    streamed,
    zero_filled,
)

SETTING = work.Setting(kv_heads=2, group=4, itemsize=2, places=264, least_split=256)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def poisoned_states(layout, kv_heads, dim, value_dim, dtype=torch.float32):
    """Suffixes whose memory is NaN wherever no row has a token."""
    suffixes = states(layout, kv_heads, dim, value_dim, dtype)
    for rows, tensors in zip(layout.suffixes, suffixes, strict=True):
        for r, (first, length) in enumerate(zip(rows.first, rows.lengths, strict=True)):
            for tensor in tensors:
                tensor[r, :, length if first >= 0 else 0 :] = torch.nan
    return suffixes


def check(queries, prefixes, layout, kv_heads, value_dim, scale=0.3, tolerance=None, least_split=64):
    suffixes = poisoned_states(layout, kv_heads, queries.shape[2], value_dim, queries.dtype)
    ours = fused.prefix_attention(queries, prefixes, suffixes, layout, LogitRules(scale), least_split)
    assert ours.dtype == queries.dtype
    expected = reference.prefix_attention(queries, prefixes, suffixes, layout, LogitRules(scale))
    assert error(ours, expected) < (tolerance or TOLERANCE[queries.dtype])


KINDS = {
    "plain": lambda d, dv, t: packed([70, 5], d, dv, t),
    "stacked": lambda d, dv, t: stacked([66, 66], d, dv, t),
    "streamed": lambda d, dv, t: streamed([5, 0], d, dv, t),
    "int8": lambda d, dv, t: packed([70, 5], d, dv, t, bits=8, group=64),
    "int4": lambda d, dv, t: packed([70, 5], d, dv, t, bits=4, group=32),
    "int3": lambda d, dv, t: packed([70, 5], d, dv, t, bits=3, group=8),
    "int2": lambda d, dv, t: packed([70, 5], d, dv, t, bits=2, group=8),
    "groups of 12": lambda d, dv, t: packed([70, 5], d, dv, t, bits=4, group=12),
    "merged": lambda d, dv, t: merged([5, 66], [70, 70], d, dv, t),
    "merged int4": lambda d, dv, t: merged([5, 66], [70, 70], d, dv, t, bits=4),
    "selected": lambda d, dv, t: selected(packed([70, 5], d, dv, t)),
    "selected int4": lambda d, dv, t: selected(packed([70, 5], d, dv, t, bits=4, group=32)),
    "pruned": lambda d, dv, t: pruned([70, 5], d, dv, 3, t),
    "pruned int4": lambda d, dv, t: pruned([70, 5], d, dv, 3, t, bits=4, group=32),
    "selected pruned": lambda d, dv, t: selected(pruned([70, 5], d, dv, 3, t, bits=8, group=12)),
}


def selected(base):
    """Rows far apart, and fewer than there is room for: reading on would give others."""
    rows = torch.tensor([[0, 1, 33, 34, 69, 7], [4, 1, 1, 1, 1, 1]], dtype=torch.int32)
    return SelectedPrefix(base, Chosen(rows, torch.tensor([5, 1], dtype=torch.int32)))


@in_turn({"kind": [*KINDS], "dtype": DTYPES, "dim, value_dim": [(16, 16), (5, 24)]})
def test_each_kind_of_prefix(kind, dtype, dim, value_dim):
    document = (KINDS[kind](dim, value_dim, dtype),)
    check(random(2, 6, dim, dtype=dtype, seed=1), [document], one_document(1, rows=2), 2, value_dim)


@in_turn({"bits": [None, 2, 3, 4, 8], "dim, kept": [(64, 39), (16, 1), (24, 16)]})
def test_pruned_keys_are_keys_with_zeros(dim, kept, bits):
    document, beside = pruned([150, 5], dim, 24, kept, bits=bits, group=32), packed([3, 70], dim, 24, seed=7)
    q, layout, rules = random(3, 4, dim, seed=1), one_document(3), LogitRules(0.2)
    suffixes = poisoned_states(layout, 2, dim, 24)
    ours = fused.prefix_attention(q, [(document, beside)], suffixes, layout, rules, 64)
    expected = reference.prefix_attention(q, [(zero_filled(document, dim), beside)], suffixes, layout, rules)
    assert error(ours, expected) < TOLERANCE[torch.float32]


def test_each_token_chooses_by_its_query():
    base, queries = packed([70, 50], 16, 16, bits=4, group=32), random(2, 4, 16, seed=1)
    parts = units([70, 50], 8, 16)
    seen = []
    for _ in range(2):
        choice = choice_of([parts], 32)
        seen.append([SelectedPrefix(base, choice.chosen[0], choice)])
    layout = BatchLayout((1, 1), (SuffixRows((3, 5), (0, 1)),), CPU)
    check(queries, seen, layout, 2, 16)


def test_heads_as_wide_as_latents_are_left_to_torch(monkeypatch):
    """And values that are a part of the keys are read in place, by torch and by the kernels."""
    for dim, rank in ((24, 16), (576, 512)):
        joined, suffix = random(70, dim, seed=2), random(2, 1, 9, dim, seed=3)
        layout, prefix = one_document(1, rows=2), PackedPrefix(joined, joined[:, :rank], (70,))
        if dim > 256:
            monkeypatch.setattr(fused, "work_of", lambda *_: pytest.fail("no tile of a kernel fits"))
        arguments = random(2, 6, dim, seed=1), [[prefix]], [(suffix, suffix[..., :rank])], layout, LogitRules(0.1)
        ours = fused.prefix_attention(*arguments)
        assert error(ours, reference.prefix_attention(*arguments)) < TOLERANCE[torch.float32]


def test_keys_by_channels_and_values_by_tokens():
    def quantized(seed, axis):
        return QuantizedRows.quantize(random(70, 20, seed=seed), [70], bits=4, group=16, axis=axis)

    document = (PackedPrefix(quantized(1, "channels"), quantized(2, "tokens"), (70,)),)
    check(random(1, 2, 20), [document], one_document(1), 1, 20)


def kind_of(prefix):
    setting = SETTING._replace(kv_heads=len(prefix.lengths))
    return work.work_of([(prefix,)], one_document(1), setting).launches[0].kind


def test_rows_that_begin_anywhere():
    """Slices of wider memory, at odd addresses: nothing may be taken for aligned."""
    keys, values = random(70, 37), random(70, 37, seed=1)
    document = (PackedPrefix(keys[:, 1:17], values[:, 3:19], (30, 40)),)
    queries = random(4, 1, 33, seed=2)[..., 1:17].transpose(0, 1)
    check(queries, [document], one_document(1), 2, 16)
    assert not kind_of(document[0]).keys.aligned
    wide, stride = random(70, 64), random(70, 17)
    kind = kind_of(PackedPrefix(wide[:, 4:20], stride[:, :16], (70,)))
    assert (kind.keys.aligned, kind.values.aligned) == (True, False)


def test_alignment_is_that_of_every_row():
    """A wrong yes would be a fault on a GPU, and is nothing to the interpreter."""
    even, odd = random(3, 8, 32), random(3, 8, 33)
    assert fused.aligned(even, even[:, 1:, 4:20])
    for crooked in (even[..., 1:17], odd[..., :32], odd[0, :, :32], even[..., 1:17].bfloat16()[..., 3:]):
        assert not fused.aligned(even, crooked)


@pytest.mark.parametrize("least_split", [64, 1 << 20])
@pytest.mark.parametrize("group", [1, 2, 4, 8] if SOAK else [1, 8])
def test_several_documents_in_every_state(group, least_split):
    """Shared documents, several prefixes of one, none, empty ones, absent rows, and a question among them."""
    prefixes = [
        (packed([130, 20], 16, 16), streamed([9, 30], 16, 16), packed([0, 70], 16, 16, bits=4, group=32)),
        (),
        (merged([20, 9], [100, 3], 16, 16), packed([5, 0], 16, 16, seed=3)),
        (packed([0, 0], 16, 16), merged([3, 0], [0, 0], 16, 16)),
    ]
    rows = SuffixRows((3, 7, 70, 9, 2, 1), (0, -1, 1, 8, 9, 7))
    layout = BatchLayout((2, 5, 2, 1), (rows, SuffixRows((11,), (2,), 5)), CPU)
    check(random(10, 2 * group, 16, seed=1), prefixes, layout, 2, 16, least_split=least_split)


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 9), (torch.bfloat16, 18), (torch.float32, 18)], ids=str)
def test_shared_documents_in_blocks_of_query_rows(dtype, tokens):
    document = (packed([100, 30], 16, 16, dtype),)
    check(random(tokens, 8, 16, dtype=dtype, seed=1), [document], one_document(1, 3, rows=tokens), 2, 16)


def test_long_questions_are_causal():
    document = (packed([70], 16, 16), merged([20], [60], 16, 16))
    check(random(50, 4, 16, seed=1), [document], one_document(25, 90, rows=2), 1, 16)


def test_a_share_that_ends_within_a_question():
    layout = BatchLayout((3, 4), (SuffixRows((9,), (0,), 7),), CPU)
    check(random(7, 4, 16, seed=1), [(packed([70], 16, 16),), (packed([20], 16, 16, seed=5),)], layout, 1, 16)


def test_no_prefix_at_all():
    check(random(3, 4, 16, seed=1), [()], one_document(3, 8), 2, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [[], [9, 70]], ids=["no prefix", "a prefix"])
def test_weights_of_suffix_tokens_are_made_from_its_log_sum_exps(dtype, parts):
    rows = SuffixRows((40, 7, 5), (1, 0, 2), 1, observed=(True, True, False)), SuffixRows((50,), (3,), 4)
    layout = BatchLayout((7,), rows, CPU)
    suffixes, queries = states(layout, 2, 32, 32, dtype), random(7, 4, 32, dtype=dtype)
    prefixes = [[packed(parts, 32, 32, dtype)] if parts else []]
    weights = {}
    for form in (eager, fused):
        weights[form] = torch.zeros(3, 4, 43)
        asking = {"weights": [weights[form], None]}
        form.prefix_attention(queries, prefixes, suffixes, layout, LogitRules(0.3), **asking)
    for row, length in enumerate((40, 7)):
        ours, expected = (weights[form][row, :, :length] for form in (fused, eager))
        assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-6)


def test_large_logits_do_not_overflow():
    queries = random(2, 2, 16, seed=1) * 100  # logits to about 1000, of which fp32 has 6e-5
    document = (merged([7], [29], 16, 16), packed([130], 16, 16), packed([70], 16, 16, bits=8))
    check(queries, [document], one_document(2), 1, 16, tolerance=2e-4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(batches())
def test_any_batch(batch):
    check(*batch)


@settings(max_examples=amount(2, 5), deadline=None)
@given(batches())
def test_equals_eager_and_itself(batch):
    queries, prefixes, layout, kv_heads, value_dim = batch
    given_states = states(layout, kv_heads, queries.shape[2], value_dim)
    ours = fused.prefix_attention(queries, prefixes, given_states, layout, LogitRules(0.3))
    assert torch.equal(ours, fused.prefix_attention(queries, prefixes, given_states, layout, LogitRules(0.3)))
    assert error(ours, eager.prefix_attention(queries, prefixes, given_states, layout, LogitRules(0.3))) < 2e-6


def test_neighbours_change_nothing():
    """A row alone, and the same row in a batch: other splits, equal results but for rounding."""
    own, other = (packed([500, 130], 16, 16, seed=s) for s in (0, 7))
    queries = random(5, 4, 16, seed=1)
    batch = BatchLayout((2, 3), (SuffixRows((4, 9, 2, 7, 5), (0, 1, 2, 3, 4)),), CPU)
    ((keys, values),) = poisoned_states(batch, 2, 16, 16)
    together = fused.prefix_attention(queries, [(other,), (own,)], [(keys, values)], batch, LogitRules(0.3), 64)
    single = BatchLayout((1,), (SuffixRows((7,), (0,)),), CPU)
    alone = fused.prefix_attention(queries[3:4], [(own,)], [(keys[3:4], values[3:4])], single, LogitRules(0.3))
    assert error(together[3:4], alone) < 2e-6


@pytest.mark.usefixtures("forced_triton")
def test_dispatch(monkeypatch):
    called = []
    real = fused.work_of
    monkeypatch.setattr(fused, "work_of", lambda *args: called.append(args) or real(*args))
    document, layout = (packed([30], 16, 16),), one_document(1)
    suffixes = states(layout, 1, 16, 16)
    ours = prefix_attention(random(1, 2, 16), [document], suffixes, layout, LogitRules(0.3))
    assert called
    assert (
        error(ours, reference.prefix_attention(random(1, 2, 16), [document], suffixes, layout, LogitRules(0.3))) < 2e-6
    )


def test_a_work_table_is_made_once_for_a_composition_and_goes_with_its_documents(monkeypatch):
    uploads = []
    real = work.upload
    monkeypatch.setattr(work, "upload", lambda *args: uploads.append(args) or real(*args))
    first, second = packed([30, 9], 16, 16), packed([8, 1], 16, 16)
    layouts = [BatchLayout((1, 1), (SuffixRows((n, n), (0, 1)),), CPU) for n in (3, 4)]
    before = work.work_of([(first,), (second,)], layouts[0], SETTING)
    assert work.work_of([[first], [second]], layouts[1], SETTING) is before  # the next step
    assert len(uploads) == 1
    other = packed([8, 1], 16, 16)
    assert work.work_of([(first,), (other,)], layouts[1], SETTING) is not before
    assert work.work_of([(first, second), ()], layouts[1], SETTING) is not before
    assert work.work_of([(first, second)], one_document(2), SETTING) is not before
    assert len(uploads) == 4
    gone = weakref.ref(first), weakref.ref(second)
    del first, second, before
    uploads.clear()
    gc.collect()
    assert gone[0]() is gone[1]() is None


def splits_of(lengths, places=264, least=256, tokens=1):
    kv_heads = len(lengths)
    prefix = PackedPrefix(torch.empty(sum(lengths), 1), torch.empty(sum(lengths), 1), tuple(lengths))
    setting = SETTING._replace(kv_heads=kv_heads, places=places, least_split=least)
    made = work.work_of([(prefix,)], one_document(1, rows=tokens), setting)
    return made, made.launches[0].items


def test_one_long_document_fills_the_device_once():
    made, items = splits_of([32768] * 8)
    assert len(items) == 256
    assert set((items[:, 5] - items[:, 4]).tolist()) == {1024}
    assert made.scratch_rows == 256 * 4
    assert len(splits_of([100] * 8)[1]) == 8  # too short to split


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=9).filter(any),
    st.integers(2, 40),
    st.integers(1, 300),
    st.integers(1, 70),
)
def test_items_cover_every_row_once(lengths, places, least, tokens):
    """Each row of a head meets each query row once, and no two items write to one place."""
    made, items = splits_of(lengths, places, least, tokens)
    ahead = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    written = torch.zeros(made.scratch_rows, dtype=torch.int64)
    for _, rows, row, head, start, stop, out, *_ in items.tolist():
        count = min(made.block_m, rows - row)
        assert count > 0
        assert start % work.TILE == 0
        assert start < stop <= lengths[head]
        ahead[head, start:stop] += count
        written[out + row : out + row + count] += 1
    for head, length in enumerate(lengths):
        assert (ahead[head, :length] == tokens * SETTING.group).all()
        assert (ahead[head, length:] == 0).all()
    assert written.max() == 1
    heads = sum(length > 0 for length in lengths) * -(-tokens * SETTING.group // made.block_m)
    if 2 * heads <= places:
        assert len(items) <= places


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=4), st.integers(0, 9))
def test_folded_slots_are_the_slots(sizes, seed):
    classes, slots = [c for c, _ in sizes], [n if c else 0 for c, n in sizes]
    prefix: MergedPrefix = merged(classes, slots, 4, 4, seed=seed)
    folded = fold(prefix)
    bounds = folded.bounds.tolist()
    for head, (_, _, scales, of_class) in enumerate(prefix.heads):
        own = slice(bounds[head], bounds[head + 1])
        assert own.stop - own.start <= folded.most[head]
        rows = folded.scales[:, own].T
        assert rows.isnan().all(dim=1).sum() == 0
        slots = [(int(c), float(s)) for c, row in zip(folded.classes[own], rows, strict=True) for s in row if s == s]
        assert sorted(slots) == sorted(zip(of_class.tolist(), scales.tolist(), strict=True))


def row_kind(dim, bits=0, group=0, by_tokens=False):
    return RowKind(bits, group, by_tokens, dim * (bits or 8) // 8, dim, True)


def split_variant(name, dim, group, block_m, kind):
    tiles = fused.split_tiles(kind, {"fp32": 4}.get(name, 2), block_m)
    options = {option: tiles.pop(option) for option in ("num_warps", "num_stages")}
    signature = {"queries": f"*{name}", "items": "*i64", "outs": "*fp32", "lses": "*fp32"}
    signature |= {"token_stride": "i32", "head_stride": "i32", "scale": "fp32"}
    constants = {"DIM": dim, "HEADS": group, "COLUMNS": work.COLUMNS, "UPCAST": False}
    return Variant("attend_splits", signature, constants | fused.kind_constants(kind) | tiles, **options)


def suffix_variant(name, dim, group, rows):
    tiles = fused.suffix_tiles(dim, dim, {"fp32": 4}.get(name, 2), rows)
    options = {option: tiles.pop(option) for option in ("num_warps", "num_stages")}
    signature = dict.fromkeys(("queries", "keys", "values", "out"), f"*{name}")
    signature |= {"united": "*fp32", "rows": "*i32", "tokens": "*i32"}
    signature |= {"shares": "*i64", "outs": "*fp32", "lses": "*fp32"}
    strides = ("token_stride", "head_stride", "key_row_stride", "key_head_stride", "value_row_stride")
    signature |= dict.fromkeys((*strides, "value_head_stride", "new"), "i32") | {"scale": "fp32"}
    constants = {"DIM": dim, "VALUE_DIM": dim, "HEADS": group, "KEY_STRIDE": dim, "VALUE_STRIDE": dim}
    constants |= {"ALIGNED": True, "PREFIXED": True, "TELLING": True, "UPCAST": False}
    return Variant("attend_suffixes", signature, constants | tiles, **options)


@pytest.mark.slow
def test_splits_compile_for_gpus(compile_all):
    """Llama-3.1-8B's heads, and smaller ones in fp32: a decode step, and as many query rows as a kind takes."""

    def kind(dim, bits=0, merged=False, selected=False):
        return PrefixKind(merged, row_kind(dim, bits, 32, True), row_kind(dim, bits, 32), selected)

    variants = [
        split_variant("bf16", 128, 4, 16, kind(128)),
        split_variant("fp16", 128, 4, 64, kind(128)),
        split_variant("bf16", 128, 4, 32, kind(128, 4)),
        split_variant("bf16", 128, 4, 32, kind(128, 3)),
        split_variant("bf16", 128, 4, 32, kind(128, merged=True)),
        split_variant("bf16", 128, 4, 16, kind(128, 4, selected=True)),
        split_variant("fp32", 64, 2, 32, kind(64)),
        split_variant("bf16", 128, 4, 16, kind(128)._replace(keys=row_kind(77, 4, 32, True))),
        split_variant("bf16", 128, 4, 16, kind(128)._replace(keys=row_kind(77, 3, 32, True))),
    ]
    compiled = compile_all("kvshelf.kernels.prefix_attention.splits", variants)
    require_fits(compiled)
    assert max(one.shared for one in compiled if one.arch == 80) < 163 * 1024 // 1.5


@pytest.mark.slow
def test_suffixes_compile_for_gpus(compile_all):
    variants = [
        suffix_variant("bf16", 128, 4, 4),
        suffix_variant("fp16", 128, 4, 128),
        suffix_variant("fp32", 64, 2, 2),
    ]
    require_fits(compile_all("kvshelf.kernels.prefix_attention.union", variants))
