"""Batches of a home: the request, the state, and a journal with the result of each row."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final

from pydantic import Field

from kvshelf.api.batches import BatchError, BatchStatus, RequestCounts
from kvshelf.errors import BatchNotFound
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import Item, JobTable, overtaken, read, require_after

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_LINES: Final = 1000


class BatchRecord(StoredRecord):
    """One batch. Times are Unix seconds. body: the request as it was accepted. times: when each state was entered last.
    attempts: how often it was started, retries included; a retry does the failed rows again. progress: numbers of the
    run for people, JSON types only. version: counts its changes."""

    id: str
    tenant: str
    body: dict[str, Any]
    state: BatchStatus
    times: dict[BatchStatus, float]
    created_at: float
    expires_at: float
    attempts: int = 1
    counts: RequestCounts = RequestCounts()
    progress: dict[str, Any] = Field(default_factory=dict)
    problems: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    version: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def priority(self) -> int:
        return int(self.body.get("priority", 0))

    @property
    def asks(self) -> bool:
        """Whether its rows are questions."""
        return self.body.get("endpoint") == "/v1/chat/completions"

    def entered(self, state: BatchStatus, now: float, **changes: Any) -> BatchRecord:
        """The record after a change of state."""
        return self.model_copy(update={"state": state, "times": {**self.times, state: now}} | changes)


class BatchTable:
    """The batches of one home. Two tenants see nothing of each other. Raises as `JobTable` does. table: the job table
    of the home, for leases and journals: the holder of the lease runs the batch."""

    def __init__(self, table: JobTable) -> None:
        self.table = table

    def create(
        self, tenant: str, body: dict[str, Any], *, now: float, expires_at: float, most_open: int | None = None
    ) -> BatchRecord:
        """Raises `QuotaExceeded` if the tenant has `most_open` batches that have not ended."""
        record = BatchRecord(
            id="batch_" + secrets.token_hex(20),
            tenant=tenant,
            body=body,
            state="validating",
            times={"validating": now},
            created_at=now,
            expires_at=expires_at,
        )
        self.table.add(_item(record), most_open=most_open)
        return record

    def get(self, batch_id: str, *, tenant: str) -> BatchRecord:
        """Raises `BatchNotFound` for an unknown id and for another tenant's, with the same message."""
        item = self.table.find(batch_id, tenant)
        if item is None or item.kind != "batch":
            raise BatchNotFound(f"there is no batch {batch_id[:80]!r}", param="batch_id")
        return _record(item)

    def update(
        self, batch_id: str, change: Callable[[BatchRecord], BatchRecord], *, tenant: str, term: int | None = None
    ) -> BatchRecord:
        """Change the current record; retries if another process was faster, stores nothing if nothing changes. Raises
        `BatchNotFound`, any error of `change`, and `StateConflict` if the lease of `term` is over."""
        tried = -1
        while True:
            record = self.get(batch_id, tenant=tenant)
            changed = change(record)
            if changed == record:
                return record
            if record.version == tried:
                raise overtaken(batch_id, term or 0)
            if (stored := self.table.change(_item(changed), term=term)) is not None:
                return _record(stored)
            tried = record.version

    def unfinished(self) -> list[BatchRecord]:
        """Batches of all tenants that have not ended, oldest first."""
        return [_record(item) for item in self.table.open_items("batch")]

    def count_unfinished(self, *, tenant: str) -> int:
        """The number of one tenant's batches that have not ended."""
        return sum(record.tenant == tenant for record in self.unfinished())

    def journal(self, batch_id: str) -> Iterator[bytes]:
        """All lines of the journal, in the order in which they were added, but those that were erased."""
        return (line for _, line in self.numbered_journal(batch_id))

    def numbered_journal(self, batch_id: str) -> Iterator[tuple[int, bytes]]:
        """As `journal`, with the number of each line."""
        start = 0
        while lines := self.table.lines(batch_id, start, _LINES):
            yield from ((number, line) for number, line in enumerate(lines, start) if line)
            start += len(lines)

    def list(self, *, tenant: str, limit: int, after: str | None = None) -> tuple[list[BatchRecord], bool]:
        """A tenant's batches, newest first, and whether there are more. Raises `InvalidRequest` for an unknown
        `after`."""
        require_after(self.table, tenant, after)
        items = self.table.listing("batch", tenant, after, limit + 1)
        return [_record(item) for item in items[:limit]], len(items) > limit


def _item(record: BatchRecord) -> Item:
    text = record.model_dump_json(exclude={"version"})
    due = record.times[record.state] + KEEP_ENDED_S if record.ended else None
    return Item("batch", record.id, record.tenant, text, record.version, not record.ended, due)


def _record(item: Item) -> BatchRecord:
    return read(item, BatchRecord, version=item.version)
