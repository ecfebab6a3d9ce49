"""Blobs taken apart and put together again with digests that fit: what a hostile writer could hand in."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import torch
from blake3 import blake3

from kvshelf.store.artifact import Kept
from kvshelf.store.artifact import Parts as PartsRecord
from tests.store.caches import make_cache, make_merged

Fields = dict[str, Any]


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
        self.total: int | None = None

    @property
    def first(self) -> Fields:
        layer: Fields = self.fields["layers"][0]
        return layer

    def put_positions(self, data: bytes) -> None:
        """Replace the positions of the first and only layer."""
        part = self.first["positions"]
        part["nbytes"] = len(data)
        self.body[part["offset"] :] = data.ljust(aligned(len(data)), b"\0")
        self.first["nbytes"] = len(self.body)

    def array(self, record: int, name: str) -> memoryview:
        """One array of the first layer of 1.1, found by walking all before it as docs/format.md says; it may be written
        to."""
        start = self.first["offset"]
        for index, fields in enumerate(self.first["records"]):
            for found, size in zip(_names(fields), fields["sizes"], strict=True):
                if (index, found) == (record, name):
                    return memoryview(self.body)[start : start + size]
                start += aligned(size)
        raise KeyError(name)

    def join(self) -> bytes:
        for layer in self.fields.get("layers", ()):
            if isinstance(layer, dict) and {"offset", "nbytes", "digest"} <= layer.keys():
                layer["digest"] = blake3(self.body[layer["offset"] : layer["offset"] + layer["nbytes"]]).digest()
        header = msgpack.packb(sorted_fields(self.fields)) if self.header is None else self.header
        fixed = struct.pack("<8sHHI", self.magic, self.major, self.minor, len(header)) + header
        head = fixed.ljust(aligned(len(fixed)), self.padding)
        total = (len(head) + len(self.body) + 40 if self.total is None else self.total).to_bytes(8, "little")
        return head + self.body + total + blake3(head + total).digest()


def sorted_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_fields(value[key]) for key in sorted(value)}
    return [sorted_fields(item) for item in value] if isinstance(value, list) else value


def _names(record: Fields) -> list[str]:
    """The arrays of a record of 1.1, in the order of docs/format.md."""
    names = ["keys", "values"]
    if record["codec"] != "none":
        names = [f"{rows} {what}" for rows in names for what in ("codes", "scales", "zeros")]
    names.append("positions")
    return [*names, "slot positions", "slot classes", "slot scales"] if record["kind"] == "merged" else names


def some_blob() -> bytes:
    # One layer; its positions are a bitmap of 2 * 5 bytes, keys 29 * 3 * 4 bytes: every part is followed by padding.
    return make_cache(lengths=((20, 9),), dims=(3, 5)).to_bytes()


def encoded_blob() -> bytes:
    # One layer of 1.1 with two merged records: [8, 5] classes under int4 and the residual's [4, 4]. Rows of 3 and 5
    # codes leave four bits of their last byte unused.
    generator = torch.Generator().manual_seed(4)
    layer = make_merged((12, 9), 40, dims=(3, 5), generator=generator)
    cache = replace(make_cache(), layers=(layer,))
    return cache.to_bytes("int4:group=8,residual=4")


def kept_blob() -> bytes:
    # One layer of 1.1 with two plain `Kept` records that share no position: [0, 2, 4, ...] and [1, 3, 5, ...].
    def record(first: int) -> Kept:
        positions = [torch.arange(first, 30, 2)] * 2
        rows = [torch.ones(15, 2)] * 2
        return Kept.from_heads(rows, rows, positions)

    return replace(make_cache(), layers=(PartsRecord((record(0), record(1))),)).to_bytes()


Make = Callable[[], bytes]
Edit = Callable[[Parts], None]
Cases = dict[str, tuple[str, Make, Edit]]
"""Faults by name: the reason they are refused for, the blob they are made in, and how."""


def recorder(cases: Cases) -> Callable[..., Callable[[Edit], None]]:
    """A decorator that adds a fault to `cases`: `@case(reason)`, or `@case(reason, make)` for another blob."""

    def case(reason: str, make: Make = some_blob) -> Callable[[Edit], None]:
        def add(edit: Edit) -> None:
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
        assert name in parts.first["records"][0]
        parts.first["records"][0][name] = value

    return edit
