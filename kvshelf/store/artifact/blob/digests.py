"""The digests of a segment: one of its head, and one of each run of rows. docs/format.md says what they cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from blake3 import blake3

from kvshelf.errors import BlobError
from kvshelf.store.artifact.blob.layer import DIGEST_BYTES, Cut, Layer, aligned

_GATHERED: Final = 32 << 10
"""Bytes. BLAKE3 hashes 16 blocks of 1 KiB at once; given 8 KiB at a time it takes twice as long. So smaller pieces are
copied together first."""


def digests_of(layer: Layer, buffers: Iterable[memoryview]) -> tuple[Hasher, bytes]:
    """A segment's head, to be hashed on with the digests that end it, and those digests, with their padding.

    buffers: the segment from its first byte on, in pieces of any size; a buffer may be filled anew for the next piece.
    What they have from the digests on is not read.
    """
    head, runs = Hasher(), [Hasher() for _ in range(layer.num_runs)]
    for run, piece in _cut(buffers, layer.cuts()):
        (head if run is None else runs[run]).update(piece)
    digests = b"".join(run.digest() for run in runs)
    return head, digests.ljust(aligned(len(digests)), b"\0")


def require_head(index: int, layer: Layer, digest: bytes) -> None:
    """Raise `BlobError` unless this is the digest of a layer's head."""
    if digest != layer.digest:
        raise _differs(f"segment {index}")


def require_run(index: int, run: int, digest: bytes, digests: memoryview) -> None:
    """Raise `BlobError` unless this is the digest of a run. digests: the array of all runs, from a verified head."""
    if digest != digests[run * DIGEST_BYTES : (run + 1) * DIGEST_BYTES]:
        raise _differs(f"run {run} of segment {index}")


def _cut(buffers: Iterable[memoryview], cuts: Iterable[Cut]) -> Iterator[tuple[int | None, memoryview]]:
    """The same bytes in smaller pieces: each is of one cut, and names its run. Stops with the last cut."""
    coming = iter(buffers)
    buffer = memoryview(b"")
    for run, left in cuts:
        while left:
            if not buffer:
                buffer = next(coming)
                continue
            piece, buffer = buffer[:left], buffer[left:]
            left -= len(piece)
            yield run, piece


class Hasher:
    """BLAKE3 of pieces of any size."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._gathered = bytearray()

    def update(self, piece: memoryview) -> None:
        if self._gathered or len(piece) < _GATHERED:
            self._gathered += piece
            if len(self._gathered) >= _GATHERED:
                self._flush()
        else:
            self._hasher.update(piece)

    def digest(self) -> bytes:
        self._flush()
        return self._hasher.digest()

    def _flush(self) -> None:
        self._hasher.update(self._gathered)
        self._gathered = bytearray()


def _differs(what: str) -> BlobError:
    return BlobError(f"{what} is not what was written: its digest differs", reason="digest_mismatch")
