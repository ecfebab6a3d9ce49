"""The docket of a disk home: two tables of the SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvshelf.errors import StoreUnavailable
from kvshelf.store.disk.database import Database
from kvshelf.store.jobs.table import Docket, Item, Kind, overtaken

_FIELDS: Final = "kind, id, tenant, text, version, open, due"

_FOR_EVER: Final = 9e15
"""The end of a lease that has none. A number, and no NULL, so that all that is known of leases holds for it, too."""


class SqliteDocket(Docket):
    """See `Docket`. Leases use the wall clock, which all processes of a machine share."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def add(self, item: Item, *, hold: str | None = None) -> None:
        with self._database.write() as tx:
            if hold is not None:
                held = tx.execute(
                    "UPDATE writes SET lease_until = ? WHERE name = ? AND lease_until > ?",
                    (_FOR_EVER, hold, self._now()),
                )
                if held.rowcount != 1:
                    raise StoreUnavailable("the file took longer to write than a writer may be silent; send it again")
            tx.execute(
                f"INSERT INTO docket ({_FIELDS}) VALUES (?, ?, ?, ?, 0, ?, ?)",
                (item.kind, item.id, item.tenant, item.text, item.open, item.due),
            )

    def find(self, item_id: str, tenant: str) -> Item | None:
        with self._database.read() as connection:
            found = _items(connection, "id = ? AND tenant = ?", (item_id, tenant))
        return found[0] if found else None

    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        where, values = "kind = ? AND tenant = ?", [kind, tenant]
        if after is not None:
            where += " AND seq < (SELECT seq FROM docket WHERE id = ? AND kind = ? AND tenant = ?)"
            values += [after, kind, tenant]
        with self._database.read() as connection:
            return _items(connection, f"{where} ORDER BY seq DESC LIMIT ?", (*values, limit))

    def change(self, item: Item, *, term: int | None = None) -> bool:
        with self._database.write() as tx:
            changed = tx.execute(
                "UPDATE docket SET text = ?, open = ?, due = ?, version = version + 1 "
                "WHERE id = ? AND version = ? AND term = coalesce(?, term)",
                (item.text, item.open, item.due, item.id, item.version, term),
            )
            return changed.rowcount == 1

    def remove(self, item_id: str, *, held: str | None = None) -> bool:
        with self._database.write() as tx:
            removed = tx.execute("DELETE FROM docket WHERE id = ?", (item_id,)).rowcount == 1
            if removed and held is not None:
                tx.execute("UPDATE writes SET lease_until = 0 WHERE name = ?", (held,))
            return removed

    def due(self, kind: Kind, now: float, limit: int) -> list[Item]:
        with self._database.read() as connection:
            return _items(connection, "kind = ? AND due <= ? ORDER BY due LIMIT ?", (kind, now, limit))

    def open_items(self) -> list[Item]:
        with self._database.read() as connection:
            return _items(connection, "open = 1 ORDER BY seq", ())

    def take(self, item_id: str, *, lease_s: float) -> int | None:
        now = self._now()
        with self._database.write() as tx:
            row = tx.execute(
                "UPDATE docket SET term = term + 1, lease_until = ? WHERE id = ? AND lease_until <= ? RETURNING term",
                (now + lease_s, item_id, now),
            ).fetchone()
        return None if row is None else int(row["term"])

    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        if not self._lease(item_id, term, self._now() + lease_s):
            raise overtaken(item_id, term)

    def release(self, item_id: str, term: int) -> None:
        self._lease(item_id, term, 0.0)

    def _lease(self, item_id: str, term: int, until: float) -> bool:
        with self._database.write(durable=False) as tx:  # a power cut that loses it ends the holder, too
            leased = tx.execute("UPDATE docket SET lease_until = ? WHERE id = ? AND term = ?", (until, item_id, term))
            return leased.rowcount == 1

    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        with self._database.write() as tx:
            if not tx.execute("SELECT 1 FROM docket WHERE id = ? AND term = ?", (item_id, term)).fetchone():
                raise overtaken(item_id, term)
            last = tx.execute("SELECT max(number) AS number FROM docket_lines WHERE item = ?", (item_id,)).fetchone()
            first = 0 if last["number"] is None else last["number"] + 1
            tx.executemany(
                "INSERT INTO docket_lines VALUES (?, ?, ?)",
                [(item_id, number, line) for number, line in enumerate(lines, first)],
            )

    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT line FROM docket_lines WHERE item = ? AND number >= ? ORDER BY number LIMIT ?",
                (item_id, start, limit),
            )
            return [bytes(row["line"]) for row in rows]


def _items(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Item]:
    rows = connection.execute(f"SELECT {_FIELDS} FROM docket WHERE {where}", values)
    return [Item(**{**row, "open": bool(row["open"])}) for row in rows]
