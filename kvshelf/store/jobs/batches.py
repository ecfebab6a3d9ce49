"""Batches as a home knows them: what was asked, how far it is, and the journal of what came of each row."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from kvshelf.errors import BatchNotFound
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.table import Docket, Item, overtaken, require_after
from kvshelf.store.manifest import Record

BatchState = Literal[
    "validating",
    "in_progress",
    "paused",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_LINES: Final = 1000
_BATCH: Final = 100


class BatchCounts(Record):
    """Rows by what became of them. `reused` ones are among the completed: their caches were on the shelf already."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    reused: int = 0


class BatchProblem(Record):
    """Why a batch could not be begun. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(Record):
    """One batch. Times are Unix seconds.

    body: the request as it was accepted. times: when each state was entered last. attempts: how often it was begun,
    the retries included; a retry does the failed rows again. progress: numbers of the run for people, JSON types only.
    version: counts its changes.
    """

    id: str
    tenant: str
    body: dict[str, Any]
    state: BatchState
    times: dict[BatchState, float]
    created_at: float
    expires_at: float
    attempts: int = 1
    counts: BatchCounts = BatchCounts()
    progress: dict[str, Any] = Field(default_factory=dict)
    problems: tuple[BatchProblem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    version: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def entered(self, state: BatchState, now: float, **changes: Any) -> BatchRecord:
        """The record after a change of state."""
        return self.model_copy(update={"state": state, "times": {**self.times, state: now}} | changes)


class Batches:
    """The batches of one home. Two tenants see nothing of each other. Raises as `Docket` does."""

    def __init__(self, docket: Docket) -> None:
        self._docket = docket

    def create(self, tenant: str, body: dict[str, Any], *, now: float, expires_at: float) -> BatchRecord:
        record = BatchRecord(
            id="batch_" + secrets.token_hex(20),
            tenant=tenant,
            body=body,
            state="validating",
            times={"validating": now},
            created_at=now,
            expires_at=expires_at,
        )
        self._docket.add(_item(record))
        return record

    def get(self, batch_id: str, *, tenant: str) -> BatchRecord:
        """Raises `BatchNotFound` for an unknown id and for another tenant's, with the same message."""
        item = self._docket.find(batch_id, tenant)
        if item is None or item.kind != "batch":
            raise BatchNotFound(f"there is no batch {batch_id[:80]!r}", param="batch_id")
        return _record(item)

    def update(
        self, batch_id: str, change: Callable[[BatchRecord], BatchRecord], *, tenant: str, term: int | None = None
    ) -> BatchRecord:
        """Change a batch as it is now, and again if somebody else was faster; what `change` gives back as it was stays.

        Raises `BatchNotFound`, what `change` raises, and `StateConflict` if the lease of `term` is over.
        """
        tried = -1
        while True:
            record = self.get(batch_id, tenant=tenant)
            changed = change(record)
            if changed == record:
                return record
            if record.version == tried:
                raise overtaken(batch_id, term or 0)
            if self._docket.change(_item(changed), term=term):
                return changed.model_copy(update={"version": record.version + 1})
            tried = record.version

    def unfinished(self) -> list[BatchRecord]:
        """Those of all tenants that have not ended, oldest first."""
        return [_record(item) for item in self._docket.open_items()]

    def count_unfinished(self, *, tenant: str) -> int:
        """How many of one tenant have not ended."""
        return sum(record.tenant == tenant for record in self.unfinished())

    def take(self, batch_id: str, *, lease_s: float) -> int | None:
        """See `Docket.take`: who holds the lease runs the batch."""
        return self._docket.take(batch_id, lease_s=lease_s)

    def renew(self, batch_id: str, term: int, *, lease_s: float) -> None:
        self._docket.renew(batch_id, term, lease_s=lease_s)

    def release(self, batch_id: str, term: int) -> None:
        self._docket.release(batch_id, term)

    def append(self, batch_id: str, term: int, lines: Sequence[bytes]) -> None:
        """Add to the journal; see `Docket.append`."""
        self._docket.append(batch_id, term, lines)

    def journal(self, batch_id: str) -> Iterator[bytes]:
        """All lines of the journal, in the order in which they were added."""
        start = 0
        while lines := self._docket.lines(batch_id, start, _LINES):
            yield from lines
            start += len(lines)

    def forget(self, now: float) -> int:
        """Drop batches that ended long ago, with their journals; returns how many."""
        count = 0
        while items := self._docket.due("batch", now, _BATCH):
            count += sum(self._docket.remove(item.id) for item in items)
        return count

    def list(self, *, tenant: str, limit: int, after: str | None = None) -> tuple[list[BatchRecord], bool]:
        """A tenant's batches, newest first, and whether there are more. Raises `InvalidRequest` for an unknown
        `after`."""
        require_after(self._docket, tenant, after)
        found = self._docket.listing("batch", tenant, after, limit + 1)
        return [_record(item) for item in found[:limit]], len(found) > limit


def _item(record: BatchRecord) -> Item:
    text = record.model_dump_json(exclude={"version"})
    due = record.times[record.state] + KEEP_ENDED_S if record.ended else None
    return Item("batch", record.id, record.tenant, text, record.version, not record.ended, due)


def _record(item: Item) -> BatchRecord:
    return BatchRecord.model_validate_json(item.text).model_copy(update={"version": item.version})
