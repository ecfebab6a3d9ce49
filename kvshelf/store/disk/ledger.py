"""The ledger of a disk home: one table of the SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshelf.store.disk.database import Database
from kvshelf.store.jobs import ledger
from kvshelf.store.jobs.ledger import Ledger, RequestError, RequestRecord


class SqliteLedger(Ledger):
    """See `Ledger`. Leases use the wall clock, which all processes of a machine share."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def open_request(self, request_id: str, *, tenant: str, body: bytes, again: bool = False) -> RequestRecord:
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
                raise ledger.taken(request_id)
            elif row["state"] == "failed" or (row["state"] == "done" and again):
                tx.execute(
                    "UPDATE requests SET state = 'queued', body = ?, attempts_before = attempts, cache_ids = '[]', "
                    f"worker = NULL, {_NO_ERROR}, updated_at = ? WHERE id = ?",
                    (body, now, request_id),
                )
            return _record(_require(tx, request_id))

    def start_attempt(self, request_id: str, *, worker: str, lease_s: float) -> int:
        now = self._now()
        with self._database.write() as tx:
            row = _require(tx, request_id)
            if row["state"] in ("done", "failed"):
                raise ledger.ended(request_id, row["state"])
            if row["state"] == "running" and row["lease_until"] > now:
                raise ledger.at_work(request_id, row["worker"], row["lease_until"] - now)
            attempt = int(row["attempts"]) + 1
            tx.execute(
                "UPDATE requests SET state = 'running', attempts = ?, worker = ?, lease_until = ?, updated_at = ? "
                "WHERE id = ?",
                (attempt, worker, now + lease_s, now, request_id),
            )
            return attempt

    def renew(self, request_id: str, attempt: int, *, lease_s: float) -> None:
        now = self._now()
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET lease_until = ?, updated_at = ? WHERE id = ?", (now + lease_s, now, request_id)
            )

    def finish(self, request_id: str, attempt: int, *, cache_ids: Sequence[str]) -> None:
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET state = 'done', body = NULL, worker = NULL, lease_until = NULL, cache_ids = ?, "
                f"{_NO_ERROR}, updated_at = ? WHERE id = ?",
                (json.dumps(list(cache_ids)), self._now(), request_id),
            )

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
        error = (code, message, param, json.dumps(details) if details else None)
        with self._database.write() as tx:
            _require_holder(tx, request_id, attempt)
            tx.execute(
                "UPDATE requests SET state = ?, body = iif(?, NULL, body), worker = NULL, lease_until = NULL, "
                "error_code = ?, error_message = ?, error_param = ?, error_details = ?, updated_at = ?, "
                "attempts_before = attempts_before + ? WHERE id = ?",
                ("failed" if final else "queued", final, *error, self._now(), not counted, request_id),
            )

    def get_request(self, request_id: str, *, tenant: str) -> RequestRecord:
        with self._database.read() as connection:
            row = _row(connection, request_id)
        if row is None or row["tenant"] != tenant:
            raise ledger.not_found(request_id)
        return _record(row)

    def body(self, request_id: str) -> bytes:
        with self._database.read() as connection:
            row = _require(connection, request_id)
        if row["body"] is None:
            raise ledger.dropped(request_id)
        return bytes(row["body"])

    def unfinished(self) -> list[RequestRecord]:
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_FIELDS} FROM requests WHERE state IN ('queued', 'running') ORDER BY created_at, id"
            )
            return [_record(row) for row in rows]

    def forget(self, before: float) -> int:
        with self._database.write() as tx:
            return tx.execute(
                "DELETE FROM requests WHERE state IN ('done', 'failed') AND updated_at < ?", (before,)
            ).rowcount


_FIELDS = (
    "id, tenant, state, attempts, attempts_before, worker, lease_until, cache_ids, "
    "error_code, error_message, error_param, error_details, created_at, updated_at"
)

_NO_ERROR = "error_code = NULL, error_message = NULL, error_param = NULL, error_details = NULL"


def _row(connection: sqlite3.Connection, request_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        f"SELECT {_FIELDS}, body FROM requests WHERE id = ?", (request_id,)
    ).fetchone()
    return row


def _require(connection: sqlite3.Connection, request_id: str) -> sqlite3.Row:
    row = _row(connection, request_id)
    if row is None:
        raise ledger.not_found(request_id)
    return row


def _require_holder(connection: sqlite3.Connection, request_id: str, attempt: int) -> None:
    row = _require(connection, request_id)
    if row["state"] != "running" or row["attempts"] != attempt:
        raise ledger.stale(request_id, attempt, row["state"], row["attempts"])


def _record(row: sqlite3.Row) -> RequestRecord:
    error = None
    if row["error_code"] is not None:
        details = None if row["error_details"] is None else json.loads(row["error_details"])
        error = RequestError(
            code=row["error_code"], message=row["error_message"], param=row["error_param"], details=details
        )
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
