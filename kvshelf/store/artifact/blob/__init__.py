"""Blob format 1: a compressed cache as bytes. docs/format.md describes it byte by byte, with the reasons.

    fixed part   magic, major, minor, header length                          16 bytes
    header       msgpack, then zeros up to a multiple of 64
    body         one segment per layer: its records' arrays, each aligned to 64 and padded with zeros, then the digests
                 of its runs of rows
    trailer      total length, root digest                                   40 bytes

The digest of each segment's head lies in the header, the digests of its runs in that head, and the root digest covers
the fixed part, the header, its padding and the total length. So every byte is covered and hashed once; hashing the
whole blob again would double the time of a read. The digests also let a reader use a layer before the next one has
arrived, and some runs of a layer without the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import BinaryIO

from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store.artifact.blob.digests import digests_of, require_head, require_run
from kvshelf.store.artifact.blob.frame import (
    FIXED,
    TRAILER,
    BlobSummary,
    Buffer,
    body_offset,
    open_frame,
)
from kvshelf.store.artifact.blob.header import Header
from kvshelf.store.artifact.blob.layer import DIGEST_BYTES, Layer, aligned

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


def check_segment(index: int, layer: Layer, segment: memoryview) -> None:
    """Raise `BlobError` unless a layer's segment matches its digests and its padding is zero."""
    _check_digests(index, layer, [segment], lambda: segment[layer.run_digests.offset :])
    check_padding(index, layer, segment)


def check_padding(index: int, layer: Layer, segment: memoryview) -> None:
    """Raise `BlobError` unless the padding behind each array is zero."""
    for span in layer.spans:
        end = span.offset + span.nbytes
        if any(segment[end : aligned(end)]):
            raise BlobError(f"padding in segment {index} is not zero", reason="nonzero_padding")


def inspect(data: Buffer) -> BlobSummary:
    """The header of a blob, its root digest checked; the segments are not read. Raises `BlobError`."""
    view = as_view(data)
    body = body_offset(view[: FIXED.size], len(view))
    return open_frame(view[:body], view[-TRAILER.size :], len(view))


def open_file(file: BinaryIO, size: int) -> BlobSummary:
    """`inspect` a blob in a seekable file that must have `size` bytes; leaves it at the first byte of the body."""
    end = file.seek(0, os.SEEK_END)
    if end != size:
        raise BlobError(
            f"the file has {end} bytes, {size} were written", reason="truncated" if end < size else "trailing_bytes"
        )
    file.seek(max(0, size - TRAILER.size))
    trailer = _read(file, min(size, TRAILER.size))
    file.seek(0)
    fixed = _read(file, min(size, FIXED.size))
    rest = _read(file, body_offset(fixed, size) - len(fixed))  # without a seek, so that one stream carries it
    return open_frame(fixed + rest, trailer, size)


def verify_file(file: BinaryIO, size: int) -> BlobSummary:
    """Check every digest of a blob in a seekable file of `size` bytes, in constant memory. Raises `BlobError`."""
    summary = open_file(file, size)
    buffer = bytearray(_CHUNK)
    for index, layer in enumerate(summary.header.layers):  # segments follow each other without holes
        rows, digests = layer.run_digests.offset, layer.nbytes - layer.run_digests.offset
        # The digests come last: those of the bytes before are all computed by then.
        _check_digests(index, layer, _chunks(file, buffer, rows), partial(_read, file, digests))
    return summary


def as_view(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidRequest(f"a blob is a run of bytes, not {type(data).__name__}", param="blob") from error


def _check_digests(index: int, layer: Layer, buffers: Iterable[memoryview], read_digests: Callable[[], Buffer]) -> None:
    """read_digests: gives the stored digests of the runs, once `buffers` has given the bytes before them."""
    head, found = digests_of(layer, buffers)
    stored = memoryview(read_digests())
    head.update(stored)
    require_head(index, layer, head.digest())
    for run in range(layer.num_runs):
        require_run(index, run, found[run * DIGEST_BYTES : (run + 1) * DIGEST_BYTES], stored)


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
