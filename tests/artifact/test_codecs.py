"""Codecs: their texts, what they do to a record, and how far off they may be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvshelf.artifact.codecs import BITS, Codec, resolve
from kvshelf.artifact.encoding import encode
from kvshelf.artifact.records import Kept, Merged, PackedRecord, Parts
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.quantize.rows import QuantizedRows
from tests.store.caches import make_cache, make_layer, make_merged, parts_of, split_at_random


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("int4", "int4"),
        ("int8:group=32", "int8"),
        ("int2:residual=32,group=32", "int2"),
        ("int4:residual=128,group=64", "int4:group=64,residual=128"),
        ("int4:residual=000", "int4:residual=0"),
        ("mixed", "mixed"),
        ("mixed:high=int8,low=int2,share=0.5,group=32", "mixed"),
        ("mixed:group=64,share=.250,low=int4,high=none", "mixed:high=none,low=int4,share=0.25,group=64"),
        ("mixed:share=0.0001", "mixed:share=0.0001"),
        ("mixed:share=policy,low=int4", "mixed:low=int4,share=policy"),
        ("klt:steps=even,step=1.50,heads=each", "klt:heads=each"),
        ("klt:steps=kl,step=2", "klt:step=2,steps=kl"),
        ("klt:shares=25.0/12.50,classes=1.5/04,steps=kl", "klt:steps=kl,classes=1.5/4,shares=25/12.5"),
        ("klt:classes=0.05/1/4/16,shares=0.01/1/2/3", "klt:classes=0.05/1/4/16,shares=0.01/1/2/3"),
    ],
)
def test_a_codec_has_one_text(text: str, canonical: str) -> None:
    codec = Codec.parse(text)
    assert str(codec) == canonical
    assert Codec.parse(canonical) == codec


codecs = st.one_of(
    st.just(Codec()),
    st.builds(
        Codec,
        st.sampled_from(["int8", "int4", "int2"]),
        group=st.sampled_from([8 << n for n in range(8)]),
        residual=st.integers(0, 65_536),
    ),
    st.builds(
        Codec,
        st.just("mixed"),
        group=st.sampled_from([8 << n for n in range(8)]),
        high=st.sampled_from(["none", "int8"]),
        low=st.sampled_from(["int2", "int3", "int4"]),
        share=st.one_of(st.just("policy"), st.integers(1, 9999).map(lambda n: n / 10_000)),
    ),
    st.builds(
        Codec,
        st.just("klt"),
        heads=st.sampled_from(["", "each"]),
        steps=st.sampled_from(["even", "kl"]),
        classes=st.sets(st.integers(500, 160_000), min_size=3, max_size=3).map(
            lambda steps: tuple(n / 10_000 for n in sorted(steps))
        ),
        shares=st.tuples(*[st.integers(1, 3333).map(lambda n: n / 100)] * 3),
    ),
)


@given(codecs)
def test_every_codec_comes_back_from_its_text(codec: Codec) -> None:
    assert Codec.parse(str(codec)) == codec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip", "unknown codec 'zip'; this version has none, int8, int4, int2, mixed"),
        ("", "unknown codec ''"),
        ("INT44", "unknown codec 'INT44' (did you mean 'int4'?); this version has"),
        ("klt:stp=2", "no parameter 'stp' (did you mean 'step'?); it has step"),
        ("INT4", "unknown codec 'INT4'"),
        (" int4", "unknown codec ' int4'"),
        ("int4:", "no parameter ''; it has group, residual"),
        ("int4:bits=3", "no parameter 'bits'"),
        ("int4:share=0.5", "no parameter 'share'"),
        ("mixed:residual=3", "no parameter 'residual'; it has high, low, share, group"),
        ("none:group=32", "codec none has no parameter 'group'; it has none"),
        ("int4:group=32,", "no parameter ''"),
        ("int4:group=32,group=32", "given group twice"),
        ("int4:group=48", "group must be a power of two from 8 to 1024, not '48'"),
        ("int4:group=4", "from 8 to 1024, not '4'"),
        ("int4:group=2048", "from 8 to 1024, not '2048'"),
        ("int4:group=-8", "not '-8'"),
        ("int4:group", "not ''"),
        ("int4:residual=65537", "residual must be a number from 0 to 65536, not '65537'"),
        ("int4:residual=1.5", "not '1.5'"),
        ("int4:residual=٣", "not '٣'"),
        ("mixed:high=int4", "high must be one of none, int8, not 'int4'"),
        ("mixed:low=int8", "low must be one of int2, int3, int4, not 'int8'"),
        ("mixed:share=1", "share must be policy, or from 0.0001 to 0.9999"),
        ("mixed:share=0.0", "share must be"),
        ("mixed:share=0.00001", "share must be"),
        ("mixed:share=1e-2", "share must be"),
        ("mixed:share=nan", "share must be"),
        ("klt:steps=uneven", "steps must be one of even, kl, not 'uneven'"),
        ("klt:classes=1.5/4", "2 classes and 0 shares were given; each class needs its share"),
        ("klt:shares=25/25", "0 classes and 2 shares were given"),
        ("klt:classes=1.5/4,shares=25/25/25", "2 classes and 3 shares were given"),
        ("klt:heads=joint,classes=1/2,shares=10/10", "heads=joint transforms the same tokens of all heads"),
        ("klt:step=1.5,classes=1.5/4,shares=25/25", "step is one step for all entries, and classes are several"),
        ("klt:classes=1.5,shares=25", "classes must be 2 to 4 steps, each larger than the one before, not '1.5'"),
        ("klt:classes=4/1.5,shares=25/25", "each larger than the one before, not '4/1.5'"),
        ("klt:classes=4/4,shares=25/25", "each larger than the one before"),
        ("klt:classes=1/2/3/4/5,shares=1/1/1/1/1", "classes must be 2 to 4 steps"),
        ("klt:classes=1.5/17,shares=25/25", "step must be from 0.05 to 16, with at most four decimals, not '17'"),
        ("klt:classes=0.01/2,shares=25/25", "step must be from 0.05 to 16"),
        ("klt:classes=1//2,shares=25/25", "step must be from 0.05 to 16, with at most four decimals, not ''"),
        ("klt:classes=1/2,shares=0/25", "shares must be from 0.01 to 99.99 %"),
        ("klt:classes=1/2,shares=100/25", "shares must be from 0.01 to 99.99 %"),
        ("klt:classes=1/2,shares=-1/25", "shares must be from 0.01 to 99.99 %"),
        ("klt:classes=1/2,shares=60/40.01", "these add up to 100.01"),
        ("int4:classes=1/2", "no parameter 'classes'"),
        ("int4:" + "group=32," * 20, "at most 128 characters"),
        (None, "not None"),
        (4, "not 4"),
    ],
)
def test_what_is_no_codec_is_refused_with_what_would_be(text: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
        Codec.parse(text)
    assert refusal.value.param == "codec"


# How far off

LENGTHS = (70, 0, 1, 33)


def rounded(x: Tensor, up: bool) -> Tensor:
    """The nearest bfloat16 that is not below (or not above) a number, by stepping from the nearest one."""
    near = x.to(torch.bfloat16)
    wrong = near.double() < x.double() if up else near.double() > x.double()
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, torch.inf if up else -torch.inf)), near)


def bound(group: Tensor, bits: int) -> Tensor:
    """Half the step of groups that lie along the first dimension, from their definition, and fp32's own rounding."""
    zero = rounded(group.float().min(dim=0).values, up=False).double()
    top = group.double().max(dim=0).values
    step = rounded((top - zero) / (2**bits - 1), up=True).double()
    return step / 2 + top.abs().maximum(zero.abs()) * 2**-21


def require_close(stored: QuantizedRows, original: Tensor, lengths: tuple[int, ...]) -> None:
    """Every number is within half a step of its group, and the rounding to the model's dtype where that is smaller."""
    found = stored.dequantize()
    assert found.dtype == original.dtype
    assert found.shape == original.shape == stored.shape
    error = (found.double() - original.double()).abs()
    rounding = 0.0 if original.dtype == torch.float32 else 2.0**-8
    offset = 0
    for length in lengths:
        rows, errors = original[offset : offset + length], error[offset : offset + length]
        offset += length
        if stored.axis == "channels":
            rows, errors = rows.T, errors.T
        for start in range(0, rows.shape[0] if length else 0, stored.group):
            group = rows[start : start + stored.group]
            slack = rounding * (group.double().abs() + bound(group, stored.bits))
            assert (errors[start : start + stored.group] <= bound(group, stored.bits) + slack).all()


def numbers(rows: int, dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Channels of very different size and offset, some constant, some exactly zero, some with one outlier."""
    x = torch.randn(rows, dim, generator=generator) * torch.logspace(-4, 3, dim) + torch.linspace(-50, 50, dim)
    x[:, 1] = 0.3
    x[:, 2] = 0.0
    if rows:
        x[rows // 2, 3] = 1e4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["kept", "merged"])
@pytest.mark.parametrize("group", [8, 32, 1024])
@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_errors_stay_within_half_a_step(name: str, group: int, kind: str, dtype: torch.dtype) -> None:
    """Ragged heads, an empty one, short last groups of rows and of channels."""
    generator = torch.Generator().manual_seed(7)
    make = make_merged if kind == "merged" else make_layer
    record: PackedRecord = make(LENGTHS, 200, generator=generator)
    entries = record.entries
    record = replace(record, keys=numbers(entries, 37, dtype, generator), values=numbers(entries, 45, dtype, generator))
    encoded = encode(Codec.parse(f"{name}:group={group},residual=0"), record)
    assert isinstance(encoded, type(record))
    for stored, original, axis in (
        (encoded.keys, record.keys, "tokens"),
        (encoded.values, record.values, "channels"),
    ):
        assert isinstance(stored, QuantizedRows)
        assert isinstance(original, Tensor)
        assert (stored.bits, stored.group, stored.axis) == (BITS[name], group, axis)  # type: ignore[index]
        require_close(stored, original, LENGTHS)
    assert torch.equal(encoded.entry_positions, record.entry_positions)


def test_any_rows_can_be_picked() -> None:
    """By range and by index, of any head: what `dequantize` gives."""
    generator = torch.Generator().manual_seed(7)
    x = numbers(sum(LENGTHS), 21, torch.float32, generator)
    for axis in ("tokens", "channels"):
        rows = QuantizedRows.quantize(x, LENGTHS, bits=4, group=16, axis=axis)
        whole = torch.split(rows.dequantize(), LENGTHS)
        for head, expected in enumerate(whole):
            view = rows.heads()[head]
            for start, stop in ((0, 5), (17, 40), (33, 33), (3, 10**6)):
                assert torch.equal(view[start:stop], expected[start:stop])
            index = torch.randint(len(expected), (9,), generator=generator) if len(expected) else torch.arange(0)
            assert torch.equal(view[index], expected[index])


# Which entries


def originals(record: PackedRecord) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Key and value of each entry, by head and position."""
    keys, values = record.plain_heads()
    return {
        (head, position): (keys[head][i], values[head][i])
        for head, positions in enumerate(record.positions)
        for i, position in enumerate(positions.tolist())
    }


@pytest.mark.parametrize("kind", ["kept", "merged"])
def test_the_last_entries_of_each_head_stay_as_they_are(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    record = (make_merged if kind == "merged" else make_layer)(LENGTHS, 200, generator=generator)
    before = originals(record)
    low, residual = parts_of(encode(Codec.parse("int4:residual=20"), record))
    assert (low.quantized, residual.quantized) == (True, False)
    assert (low.lengths, residual.lengths) == ([50, 0, 0, 13], [20, 0, 1, 20])
    for head, positions in enumerate(residual.positions):
        assert torch.equal(positions, record.positions[head][-20:])
    for entry, (key, value) in originals(residual).items():
        assert torch.equal(key, before[entry][0])
        assert torch.equal(value, before[entry][1])
    for entry, (key, _) in originals(low).items():
        assert not torch.equal(key, before[entry][0])


def test_a_layer_within_the_residual_is_not_quantized() -> None:
    record = replace(make_layer((7, 3), 20, generator=torch.Generator().manual_seed(1)), importance=torch.arange(10.0))
    encoded = encode(Codec.parse("int2"), record)
    assert isinstance(encoded, Kept)
    assert not encoded.quantized
    assert encoded.importance is None


def test_a_layer_without_entries_stays_one() -> None:
    record = make_layer((0, 0), 20, generator=torch.Generator().manual_seed(1))
    assert encode(Codec.parse("int2"), record) is record
    parts = Parts((record, record))
    assert encode(Codec.parse("int2"), parts) is parts


def test_each_part_is_encoded_on_its_own() -> None:
    generator = torch.Generator().manual_seed(3)
    record = split_at_random(make_layer((40, 50), 100, generator=generator), generator)
    pieces = parts_of(encode(Codec.parse("int4:residual=4"), record))
    assert [piece.quantized for piece in pieces] == [True, False] * 2
    assert [piece.lengths for piece in pieces[1::2]] == [[4, 4]] * 2
    assert [piece.lengths for piece in pieces[::2]] == [[n - 4 for n in part.lengths] for part in record.parts]


@pytest.mark.parametrize("kind", ["kept", "merged"])
@pytest.mark.parametrize("high", ["none", "int8"])
def test_mixed_keeps_the_important_entries_better(high: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    record: PackedRecord = (make_merged if kind == "merged" else make_layer)(LENGTHS, 200, generator=generator)
    importance = torch.randint(0, 9, (record.entries,), generator=generator).float()  # with many ties
    record = replace(record, importance=importance)
    best, rest = parts_of(encode(Codec.parse(f"mixed:high={high},low=int2,share=0.3"), record))
    assert (best.lengths, rest.lengths) == ([21, 0, 0, 9], [49, 0, 1, 24])
    bits = best.keys.bits if isinstance(best.keys, QuantizedRows) else None
    assert bits == (8 if high == "int8" else None)
    assert isinstance(rest.keys, QuantizedRows)
    assert rest.keys.bits == 2
    for head, positions in enumerate(record.positions):
        ranks = dict(zip(positions.tolist(), torch.split(importance, record.lengths)[head].tolist(), strict=True))
        expected = sorted(ranks, key=lambda position: (-ranks[position], position))[: best.lengths[head]]
        assert best.positions[head].tolist() == sorted(expected)
    assert best.importance is rest.importance is None


def test_a_share_is_a_floor_that_forgives_binary_fractions() -> None:
    record = make_layer((100, 99), 200, generator=torch.Generator().manual_seed(1))
    record = replace(record, importance=torch.arange(199.0))
    best, _ = parts_of(encode(Codec.parse("mixed:share=0.29"), record))
    assert int(100 * 0.29) == 28
    assert best.lengths == [29, 28]


def test_a_head_shorter_than_its_policy_says_is_precise_as_a_whole() -> None:
    record = make_layer((9, 40), 60, generator=torch.Generator().manual_seed(1))
    record = replace(record, importance=torch.arange(49.0), precise=(12, 12))
    best, rest = parts_of(encode(Codec.parse("mixed:share=policy"), record))
    assert (best.lengths, rest.lengths) == ([9, 12], [0, 28])
    assert best.positions[1].tolist() == record.positions[1][-12:].tolist()


def test_mixed_needs_to_know_what_is_important() -> None:
    with pytest.raises(InvalidRequest, match=r"layer 0 carries none any more; encode the cache when it is compressed"):
        make_cache().encoded("mixed")


# Refusals


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("codec", ["int8", "int2:residual=0", "mixed"])
def test_numbers_that_are_none_are_refused_with_their_layer(codec: str, field: str, value: float) -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80), (70, 60)))
    layer = cache.layers[1]
    rows = getattr(layer, field).clone()
    rows[5, 2] = value
    cache = replace(cache, layers=(cache.layers[0], replace(layer, **{field: rows})))
    if codec == "mixed":
        ranked = [replace(layer, importance=torch.zeros(layer.entries)) for layer in cache.layers]
        cache = replace(cache, layers=tuple(ranked))
    with pytest.raises(InvalidRequest, match=f"the {field} of layer 1 hold NaN or infinity") as refusal:
        cache.encoded(codec)
    assert refusal.value.param == "codec"


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 3.4e38), (torch.bfloat16, 3.38e38), (torch.float16, 65504.0)]
)
def test_numbers_whose_codes_would_stand_for_infinity_are_refused(dtype: torch.dtype, most: float) -> None:
    record = make_layer((64,), 100, dtype=dtype, generator=torch.Generator().manual_seed(1))
    assert isinstance(record.values, Tensor)
    values = record.values.clone()
    values[3, 1], values[3, 2] = most, -most
    with pytest.raises(InvalidRequest, match="too near the largest"):
        encode(Codec.parse("int4"), replace(record, values=values))


@pytest.mark.parametrize(
    ("current", "wanted", "found"),
    [
        ("none", "none", "none"),
        ("none", "int4:group=32", "int4"),
        ("int4", "none", "int4"),
        ("int4", "int4:residual=32", "int4"),
        ("int4", "int4:residual=31", None),
        ("int4", "int8", None),
        ("mixed", "int8", None),
    ],
)
def test_a_cache_is_encoded_once(current: str, wanted: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(InvalidRequest, match="not encoded again"):
            resolve(current, wanted)
    else:
        assert str(resolve(current, wanted)) == found


def test_an_encoded_cache_is_another_cache() -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80), (70, 60)))
    encoded = cache.encoded("int4:residual=0,group=32")
    assert (cache.codec, encoded.codec) == ("none", "int4:residual=0")
    assert cache.encoded("none") is cache
    assert encoded.encoded("none") is encoded.encoded("int4:residual=0") is encoded
    assert encoded.identity is cache.identity
    assert encoded.kept_tokens == cache.kept_tokens
    assert encoded.nbytes < cache.nbytes / 2
    assert all(isinstance(layer, Kept) and layer.quantized for layer in encoded.layers)
    with pytest.raises(InvalidRequest, match="encoded already"):
        encode(Codec.parse("int4"), encoded.layers[0])


def test_a_merged_cache_can_be_encoded_too() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = replace(make_cache(num_tokens=200), layers=(make_merged(LENGTHS, 200, generator=generator),))
    low, residual = parts_of(cache.encoded("int4").layers[0])
    assert isinstance(low, Merged)
    assert isinstance(residual, Merged)
    slots = [a + b for a, b in zip(low.slot_lengths, residual.slot_lengths, strict=True)]
    assert slots == [2 * length for length in LENGTHS]
