"""Blob format 1, a compressed cache as bytes; docs/internals/format.md describes and explains every byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import BinaryIO

from kvshelf.artifact.blob import frame
from kvshelf.artifact.blob.digests import check_whole, require_run, run_digests
from kvshelf.artifact.blob.header import Header
from kvshelf.artifact.blob.layer import Layer, aligned
from kvshelf.errors import BlobError, InvalidRequest

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
    """Raise `BlobError` unless a layer's segment matches the digests of its head and of all its rows, and its padding
    is zero. `check_runs` checks the digests of its runs, which only a partial read uses."""
    check_whole(index, layer, [segment], lambda: segment[layer.digests.offset :])
    check_padding(index, layer, segment)


def check_runs(index: int, layer: Layer, segment: memoryview) -> None:
    """Raise `BlobError` unless the digest of every run is that of its rows. For blobs from outside: those on a shelf
    were checked when they came, and their root digest has not changed."""
    digests = segment[layer.digests.offset :]
    for run, digest in enumerate(run_digests(layer, [segment])):
        require_run(index, run, digest, digests)


def check_padding(index: int, layer: Layer, segment: memoryview) -> None:
    """Raise `BlobError` unless the padding behind each array is zero."""
    for span in layer.spans:
        end = span.offset + span.nbytes
        if any(segment[end : aligned(end)]):
            raise BlobError(f"padding in segment {index} is not zero", reason="nonzero_padding")


def inspect(data: frame.Buffer) -> frame.BlobSummary:
    """The header of a blob, its root digest checked; the segments are not read. Raises `BlobError`."""
    view = as_view(data)
    body = frame.body_offset(view[: frame.FIXED.size], len(view))
    return frame.open_frame(view[:body], view[-frame.TRAILER.size :], len(view))


def open_file(file: BinaryIO, size: int) -> frame.BlobSummary:
    """`inspect` a blob in a seekable file that must have `size` bytes; leaves it at the first byte of the body."""
    end = file.seek(0, os.SEEK_END)
    if end != size:
        raise BlobError(
            f"the file has {end} bytes, {size} were written", reason="truncated" if end < size else "trailing_bytes"
        )
    file.seek(max(0, size - frame.TRAILER.size))
    trailer = _read(file, min(size, frame.TRAILER.size))
    file.seek(0)
    fixed = _read(file, min(size, frame.FIXED.size))
    rest = _read(file, frame.body_offset(fixed, size) - len(fixed))  # without a seek, so that one stream carries it
    return frame.open_frame(fixed + rest, trailer, size)


def verify_file(file: BinaryIO, size: int) -> frame.BlobSummary:
    """Check every digest of a blob in a seekable file of `size` bytes, in constant memory. Raises `BlobError`."""
    summary = open_file(file, size)
    buffer = bytearray(_CHUNK)
    for index, layer in enumerate(summary.header.layers):  # segments follow each other without holes
        offset = layer.digests.offset
        check_whole(index, layer, _chunks(file, buffer, offset), partial(_read, file, layer.nbytes - offset))
    return summary


def as_view(data: frame.Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidRequest(f"a blob is a run of bytes, not {type(data).__name__}", param="blob") from error


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
