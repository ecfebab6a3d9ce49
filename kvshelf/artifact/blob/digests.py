"""The digests of a segment: of its head, of all rows in runs, and of each run (docs/internals/format.md)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from blake3 import blake3

from kvshelf.artifact.blob.layer import DIGEST_BYTES, Layer, Span
from kvshelf.errors import BlobError

_GATHERED: Final = 32 << 10
"""Bytes. BLAKE3 hashes 16 blocks of 1 KiB at once, and 8 KiB in twice the time: small pieces are copied together."""


def digests_of(layer: Layer, buffers: Sequence[memoryview]) -> tuple[bytes, bytes]:
    """The digest of a segment's head, and the array of digests, without padding, that ends the segment.

    buffers: the segment up to that array. No array of rows extends over two of them.
    """
    head, rows = _hashed(layer, buffers)
    digests = b"".join([*run_digests(layer, buffers), rows.digest()]) if layer.num_runs else b""
    head.update(digests).update(bytes(layer.digests_padding))
    return head.digest(), digests


def check_whole(
    index: int, layer: Layer, buffers: Iterable[memoryview], read: Callable[[], bytes | memoryview]
) -> None:
    """Raise `BlobError` unless a segment matches the digests of its head and of all its rows.

    buffers: the segment up to its array of digests; a buffer may be filled anew for the next piece. read: called when
    those are used up, for the array with its padding.
    """
    head, rows = _hashed(layer, buffers)
    digests = read()
    require_head(index, layer, head.update(digests).digest())
    if layer.num_runs and rows.digest() != digests[layer.num_runs * DIGEST_BYTES :][:DIGEST_BYTES]:
        raise _differs(f"segment {index}")


def require_head(index: int, layer: Layer, digest: bytes) -> None:
    """Raise `BlobError` unless `digest` is that of the layer's head."""
    if digest != layer.digest:
        raise _differs(f"segment {index}")


def require_run(index: int, run: int, digest: bytes, digests: memoryview) -> None:
    """Raise `BlobError` unless `digest` is that of the run. digests: the array of a head that has been checked."""
    if digest != digests[run * DIGEST_BYTES :][:DIGEST_BYTES]:
        raise _differs(f"run {run} of segment {index}")


def run_digests(layer: Layer, buffers: Sequence[memoryview]) -> list[bytes]:
    """The digest of each run. buffers: as of `digests_of`."""
    starts = list(accumulate(map(len, buffers), initial=0))

    def at(span: Span) -> memoryview:
        buffer = bisect_right(starts, span.offset) - 1
        return buffers[buffer][span.offset - starts[buffer] :][: span.nbytes]

    return [digest_of(map(at, layer.run_spans(run))) for run in range(layer.num_runs)]


def digest_of(pieces: Iterable[memoryview]) -> bytes:
    """BLAKE3 of pieces that follow each other."""
    hasher = blake3()
    gathered, nbytes = list[memoryview](), 0
    for piece in pieces:
        gathered.append(piece)
        nbytes += len(piece)
        if nbytes >= _GATHERED:
            hasher.update(piece if len(piece) == nbytes else b"".join(gathered))
            gathered, nbytes = [], 0
    return hasher.update(b"".join(gathered)).digest()


def _hashed(layer: Layer, buffers: Iterable[memoryview]) -> tuple[blake3, blake3]:
    """The head of a segment up to its array of digests, and all rows in runs, to be hashed on."""
    head, rows = blake3(), blake3()
    for in_run, piece in _cut(buffers, layer):
        (rows if in_run else head).update(piece)
    return head, rows


def _cut(buffers: Iterable[memoryview], layer: Layer) -> Iterator[tuple[bool, memoryview]]:
    """The segment up to its array of digests in pieces, each with whether it is of rows in runs."""
    remaining = iter(buffers)
    buffer = memoryview(b"")
    for in_run, nbytes in layer.cuts():
        while nbytes:
            if not buffer:
                buffer = next(remaining)
                continue
            piece, buffer = buffer[:nbytes], buffer[nbytes:]
            nbytes -= len(piece)
            yield in_run, piece


def _differs(what: str) -> BlobError:
    return BlobError(f"{what} is not what was written: its digest differs", reason="digest_mismatch")
