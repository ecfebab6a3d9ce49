"""Headers of anything msgpack can say, under digests that fit, and what reading them may cost."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept, Merged
from tests.store.bounds import memory_bounded
from tests.store.caches import make_identity, make_layer
from tests.store.faults import CASES
from tests.store.hostile import (
    Make,
    Parts,
    encoded_blob,
    kept_blob,
    places,
    reading_bounded,
    refusal,
    require_one_form,
    some_blob,
)
from tests.store.processes import run_in_child

SECONDS = 5  # of processor time, for anything at all; the slowest below takes 1

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9))
    | st.builds(msgpack.Timestamp, st.integers(-(2**63), 2**63 - 1), st.integers(0, 999_999_999))
)
names = st.sampled_from(
    ("identity", "num_tokens", "next_position", "codec", "layers", "kind", "rope_mode", "dtype", "key_dim", "lengths",
     "position_encoding", "offset", "nbytes", "keys", "positions", "digest", "records", "group", "sizes")
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names | st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


def _length(form: bytes, code: str) -> st.SearchStrategy[bytes]:
    """The first bytes of an array, a map or a run of bytes, with a length that may be true."""
    sizes = st.integers(0, 3) | st.integers(0, 2 ** (8 * struct.calcsize(f">{code}")) - 1)
    return sizes.map(lambda size: form + struct.pack(f">{code}", size))


tokens = st.lists(
    st.binary(min_size=1, max_size=9)
    | st.integers(0x80, 0x9F).map(lambda first: bytes([first]))  # short maps and arrays
    | names.map(msgpack.packb)
    | scalars.map(msgpack.packb)
    | st.one_of(_length(bytes([first]), "I") for first in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9))
    | st.one_of(_length(bytes([first]), "H") for first in (0xDC, 0xDE, 0xDA, 0xC5, 0xC8)),
    max_size=60,
).map(b"".join)
"""Bytes that look like msgpack: maps with a key twice or of any kind, lengths that lie, values that are cut off."""


def whole_header(raw: bytes, make: Make) -> bytes:
    parts = Parts(make())
    parts.header = raw
    return parts.join()


def one_parameter(raw: bytes, make: Make) -> bytes:
    """In an otherwise good header."""
    parts = Parts(make())
    parts.put_raw(raw)
    return parts.join()


makes = st.sampled_from([some_blob, encoded_blob, kept_blob])


@pytest.mark.parametrize("place", [whole_header, one_parameter])
@pytest.mark.parametrize("raw", [values.map(msgpack.packb), tokens], ids=["values", "tokens"])
def test_no_header_does_more_than_be_refused(
    place: Callable[[bytes, Make], bytes], raw: st.SearchStrategy[bytes], soak: bool
) -> None:
    @fuzzed(1000 if soak else 100)
    @given(raw, makes)
    def fuzz(raw: bytes, make: Make) -> None:
        read_in_bounds(place(raw, make))

    run_in_child(fuzz)


@pytest.mark.parametrize("make", [some_blob, encoded_blob, kept_blob])
def test_any_value_in_the_place_of_any_field(make: Make, soak: bool) -> None:
    paths = list(places(Parts(make()).fields))

    @fuzzed(1000 if soak else 100)
    @given(st.sampled_from(paths), values)
    def fuzz(path: tuple[Any, ...], value: Any) -> None:
        parts = Parts(make())
        within: Any = parts.fields
        for key in path[:-1]:
            within = within[key]
        within[path[-1]] = value
        read_in_bounds(parts.join())

    run_in_child(fuzz)


@pytest.mark.slow
def test_a_refusal_takes_little_time_and_memory() -> None:
    """Each by itself, in one child: a fork takes longer than a refusal."""
    hostile = {}
    for name, (reason, make, edit) in CASES.items():
        parts = Parts(make())
        edit(parts)
        hostile[name] = (reason, parts.join())

    def child() -> None:
        for name, (reason, data) in hostile.items():
            assert read_in_bounds(data) == reason, name

    run_in_child(child)


def filled(item: bytes) -> bytes:
    """A blob whose header is filled with one value over and over."""
    row = b"\xdc\x10\x00" + item * 4096
    rows = 255 * 1024 // len(row)
    return one_parameter(b"\xdc" + struct.pack(">H", rows) + row * rows, some_blob)


@cache
def layer_of_one_dimension(tokens: int) -> Kept:
    """A million entries that take next to nothing, so that their positions are most of the blob. Made once: drawing
    positions from many tokens takes seconds."""
    return make_layer((1 << 20,), tokens, dims=(1, 1), dtype=torch.float16, generator=torch.Generator().manual_seed(7))


def entries_of_one_dimension(tokens: int, codec: str = "none") -> bytes:
    layer = layer_of_one_dimension(tokens)
    return CompressedCache((layer,), tokens, tokens, make_identity(tokens)).to_bytes(codec)


def classes_of_one_dimension() -> bytes:
    """A million classes of one slot."""
    layer = CompressedCache.from_bytes(entries_of_one_dimension(64 << 20)).layers[0]
    slots = {
        "slot_scales": torch.ones(layer.entries),
        "slot_classes": torch.arange(layer.entries, dtype=torch.int32),
        "slot_positions": layer.entry_positions,
        "slot_offsets": layer.offsets,
    }
    merged = Merged(layer.keys, layer.values, layer.entry_positions, layer.offsets, **slots)
    return CompressedCache((merged,), 64 << 20, 64 << 20, make_identity(64 << 20)).to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(filled, b"\x90"), id="empty arrays"),
        pytest.param(partial(filled, b"\x80"), id="empty maps"),
        pytest.param(partial(filled, b"\x81\xa0\xc0"), id="small maps"),
        pytest.param(partial(filled, b"\xa1a"), id="strings"),
        pytest.param(partial(entries_of_one_dimension, 64 << 20), id="deltas"),
        pytest.param(partial(entries_of_one_dimension, 8 << 20), id="bitmap"),
        pytest.param(partial(entries_of_one_dimension, 64 << 20, "int2:residual=0"), id="deltas of codes"),
        pytest.param(classes_of_one_dimension, id="deltas of classes and slots"),
    ],
)
def test_good_blobs_that_take_the_most_memory(make: Callable[[], bytes]) -> None:
    data = make()

    def child() -> None:
        assert read_in_bounds(data) == ""

    run_in_child(child)


def test_the_bound_on_memory_is_one() -> None:
    """Otherwise the tests above would show nothing. The two pieces are each larger than an arena of glibc, 64 MiB: the
    second of two smaller ones may lie in memory that another thread of the parent took and freed."""

    def child() -> None:
        with memory_bounded(256 << 20):
            bytearray(b"x" * (64 << 20))
        with pytest.raises((AssertionError, MemoryError)), memory_bounded(256 << 20):
            bytearray(b"x" * (192 << 20))  # twice
        with pytest.raises(MemoryError), memory_bounded(256 << 20):
            bytearray(1 << 40)

    run_in_child(child)


def fuzzed(examples: int) -> Callable[[Any], Any]:
    # Time is bounded for each reading, in processor time. A child does not write to its parent's database.
    too_slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=too_slow)


def read_in_bounds(data: bytes) -> str:
    start = time.process_time()
    with reading_bounded(len(data)):
        reason = refusal(data)
    assert time.process_time() - start < SECONDS
    if not reason:
        require_one_form(data)
    return reason
