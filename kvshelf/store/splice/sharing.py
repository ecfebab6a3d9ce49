"""Finds the bytes that a blob shares with a stored one, and makes the file of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.blob.frame import TRAILER, BlobSummary
from kvshelf.artifact.blob.layer import Layer, Span, aligned
from kvshelf.store.blobs import Name, StoredFile
from kvshelf.store.splice import BASES_LIMIT, TABLE_LIMIT, Splice, SplicedFile, SplicedRun

LEAST_RUN: Final = 4 << 10
"""Bytes. A shorter run is written again: it takes a read of its own, and its place in the table."""

LEAST_SHARE: Final = 1 / 8
"""A cache that shares less of its blob is written whole."""

_PIECE: Final = 1 << 20  # bytes compared at once


class Shared(NamedTuple):
    """Bytes of a new blob, from byte `start` on, that are those of another blob from byte `offset` on."""

    start: int
    offset: int
    nbytes: int


def shared_with(packed: PackedBlob, parent: BlobSummary, file: StoredFile) -> list[Shared]:
    """The bytes that a blob has in common with a stored one that it extends: whole arrays of the first records of each
    layer, in ascending order, joined where they follow each other. Compares the bytes of both. file: the parent's whole
    blob. The padding behind an array counts as shared: it is zero in both."""
    runs: list[Shared] = []
    body = packed.nbytes - TRAILER.size - packed.header.body_bytes
    parent_body = parent.nbytes - TRAILER.size - parent.header.body_bytes
    memory = memoryview(bytearray(_PIECE))
    for layer, old, segment in zip(packed.header.layers, parent.header.layers, packed.parts[1:-1], strict=False):
        starts = accumulate(map(len, segment), initial=0)
        buffers = {start: buffer for start, buffer in zip(starts, segment, strict=False) if len(buffer)}
        for span, old_span in _pairs(layer, old):
            offset = parent_body + old.offset + old_span.offset
            if span.nbytes and _are_equal(buffers[span.offset], offset, file, memory):
                _join(runs, Shared(body + layer.offset + span.offset, offset, aligned(span.nbytes)))
    return [run for run in runs if run.nbytes >= LEAST_RUN]


def _pairs(layer: Layer, old: Layer) -> Iterator[tuple[Span, Span]]:
    """The arrays of both layers that could be equal, by their place and size."""
    for spans, old_spans in zip(layer.arrays, old.arrays, strict=False):
        for name, span in spans.items():
            if name in old_spans and old_spans[name].nbytes == span.nbytes:
                yield span, old_spans[name]


def _are_equal(buffer: memoryview, offset: int, file: StoredFile, memory: memoryview) -> bool:
    for start in range(0, len(buffer), len(memory)):
        piece = buffer[start : start + len(memory)]
        stored = memory[: len(piece)]
        file.read_ranges([(offset + start, stored)])
        if not np.array_equal(np.frombuffer(piece, np.uint8), np.frombuffer(stored, np.uint8)):
            return False
    return True


def _join(runs: list[Shared], new: Shared) -> None:
    last = runs[-1] if runs else None
    if last and (last.start + last.nbytes, last.offset + last.nbytes) == (new.start, new.offset):
        runs[-1] = last._replace(nbytes=last.nbytes + new.nbytes)
    else:
        runs.append(new)


class Spliced(NamedTuple):
    """A blob as a file to write: its table, and its own bytes in parts as those of a `PackedBlob`."""

    splice: Splice
    parts: list[list[memoryview]]
    nbytes: int


def spliced(
    packed: PackedBlob, shared: Sequence[Shared], parent: Name, file: StoredFile, bases: Sequence[Name]
) -> Spliced | None:
    """A blob without the bytes that it shares; None where it shares too little, or would have too many bases. parent:
    the file that has the other blob, or the own bytes of it; bases: those of it."""
    if sum(run.nbytes for run in shared) < LEAST_SHARE * packed.nbytes:
        return None
    files: dict[Name, int] = {}
    runs: list[SplicedRun] = []
    own_bytes = end = 0
    for start, offset, nbytes in shared:
        if start > end:
            runs.append(SplicedRun(0, own_bytes, start - end))
        own_bytes += start - end
        located = file.locate(offset, nbytes) if isinstance(file, SplicedFile) else [SplicedRun(0, offset, nbytes)]
        for run in located:
            name = [parent, *bases][run.file]
            runs.append(run._replace(file=files.setdefault(name, len(files) + 1)))
        end = start + nbytes
    runs.append(SplicedRun(0, own_bytes, packed.nbytes - end))  # the trailer, at least
    own_bytes += packed.nbytes - end
    if len(files) > BASES_LIMIT:
        return None
    splice = Splice(tuple(files), tuple(_joined(runs)))
    table = splice.pack()
    if len(table) > TABLE_LIMIT:
        return None
    parts = [[memoryview(table)], *_without(packed, shared)]
    return Spliced(splice, parts, len(table) + own_bytes)


def _joined(runs: Sequence[SplicedRun]) -> list[SplicedRun]:
    joined: list[SplicedRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.file == run.file and last.offset + last.nbytes == run.offset:
            joined[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


def _without(packed: PackedBlob, shared: Sequence[Shared]) -> list[list[memoryview]]:
    """The parts of a blob without its shared bytes, which begin and end with buffers."""
    parts: list[list[memoryview]] = []
    runs = iter(shared)
    skip, start = next(runs, None), 0
    for part in packed.parts:
        parts.append([])
        for buffer in part:
            while skip and start >= skip.start + skip.nbytes:
                skip = next(runs, None)
            if not skip or start < skip.start:
                parts[-1].append(buffer)
            start += len(buffer)
    return parts
