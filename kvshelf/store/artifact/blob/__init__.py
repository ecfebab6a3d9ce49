"""Blob format 1: a compressed cache as bytes. docs/format.md describes it byte by byte, with the reasons.

    fixed part   magic, major, minor, header length                          16 bytes
    header       msgpack, then zeros up to a multiple of 64
    body         one segment per layer: its records' arrays, each aligned to 64 and padded with zeros
    trailer      total length, root digest                                   40 bytes

Each segment's digest lies in the header, and the root digest covers the fixed part, the header, its padding and the
total length. So every byte is covered and hashed once; hashing the whole blob again would double the time of a read.
The digests also let a reader use a layer before the next one has arrived.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from blake3 import blake3

from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store.artifact.blob.body import Body
from kvshelf.store.artifact.blob.frame import (
    FIXED,
    FORMAT_MAJOR,
    TRAILER,
    BlobSummary,
    Buffer,
    body_offset,
    close_frame,
    open_frame,
)
from kvshelf.store.artifact.blob.header import HEADER_LIMIT, Header, IdentityHeader, parse_header
from kvshelf.store.artifact.blob.layer import Layer, aligned
from kvshelf.store.artifact.blob.segment import read_layer, write_layer
from kvshelf.store.artifact.identity import Identity
from kvshelf.store.artifact.records import LayerRecord

__all__ = [
    "FORMAT_MAJOR",
    "BlobSummary",
    "Body",
    "Buffer",
    "PackedBlob",
    "check_segment",
    "decode",
    "inspect",
    "open_file",
    "pack",
    "read_layer",
    "verify_file",
]

_CHUNK = 1 << 20  # fits the processor's cache between reading and hashing


@dataclass(frozen=True)
class PackedBlob:
    """A blob as a sequence of buffers, which a writer writes one after the other.

    `parts` are the head, one segment per layer, and the trailer; each is a run of buffers. The buffers share memory
    with the cache's tensors wherever these are contiguous and on the CPU.
    """

    parts: tuple[tuple[memoryview, ...], ...]
    nbytes: int
    root: bytes
    header: Header

    @property
    def buffers(self) -> Iterator[memoryview]:
        """All buffers, from the first byte to the last."""
        return chain.from_iterable(self.parts)


def decode(data: Buffer) -> tuple[Header, tuple[LayerRecord, ...]]:
    """Read a blob: its header and its layers. Checks every digest before it makes a tensor.

    Raises `BlobError` for any bytes that `pack` does not write.

    The tensors are views of `data` and keep it alive. Neither `data` nor the tensors may be changed afterwards.
    """
    header = inspect(data).header
    view = _view(data)[-header.body_bytes - TRAILER.size :]
    for index, layer in enumerate(header.layers):
        check_segment(index, layer, view[layer.offset : layer.offset + layer.nbytes])
    body = Body(view)
    return header, tuple(read_layer(index, header, body) for index in range(len(header.layers)))


def check_segment(index: int, layer: Layer, segment: memoryview) -> None:
    """Raise `BlobError` unless a layer's segment matches its digest and its padding is zero."""
    _require_digest(f"segment {index}", blake3(segment).digest(), layer.digest)
    for span in (span for spans in layer.arrays for span in spans.values()):
        end = span.offset + span.nbytes
        if any(segment[end : aligned(end)]):
            raise BlobError(f"padding in segment {index} is not zero", reason="nonzero_padding")


def inspect(data: Buffer) -> BlobSummary:
    """The header of a blob, its root digest checked; the segments are not read. Raises `BlobError`."""
    view = _view(data)
    body = body_offset(view[: FIXED.size], len(view))
    return open_frame(view[:body], view[-TRAILER.size :], len(view))


def open_file(file: BinaryIO, size: int) -> BlobSummary:
    """`inspect` a blob in a seekable file that must have `size` bytes; leaves it at the first byte of the body."""
    end = file.seek(0, os.SEEK_END)
    if end != size:
        raise BlobError(
            f"the file has {end} bytes, {size} were written", reason="truncated" if end < size else "trailing_bytes"
        )
    trailer = _read_at(file, max(0, size - TRAILER.size), min(size, TRAILER.size))
    file.seek(0)
    fixed = _read(file, min(size, FIXED.size))
    rest = _read(file, body_offset(fixed, size) - len(fixed))  # without a seek, so that one stream carries it
    return open_frame(fixed + rest, trailer, size)


def verify_file(file: BinaryIO, size: int) -> BlobSummary:
    """Check every digest of a blob in a seekable file of `size` bytes, in constant memory. Raises `BlobError`."""
    summary = open_file(file, size)
    buffer = bytearray(_CHUNK)
    for index, layer in enumerate(summary.header.layers):  # segments follow each other without holes
        digest = blake3()
        for chunk in _chunks(file, buffer, layer.nbytes):
            digest.update(chunk)
        _require_digest(f"segment {index}", digest.digest(), layer.digest)
    return summary


def pack(
    records: Sequence[LayerRecord], num_tokens: int, next_position: int, identity: Identity, codec: str
) -> PackedBlob:
    """Lay the fields of a `CompressedCache` out as a blob and compute its digests. Equal fields give equal bytes.

    Raises `InvalidRequest` for what the format cannot hold: a dtype other than float32, bfloat16 and float16, a header
    over 256 KiB, records that contradict themselves.
    """
    layers: list[Layer] = []
    segments: list[tuple[memoryview, ...]] = []
    offset = 0
    for record in records:
        layer, buffers = _segment(record, num_tokens, offset)
        layers.append(layer)
        segments.append(tuple(buffers))
        offset += layer.nbytes
    try:
        described = IdentityHeader.model_validate(identity.to_dict())
        header = Header(
            identity=described, num_tokens=num_tokens, next_position=next_position, codec=codec, layers=layers
        )
        packed = header.pack()
        parse_header(packed)  # what cannot be read back is refused before it is stored
    except (ValueError, OverflowError, BlobError) as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    if len(packed) > HEADER_LIMIT:
        raise InvalidRequest(
            f"the cache's description takes {len(packed)} bytes, the format allows {HEADER_LIMIT}; shorten the policy "
            "parameters, the probe text or the expected questions"
        )
    head, trailer = close_frame(packed, offset)
    nbytes = len(head) + offset + len(trailer)
    return PackedBlob(((memoryview(head),), *segments, (memoryview(trailer),)), nbytes, trailer[8:], header)


def _view(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidRequest(f"a blob is a run of bytes, not {type(data).__name__}", param="blob") from error


def _segment(record: LayerRecord, num_tokens: int, offset: int) -> tuple[Layer, list[memoryview]]:
    """One layer's header and the buffers of its segment, padding included."""
    dims, records = write_layer(record, num_tokens)
    buffers: list[memoryview] = []
    digest = blake3()
    for data in (data for _, arrays in records for data in arrays.values()):
        padding = memoryview(bytes(aligned(len(data)) - len(data)))
        buffers.extend((data, padding))
        digest.update(data).update(padding)
    headers, nbytes = [header for header, _ in records], sum(map(len, buffers))
    layer = Layer(**dims._asdict(), records=headers, offset=offset, nbytes=nbytes, digest=digest.digest())
    return layer, buffers


def _require_digest(what: str, actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise BlobError(f"{what} is not what was written: its digest differs", reason="digest_mismatch")


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return _read(file, size)


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise BlobError(f"the file ended {size - len(data)} bytes early while it was read", reason="truncated")
    return data


def _chunks(file: BinaryIO, buffer: bytearray, size: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while size:
        count = file.readinto(view[: min(size, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise BlobError(f"the file ended {size} bytes early while it was read", reason="truncated")
        yield view[:count]
        size -= count
