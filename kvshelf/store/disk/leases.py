"""Leases of readers in the SQLite file of a home, for bytes that lie elsewhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Final

from kvshelf.store.disk.database import Database
from kvshelf.store.leases import READ_LEASE_S, TAKEN, TAKEN_S, Leases

_READERS: Final = "SELECT 1 FROM readers WHERE name = ? AND (token = ?) = ? LIMIT 1"


class SqliteLeases(Leases):
    """See `Leases`. A power cut may lose them: no reader survives it either."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def hold(self, name: str, token: str) -> bool:
        with self._database.write(durable=False) as tx:
            self._forget_ended(tx)
            if _has(tx, name, taken=True):
                return False
            self._put(tx, name, token, READ_LEASE_S)
            return True

    def release(self, name: str, token: str) -> None:
        with self._database.write(durable=False) as tx:
            tx.execute("DELETE FROM readers WHERE name = ? AND token = ?", (name, token))

    def held(self, name: str) -> bool:
        with self._database.write(durable=False) as tx:
            self._forget_ended(tx)
            return _has(tx, name, taken=False)

    def take(self, name: str) -> bool:
        with self._database.write(durable=False) as tx:
            self._forget_ended(tx)
            if _has(tx, name, taken=False):
                return False
            self._put(tx, name, TAKEN, TAKEN_S)
            return True

    def _forget_ended(self, tx: sqlite3.Connection) -> None:
        tx.execute("DELETE FROM readers WHERE lease_until <= ?", (self._now(),))

    def _put(self, tx: sqlite3.Connection, name: str, token: str, lease_s: float) -> None:
        tx.execute("INSERT OR REPLACE INTO readers VALUES (?, ?, ?)", (name, token, self._now() + lease_s))


def _has(tx: sqlite3.Connection, name: str, *, taken: bool) -> bool:
    """Whether a name is taken, or whether it has readers."""
    return tx.execute(_READERS, (name, TAKEN, taken)).fetchone() is not None
