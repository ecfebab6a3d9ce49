"""A batch of a service: its input file and its journal are in the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pydantic_core

from kvshelf.corpus.input.rows import parse_jsonl
from kvshelf.corpus.row import Row, RowError, Shard
from kvshelf.corpus.run.journal import Journal, Lines, ReadLines, last_ends
from kvshelf.store.jobs.batches import BatchTable
from kvshelf.store.url import StoreConfig


@dataclass(frozen=True)
class StoredShard(Shard):
    """One uploaded JSONL file, read in one go because that costs little. The reader opens the store itself."""

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


@dataclass(frozen=True, kw_only=True)
class QuestionShard(StoredShard):
    """One uploaded file of questions. Rows that an earlier run ended come as they ended, so that none is asked twice.
    recorded: the number of lines of the batch's journal that count, so that each reading gives the same rows.
    retry_failed: ask failed ones again."""

    batch_id: str
    recorded: int
    retry_failed: bool

    def read(self) -> Iterator[Row]:
        with self.store.open() as store, store.files.open(self.file_id, tenant=self.tenant) as opened:
            ends = {row.line: replace(row, answer=None, seconds=0.0) for row in self._earlier(store.batches)}
            for row in parse_jsonl(opened.file, self.filename, self.defaults, endpoint="/v1/chat/completions"):
                yield ends.get(row.line, row)

    def _earlier(self, batches: BatchTable) -> Iterator[Row]:
        for row in last_ends(lambda: islice(_recorded(batches, self.batch_id), self.recorded)):
            if row.error is None:
                yield replace(row, reused=True)
            elif not self.retry_failed:
                yield row


class TableLines(Lines):
    """The lines that the job table keeps with a batch. After the batch's lease is lost, `append` raises
    `StateConflict`."""

    def __init__(self, batches: BatchTable, batch_id: str, term: int) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._term = term

    def append(self, lines: Sequence[bytes]) -> None:
        self._batches.table.append(self._batch_id, self._term, lines)

    def reader(self, *, of_this_run: bool) -> ReadLines:
        assert not of_this_run, "the lines of all runs are a batch's results"
        return lambda: ((self._batch_id, line) for line in self._batches.journal(self._batch_id))


class StoredJournal(Journal):
    """A resumed run revisits finished rows as reused; their first end stays in the journal."""

    def __init__(self, batches: BatchTable, batch_id: str, term: int) -> None:
        super().__init__(TableLines(batches, batch_id, term))
        self._recorded = partial(_recorded, batches, batch_id)
        self._ends: dict[tuple[str, int], _End] | None = None

    def append(self, rows: Sequence[Row]) -> None:
        if self._ends is None:
            self._ends = {row.key: _end_of(row) for row in self._recorded()}
        ends = self._ends
        new = [row for row in rows if not _is_recorded(row, ends.get(row.key))]
        super().append(new)
        ends.update((row.key, _end_of(row)) for row in new)


_End = tuple[str | None, RowError | None, int]


def _end_of(row: Row) -> _End:
    return row.cache_id, row.error, row.attempts


def _is_recorded(row: Row, end: _End | None) -> bool:
    if end is None:
        return False
    return end[0] == row.cache_id if row.reused else row.error is not None and end == _end_of(row)


def last_results(batches: BatchTable, batch_id: str) -> Iterator[Row]:
    """Each row's last end, in the order of the journal."""
    return last_ends(lambda: _recorded(batches, batch_id))


def _recorded(batches: BatchTable, batch_id: str) -> Iterator[Row]:
    return (Row.from_dict(pydantic_core.from_json(line)) for line in batches.journal(batch_id))
