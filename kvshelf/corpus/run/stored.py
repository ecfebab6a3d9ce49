"""A batch that is kept in the home: its input is a file there, its results are a journal there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from kvshelf.corpus.input.rows import Row, RowError, parse_jsonl
from kvshelf.corpus.input.sources import Shard, Source
from kvshelf.corpus.output.results import Journal, Result
from kvshelf.store.jobs.batches import Batches
from kvshelf.store.url import StoreConfig


@dataclass(frozen=True)
class StoredShard(Shard):
    """The whole of one uploaded JSONL file. Each process that reads it opens the store itself."""

    store: StoreConfig
    tenant: str
    file_id: str
    filename: str
    defaults: Mapping[str, Any]
    nbytes: int
    rows: int | None

    def read(self) -> Iterator[Row]:
        with self.store.open() as store, store.files.open(self.file_id, tenant=self.tenant) as opened:
            yield from parse_jsonl(opened.file, self.filename, self.defaults)


class StoredFile(Source):
    """One uploaded file as the input of a batch. Its rows are not spread: reading them is little beside the work."""

    def __init__(self, shard: StoredShard) -> None:
        self._shard = shard

    def shards(self) -> Sequence[Shard]:
        return [self._shard]


class HomeJournal(Journal):
    """See `Journal`. One line of JSON for each result; who has lost the lease of the batch can add none.

    A run that goes on brings the ends of earlier rows again, then as reused: what the journal has of these stays.
    """

    def __init__(self, batches: Batches, batch_id: str, term: int) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._term = term
        self._ends: dict[tuple[str, int], _End] | None = None

    def append(self, results: Sequence[Result]) -> None:
        if self._ends is None:
            self._ends = {result.key: _end_of(result) for result in self._read()}
        known = self._ends
        new = [result for result in results if not _says_nothing_new(result, known.get(result.key))]
        self._batches.append(self._batch_id, self._term, [pydantic_core.to_json(each.to_dict()) for each in new])
        known.update((result.key, _end_of(result)) for result in new)

    def finished(self) -> Iterator[Result]:
        return last_results(self._batches, self._batch_id)

    def _read(self) -> Iterator[Result]:
        return map(_parsed, self._batches.journal(self._batch_id))


_End = tuple[str | None, RowError | None, int]


def _end_of(result: Result) -> _End:
    return result.cache_id, result.error, result.attempts


def _says_nothing_new(result: Result, known: _End | None) -> bool:
    if known is None:
        return False
    return known[0] == result.cache_id if result.reused else result.error is not None and known == _end_of(result)


def last_results(batches: Batches, batch_id: str) -> Iterator[Result]:
    """Each row's last result, in the order in which they came. Read twice, so that none but its number is held."""
    last: dict[tuple[str, int], int] = {}
    for number, line in enumerate(batches.journal(batch_id)):
        last[_parsed(line).key] = number
    kept = set(last.values())
    for number, line in enumerate(batches.journal(batch_id)):
        if number in kept:
            yield _parsed(line)


def _parsed(line: bytes) -> Result:
    return Result.from_dict(pydantic_core.from_json(line))
