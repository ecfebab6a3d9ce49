"""The job table of a disk home: two tables of the SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvshelf.store.disk.database import Database
from kvshelf.store.table import Item, JobTable, Kind, overtaken, too_many, too_slow

_FIELDS: Final = (
    "kind, id, tenant, text, version, open, due, held, owner, after_s, "
    "term, holder, lease_until, created_at, updated_at"
)

FOREVER: Final = 9e15
"""The end of a lease that never ends: a number, not NULL, so that all comparisons of leases work for it too."""


class SqliteJobs(JobTable):
    """See `JobTable`. Leases use the wall clock, which all processes of a machine share."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def add(self, item: Item, *, most_open: int | None = None) -> Item | None:
        now = self._now()
        with self._database.write() as tx:
            if _items(tx, "id = ?", (item.id,)):
                return None
            counting = "SELECT count(*) AS open FROM jobs WHERE kind = ? AND tenant = ? AND open = 1"
            if most_open is not None and tx.execute(counting, (item.kind, item.tenant)).fetchone()["open"] >= most_open:
                raise too_many(item, most_open)
            self._hold(tx, item.held)
            tx.execute(
                "INSERT INTO jobs (kind, id, tenant, text, open, due, held, owner, after_s, created_at, updated_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*(item.kind, item.id, item.tenant), *_changing(item), now, now),
            )
            return _items(tx, "id = ?", (item.id,))[0]

    def find(self, item_id: str, tenant: str | None) -> Item | None:
        with self._database.read() as connection:
            if tenant is None:
                items = _items(connection, "id = ?", (item_id,))
            else:
                items = _items(connection, "tenant = ? AND id = ?", (tenant, item_id), "jobs_by_tenant_and_id")
        return items[0] if items else None

    def owned(self, owner: str, tenant: str) -> list[Item]:
        with self._database.read() as connection:
            return _items(connection, "owner = ? AND tenant = ? ORDER BY seq", (owner, tenant))

    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        where, values = "kind = ? AND tenant = ?", [kind, tenant]
        if after is not None:
            where += " AND seq < (SELECT seq FROM jobs WHERE id = ? AND kind = ? AND tenant = ?)"
            values += [after, kind, tenant]
        with self._database.read() as connection:
            return _items(connection, f"{where} ORDER BY seq DESC LIMIT ?", (*values, limit))

    def change(self, item: Item, *, term: int | None = None, release: bool = False) -> Item | None:
        with self._database.write() as tx:
            items = _items(tx, "id = ? AND version = ? AND term = coalesce(?, term)", (item.id, item.version, term))
            if not items:
                return None
            if items[0].held != item.held:
                self._hold(tx, item.held)
                _let_go(tx, "id = ?", (item.id,))
            tx.execute(
                "UPDATE jobs SET text = ?, open = ?, due = ?, held = ?, owner = ?, after_s = ?, version = version + 1, "
                "lease_until = iif(?, 0, lease_until), updated_at = ? WHERE id = ?",
                (*_changing(item), release, self._now(), item.id),
            )
            return _items(tx, "id = ?", (item.id,))[0]

    def remove(self, item_id: str) -> bool:
        with self._database.write() as tx:
            return _delete(tx, "id = ?", (item_id,)) == 1

    def forget(self, kind: Kind, now: float) -> int:
        with self._database.write() as tx:
            return _delete(tx, "kind = ? AND due <= ?", (kind, now))

    def due_items(self, kind: Kind, now: float) -> list[Item]:
        with self._database.read() as connection:
            return _items(connection, "kind = ? AND due <= ?", (kind, now))

    def open_items(self, kind: Kind, limit: int | None = None) -> list[Item]:
        with self._database.read() as connection:
            most = -1 if limit is None else limit  # -1: all
            return _items(connection, "kind = ? AND open = 1 ORDER BY seq LIMIT ?", (kind, most))

    def take(self, item_id: str, *, lease_s: float, holder: str = "") -> int | None:
        now = self._now()
        with self._database.write() as tx:
            row = tx.execute(
                "UPDATE jobs SET term = term + 1, holder = ?, lease_until = ?, updated_at = ? "
                "WHERE id = ? AND open = 1 AND lease_until <= ? RETURNING term",
                (holder, now + lease_s, now, item_id, now),
            ).fetchone()
        return None if row is None else int(row["term"])

    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        if not self._lease(item_id, term, self._now() + lease_s):
            raise overtaken(item_id, term)

    def release(self, item_id: str, term: int) -> None:
        self._lease(item_id, term, 0.0)

    def _lease(self, item_id: str, term: int, until: float) -> bool:
        with self._database.write(durable=False) as tx:
            leased = tx.execute(
                "UPDATE jobs SET lease_until = ?, updated_at = ? WHERE id = ? AND term = ? AND lease_until > 0",
                (until, self._now(), item_id, term),
            )
            return leased.rowcount == 1

    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        with self._database.write() as tx:
            if not _items(tx, "id = ? AND term = ?", (item_id, term)):
                raise overtaken(item_id, term)
            last = tx.execute("SELECT max(number) AS number FROM journals WHERE item = ?", (item_id,)).fetchone()
            first = 0 if last["number"] is None else last["number"] + 1
            tx.executemany(
                "INSERT INTO journals VALUES (?, ?, ?)",
                [(item_id, number, line) for number, line in enumerate(lines, first)],
            )

    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT line FROM journals WHERE item = ? AND number >= ? ORDER BY number LIMIT ?",
                (item_id, start, limit),
            )
            return [bytes(row["line"]) for row in rows]

    def erase_lines(self, item_id: str, numbers: Sequence[int]) -> None:
        with self._database.write() as tx:
            values = [(item_id, number) for number in numbers]
            tx.executemany("UPDATE journals SET line = x'' WHERE item = ? AND number = ?", values)

    def _hold(self, tx: sqlite3.Connection, name: str | None) -> None:
        if name is not None:
            values = (FOREVER, name, self._now())
            extended = tx.execute("UPDATE writes SET lease_until = ? WHERE name = ? AND lease_until > ?", values)
            if extended.rowcount != 1:
                raise too_slow()


def _changing(item: Item) -> tuple[Any, ...]:
    return (item.text, item.open, item.due, item.held, item.owner, item.after_s)


def _items(connection: sqlite3.Connection, where: str, values: Sequence[Any], index: str | None = None) -> list[Item]:
    by = "" if index is None else f"INDEXED BY {index}"
    rows = connection.execute(f"SELECT {_FIELDS} FROM jobs {by} WHERE {where}", values)
    return [Item(**{**row, "open": bool(row["open"])}) for row in rows]


def _delete(tx: sqlite3.Connection, where: str, values: Sequence[Any]) -> int:
    _let_go(tx, where, values)
    return tx.execute(f"DELETE FROM jobs WHERE {where}", values).rowcount


def _let_go(tx: sqlite3.Connection, where: str, values: Sequence[Any]) -> None:
    """Abandon the bytes that items hold."""
    tx.execute(f"UPDATE writes SET lease_until = 0 WHERE name IN (SELECT held FROM jobs WHERE {where})", values)
