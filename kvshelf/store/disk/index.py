"""The index of a disk home: all SQL about caches. The tables are in `schema.sql`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Literal

from kvshelf.store import checks, eviction
from kvshelf.store.blobs import WRITE_LEASE_S, Name, cache_of
from kvshelf.store.disk.database import Database
from kvshelf.store.disk.jobs import FOREVER, SqliteJobs
from kvshelf.store.index import NO_LIMITS, BasesGone, Entry, Filters, Index, Quota, Writing, lapsed
from kvshelf.store.manifest import Manifest, StoredUsage

_FIELDS: Final = (
    "seq, id, tenant, state, version, name, nbytes, expires_at, last_used_at, uses, cost_s, priority, "
    " pinned, ended_at, problem, bases, parent_id, manifest AS text"
)
_IS_BASE: Final = "EXISTS (SELECT 1 FROM refs WHERE refs.name = caches.name)"
_NAME: Final = "json_extract(manifest, '$.name')"  # as the index has it; the column `name` is that of the blob
_PROMISE: Final = "json_extract(manifest, '$.guaranteed_until')"
_BATCH: Final = 500


class SqliteIndex(Index):
    """See `Index`. The home's clock is the wall clock, which all processes of a machine share."""

    def __init__(
        self, database: Database, key: bytes, now: Callable[[], float], write_lease_s: float = WRITE_LEASE_S
    ) -> None:
        self.key = key
        self.jobs = SqliteJobs(database, now)
        self.database = database
        self._now = now
        self.write_lease_s = write_lease_s

    # Writing

    def begin(self, writing: Writing, quota: Quota) -> None:
        size = writing.nbytes
        replaced = writing.cache_id if writing.of_cache else ""
        with self.database.write(durable=False) as tx:
            caches, nbytes = _used_beside(tx, replaced, writing.tenant)
            if quota.max_caches is not None and replaced and caches + 1 > quota.max_caches:
                raise quota.exceeded("max_caches", caches, size)
            if quota.max_bytes is not None and nbytes + size > quota.max_bytes:
                raise quota.exceeded("max_bytes", nbytes, size)
            if quota.budget_bytes is not None and _used_beside(tx, replaced, None)[1] + size > quota.budget_bytes:
                raise quota.exceeded("budget_bytes", 0, size)
            _register(tx, writing, self._now() + self.write_lease_s)

    def renew(self, name: str) -> None:
        now = self._now()
        with self.database.write(durable=False) as tx:
            _require_lease(tx, name, now)
            tx.execute("UPDATE writes SET lease_until = ? WHERE name = ?", (now + self.write_lease_s, name))

    def abandon(self, name: str) -> None:
        with self.database.write(durable=False) as tx:
            tx.execute("DELETE FROM writes WHERE name = ?", (name,))

    def abandoned(self) -> list[Writing]:
        with self.database.write() as tx:
            tx.execute("UPDATE writes SET lease_until = 0 WHERE lease_until <= ?", (self._now(),))
            rows = tx.execute("SELECT name, id AS cache_id, tenant, nbytes, of_cache FROM writes WHERE lease_until = 0")
            return [Writing(**{**row, "of_cache": bool(row["of_cache"])}) for row in rows]

    def publish(
        self,
        writing: Writing,
        manifest: Manifest,
        *,
        over: Entry | None,
        cost_s: float,
        now: float,
        quota: Quota = NO_LIMITS,
    ) -> tuple[bool, Entry | None]:
        with self.database.write() as tx:
            _require_lease(tx, writing.name, self._now())
            old = _find(tx, manifest.id, manifest.tenant)
            if old is not None and old.live(now) and (over is None or old.name != over.name):
                return False, old
            if writing.parent_id is not None:
                _require_ancestors(tx, writing.parent_id)
            _require_bases(tx, writing)
            if old is not None and old.stored and old.expired(now):  # before a sweep came: what it owns ends, too
                tx.execute("UPDATE caches SET state = 'expired', ended_at = expires_at WHERE seq = ?", (old.seq,))
            tx.execute("DELETE FROM caches WHERE id = ?", (manifest.id,))
            if manifest.promised:
                _require_promisable(tx, writing.tenant, writing.nbytes, quota)
            _insert(tx, writing, manifest, cost_s)
            if old is not None and old.stored:
                _retire(tx, old.retired())
            tx.execute("DELETE FROM writes WHERE name = ?", (writing.name,))
        return True, old if old is not None and old.stored else None

    # Reading

    def find(self, cache_id: str, tenant: str) -> Entry | None:
        with self.database.read() as connection:
            return _find(connection, cache_id, tenant)

    def listing(self, query: Filters, now: float, before: int | None, limit: int) -> list[Entry]:
        where = ["tenant = ?", "state = 'ready'", "(expires_at IS NULL OR expires_at > ?)"]
        values: list[Any] = [query.tenant, now]
        columns = {"document_id": query.document_id, "model": query.model, "policy": query.policy, _NAME: query.name}
        columns |= {"parent_id": query.parent_id}
        for name, value in columns.items():
            if value is not None:
                where.append(f"{name} = ?")
                values.append(value)
        if query.id_prefix is not None:
            where.append("seq IN (SELECT seq FROM caches WHERE tenant = ? AND id >= ? AND id < ?)")
            values += [query.tenant, query.id_prefix, query.id_prefix + "~"]  # which is after every digit
        for name, value in query.labels.items():
            where.append("seq IN (SELECT seq FROM labels WHERE tenant = ? AND name = ? AND value = ?)")
            values += [query.tenant, name, value]
        if before is not None:
            where.append("seq < ?")
            values.append(before)
        with self.database.read() as connection:
            return _entries(connection, f"{' AND '.join(where)} ORDER BY seq DESC LIMIT ?", (*values, limit))

    def changes(self, tenant: str, after: int | None, limit: int) -> tuple[list[Entry], int]:
        with self.database.read() as connection:
            if after is None:  # numbers are of the whole home, so that none is given twice
                last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
                return [], 0 if last is None else int(last["seq"])
            rows = connection.execute(
                f"SELECT {_FIELDS}, number FROM (SELECT number, seq FROM changes WHERE tenant = ? AND number > ? "
                "ORDER BY number LIMIT ?) JOIN caches USING (seq) ORDER BY number",
                (tenant, after, limit),
            )
            changed = [dict(row) for row in rows]
        numbers = [after, *(row.pop("number") for row in changed)]
        return list(map(_entry, changed)), numbers[-1]

    def children(self, cache_id: str, tenant: str) -> list[Entry]:
        with self.database.read() as connection:
            return _entries(connection, "parent_id = ? AND tenant = ? ORDER BY seq", (cache_id, tenant))

    def usage(self, tenant: str | None) -> StoredUsage:
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ?", (tenant,))
        query = f"SELECT coalesce(sum(caches), 0) AS caches, coalesce(sum(bytes), 0) AS bytes FROM usage {where}"
        with self.database.read() as connection:
            return StoredUsage(**connection.execute(query, values).fetchone())

    def stored(self) -> Iterator[Entry]:
        seq = 0
        while True:
            where = "state IN ('ready', 'corrupt') AND seq > ? ORDER BY seq LIMIT ?"
            with self.database.read() as connection:  # a connection is not held while the caller works
                batch = _entries(connection, where, (seq, _BATCH))
            if not batch:
                return
            yield from batch
            seq = batch[-1].seq

    def knows(self, name: str) -> bool:
        where = "id = ? AND name = ?"  # the id is part of the name and is indexed; the names of caches are not
        values = (cache_of(name), name)
        with self.database.read() as connection:
            queries = (f"SELECT 1 FROM {table} WHERE {where}" for table in ("caches", "writes"))
            return any(connection.execute(query, values).fetchone() for query in queries)

    def is_base(self, name: str) -> bool:
        with self.database.read() as connection:
            return _is_base(connection, name)

    # Changing

    def swap(self, entry: Entry, manifest: Manifest, writing: Writing | None = None, quota: Quota = NO_LIMITS) -> bool:
        new, old = entry.swapped(manifest, writing)
        states = "'ready'" if writing is None else "'ready', 'corrupt'"
        with self.database.write() as tx:
            if writing is not None:
                _require_lease(tx, writing.name, self._now())
                _require_bases(tx, writing)
            if new.pinned and not entry.pinned:
                _require_promisable(tx, entry.tenant, new.nbytes, quota)
            swapped = tx.execute(
                "UPDATE caches SET manifest = ?, expires_at = ?, pinned = ?, version = ?, state = ?, problem = NULL, "
                "name = ?, nbytes = ?, bases = ? "
                f"WHERE seq = ? AND name = ? AND version = ? AND state IN ({states})",
                (
                    *(new.text, new.expires_at, new.pinned, new.version, new.state),
                    *(new.name, new.nbytes, json.dumps(new.bases)),
                    *(entry.seq, entry.name, entry.version),
                ),
            )
            if swapped.rowcount != 1:
                return False
            _set_labels(tx, entry.seq, manifest.tenant, manifest.labels)
            if old is not None:
                _set_refs(tx, entry.seq, new.bases)
                _retire(tx, old)
            if writing is not None:
                tx.execute("DELETE FROM writes WHERE name = ?", (writing.name,))
        return True

    def touch(self, cache_id: str, tenant: str, now: float) -> Entry | None:
        with self.database.write(durable=False) as tx:
            entry = _find(tx, cache_id, tenant)
            if entry is not None and entry.state == "ready":
                uses = entry.uses + 1
                priority = eviction.priority(_clock(tx), uses + 1, entry.cost_s, entry.nbytes)
                changes = (now, uses, priority, entry.seq)
                tx.execute("UPDATE caches SET last_used_at = ?, uses = ?, priority = ? WHERE seq = ?", changes)
        return None if entry is None or entry.expires_at is None else entry

    def mark_corrupt(self, entry: Entry, problem: str) -> bool:
        with self.database.write() as tx:
            marked = tx.execute(
                "UPDATE caches SET state = 'corrupt', problem = ? WHERE seq = ? AND state = 'ready' AND name = ?",
                (problem, entry.seq, entry.name),
            )
            return marked.rowcount == 1

    def bury(self, entry: Entry, state: Literal["expired", "evicted", "deleted"], now: float) -> bool:
        where = {
            "deleted": "state != 'deleted' AND version = ?",
            "expired": "state IN ('ready', 'corrupt') AND expires_at <= ?",
            "evicted": f"state = 'ready' AND pinned = 0 AND NOT {_IS_BASE}",
        }[state]
        bound: dict[str, list[float]] = {"deleted": [entry.version], "expired": [now], "evicted": []}
        with self.database.write() as tx:
            due = _entries(tx, f"seq = ? AND {where}", (entry.seq, *bound[state]))
            if not due or (state == "deleted" and _has_descendants(tx, entry)):
                return False
            tx.execute(
                "UPDATE caches SET state = ?, ended_at = ?, name = NULL, nbytes = 0, problem = NULL, bases = '[]', "
                "manifest = NULL WHERE seq = ?",
                (state, now, entry.seq),
            )
            _set_labels(tx, entry.seq, entry.tenant, {})
            if due[0].stored:
                _set_refs(tx, entry.seq, ())
                _retire(tx, due[0].retired())
            if state == "evicted":
                clock = max(_clock(tx), entry.priority)
                tx.execute("INSERT OR REPLACE INTO meta VALUES ('clock', ?)", (repr(clock).encode(),))
        return True

    def expired(self, now: float, limit: int) -> list[Entry]:
        with self.database.read() as connection:
            return _entries(connection, "state IN ('ready', 'corrupt') AND expires_at <= ? LIMIT ?", (now, limit))

    def unpromised(self, now: float, limit: int) -> list[Entry]:
        where = f"state = 'ready' AND pinned = 1 AND {_PROMISE} <= ? LIMIT ?"
        with self.database.read() as connection:
            return _entries(connection, where, (now, limit))

    def promised(self, tenant: str | None) -> StoredUsage:
        with self.database.read() as connection:
            return _promised(connection, tenant)

    def victims(self, limit: int) -> list[Entry]:
        with self.database.read() as connection:
            where = f"state = 'ready' AND pinned = 0 AND NOT {_IS_BASE} ORDER BY priority LIMIT ?"
            return _entries(connection, where, (limit,))

    def spliced(self, least: int, limit: int) -> list[Entry]:
        where = "state = 'ready' AND bases != '[]' AND json_array_length(bases) >= ? LIMIT ?"
        with self.database.read() as connection:
            return _entries(connection, where, (least, limit))

    def forget(self, before: float) -> int:
        with self.database.write() as tx:
            return tx.execute(
                "DELETE FROM caches WHERE state IN ('expired', 'evicted', 'deleted') AND ended_at < ? "
                "AND NOT EXISTS (SELECT 1 FROM caches AS child WHERE child.parent_id = caches.id)",
                (before,),
            ).rowcount

    def purge(self, *, at_once: bool) -> None:
        self.database.purge(at_once=at_once)

    def problems(self) -> list[str]:
        with self.database.read() as connection:
            problems = [row[0] for row in connection.execute("PRAGMA quick_check") if row[0] != "ok"]
            problems += [row[0] for query in _WRONG_REFERENCES for row in connection.execute(query)]
        return [f"index: {problem}" for problem in problems]

    def close(self) -> None:
        self.database.close()


def _entries(
    connection: sqlite3.Connection, where: str, values: tuple[Any, ...], index: str | None = None
) -> list[Entry]:
    by = "" if index is None else f"INDEXED BY {index}"
    rows = connection.execute(f"SELECT {_FIELDS} FROM caches {by} WHERE {where}", values)
    return [_entry(row) for row in rows]


def _entry(row: Mapping[str, Any] | sqlite3.Row) -> Entry:
    bases = map(tuple, json.loads(row["bases"])) if row["bases"] != "[]" else ()  # most have none
    return Entry(**{**row, "pinned": bool(row["pinned"]), "bases": tuple(bases)})


def _find(connection: sqlite3.Connection, cache_id: str, tenant: str) -> Entry | None:
    entries = _entries(connection, "tenant = ? AND id = ?", (tenant, cache_id), "caches_by_tenant_and_id")
    return entries[0] if entries else None


def _used_beside(connection: sqlite3.Connection, cache_id: str, tenant: str | None) -> tuple[int, int]:
    """Caches and bytes of one tenant or all that are ready, kept or being written, without those of one cache id."""
    mine, values = ("", ()) if tenant is None else ("AND tenant = ?", (tenant,))
    row = connection.execute(
        f"SELECT coalesce(sum(caches), 0) AS caches, coalesce(sum(bytes), 0) AS bytes FROM ("
        f"  SELECT caches, bytes FROM usage WHERE true {mine}"
        f"  UNION ALL SELECT -1, -nbytes FROM caches WHERE id = ? AND state = 'ready' {mine}"
        f"  UNION ALL SELECT of_cache, nbytes FROM writes"
        f"  WHERE lease_until > 0 AND (kept OR id != ?) {mine})",
        (*values, cache_id, *values, cache_id, *values),
    ).fetchone()
    return row["caches"], row["bytes"]


def _promised(connection: sqlite3.Connection, tenant: str | None) -> StoredUsage:
    mine, values = ("", ()) if tenant is None else ("AND tenant = ?", (tenant,))
    query = (
        "SELECT count(*) AS caches, coalesce(sum(nbytes), 0) AS bytes FROM caches "
        f"WHERE state = 'ready' AND pinned = 1 {mine}"
    )
    return StoredUsage(**connection.execute(query, values).fetchone())


def _require_promisable(connection: sqlite3.Connection, tenant: str, nbytes: int, quota: Quota) -> None:
    quota.require_promisable(lambda whose: _promised(connection, whose).bytes, tenant, nbytes)


def _require_lease(connection: sqlite3.Connection, name: str, now: float) -> None:
    row = connection.execute("SELECT lease_until FROM writes WHERE name = ?", (name,)).fetchone()
    if row is None or row["lease_until"] <= now:
        raise lapsed()


def _insert(connection: sqlite3.Connection, writing: Writing, manifest: Manifest, cost_s: float) -> None:
    priority = eviction.priority(_clock(connection), 1, cost_s, writing.nbytes)
    described = manifest.model_dump(include={"id", "tenant", "document_id", "model", "policy", "expires_at"})
    described["pinned"] = manifest.promised
    cursor = connection.execute(
        "INSERT INTO caches (id, tenant, state, name, nbytes, document_id, model, policy, expires_at, cost_s, "
        "priority, pinned, bases, parent_id, manifest) VALUES (:id, :tenant, 'ready', :name, :nbytes, :document_id, "
        ":model, :policy, :expires_at, :cost_s, :priority, :pinned, :bases, :parent_id, :manifest)",
        asdict(writing)
        | described
        | {"cost_s": cost_s, "priority": priority, "manifest": manifest.model_dump_json()}
        | {"bases": json.dumps(writing.bases)},
    )
    assert cursor.lastrowid is not None
    _set_refs(connection, cursor.lastrowid, writing.bases)
    _set_labels(connection, cursor.lastrowid, manifest.tenant, manifest.labels)


def _register(connection: sqlite3.Connection, writing: Writing, lease_until: float) -> None:
    """lease_until: Unix seconds; 0 for names that are only to be removed."""
    row = (writing.name, writing.cache_id, writing.tenant, writing.nbytes, writing.of_cache)
    connection.execute("INSERT INTO writes VALUES (?, ?, ?, ?, ?, ?, 0)", (*row, lease_until))


def _retire(connection: sqlite3.Connection, old: Writing) -> None:
    """Record a name that gave way as an abandoned write, or as kept if the blob is a base. Then end the kept names
    whose last reference the entry was."""
    if _is_base(connection, old.name):
        _register(connection, replace(old, of_cache=False), FOREVER)
        connection.execute("UPDATE writes SET kept = 1 WHERE name = ?", (old.name,))
    elif old.name:
        _register(connection, old, 0)
    connection.executemany(
        "UPDATE writes SET lease_until = 0, kept = 0 "
        "WHERE name = ? AND kept = 1 AND NOT EXISTS (SELECT 1 FROM refs WHERE refs.name = writes.name)",
        [(name,) for name, _ in old.bases],
    )


def _is_base(connection: sqlite3.Connection, name: str) -> bool:
    return connection.execute("SELECT 1 FROM refs WHERE name = ?", (name,)).fetchone() is not None


def _set_refs(connection: sqlite3.Connection, seq: int, bases: Sequence[Name]) -> None:
    connection.execute("DELETE FROM refs WHERE seq = ?", (seq,))
    connection.executemany("INSERT INTO refs VALUES (?, ?)", [(name, seq) for name, _ in bases])


def _require_bases(connection: sqlite3.Connection, writing: Writing) -> None:
    query = (
        "SELECT 1 FROM caches WHERE id = :id AND name = :name AND tenant = :tenant "
        "UNION ALL SELECT 1 FROM writes WHERE kept = 1 AND name = :name AND tenant = :tenant"
    )
    for name, _ in writing.bases:
        values = {"id": cache_of(name), "name": name, "tenant": writing.tenant}
        if connection.execute(query, values).fetchone() is None:
            raise BasesGone


def _require_ancestors(connection: sqlite3.Connection, parent_id: str) -> None:
    query = (
        "WITH RECURSIVE line (id) AS (VALUES (?) UNION "
        "SELECT parent_id FROM caches JOIN line USING (id) WHERE parent_id IS NOT NULL) "
        "SELECT 1 FROM caches JOIN line USING (id) WHERE state = 'deleted'"
    )
    if connection.execute(query, (parent_id,)).fetchone() is not None:
        raise checks.not_found(parent_id)


def _has_descendants(connection: sqlite3.Connection, entry: Entry) -> bool:
    query = (
        "WITH RECURSIVE below (id, stored) AS ("
        "SELECT id, state IN ('ready', 'corrupt') FROM caches WHERE parent_id = :id AND tenant = :tenant "
        "UNION SELECT caches.id, state IN ('ready', 'corrupt') FROM caches JOIN below ON parent_id = below.id "
        "WHERE NOT below.stored AND tenant = :tenant) "
        "SELECT 1 FROM below WHERE stored"
    )
    return connection.execute(query, {"id": entry.id, "tenant": entry.tenant}).fetchone() is not None


_WRONG_REFERENCES: Final = (
    "SELECT id || ' and the references to its bases differ' FROM caches WHERE "
    "(SELECT count(*) FROM refs WHERE refs.seq = caches.seq) != json_array_length(bases) OR EXISTS (SELECT 1 FROM "
    "json_each(bases) AS base WHERE NOT EXISTS (SELECT 1 FROM refs WHERE refs.seq = caches.seq AND "
    "refs.name = json_extract(base.value, '$[0]')))",
    "SELECT 'the base ' || refs.name || ' is no blob of a cache and is not kept' FROM refs WHERE NOT EXISTS "
    "(SELECT 1 FROM caches WHERE id = 'kvs_' || substr(refs.name, 1, 40) AND name = refs.name) AND NOT EXISTS "
    "(SELECT 1 FROM writes WHERE writes.name = refs.name AND kept = 1)",
    "SELECT writes.name || ' is kept and is no base' FROM writes WHERE kept = 1 AND NOT EXISTS "
    "(SELECT 1 FROM refs WHERE refs.name = writes.name)",
)
"""Queries whose rows are references that do not add up."""


def _set_labels(connection: sqlite3.Connection, seq: int, tenant: str, labels: Mapping[str, str]) -> None:
    connection.execute("DELETE FROM labels WHERE seq = ?", (seq,))
    connection.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", [(seq, tenant, *pair) for pair in labels.items()])


def _clock(connection: sqlite3.Connection) -> float:
    """The eviction clock: the highest priority that was ever evicted."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'clock'").fetchone()
    return 0.0 if row is None else float(row["value"])
