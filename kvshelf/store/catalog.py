"""The rows of caches in the index: plain functions over a connection, all SQL of the shelf in one place."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvshelf.store.manifest import Manifest


@dataclass(frozen=True)
class Entry:
    """One row. `file` and `text` (the manifest's JSON) are None in a tombstone."""

    seq: int
    id: str
    tenant: str
    state: str
    file: str | None
    nbytes: int
    expires_at: float | None
    last_used_at: float | None
    ended_at: float | None
    problem: str | None
    text: str | None

    @property
    def stored(self) -> bool:
        """Whether there is still something to read, expire or delete."""
        return self.state in ("ready", "corrupt")

    def expired(self, now: float) -> bool:
        return self.state == "expired" or (self.expires_at is not None and self.expires_at <= now)

    def manifest(self) -> Manifest:
        assert self.text is not None, "a tombstone has no manifest"
        return Manifest.model_validate_json(self.text).model_copy(update={"last_used_at": self.last_used_at})


_FIELDS = "seq, id, tenant, state, file, nbytes, expires_at, last_used_at, ended_at, problem, manifest AS text"


def find(connection: sqlite3.Connection, cache_id: str, tenant: str) -> Entry | None:
    row = connection.execute(f"SELECT {_FIELDS} FROM caches WHERE id = ? AND tenant = ?", (cache_id, tenant)).fetchone()
    return None if row is None else Entry(**row)


def insert(connection: sqlite3.Connection, manifest: Manifest, file: str) -> None:
    """Make a cache visible; a tombstone or a corrupt row of the same id gives way."""
    connection.execute("DELETE FROM caches WHERE id = ?", (manifest.id,))
    cursor = connection.execute(
        "INSERT INTO caches (id, tenant, state, file, nbytes, document_id, model, policy, expires_at, manifest) "
        "VALUES (?, ?, 'ready', ?, ?, ?, ?, ?, ?, ?)",
        (
            manifest.id,
            manifest.tenant,
            file,
            manifest.bytes_stored,
            manifest.document_id,
            manifest.model,
            manifest.policy,
            manifest.expires_at,
            manifest.model_dump_json(),
        ),
    )
    assert cursor.lastrowid is not None
    _set_labels(connection, cursor.lastrowid, manifest.labels)


def rewrite(connection: sqlite3.Connection, seq: int, manifest: Manifest) -> None:
    connection.execute(
        "UPDATE caches SET manifest = ?, expires_at = ? WHERE seq = ?",
        (manifest.model_dump_json(), manifest.expires_at, seq),
    )
    _set_labels(connection, seq, manifest.labels)


def touch(connection: sqlite3.Connection, cache_id: str, tenant: str, now: float) -> None:
    connection.execute(
        "UPDATE caches SET last_used_at = ? WHERE id = ? AND tenant = ? AND state = 'ready'", (now, cache_id, tenant)
    )


def mark_corrupt(connection: sqlite3.Connection, seq: int, problem: str) -> None:
    connection.execute("UPDATE caches SET state = 'corrupt', problem = ? WHERE seq = ?", (problem, seq))


def bury(connection: sqlite3.Connection, seq: int, state: str, now: float) -> None:
    """Turn a row into a tombstone: nothing of what the caller wrote into it remains. "deleted" is final."""
    connection.execute(
        "UPDATE caches SET state = ?, ended_at = ?, file = NULL, nbytes = 0, problem = NULL, manifest = NULL "
        "WHERE seq = ? AND state != 'deleted'",
        (state, now, seq),
    )
    _set_labels(connection, seq, {})


def expired(connection: sqlite3.Connection, now: float) -> list[Entry]:
    query = f"SELECT {_FIELDS} FROM caches WHERE state IN ('ready', 'corrupt') AND expires_at <= ?"
    return [Entry(**row) for row in connection.execute(query, (now,))]


def stored(connection: sqlite3.Connection) -> list[Entry]:
    query = f"SELECT {_FIELDS} FROM caches WHERE state IN ('ready', 'corrupt') ORDER BY seq"
    return [Entry(**row) for row in connection.execute(query)]


def names_file(connection: sqlite3.Connection, file: str) -> bool:
    # The cache id is part of the file name and is indexed; the file column is not.
    row = connection.execute("SELECT file FROM caches WHERE id = ?", (f"kvs_{file[:40]}",)).fetchone()
    return row is not None and row["file"] == file


def forget(connection: sqlite3.Connection, before: float) -> int:
    """Drop tombstones that ended before a time."""
    return connection.execute(
        "DELETE FROM caches WHERE state IN ('expired', 'deleted') AND ended_at < ?", (before,)
    ).rowcount


def listing(
    connection: sqlite3.Connection,
    tenant: str,
    columns: Mapping[str, str | None],
    labels: Mapping[str, str],
    now: float,
    before: int | None,
    limit: int,
) -> list[Entry]:
    """Live rows of a tenant, newest first. `columns` maps names written in this package to the value wanted."""
    where = ["tenant = ?", "state = 'ready'", "(expires_at IS NULL OR expires_at > ?)"]
    values: list[Any] = [tenant, now]
    for name, value in columns.items():
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
    for name, value in labels.items():
        where.append("seq IN (SELECT seq FROM labels WHERE name = ? AND value = ?)")
        values += [name, value]
    if before is not None:
        where.append("seq < ?")
        values.append(before)
    query = f"SELECT {_FIELDS} FROM caches WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?"
    return [Entry(**row) for row in connection.execute(query, (*values, limit))]


def usage(connection: sqlite3.Connection, tenant: str | None) -> tuple[int, int]:
    """Caches and bytes that occupy the disk."""
    where, values = ("AND tenant = ?", (tenant,)) if tenant is not None else ("", ())
    row = connection.execute(
        f"SELECT count(*) AS caches, coalesce(sum(nbytes), 0) AS bytes FROM caches WHERE state = 'ready' {where}",
        values,
    ).fetchone()
    return row["caches"], row["bytes"]


def _set_labels(connection: sqlite3.Connection, seq: int, labels: Mapping[str, str]) -> None:
    connection.execute("DELETE FROM labels WHERE seq = ?", (seq,))
    connection.executemany("INSERT INTO labels VALUES (?, ?, ?)", [(seq, *pair) for pair in labels.items()])
