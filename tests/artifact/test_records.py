"""Layer records in memory: their entries, and what attention sees of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.encoding import encode
from kvshelf.artifact.heads import cut, joined
from kvshelf.artifact.packed import Rotate
from kvshelf.artifact.records import Kept, LayerRecord, Merged, Parts
from kvshelf.errors import StateConflict
from kvshelf.kernels.prefix_attention import LogitRules, MergedPrefix, PackedPrefix
from kvshelf.kernels.prefix_attention.eager import attend_prefix
from tests.store.caches import make_layer, make_merged, parts_of, split_at_random, tensors_of

LENGTHS = (45, 0, 1, 33)  # ragged, one head empty, one with a single entry, two with a short last group
CODECS = ("none", "int8", "int4:group=8,residual=5", "int2:group=16,residual=0", "int4:residual=1000")
KINDS = ("kept", "kept pre", "merged", "merged pre", "parts", "parts pre", "merged parts", "merged parts pre")


def rotate(keys: Tensor, positions: Tensor) -> Tensor:
    """A toy RoPE: the two halves of a key as the coordinates of one plane."""
    angles = positions.to(keys.dtype).unsqueeze(-1) / 7
    left, right = keys.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], dim=-1)


def make_record(kind: str, dims: tuple[int, int] = (8, 6), dtype: torch.dtype = torch.float32) -> LayerRecord:
    generator = torch.Generator().manual_seed(11)
    rope_mode = "pre" if "pre" in kind else "baked"
    record: Kept | Merged
    if "merged" in kind:
        record = make_merged(LENGTHS, 100, dims=dims, dtype=dtype, rope_mode=rope_mode, generator=generator)
    else:
        record = replace(make_layer(LENGTHS, 100, dims=dims, dtype=dtype, generator=generator), rope_mode=rope_mode)
    return split_at_random(record, generator) if "parts" in kind else record


def shown(record: LayerRecord, rotate: Rotate | None, head: int) -> tuple[Tensor, Tensor]:
    """The keys and values, fp64, of every token that one head shows, the naive way: out of `dense()`, one by one."""
    if isinstance(record, Parts):
        parts = [shown(part, rotate, head) for part in record.parts]
        return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
    keys, values, valid = (tensor[head] for tensor in record.dense())
    keys, values = keys[valid].double(), values[valid].double()
    positions = record.positions[head]
    if isinstance(record, Merged):
        slots = slice(record.slot_offsets[head], record.slot_offsets[head + 1])
        classes = record.slot_classes[slots].tolist()
        scales = record.slot_scales[slots].tolist()
        keys = torch.stack([scale * keys[i] for i, scale in zip(classes, scales, strict=True)]) if classes else keys[:0]
        values, positions = values[classes], record.slot_positions[slots]
    if record.rope_mode == "pre":
        assert rotate is not None
        keys = rotate(keys, positions)
    return keys, values


def attend(record: LayerRecord, head: int, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention through `prefixes`, summed over them by log-sum-exp in fp64."""
    rows = queries.expand(1, record.kv_heads, -1, -1)
    found = [attend_prefix(rows, prefix, LogitRules(scale)) for prefix in record.prefixes(rotate)]
    found = [(out[0, head], lse[0, head]) for out, lse in found]
    lse = torch.stack([lse.double() for _, lse in found])
    weights = (lse - lse.logsumexp(dim=0)).exp() if lse.isfinite().any() else torch.zeros_like(lse)
    return sum(w.unsqueeze(-1) * out.double() for w, (out, _) in zip(weights, found, strict=True)), lse.logsumexp(dim=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(8, 8), (6, 5)], ids=["equal dims", "odd dims"])
def test_attention_through_prefixes_is_that_over_what_the_record_stands_for(
    kind: str, codec: str, dims: tuple[int, int]
) -> None:
    record = encode(Codec.parse(codec), make_record(kind, dims))
    queries = torch.randn(5, dims[0], generator=torch.Generator().manual_seed(3))
    scale = 1 / math.sqrt(dims[0])
    for head in range(record.kv_heads):
        keys, values = shown(record, rotate, head)
        out, lse = attend(record, head, queries, scale)
        logits = scale * queries.double() @ keys.T
        torch.testing.assert_close(lse, logits.logsumexp(dim=1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out, logits.softmax(dim=1) @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["kept pre", "merged", "merged pre", "parts"])
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_attention_in_bfloat16(kind: str, codec: str) -> None:
    record = encode(Codec.parse(codec), make_record(kind, dtype=torch.bfloat16))
    queries = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for head in (0, 3):
        keys, values = shown(record, rotate, head)
        out, _ = attend(record, head, queries, 0.35)
        expected = (0.35 * queries.double() @ keys.T).softmax(dim=1) @ values
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_more_rows_than_one_block() -> None:
    """Blocks of 1,024 rows begin within a group of entries and within a class."""
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(3, 8, generator=generator)
    for record in (
        make_layer((2500,), 4000, generator=generator),
        make_merged((1500,), 4000, rope_mode="pre", generator=generator),
    ):
        for codec in ("int8:group=1024,residual=0", "int4:group=64,residual=7"):
            encoded = encode(Codec.parse(codec), record)
            keys, values = shown(encoded, rotate, 0)
            out, _ = attend(encoded, 0, queries, 0.35)
            expected = (0.35 * queries.double() @ keys.T).softmax(dim=1) @ values
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_plain_keys_are_read_in_place_and_slots_are_not_expanded() -> None:
    record = make_record("kept")
    (prefix,) = record.prefixes(None)
    assert isinstance(prefix, PackedPrefix)
    assert prefix.keys is record.keys
    assert [head.data_ptr() for head, _ in prefix.heads] == [head.data_ptr() for head, _ in record.heads()]
    assert [type(prefix) for prefix in make_record("merged").prefixes(None)] == [MergedPrefix]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pre" in kind])
def test_keys_that_need_a_rotation_are_not_attended_to_without_it(kind: str) -> None:
    with pytest.raises(StateConflict, match="without their rotation"):
        make_record(kind).prefixes(None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_and_its_parts_agree(kind: str) -> None:
    """Splitting a record changes none of its facts."""
    whole = make_record(kind.replace("parts", ""))
    record = make_record(kind)
    assert (record.kv_heads, record.entries, record.uniform) == (4, 79, False)
    assert (record.key_dim, record.value_dim, record.dtype) == (8, 6, torch.float32)
    for ours, theirs in zip(record.positions, whole.positions, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.diff() > 0).all()
    for ours, theirs in zip(record.dense(), whole.dense(), strict=True):
        assert torch.equal(ours, theirs)
    assert record.nbytes == whole.nbytes


def test_parts_are_uniform_when_their_heads_are_equal_together() -> None:
    generator = torch.Generator().manual_seed(2)
    whole = make_layer((6, 6), 20, generator=generator)
    chosen = torch.zeros(12, dtype=torch.bool)
    chosen[:4] = True
    record = Parts((whole.select(chosen), whole.select(~chosen)))
    assert record.uniform
    assert not record.parts[0].uniform


def test_the_bytes_of_a_merged_record() -> None:
    record = make_record("merged", dims=(8, 6), dtype=torch.bfloat16)
    assert isinstance(record, Merged)
    slots = 2 * 45 + 2 * 1 + 2 * 33
    assert (record.slots, record.slot_lengths) == (slots, [90, 0, 2, 66])
    assert record.nbytes == 79 * (8 + 6) * 2 + 79 * 4 + slots * (4 + 4 + 4)


def test_importance_is_not_counted_and_follows_its_entries() -> None:
    record = make_record("kept")
    assert isinstance(record, Kept)
    ranked = replace(record, importance=record.keys[:, 0].clone())
    assert ranked.nbytes == record.nbytes
    part = ranked.select(ranked.importance > 0)  # type: ignore[operator]
    assert torch.equal(part.importance, part.keys[:, 0])  # type: ignore[index, arg-type]
    assert 0 < part.entries < record.entries


def test_a_merged_record_keeps_the_slots_of_the_classes_that_are_chosen() -> None:
    record = make_record("merged")
    assert isinstance(record, Merged)
    chosen = torch.arange(record.entries) % 3 == 0
    part = record.select(chosen)
    for head in range(4):
        kept = chosen[record.offsets[head] : record.offsets[head + 1]].nonzero()[:, 0].tolist()
        slots = slice(record.slot_offsets[head], record.slot_offsets[head + 1])
        old = zip(
            *(t[slots].tolist() for t in (record.slot_positions, record.slot_classes, record.slot_scales)), strict=True
        )
        expected = [(p, kept.index(c), s) for p, c, s in old if c in kept]
        mine = slice(part.slot_offsets[head], part.slot_offsets[head + 1])
        new = zip(*(t[mine].tolist() for t in (part.slot_positions, part.slot_classes, part.slot_scales)), strict=True)
        assert list(new) == expected


def test_the_columns_of_a_merged_record_are_of_its_slots() -> None:
    """And go with them; those of entries are the centers' own."""
    record = make_merged(LENGTHS, 100, generator=torch.Generator().manual_seed(11))
    record = replace(record, columns={"place": record.slot_positions.float()})
    chosen = torch.arange(record.entries) % 3 != 1
    heads = [cut(record, first, last) for first, last in ((0, 1), (1, 3), (3, 4))]
    for one in (record, record.select(chosen), record.select(chosen, [30, 0, 1, 22]), *heads, joined(heads)):
        assert isinstance(one, Merged)
        assert torch.equal(one.columns["place"], one.slot_positions.float())
        assert all(map(torch.equal, one.of_entries("place"), [own.float() for own in one.positions]))
        assert one.centered
    assert all(own.isnan().all() for own in record.of_entries("other"))
    assert not replace(record, slot_scales=record.slot_scales * 2).centered
    assert not replace(record, entries_at=record.entry_positions + 1).centered


def test_moving_to_another_device_moves_all_of_a_record() -> None:
    """The device without memory: what arrives there can be counted, not read."""
    for kind in ("kept", "merged", "parts"):
        record = encode(Codec.parse("int4"), make_record(kind))
        moved = record.to("meta")
        assert moved.nbytes == record.nbytes
        assert record.to("cpu") is record
        assert {t.device.type for part in parts_of(moved) for t in tensors_of(part).values()} == {"meta"}


def test_quantized_records_have_no_views() -> None:
    record = encode(Codec.parse("int4:residual=0"), make_record("kept"))
    assert isinstance(record, Kept)
    with pytest.raises(StateConflict, match="use dense"):
        record.heads()
