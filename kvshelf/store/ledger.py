"""Requests in flight, written down: what was asked, how often it was tried, who is at it, and how it ended.

An attempt is counted before its work begins, so a document that kills its worker is counted too. The attempt's number
is the fence: a holder whose lease ran out and whose request was taken over holds an old number and can do nothing with
it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Literal

from kvshelf.errors import RequestNotFound, StateConflict
from kvshelf.store.database import Database
from kvshelf.store.manifest import Record

RequestState = Literal["queued", "running", "done", "failed"]


class RequestError(Record):
    """Why an attempt failed, in the words of the wire."""

    code: str
    message: str
    param: str | None = None


class RequestRecord(Record):
    """One request. Times are Unix seconds. `error` is the last attempt's, also while another one is to come.

    attempts: the number of the last attempt. Numbers never begin anew, also when the request is queued again after it
    had ended: `attempts_before` says how many of them belong to the time before that.
    """

    id: str
    tenant: str
    state: RequestState
    attempts: int
    attempts_before: int
    worker: str | None
    lease_until: float | None
    cache_ids: tuple[str, ...]
    error: RequestError | None
    created_at: float
    updated_at: float

    @property
    def tries(self) -> int:
        """Attempts since the request was last queued anew."""
        return self.attempts - self.attempts_before


class Ledger:
    """The requests of one disk home. Leases use the wall clock, which all processes of a machine share."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def open_request(self, request_id: str, *, tenant: str, body: bytes, again: bool = False) -> RequestRecord:
        """Write a request down as queued. Durable when it returns; asking twice changes nothing.

        A failed request is queued anew. A finished one is returned as it is, unless `again` says that its caches are
        gone and it is to be done once more. Raises `StateConflict` for an id that another tenant holds: ids must be
        hashes that include the tenant.
        """
        now = self._now()
        with self._database.write() as tx:
            row = _row(tx, request_id)
            if row is None:
                tx.execute(
                    "INSERT INTO requests (id, tenant, state, body, created_at, updated_at) "
                    "VALUES (?, ?, 'queued', ?, ?, ?)",
                    (request_id, tenant, body, now, now),
                )
            elif row["tenant"] != tenant:
                raise StateConflict(f"request id {request_id!r} is taken", param="request_id")
            elif row["state"] == "failed" or (row["state"] == "done" and again):
                tx.execute(
                    "UPDATE requests SET state = 'queued', body = ?, attempts_before = attempts, cache_ids = '[]', "
                    "worker = NULL, error_code = NULL, error_message = NULL, error_param = NULL, updated_at = ? "
                    "WHERE id = ?",
                    (body, now, request_id),
                )
            return _record(_require(tx, request_id))

    def start_attempt(self, request_id: str, *, worker: str, lease_s: float) -> int:
        """Count an attempt and take the lease; returns the attempt's number, 1 for the first.

        A running request whose lease ran out is taken over. Raises `StateConflict` when another holder's lease lives
        or the request has ended, `RequestNotFound`.
        """
        now = self._now()
        with self._database.write() as tx:
            row = _require(tx, request_id)
            if row["state"] in ("done", "failed"):
                raise StateConflict(f"request {request_id!r} has ended ({row['state']}); there is nothing to do")
            if row["state"] == "running" and row["lease_until"] > now:
                raise StateConflict(
                    f"request {request_id!r} is being worked on by {row['worker']!r} for another "
                    f"{row['lease_until'] - now:.1f} s at least"
                )
            attempt = int(row["attempts"]) + 1
            tx.execute(
                "UPDATE requests SET state = 'running', attempts = ?, worker = ?, lease_until = ?, updated_at = ? "
                "WHERE id = ?",
                (attempt, worker, now + lease_s, now, request_id),
            )
            return attempt

    def renew(self, request_id: str, attempt: int, *, lease_s: float) -> None:
        """Extend the lease from now. Raises `StateConflict` when the attempt no longer holds the request."""
        now = self._now()
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET lease_until = ?, updated_at = ? WHERE id = ?", (now + lease_s, now, request_id)
            )

    def finish(self, request_id: str, attempt: int, *, cache_ids: Sequence[str]) -> None:
        """The work is done, its caches are stored; the body is dropped. Raises `StateConflict` for a stale holder."""
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET state = 'done', body = NULL, worker = NULL, lease_until = NULL, cache_ids = ?, "
                "error_code = NULL, error_message = NULL, error_param = NULL, updated_at = ? WHERE id = ?",
                (json.dumps(list(cache_ids)), self._now(), request_id),
            )

    def fail(
        self, request_id: str, attempt: int, *, code: str, message: str, param: str | None = None, final: bool
    ) -> None:
        """The attempt failed. `final`: for good, the body is dropped; otherwise the request is queued again.

        Raises `StateConflict` for a stale holder.
        """
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET state = ?, body = iif(?, NULL, body), worker = NULL, lease_until = NULL, "
                "error_code = ?, error_message = ?, error_param = ?, updated_at = ? WHERE id = ?",
                ("failed" if final else "queued", final, code, message, param, self._now(), request_id),
            )

    def get_request(self, request_id: str, *, tenant: str) -> RequestRecord:
        """Raises `RequestNotFound` for an unknown id and for another tenant's, with the same message."""
        with self._database.read() as connection:
            row = _row(connection, request_id)
        if row is None or row["tenant"] != tenant:
            raise _not_found(request_id)
        return _record(row)

    def body(self, request_id: str) -> bytes:
        """The request as it was given to `open_request`. Raises `StateConflict` once it was dropped."""
        with self._database.read() as connection:
            row = _require(connection, request_id)
        if row["body"] is None:
            raise StateConflict(f"request {request_id!r} has ended and its body was dropped")
        return bytes(row["body"])

    def unfinished(self) -> list[RequestRecord]:
        """Requests queued or running, of all tenants, oldest first; bodies are fetched one by one with `body`."""
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_FIELDS} FROM requests WHERE state IN ('queued', 'running') ORDER BY created_at, id"
            )
            return [_record(row) for row in rows]

    def forget(self, before: float) -> int:
        """Drop requests that ended before a time (Unix seconds); returns how many."""
        with self._database.write() as tx:
            return tx.execute(
                "DELETE FROM requests WHERE state IN ('done', 'failed') AND updated_at < ?", (before,)
            ).rowcount


_FIELDS = (
    "id, tenant, state, attempts, attempts_before, worker, lease_until, cache_ids, "
    "error_code, error_message, error_param, created_at, updated_at"
)


def _row(connection: sqlite3.Connection, request_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        f"SELECT {_FIELDS}, body FROM requests WHERE id = ?", (request_id,)
    ).fetchone()
    return row


def _require(connection: sqlite3.Connection, request_id: str) -> sqlite3.Row:
    row = _row(connection, request_id)
    if row is None:
        raise _not_found(request_id)
    return row


def _require_holder(connection: sqlite3.Connection, request_id: str, attempt: int) -> None:
    row = _require(connection, request_id)
    if row["state"] != "running" or row["attempts"] != attempt:
        raise StateConflict(
            f"attempt {attempt} no longer holds request {request_id!r} (state {row['state']}, attempt "
            f"{row['attempts']}); its result is not needed"
        )


def _not_found(request_id: str) -> RequestNotFound:
    return RequestNotFound(f"there is no request {request_id[:80]!r}", param="request_id")


def _record(row: sqlite3.Row) -> RequestRecord:
    error = None
    if row["error_code"] is not None:
        error = RequestError(code=row["error_code"], message=row["error_message"], param=row["error_param"])
    return RequestRecord(
        id=row["id"],
        tenant=row["tenant"],
        state=row["state"],
        attempts=row["attempts"],
        attempts_before=row["attempts_before"],
        worker=row["worker"],
        lease_until=row["lease_until"],
        cache_ids=tuple(json.loads(row["cache_ids"])),
        error=error,
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
