"""A stored cache of which only chosen parts are read: of a layer its head at once, and its rows run by run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from kvshelf.artifact.blob import check_padding
from kvshelf.artifact.blob.body import Body
from kvshelf.artifact.blob.digests import digest_of, require_head, require_run
from kvshelf.artifact.blob.frame import TRAILER, BlobSummary
from kvshelf.artifact.blob.layer import Span
from kvshelf.artifact.blob.segment import require_runs_sound, view_layer
from kvshelf.artifact.memory import sparse_memory
from kvshelf.artifact.opened.arriving import Guard, OpenedCache
from kvshelf.artifact.records import entries_of, parts_of
from kvshelf.errors import InvalidRequest, KvshelfError, StoreUnavailable


class RangedFile(Protocol):
    """See `kvshelf.store.blobs.StoredFile`."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]], /) -> None: ...

    def close(self) -> None: ...


ResultT = TypeVar("ResultT")


class PartialCache(OpenedCache):
    """A stored cache with a verified header, of which nothing else is read until it is asked for.

    One thread at a time reads; others wait for it. Any thread may use records meanwhile, of which fetched rows do not
    change. Made by `Store.open_parts`. Records stay usable once it is closed.
    """

    elsewhere: Callable[[], PartialCache] | None = None
    """Opens another copy of the same cache, once this one fails."""

    def __init__(self, summary: BlobSummary, source: RangedFile | memoryview, guard: Guard) -> None:
        """source: the blob as a file, which `close` closes; or its body in memory, unchanging, which records view."""
        super().__init__(summary)
        self._file = None if isinstance(source, memoryview) else source
        self._guard = guard
        self._turn = threading.Lock()
        self._closed = False
        self._memory = source if isinstance(source, memoryview) else sparse_memory(self.nbytes)
        self._body = Body(self._memory)
        self._offset = summary.nbytes - TRAILER.size - self.nbytes  # of the body in the file
        self._layers: dict[int, PartialLayer] = {}
        self.read_bytes = 0
        """Bytes of layers that have been read so far, those of memory views included."""

    def layer(self, index: int) -> PartialLayer:
        """A layer, whose head is read and verified by the first call.

        Raises `CacheCorrupt`, whose cache is quarantined, and `StoreUnavailable`.
        """
        return self._layers.get(index) or self._reading(lambda: self._opened(index))

    @property
    def indexed(self) -> bool:
        """Whether it has an index, by which selectors choose rows."""
        return any(record.kind == "indexed" for layer in self._header.layers for record in layer.records)

    @property
    def whole(self) -> bool:
        """Whether every row of every layer is here."""
        layers = map(self._layers.get, range(self.num_layers))
        fetched = (0 if layer is None else len(layer.fetched) for layer in layers)
        return all(count == layer.num_runs for count, layer in zip(fetched, self._header.layers, strict=True))

    def close(self) -> None:
        """Close the file, once no thread reads it; later reads raise `StoreUnavailable`. May be called twice."""
        with self._turn:
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _opened(self, index: int) -> PartialLayer:
        if index not in self._layers:
            self._layers[index] = PartialLayer(self, index)
        return self._layers[index]

    def _reading(self, read: Callable[[], ResultT]) -> ResultT:
        """Call `read` on this copy, and on another one if this one fails."""
        with self._turn:
            while True:
                if self._closed:
                    raise StoreUnavailable("the cache was closed before this was read; open it again")
                try:
                    with self._guard():
                        return read()
                except KvshelfError:
                    if not self._moved():
                        raise

    def _moved(self) -> bool:
        """Read from another copy from now on. Not if records are views of a copy in memory, which cannot be filled."""
        if self.elsewhere is None or self._file is None:
            return False
        try:
            other = self.elsewhere()
        except KvshelfError:
            return False  # the caller has its own error
        if other.root != self.root or other._file is None:
            other.close()
            return False
        self._file.close()
        self._file, self._guard = other._file, other._guard
        self.place, self.elsewhere = other.place, other.elsewhere
        return True

    def _read(self, start: int, spans: Iterable[Span]) -> None:
        """Bring spans of the segment that begins at byte `start` of the body into memory."""
        ranges = [(start + span.offset, start + span.offset + span.nbytes) for span in _merged(spans)]
        if self._file is not None:
            self._file.read_ranges([(self._offset + first, self._memory[first:end]) for first, end in ranges])
        self.read_bytes += sum(end - first for first, end in ranges)


class PartialLayer:
    """A layer of a `PartialCache`. record: a `LayerRecord` whose tensors are views of memory of the layer's full size;
    rows in runs that were not fetched are zeros, on pages that take no memory.

    runs: for each record of the layer (each of `Parts`) the numbers of its runs within the layer. Row i of every head
    of record p is in run `runs[p][i // run_rows[p]]`. A record that is here as a whole has none. fetched: runs here.
    """

    def __init__(self, cache: PartialCache, index: int) -> None:
        """Reads the head. Raises `BlobError`; used by `PartialCache`."""
        self._cache = cache
        self._index = index
        self._layer = layer = cache._header.layers[index]
        self._segment = cache._memory[layer.offset : layer.offset + layer.nbytes]
        head = layer.head_spans()
        cache._read(layer.offset, head)
        require_head(index, layer, digest_of(map(self._at, head)))
        check_padding(index, layer, self._segment)
        self._digests = self._at(layer.digests)
        self.num_runs = layer.num_runs
        self.runs = layer.runs
        self.run_rows = tuple(record.run_rows for record in layer.records)
        self.record = view_layer(index, cache._header, cache._body)
        self.fetched: frozenset[int] = frozenset()

    def fetch(self, runs: Iterable[int]) -> None:
        """Read and verify these runs, as far as they are not here. Several are read together, so ask for all at once.

        Raises `InvalidRequest` for a number that no run has, and as `PartialCache.layer`; then none is added.
        """
        missing = set(runs) - self.fetched
        if missing and not 0 <= min(missing) <= max(missing) < self.num_runs:
            raise InvalidRequest(
                f"layer {self._index} has runs 0 to {self.num_runs - 1}, not {sorted(missing)[:8]}", param="runs"
            )
        if missing:
            self._cache._reading(lambda: self._load(sorted(missing - self.fetched)))

    def _load(self, runs: Sequence[int]) -> None:
        spans = {run: self._layer.run_spans(run) for run in runs}
        self._cache._read(self._layer.offset, chain.from_iterable(spans.values()))
        for run, run_spans in spans.items():
            require_run(self._index, run, digest_of(map(self._at, run_spans)), self._digests)
        entries = entries_of(self.record)
        assert entries is not None, "a layer without entries has no runs"
        for part, numbers, rows in zip(parts_of(entries), self.runs, self.run_rows, strict=True):
            part_runs = [run - numbers.start for run in runs if run in numbers]
            require_runs_sound(f"layer {self._index}", part, rows, part_runs)
        self.fetched |= set(runs)

    def _at(self, span: Span) -> memoryview:
        return self._segment[span.offset : span.offset + span.nbytes]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in as few spans as possible, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and merged[-1].offset + merged[-1].nbytes == span.offset:
            merged[-1] = Span(merged[-1].offset, merged[-1].nbytes + span.nbytes)
        else:
            merged.append(span)
    return merged
