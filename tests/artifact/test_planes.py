"""Codec lossless: every bit comes back, bytes are saved, and forged planes are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import plain_record
from kvshelf.artifact.growth import joined
from kvshelf.artifact.planes import PlaneRows, encode_planes
from kvshelf.artifact.records import Kept, parts_of
from kvshelf.errors import BlobError, InvalidRequest, StateConflict
from tests.store.caches import golden_caches, make_cache, make_layer, require_equal
from tests.store.hostile import Parts as Blob
from tests.store.hostile import varied_blob

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTS = {4: torch.int32, 2: torch.int16}


def bits(rows: Tensor) -> Tensor:
    """NaN equals no NaN, and -0 equals 0; their bits differ."""
    return rows.contiguous().view(INTS[rows.itemsize])


def natural(entries: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, channels of which have scales of their own, as those of a cache."""
    generator = torch.Generator().manual_seed(entries)
    scales = torch.rand(channels, generator=generator) * 4
    return (torch.randn(entries, channels, generator=generator) * scales).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (5000, 64), (70_000, 3)])
def test_every_bit_comes_back(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows = natural(*shape, dtype)
    draw = np.random.default_rng(7)
    anything = torch.frombuffer(bytearray(draw.bytes(max(4, rows.nbytes))), dtype=dtype)[: rows.numel()].view(shape)
    for each in (rows, anything, torch.zeros_like(rows), -torch.zeros_like(rows)):
        coded = encode_planes(each)
        coded.require_sound("keys")
        assert coded.shape == shape
        assert torch.equal(bits(coded.decode()), bits(each))
        assert coded.nbytes <= each.nbytes + 8 * each.itemsize, "planes that do not shrink stay as they are"


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.4), (torch.float16, 1.1), (torch.float32, 1.15)])
def test_natural_numbers_take_fewer_bytes(dtype: torch.dtype, least: float) -> None:
    rows = natural(20_000, 64, dtype)
    assert rows.nbytes / encode_planes(rows).nbytes > least


@pytest.mark.parametrize("name", sorted(set(golden_caches()) - {"summary"}))
def test_every_kind_of_record_comes_back_through_a_blob(name: str) -> None:
    """A cache that is quantized stays as it is, and refuses."""
    cache = golden_caches()[name]
    if cache.codec not in ("none", "lossless"):
        with pytest.raises(InvalidRequest, match="is not encoded again under lossless"):
            cache.encoded("lossless")
        return
    coded = cache.encoded("lossless")
    blob = coded.to_bytes()
    read = CompressedCache.from_bytes(blob)
    assert read.to_bytes() == blob
    require_equal(read.decoded(), replace(cache.decoded(), codec="lossless"))
    assert read.attached_bytes == cache.attached_bytes


def test_coded_rows_are_not_read_by_mistake() -> None:
    coded = make_cache().encoded("lossless")
    with pytest.raises(StateConflict, match="under codec lossless; decode it"):
        coded.layers[0].dense()
    for codec in ("int8", "klt", "mixed"):
        with pytest.raises(InvalidRequest, match="encoded under lossless and is not encoded again"):
            coded.encoded(codec)
    assert coded.encoded("lossless") is coded.encoded("none") is coded


def test_records_are_joined_as_the_rows_in_them() -> None:
    """A conversation that is stored turn by turn would else end with the sixteenth."""
    generator = torch.Generator().manual_seed(3)
    turns = [make_layer((9, 4), 9, dtype=torch.bfloat16, generator=generator).placed(9 * n) for n in range(13)]
    plain = joined(turns)
    coded = joined([make_coded(turn) for turn in turns])
    assert len(plain) == len(coded) == 1
    assert isinstance(coded[0].keys, PlaneRows)
    after = plain_record(coded[0])
    for name in ("keys", "values", "entry_positions"):
        assert torch.equal(getattr(after, name), getattr(plain[0], name))


def make_coded(record: Kept) -> Kept:
    assert isinstance(record.keys, Tensor)
    assert isinstance(record.values, Tensor)
    return replace(record, keys=encode_planes(record.keys), values=encode_planes(record.values))


def framed(cache_rows: int = 4000) -> PlaneRows:
    coded = encode_planes(natural(cache_rows, 8, torch.bfloat16))
    assert coded.nbytes < 0.8 * cache_rows * 16
    return coded


def with_planes(rows: PlaneRows, *planes: bytes) -> PlaneRows:
    head = np.array([len(plane) for plane in planes], "<u8").tobytes()
    return replace(rows, data=torch.frombuffer(bytearray(head + b"".join(planes)), dtype=torch.uint8))


def test_planes_of_other_sizes_are_refused_before_they_are_decoded() -> None:
    rows = framed()
    low, high = (bytes(plane) for plane in rows._planes())
    count = rows.entries * rows.num_channels
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(count))
    forged = [
        with_planes(rows, low, bomb),
        with_planes(rows, low, unsized),
        with_planes(rows, low, b""),
        with_planes(rows, low, high[:3]),
        with_planes(rows, low, b"\0" * 40),
        with_planes(rows, low + b"\0", high),
        with_planes(rows, low),
        replace(rows, data=rows.data[:15]),
        replace(rows, data=rows.data[:-1]),
        replace(rows, entries=rows.entries - 1),
        replace(rows, entries=rows.entries + 1),
        replace(rows, entries=1 << 62),
        replace(rows, dtype=torch.float32),
    ]
    for each in forged:
        with pytest.raises(BlobError) as refused:
            each.require_sound("keys")
        assert refused.value.reason == "coded_malformed"
    behind = with_planes(rows, low, high + b"\0")
    behind.require_sound("keys")
    with pytest.raises(BlobError, match="is no Zstandard frame"):
        behind.decode()


LONG = make_cache(num_tokens=4000, lengths=((4000, 4000),))


@pytest.mark.parametrize("blob", [varied_blob("lossless"), LONG.to_bytes("lossless")], ids=["varied", "long"])
def test_forged_planes_are_refused_or_give_as_many_numbers(blob: bytes) -> None:
    """Right digests, other bytes: nothing crashes, and no more is decoded than the header counts."""
    draw, outcomes = random.Random(53), {"refused": 0, "decoded": 0}
    for number in range(200):
        parts = Blob(blob)
        array = parts.array(0, draw.choice(["keys coded", "values coded"]))
        start = draw.randrange(0, 40 if number % 2 else len(array))
        stop = min(len(array), start + draw.choice((1, 4, 64)))
        array[start:stop] = draw.randbytes(stop - start)
        del array
        try:
            layers = CompressedCache.from_bytes(parts.join()).decoded().layers
        except BlobError:
            outcomes["refused"] += 1
        else:
            for part in (part for layer in layers for part in parts_of(layer)):  # type: ignore[arg-type]
                assert isinstance(part.keys, Tensor)
                assert part.keys.shape[0] == part.entries
            outcomes["decoded"] += 1
    assert min(outcomes.values()) > 10, outcomes
