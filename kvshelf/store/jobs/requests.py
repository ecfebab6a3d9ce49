"""Background requests: each request, and each attempt before it starts, is recorded durably.

An attempt that kills its worker is therefore counted too. The attempt's number is the term of the item's lease, and the
fence. The body is sealed like a file; it is durable before the request is visible, and dropped when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvshelf.api.strict import RequestState
from kvshelf.artifact.identity import digest
from kvshelf.errors import BlobError, InternalError, RequestNotFound, StateConflict
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.manifest import StoredBody, StoredRecord
from kvshelf.store.table import Item, JobTable, overtaken, read

REQUEST_PREFIX: Final = "request:"
"""Tells a sealed body of a request from a sealed cache or file."""

REQUEST_ID: Final = "req_"
"""Begins the ids of `request_id`; rows of batches have other ids."""

_STORED: Final = {"state", "attempts_before", "cache_ids", "error", "body"}
"""The fields of a record that are in its item's text; the others are fields of the item."""


class RequestError(StoredRecord):
    """Why an attempt failed, as fields of an API error. `details` as those of a `KvshelfError`: JSON types only."""

    code: str
    message: str
    param: str | None = None
    details: dict[str, Any] | None = None


class RequestRecord(StoredRecord):
    """One request. Times are Unix seconds. `error` is the last attempt's, even if another attempt will follow.
    attempts: the number of the last attempt. Numbers never start again, not even when an ended request is queued again:
    `attempts_before` says how many attempts came before that, or do not count. body: None for an empty or dropped
    body."""

    id: str
    tenant: str
    state: RequestState
    attempts: int = 0
    attempts_before: int = 0
    worker: str | None = None
    lease_until: float | None = None
    cache_ids: tuple[str, ...] = ()
    error: RequestError | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    body: StoredBody | None = None
    version: int = 0

    @property
    def tries(self) -> int:
        """Attempts that count, since `open` last queued the request."""
        return self.attempts - self.attempts_before

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")


class RequestTable:
    """The requests of one home. Durable when a method returns. Raises as `JobTable` and `Blobs` do, too."""

    def __init__(self, table: JobTable, bodies: Bodies, now: Callable[[], float], key: bytes) -> None:
        """now: as `Store.now`, the clock of the leases. key: that of the home's content addresses."""
        self._key = key
        self.table = table
        self.bodies = bodies
        self.now = now

    def request_id(self, body: bytes, *, tenant: str) -> str:
        """The id of a request with this body: keyed as cache ids are, so that nobody can test a guess of a body."""
        return REQUEST_ID + digest("kvshelf.request", tenant, body, key=self._key)

    def open(self, request_id: str, *, tenant: str, body: bytes, again: bool = False) -> RequestRecord:
        """Queue a request; opening it twice changes nothing. A failed request is queued anew. A finished one is
        returned as it is, unless `again` says that its caches are gone and it is to be done once more. Raises
        `StateConflict` for an id that another tenant holds: ids must be hashes that include the tenant."""
        while True:
            item = self.table.find(request_id, None)
            if item is None:
                new = RequestRecord(id=request_id, tenant=tenant, state="queued")
                stored = self._queue(new, body, self.table.add)
            elif item.tenant != tenant or item.kind != "request":
                raise StateConflict(f"request id {request_id!r} is taken", param="request_id")
            else:
                record = _record(item)
                if record.state != "failed" and not (record.state == "done" and again):
                    return record
                changes = {"state": "queued", "attempts_before": record.attempts, "cache_ids": (), "error": None}
                stored = self._queue(record.model_copy(update=changes), body, self.table.change)
            if stored is not None:  # else another caller was faster
                return _record(stored)

    def _queue(self, record: RequestRecord, body: bytes, store: Callable[[Item], Item | None]) -> Item | None:
        def keep(stored_body: StoredBody | None) -> Item | None:
            return store(self._item(record.model_copy(update={"body": stored_body})))

        return self.bodies.write(record.tenant, REQUEST_PREFIX + record.id, memoryview(body), keep)

    def start(self, request_id: str, *, worker: str, lease_s: float) -> int:
        """Count an attempt and take the lease; returns the attempt's number, 1 for the first. A running request whose
        lease ran out is taken over. Raises `StateConflict` when another worker's lease lives or the request has ended,
        `RequestNotFound`."""
        while (attempt := self.table.take(request_id, lease_s=lease_s, holder=worker)) is None:
            record = self._find(request_id)
            if record.ended:
                raise StateConflict(f"request {request_id!r} has ended ({record.state}); there is nothing to do")
            if record.state == "running":
                raise StateConflict(f"request {request_id!r} is held by worker {record.worker!r}")
        return attempt

    def renew(self, request_id: str, attempt: int, *, lease_s: float) -> None:
        """Extend the lease from now. Raises `StateConflict` when the attempt no longer holds the request."""
        self.table.renew(request_id, attempt, lease_s=lease_s)

    def finish(self, request_id: str, attempt: int, *, cache_ids: Sequence[str]) -> None:
        """The work is done, its caches are stored; the body is dropped. Raises `StateConflict` for a stale holder."""
        self._end_attempt(request_id, attempt, {"state": "done", "cache_ids": tuple(cache_ids), "error": None})

    def fail(
        self,
        request_id: str,
        attempt: int,
        *,
        code: str,
        message: str,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        final: bool,
        counted: bool = True,
    ) -> None:
        """The attempt failed. `final`: for good, the body is dropped; otherwise the request is queued again. `counted`
        False: the request is not to blame, so `tries` is as if there had been no such attempt. Raises `StateConflict`
        for a stale holder."""
        fields = dict(details) if details else None
        error = RequestError(code=code, message=message, param=param, details=fields)
        changes = {"state": "failed" if final else "queued", "error": error}
        self._end_attempt(request_id, attempt, changes, uncounted=not counted)

    def _end_attempt(
        self, request_id: str, attempt: int, changes: Mapping[str, Any], *, uncounted: bool = False
    ) -> None:
        stored = None
        while stored is None:  # a failure of an earlier attempt may come between
            record = self._find(request_id)
            if record.state != "running" or record.attempts != attempt:
                raise overtaken(request_id, attempt)
            before = record.attempts_before + uncounted
            changed = record.model_copy(update={"attempts_before": before, **changes})
            dropped = {"body": None} if changed.ended else {}
            item = self._item(changed.model_copy(update=dropped))
            stored = self.table.change(item, term=attempt, release=True)
        if changed.ended and record.body is not None:
            self.bodies.remove(record.body)

    def get(self, request_id: str, *, tenant: str) -> RequestRecord:
        """Raises `RequestNotFound` for an unknown id and for another tenant's, with the same message."""
        return self._find(request_id, tenant)

    def body(self, request_id: str) -> bytes:
        """The request as it was given to `open`. Raises `StateConflict` once it was dropped, `InternalError` if it is
        lost or damaged."""
        record = self._find(request_id)
        try:
            if not record.ended:
                subject = REQUEST_PREFIX + request_id
                return b"" if record.body is None else self.bodies.read(record.body, record.tenant, subject)
        except BlobError as error:
            if not self._find(request_id).ended:
                raise InternalError(f"the body of {request_id!r} is lost or damaged: {error}") from error
        raise StateConflict(f"request {request_id!r} has ended and its body was dropped")

    def unfinished(self) -> list[RequestRecord]:
        """Requests queued or running, of all tenants, oldest first; bodies are fetched one by one with `body`."""
        return [_record(item) for item in self.table.open_items("request")]

    def _find(self, request_id: str, tenant: str | None = None) -> RequestRecord:
        item = self.table.find(request_id, tenant)
        if item is None or item.kind != "request":
            raise RequestNotFound(f"there is no request {request_id[:80]!r}", param="request_id")
        return _record(item)

    def _item(self, record: RequestRecord) -> Item:
        due = self.now() + KEEP_ENDED_S if record.ended else None
        body_name = record.body.name if record.body else None
        text = record.model_dump_json(include=_STORED)
        return Item("request", record.id, record.tenant, text, record.version, not record.ended, due, body_name)


def _record(item: Item) -> RequestRecord:
    kept = {name: getattr(item, name) for name in ("id", "tenant", "version", "created_at", "updated_at")}
    record = read(item, RequestRecord, attempts=item.term, **kept)
    if not item.open or not item.lease_until:
        return record
    running = {"state": "running", "worker": item.holder, "lease_until": item.lease_until}
    return record.model_copy(update=running)
