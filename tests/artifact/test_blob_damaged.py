"""Blobs that are damaged by accident: cut off, longer, or with bits turned over. In memory, and as files of a shelf."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store.disk import DiskStore
from tests.amounts import few
from tests.store.caches import make_cache, require_equal
from tests.store.hostile import (
    CODECS,
    Make,
    boundaries,
    encoded_blob,
    file_of,
    reading_bounded,
    refusal,
    some_blob,
    varied_blob,
)
from tests.store.processes import run_in_child

VARIED = [pytest.param(partial(varied_blob, codec), id=codec) for codec in CODECS]
GOLDEN = [
    pytest.param(path.read_bytes, id=path.stem) for path in sorted((Path(__file__).parent / "golden").glob("*.kvb"))
]


def test_a_changed_segment_is_found_by_its_own_digest() -> None:
    data = bytearray(make_cache().to_bytes())
    data[-100] ^= 1
    with pytest.raises(BlobError, match="segment 1 is not what was written") as error:
        CompressedCache.from_bytes(data)
    assert error.value.reason == "digest_mismatch"


@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_truncation_is_refused_as_such(make: Make) -> None:
    data = make()
    for size in range(len(data)):
        with pytest.raises(BlobError) as error:
            CompressedCache.from_bytes(data[:size])
        assert error.value.reason == "truncated", size


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64, b"x" * 1000])
def test_nothing_may_follow(extra: bytes) -> None:
    with pytest.raises(BlobError) as error:
        CompressedCache.from_bytes(some_blob() + extra)
    assert error.value.reason == "trailing_bytes"


@pytest.mark.slow
@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_bit_of_a_small_blob_counts(make: Make) -> None:
    """Not a sample: all of them. The first 16 bytes have their own reasons, the rest are found by digests."""
    data = bytearray(make())
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobError) as error:
            CompressedCache.from_bytes(data)
        assert bit < 128 or error.value.reason == "digest_mismatch"
        data[bit // 8] ^= 1 << bit % 8
    CompressedCache.from_bytes(data)


@pytest.mark.parametrize("make", few(13, VARIED + GOLDEN))
def test_random_flips_and_truncations_are_refused_in_bounded_memory(make: Make, soak: bool) -> None:
    rng = random.Random(20261121)
    data = make()
    bits = rng.choices(range(len(data) * 8), k=1000 if soak else 100)
    sizes = rng.choices(range(len(data)), k=200 if soak else 20)

    def child() -> None:
        with reading_bounded(len(data)):
            for bit in bits:
                assert refusal(flipped(data, bit)) in reasons_of_a_flip(bit), bit
            for size in sizes:
                assert refusal(data[:size]) == "truncated", size

    run_in_child(child)
    CompressedCache.from_bytes(data)


@pytest.mark.parametrize("make", few(13, VARIED + GOLDEN))
def test_the_edges_of_every_region(make: Make) -> None:
    """Cut where a region begins and a byte to either side; the bits at both ends of each region turned over."""
    data = make()
    edges = boundaries(data)
    assert edges[-1] == len(data) - 32
    for size in {edge + step for edge in edges for step in (-1, 0, 1)} & set(range(len(data))):
        assert refusal(data[:size]) == "truncated", size
    for bit in (byte * 8 + step for edge in edges for byte in (edge - 1, edge) if byte >= 0 for step in (0, 7)):
        assert refusal(flipped(data, bit)) in reasons_of_a_flip(bit), bit


@pytest.mark.parametrize("make", few(4, VARIED))
def test_damaged_files_are_set_aside_and_nothing_else_is(make: Make, home: Path, soak: bool) -> None:
    """Between them the codecs make up the thousand flips and two hundred truncations."""
    rng = random.Random(20261121)
    data, cache = make(), CompressedCache.from_bytes(make())
    damaged = [flipped(data, rng.randrange(len(data) * 8)) for _ in range(100 if soak else 10)]
    damaged += [data[: rng.randrange(len(data))] for _ in range(20 if soak else 2)]
    with DiskStore.open(home) as store:
        other = store.put(make_cache(1)).id
        for index, bytes_there in enumerate(damaged):
            cache_id = store.put(cache).id
            path = file_of(home, cache_id)
            path.write_bytes(bytes_there)
            with pytest.raises(CacheCorrupt) as error:
                (store.get, store.open_blob)[index % 2](cache_id)
            assert error.value.details["reason"] == refusal(bytes_there)
            assert (home / "quarantine" / path.name).read_bytes() == bytes_there
            require_equal(store.get(other), make_cache(1))
        require_equal(store.get(store.put(cache).id), cache)
        assert store.check() == []


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reasons_of_a_flip(bit: int) -> set[str]:
    """What a blob may be refused for whose bit was turned over. The first 16 bytes have reasons of their own."""
    if bit < 64:
        return {"bad_magic"}
    if bit < 80:
        return {"newer_major", "unknown_major"}
    if bit < 96:
        return {"newer_minor", "digest_mismatch"}
    if bit < 128:
        return {"header_too_large", "truncated", "digest_mismatch"}
    return {"digest_mismatch"}
