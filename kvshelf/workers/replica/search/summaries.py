"""What searches know of the caches of one tenant, in memory: which there are, and the summaries of those that were
compared. It follows the shelf by its changes, so that a search reads neither manifests nor summaries again."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvshelf.engine.summary import Block, Codes
from kvshelf.store.index import KEEP_CHANGES_S
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import Changes

Summary = list[Codes]
Places = npt.NDArray[np.int64]

BLOCK_CODES: Final = 32_768
"""Codes of a layer that are compared at once: they and what is made of them fit a core's own cache."""

_RECORD_BYTES: Final = 600
"""What Python takes for a `Record` with its texts, without labels."""


@dataclass(eq=False)
class Record:
    """What a search asks of a cache. own: whether it is of the searching model. digest: of its blob, whose summary
    `place` has among those of `Summaries`: `UNREAD`, or `NONE` where it has none. document: its number."""

    id: str
    name: str
    labels: Mapping[str, str]
    digest: str
    own: bool
    document: int
    created_at: float
    expires_at: float
    place: int

    @property
    def nbytes(self) -> int:
        return _RECORD_BYTES + sum(map(sys.getsizeof, (*self.labels, *self.labels.values())))


_SPARE: Final = 1000
"""Documents and summaries of caches that ended, which stay beside as many as there are caches."""

UNREAD: Final = -1
NONE: Final = -2


@dataclass(eq=False)
class Shortlist:
    """The caches that a search compares, the newest of each document, the newest first. until: when the first of them
    or of those left out expires. skipped: the others, counted. placed: once all have been read, those with a summary,
    the blocks that have these, and their places in the blocks."""

    labels: Mapping[str, str]
    version: int
    until: float
    records: list[Record]
    skipped: Counter[str]
    placed: tuple[list[Record], list[Block], Places] | None = None

    @property
    def missing(self) -> list[Record]:
        """The records whose summaries are not in memory."""
        return [] if self.placed else [record for record in self.records if record.place == UNREAD]


@dataclass(eq=False)
class Summaries:
    """The summaries that stay in memory, by place: blocks of them, of which the last one grows. ends: places behind
    each block."""

    blocks: list[Block] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    nbytes: int = 0

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, summaries: Iterable[Summary]) -> int:
        """Keep summaries that have codes. Returns the place of the first; the others follow."""
        first, fresh = len(self), list(summaries)
        if fresh and self.blocks and max(map(len, self.blocks[-1].codes)) < BLOCK_CODES:  # it is made anew
            begin = self.ends[-2] if len(self.ends) > 1 else 0
            fresh = [*map(self.at, range(begin, first)), *fresh]
            self.ends.pop()
            self.nbytes -= self.blocks.pop().nbytes
        for some in _portions(fresh):
            self.blocks.append(Block.of(some))
            self.ends.append(len(self) + len(some))
            self.nbytes += self.blocks[-1].nbytes
        return first

    def at(self, place: int) -> Summary:
        number = bisect_right(self.ends, place)
        block, within = self.blocks[number], place - (self.ends[number - 1] if number else 0)
        return [
            codes[starts[within] : starts[within + 1] if within + 1 < len(starts) else None]
            for codes, starts in zip(block.codes, block.starts, strict=True)
        ]

    def of(self, places: Places) -> tuple[list[Block], Places]:
        """The blocks that have these places, and the places among theirs."""
        ends = np.asarray(self.ends, np.int64)
        holding = np.searchsorted(ends, places, side="right")
        used, within = np.unique(holding, return_inverse=True)
        begins = ends - np.diff(ends, prepend=0)
        sizes = (ends - begins)[used]
        shifts = np.cumsum(sizes) - sizes - begins[used]
        return [self.blocks[number] for number in used], places + shifts[within]


def _portions(summaries: Iterable[Summary]) -> Iterator[list[Summary]]:
    """Summaries for a block each; only the last has room for more."""
    some: list[Summary] = []
    codes = 0
    for summary in summaries:
        some.append(summary)
        codes += max(map(len, summary))
        if codes >= BLOCK_CODES:
            yield some
            some, codes = [], 0
    if some:
        yield some


@dataclass(eq=False)
class Shelved:
    """The caches of one tenant. lock: held by the search that brings it up to date and compares. place: of the shelf's
    changes. listed: whether all caches were listed since `place` was asked for; after: the last one that was. version:
    counts changes of the caches and of the places of their summaries. Whoever changes it holds the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    summaries: Summaries = field(default_factory=Summaries)
    place: str | None = None
    after: str | None = None
    listed: bool = False
    version: int = 0
    _records: dict[str, Record] = field(default_factory=dict)
    _documents: dict[str, int] = field(default_factory=dict)
    _newest_first: list[Record] | None = None
    _last: Shortlist | None = None
    _asked_at: float = 0.0
    _record_bytes: int = 0
    _next_number: int = 0

    def begin(self, place: str | None) -> None:
        """Start again: all caches are to be listed, and what changes after `place` is to follow."""
        self._records, self._documents, self.summaries, self._record_bytes = {}, {}, Summaries(), 0
        self.place, self.after, self.listed, self._asked_at = place, None, False, time.monotonic()
        self._changed()

    def _changed(self) -> None:
        self._newest_first = self._last = None
        self.version += 1

    @property
    def known(self) -> str | None:
        """The place from which changes are to be asked for; None where it is unknown, or too old for the shelf."""
        return self.place if time.monotonic() - self._asked_at < KEEP_CHANGES_S / 2 else None

    def follow(self, changes: Changes, is_own: Callable[[Manifest], bool]) -> None:
        for cache_id in changes.ended:
            self._forget(cache_id)
        self.take(changes.data, is_own)
        self.place, self._asked_at = changes.place, time.monotonic()
        self._tidy()

    def take(self, manifests: Iterable[Manifest], is_own: Callable[[Manifest], bool]) -> None:
        """Take up caches as they are now. One whose blob is the same keeps its summary."""
        for manifest in manifests:
            known = self._forget(manifest.id)
            same = known is not None and known.digest == manifest.blob_digest
            if manifest.document_id not in self._documents:
                self._documents[manifest.document_id] = self._next_number
                self._next_number += 1
            record = Record(
                id=manifest.id,
                name=manifest.name,
                labels=dict(manifest.labels),
                digest=manifest.blob_digest,
                own=is_own(manifest),
                document=self._documents[manifest.document_id],
                created_at=manifest.created_at,
                expires_at=math.inf if manifest.expires_at is None else manifest.expires_at,
                place=known.place if known is not None and same else UNREAD,
            )
            self._records[manifest.id] = record
            self._record_bytes += record.nbytes

    def _forget(self, cache_id: str) -> Record | None:
        known = self._records.pop(cache_id, None)
        self._record_bytes -= 0 if known is None else known.nbytes
        self._changed()
        return known

    def chosen(self, labels: Mapping[str, str], now: float) -> Shortlist:
        """The caches to compare under these labels; the last choice again while nothing changes it."""
        last = self._last
        if last is not None and last.version == self.version and last.labels == labels and now < last.until:
            return last
        if self._newest_first is None:
            self._newest_first = sorted(self._records.values(), key=lambda record: record.created_at, reverse=True)
        newest: dict[int, Record] = {}
        own = others = 0
        until, wanted = math.inf, labels.items()
        for record in self._newest_first:
            if record.expires_at <= now or (wanted and not wanted <= record.labels.items()):
                continue
            until = min(until, record.expires_at)
            if record.own:
                own += 1
                newest.setdefault(record.document, record)
            else:
                others += 1
        left_out = Counter(other_model=others, same_document=own - len(newest))
        self._last = Shortlist(dict(labels), self.version, until, list(newest.values()), left_out)
        return self._last

    def keep(self, summaries: Sequence[tuple[Record, Summary]]) -> None:
        """Keep the summaries of some caches; an empty one says that its cache has none."""
        having = [(record, summary) for record, summary in summaries if summary]
        first = self.summaries.add(summary for _, summary in having)
        for record, _ in summaries:
            record.place = NONE
        for place, (record, _) in enumerate(having, first):
            record.place = place

    def _tidy(self) -> None:
        """Let go of what belongs to caches that ended, where that is the most."""
        if len(self._documents) > 2 * len(self._records) + _SPARE:
            numbers = {record.document for record in self._records.values()}
            self._documents = {id: number for id, number in self._documents.items() if number in numbers}
        if len(self.summaries) > 2 * len(self._records) + _SPARE:
            before, self.summaries = self.summaries, Summaries()
            self.keep([(record, before.at(record.place)) for record in self._records.values() if record.place >= 0])
            self._changed()

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return self.summaries.nbytes + self._record_bytes

    def __len__(self) -> int:
        return len(self._records)
