"""Leases of readers in the SQLite file of a home, for bytes that lie elsewhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final

from kvshelf.store.blobs import READ_LEASE_S, TAKEN, TAKEN_S, Leases
from kvshelf.store.disk.database import Database

_READERS: Final = "SELECT 1 FROM readers WHERE name = ? AND (token = ?) = ? AND lease_until > ? LIMIT 1"


class SqliteLeases(Leases):
    """See `Leases`. A power cut may lose them: no reader survives it either."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def hold(self, name: str, token: str) -> bool:
        return self._enter(name, token, READ_LEASE_S, unless_taken=True)

    def release(self, name: str, token: str) -> None:
        with self._database.write(durable=False) as tx:
            tx.execute("DELETE FROM readers WHERE name = ? AND token = ?", (name, token))

    def has_readers(self, name: str) -> bool:
        with self._database.read() as connection:
            return self._has(connection, name, taker=False)

    def take(self, name: str) -> bool:
        return self._enter(name, TAKEN, TAKEN_S, unless_taken=False)

    def _enter(self, name: str, token: str, lease_s: float, *, unless_taken: bool) -> bool:
        """Enter a lease, unless the name is taken, or unless it has readers. Returns whether it was entered."""
        now = self._now()
        with self._database.write(durable=False) as tx:
            tx.execute("DELETE FROM readers WHERE lease_until <= ?", (now,))
            if self._has(tx, name, taker=unless_taken):
                return False
            tx.execute("INSERT OR REPLACE INTO readers VALUES (?, ?, ?)", (name, token, now + lease_s))
            return True

    def _has(self, connection: sqlite3.Connection, name: str, *, taker: bool) -> bool:
        """Whether a name is taken, or (taker False) whether it has readers."""
        return connection.execute(_READERS, (name, TAKEN, taker, self._now())).fetchone() is not None
