"""Blobs taken apart and put together again with digests that fit: what a hostile writer could hand in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from blake3 import blake3

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept, Latents, LayerRecord, Recent, State, States
from kvshelf.artifact.records import Parts as PartsRecord
from kvshelf.errors import BlobError
from tests.store.bounds import memory_bounded
from tests.store.caches import (
    from_heads,
    golden_caches,
    golden_pruned,
    golden_residuals,
    make_cache,
    make_identity,
    make_indexed,
    make_layer,
    make_merged,
    split_at_random,
)

Fields = dict[str, Any]

HEADER_MEMORY = 96 << 20
MEMORY_FACTOR = 8


def aligned(size: int) -> int:
    return -(-size // 64) * 64


class Parts:
    """A blob taken apart without the reader's help, put together again with digests that fit: a hostile writer."""

    def __init__(self, data: bytes) -> None:
        self.magic, self.major, self.minor, length = struct.unpack_from("<8sHHI", data)
        self.fields: Fields = msgpack.unpackb(data[16 : 16 + length])
        self.body = bytearray(data[aligned(16 + length) : -40])
        self.padding = b"\0"
        self.header: bytes | None = None
        self.length: int | None = None
        self.total: int | None = None

    @property
    def first(self) -> Fields:
        layer: Fields = self.fields["layers"][0]
        return layer

    @property
    def digests(self) -> memoryview:
        """The array of digests at the end of the first layer, which has runs, with its padding."""
        count = -(-max(self.record["lengths"]) // 1024) + 1
        end = self.first["offset"] + self.first["nbytes"]
        return memoryview(self.body)[end - aligned(count * 32) : end]

    @property
    def record(self) -> Fields:
        """The first record of the first layer."""
        record: Fields = self.first["records"][0]
        return record

    def put_positions(self, data: bytes) -> None:
        """Replace the positions of the first and only layer, which has one plain record."""
        *rows, _ = sizes = self.record["sizes"]
        sizes[-1] = len(data)
        self.body[sum(map(aligned, rows)) :] = data.ljust(aligned(len(data)), b"\0")
        self.first["nbytes"] = len(self.body)

    def put_raw(self, value: bytes) -> None:
        """Put these bytes into the header in place of the parameter `sink`, whatever they say in msgpack."""
        self.fields["identity"]["policy_params"]["sink"] = "here"
        self.header = self.packed().replace(msgpack.packb("here"), value)

    def array(self, record: int, name: str) -> memoryview:
        """One array of the first layer, found by walking to it (docs/internals/format.md); it may be written to."""
        start = self.first["offset"]
        for index, fields in enumerate(self.first["records"]):
            for array, size in zip(_names(fields), fields["sizes"], strict=True):
                if (index, array) == (record, name):
                    return memoryview(self.body)[start : start + size]
                start += aligned(size)
        raise KeyError(name)

    def packed(self) -> bytes:
        """The header, with the digests of the segments as they are now."""
        layers = self.fields.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            match layer:
                case {"offset": int(offset), "nbytes": int(nbytes), "digest": _}:
                    head = self.body[offset : offset + nbytes]
                    for start, stop in reversed(rows_in_runs(layer)):
                        del head[start:stop]
                    layer["digest"] = blake3(head).digest()
        data: bytes = msgpack.packb(sorted_fields(self.fields))
        return data

    def join(self) -> bytes:
        header = self.packed() if self.header is None else self.header
        length = len(header) if self.length is None else self.length
        fixed = struct.pack("<8sHHI", self.magic, self.major, self.minor, length) + header
        head = fixed.ljust(aligned(len(fixed)), self.padding)
        total = (len(head) + len(self.body) + 40 if self.total is None else self.total).to_bytes(8, "little")
        return head + self.body + total + blake3(head + total).digest()


def rows_in_runs(layer: Fields) -> list[tuple[int, int]]:
    """Where a segment has rows that are in runs, by docs/internals/format.md; nowhere, if the header says nonsense."""
    start, runs = 0, []
    try:
        for record in layer["records"]:
            plain = record["kind"] in ("kept", "indexed", "latents") and record["codec"] not in ("klt", "lossless")
            rows = record["block"] if record["kind"] == "indexed" else 1024
            for name, size in zip(_names(record), record["sizes"], strict=True):
                if plain and max(record["lengths"]) > rows and name.startswith(("keys", "values")):
                    runs.append((start, start + size))
                start += aligned(size)
    except (TypeError, KeyError, ValueError):
        return []
    return runs if all(type(end) is int for span in runs for end in span) else []


def sorted_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_fields(value[key]) for key in sorted(value)}
    return [sorted_fields(item) for item in value] if isinstance(value, list) else value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in nested maps and arrays."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def _names(record: Fields) -> list[str]:
    """The arrays of a record, in the order of docs/internals/format.md."""
    names = ["keys"] if record["kind"] == "residuals" else ["keys", "values"]
    if record["codec"] in ("klt", "lossless"):
        names = [f"{rows} coded" for rows in names]
    elif record["codec"] != "none":
        names = [f"{rows} {what}" for rows in names for what in ("codes", "scales", "zeros")]
    names.append("positions")
    if record["kind"] == "pruned":
        names.append("channels")
    if record["kind"] == "indexed":
        names.append("summaries")
    if record["kind"] == "merged":
        names += ["slot positions", "slot classes", "slot scales"]
    return [*names, "columns"] if "columns" in record else names


def some_blob() -> bytes:
    # One layer; its positions are a bitmap of 2 * 5 bytes, keys 29 * 3 * 4 bytes: every part is followed by padding.
    return make_cache(lengths=((20, 9),), dims=(3, 5)).to_bytes()


def encoded_blob() -> bytes:
    # One layer with two merged records: [8, 5] classes under int4 and the residual's [4, 4]. Rows of 3 and 5
    # codes leave four bits of their last byte unused.
    generator = torch.Generator().manual_seed(4)
    layer = make_merged((12, 9), 40, dims=(3, 5), generator=generator)
    cache = replace(make_cache(), layers=(layer,))
    return cache.to_bytes("int4:group=8,residual=4")


def threes_blob() -> bytes:
    # A second record under int3, whose rows of 6 and 4 codes leave six and four bits of their last byte unused.
    return golden_caches()["mixed-int3"].to_bytes()


def kept_blob() -> bytes:
    # One layer with two plain `Kept` records that share no position: [0, 2, 4, ...] and [1, 3, 5, ...].
    def record(first: int) -> Kept:
        positions = [torch.arange(first, 30, 2)] * 2
        rows = [torch.ones(15, 2)] * 2
        return from_heads(rows, rows, positions)

    return replace(make_cache(), layers=(PartsRecord((record(0), record(1))),)).to_bytes()


def two_layers() -> bytes:
    return make_cache(lengths=((20, 9), (7, 30))).to_bytes()


def runs_blob() -> bytes:
    # One layer of two heads with two runs each; their digests are followed by padding.
    return make_cache(num_tokens=2100, lengths=((2000, 1500),), dims=(3, 5)).to_bytes()


def window_blob() -> bytes:
    # One layer: the last 9 of 40 tokens in two heads.
    rows = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(5))
    return replace(make_cache(), layers=(Recent.of(rows, rows, 10),)).to_bytes()


def chunk_blob() -> bytes:
    # One layer: the last 9 of 40 tokens, those behind the first 31, in two heads.
    rows = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(5))
    return replace(make_cache(), layers=(Recent.of(rows, rows, None, 31),)).to_bytes()


def latents_blob() -> bytes:
    # One layer of latents, [16, 5] under int4 and [4, 5] of the residual, with rotated parts of 3 channels.
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(20, 8, generator=generator)
    layer = Latents(rows[:, :5].clone(), rows[:, 5:].clone(), torch.arange(0, 40, 2, dtype=torch.int32), (0, 20))
    return replace(make_cache(), layers=(layer,)).to_bytes("int4:group=8,residual=4")


def pruned_blob() -> bytes:
    # One layer of three heads: [12, 0, 5] tokens whose keys have 3 of 7 channels, under int4, and [2, 2, 2] whole ones.
    return replace(make_cache(), layers=(golden_pruned(),)).to_bytes("int4:group=8,residual=2")


def residuals_blob() -> bytes:
    # One layer of three heads: the residuals of 10 tokens, of 7 channels, under int4, and of 2 of the residual.
    return replace(make_cache(), layers=(golden_residuals(),)).to_bytes("int4:group=8,residual=2")


def columns_blob() -> bytes:
    # One layer of merged records with the columns "all" and "past" of their slots: [8, 5] classes under int4 and [4, 4]
    # of the residual.
    layer = make_merged((12, 9), 40, dims=(3, 5), generator=torch.Generator().manual_seed(4))
    columns = {"past": torch.arange(float(layer.slots)), "all": -torch.arange(float(layer.slots))}
    return replace(make_cache(), layers=(replace(layer, columns=columns),)).to_bytes("int4:group=8,residual=4")


def indexed_blob() -> bytes:
    # One layer of two heads: [37, 37] tokens under int4 in blocks of 16, with summaries of 4 numbers, and [3, 3] of the
    # residual.
    return replace(make_cache(), layers=(make_indexed(40, 16),)).to_bytes("int4:group=8,residual=3")


def state_blob() -> bytes:
    # Three layers: states beside two heads of every token, states alone, nothing.
    made = make_cache(lengths=((40, 40),), dims=(3, 5))
    (entries,) = made.layers
    numbers = torch.arange(24, dtype=torch.float32)
    states = (State("conv", 0, numbers.view(6, 4).bfloat16()), State("recurrent", 0, numbers.view(2, 3, 4)))
    assert isinstance(entries, Kept)
    return replace(made, layers=(States(states, entries), States(states[:1]), States(()))).to_bytes()


def whole_blob() -> bytes:
    # One layer that keeps every token of two heads: its positions are a range.
    return make_cache(lengths=((40, 40),), dims=(3, 5)).to_bytes()


CODECS = (
    "none", "int8", "int8:group=8,residual=0", "int4", "int4:group=64,residual=0", "int4:group=8,residual=5",
    "int2", "int2:group=1024,residual=1", "mixed", "mixed:high=none,low=int4,share=0.25,group=16", "lossless",
)  # fmt: skip


def varied_blob(codec: str) -> bytes:
    """Four layers under a codec, of about 10 KB each before it: entries, classes, and parts of both."""
    generator = torch.Generator().manual_seed(6)
    tokens, dims = 200, (16, 13)  # rows of 13 codes leave bits of their last byte unused

    def ranked(make: Callable[..., Any], lengths: tuple[int, ...]) -> Any:
        layer = make(lengths, tokens, dims=dims, dtype=torch.bfloat16, generator=generator)
        return replace(layer, importance=torch.rand(layer.entries, generator=generator))

    layers: tuple[LayerRecord, ...] = (
        ranked(make_layer, (100, 70)),
        ranked(make_merged, (90, 60)),
        split_at_random(ranked(make_layer, (200, 0)), generator),
        split_at_random(ranked(make_merged, (64, 65)), generator),
    )
    return CompressedCache(layers, tokens, tokens, make_identity(tokens)).to_bytes(codec)


def boundaries(data: bytes) -> list[int]:
    """Where the regions of a blob begin and end, found without the reader's help as docs/internals/format.md says."""
    parts = Parts(data)
    header = struct.unpack_from("<I", data, 12)[0]
    body, trailer = aligned(16 + header), len(data) - 40
    offsets = {0, 8, 10, 12, 16, 16 + header, body, trailer, trailer + 8}
    for layer in parts.fields["layers"]:
        start = body + layer["offset"]
        for size in (size for record in layer["records"] for size in record["sizes"]):
            offsets |= {start, start + size, start + aligned(size)}
            start += aligned(size)
    return sorted(offsets)


def file_of(home: Path, cache_id: str) -> Path:
    """The blob of a cache on a disk shelf."""
    (path,) = (home / "blobs").glob(f"{cache_id.removeprefix('kvs_')}-*.kvb")
    return path


def reading_bounded(size: int) -> AbstractContextManager[None]:
    """`memory_bounded` by what reading a blob of this size may take: the header's part, and a small multiple of the
    bytes there are, which is that of entries of one dimension whose positions are deltas."""
    return memory_bounded(HEADER_MEMORY + MEMORY_FACTOR * size)


def refusal(data: bytes | bytearray) -> str:
    """The reason for which bytes are no blob, "" when they are one."""
    try:
        CompressedCache.from_bytes(data)
    except BlobError as error:
        if len(error.message) > 1000:
            raise AssertionError("a message repeats at length what a hostile writer wrote") from error
        return error.reason
    return ""


def require_one_form(data: bytes) -> None:
    """A blob is what a writer writes of what was read from it."""
    assert CompressedCache.from_bytes(data).to_bytes() == data


Make = Callable[[], bytes]
Edit = Callable[[Parts], None]
Cases = dict[str, tuple[str, Make, Edit]]
"""Faults by name: the reason they are refused for, the blob they are made in, and how."""


def recorder(cases: Cases) -> Callable[..., Callable[[Edit], None]]:
    """A decorator that adds a fault to `cases`: `@case(reason)`, or `@case(reason, make)` for another blob."""

    def case(reason: str, make: Make = some_blob) -> Callable[[Edit], None]:
        def add(edit: Edit) -> None:
            assert edit.__name__ not in cases
            cases[edit.__name__] = (reason, make, edit)

        return add

    return case


def field(name: str, value: Any) -> Callable[[Parts], None]:
    """An edit of one field of the first layer."""

    def edit(parts: Parts) -> None:
        assert name in parts.first
        parts.first[name] = value

    return edit


def record_field(name: str, value: Any) -> Callable[[Parts], None]:
    """An edit of one field of the first record of the first layer."""

    def edit(parts: Parts) -> None:
        assert name in parts.record
        parts.record[name] = value

    return edit
