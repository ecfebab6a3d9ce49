"""The index of a Redis home: every method is one call of `index.lua`, which the server runs as one atomic step.

The head of `index.lua` lists the keys. Leases are on the server's clock. Expiry is set on the server as well, so that a
manifest expires by itself. Foreign values under our keys are a named error: another program may have written there.
`RedisLink` never resends; still, `begin`, `publish` and `swap` are safe to repeat, because a caller that lost the
answer would otherwise undo them.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Self

from pydantic import TypeAdapter

from kvshelf.artifact.identity import digest
from kvshelf.errors import StoreUnavailable
from kvshelf.store import checks
from kvshelf.store.blobs import WRITE_LEASE_S, cache_of
from kvshelf.store.index import (
    ID_PREFIX,
    KEEP_ENDED_S,
    NO_LIMITS,
    BasesGone,
    Entry,
    Filters,
    Index,
    MakeBlobs,
    Quota,
    Writing,
    blobs_place,
    lapsed,
    require_blobs_place,
)
from kvshelf.store.manifest import Manifest, StoredUsage
from kvshelf.store.redis.jobs import RedisJobs
from kvshelf.store.redis.link import RedisLink, Script, Value

HOME_FORMAT: Final = 5
"""Incremented when the keys change in a way that older versions cannot read, or leave out what this one looks for."""

_BATCH: Final = 100
"""Entries per call: some hundred KB of manifests, which block the server for a few milliseconds."""

_STEPS: Final = 1000
"""Simple look-ups per call, which block the server for about as long."""

_ATTEMPTS: Final = 3

_ALWAYS_COUNTED: Final = (
    *("stored", "places", "expiry", "eviction", "pins", "spliced"),
    *("caches@u", "bytes@u", "held_caches@u", "held_bytes@u", "pinned_caches@u", "pinned_bytes@u"),
)

_REPLIES: Final = {
    **dict.fromkeys(("lost", "lapsed", "begun", "renewed", "abandoned", "done", "changed", "disowned", "baseless"), 0),
    **dict.fromkeys(("max_caches", "max_bytes", "budget_bytes", "tenant_promised_bytes", "promised_bytes"), 1),
    **dict.fromkeys(("published", "kept", "found", "writes", "entries", "known", "counts", "home", "touched"), 1),
    **dict.fromkeys(("listing", "walked", "forgotten", "changes"), 2),
}
"""The first word of each kind of reply, and how many parts follow it."""


class RedisIndex(Index):
    """See `Index`. Made by `open`. Also raises `StoreUnavailable` for foreign values under our keys."""

    def __init__(self, link: RedisLink, prefix: str, write_lease_s: float, blobs: MakeBlobs | None) -> None:
        self.jobs = RedisJobs(link, prefix)
        self.write_lease_s = write_lease_s
        self._lease_ms = round(write_lease_s * 1000)
        self._link = link
        self._blobs = blobs
        self._home = f"{{{prefix}}}:home"
        self._script = Script(link, "index.lua", self._home, _REPLIES)

    @classmethod
    def open(
        cls,
        link: RedisLink,
        prefix: str,
        key: bytes | None = None,
        *,
        write_lease_s: float = WRITE_LEASE_S,
        blobs: MakeBlobs | None = None,
    ) -> Self:
        """Connect to the home of a prefix, or create it. key: the key of content addresses for an empty home; random if
        None. With a key (a tier keeps its own), an unreachable home raises nothing here: the first operation that
        reaches the home reads its key and incarnation. blobs: how the place of the blobs is opened, if they are not in
        this Redis; `InvalidRequest` if the home was made otherwise."""
        index = cls(link, prefix, write_lease_s, blobs)
        try:
            index.key, index.incarnation = index._enter(key or secrets.token_bytes(32))
        except StoreUnavailable:
            if key is None:
                raise
            index.key = key
        return index

    # Writing

    def begin(self, writing: Writing, quota: Quota) -> None:
        reply = self._run(
            "begin",
            **writing_fields(writing),
            lease_ms=self._lease_ms,
            max_caches=quota.max_caches,
            max_bytes=quota.max_bytes,
            budget_bytes=quota.budget_bytes,
        )
        _require_lease(reply)
        if reply[0] != "begun":
            raise quota.exceeded(reply[0], int(reply[1]), writing.nbytes)

    def renew(self, name: str) -> None:
        _require_lease(self._run("renew", name=name, lease_ms=self._lease_ms))

    def abandon(self, name: str) -> None:
        self._run("abandon", name=name)

    def abandoned(self) -> list[Writing]:
        return self._writes("abandoned")

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
        reply = self._run(
            "publish",
            **writing_fields(writing),
            **manifest_fields(manifest),
            **_promises(quota),
            parent_id=writing.parent_id,
            over=None if over is None else over.name,
            cost_s=cost_s,
            now=now,
        )
        _require_publishable(reply, writing, quota)
        return reply[0] == "published", read_entry(reply[1]) if reply[1] else None

    # Reading

    def find(self, cache_id: str, tenant: str) -> Entry | None:
        shown = self._run("find", id=cache_id, tenant=tenant)[1]
        return read_entry(shown) if shown else None

    def listing(self, query: Filters, now: float, before: int | None, limit: int) -> list[Entry]:
        listings = ",".join(listings_of(query))
        matching: list[Entry] = []
        place: bytes | None = b"+inf" if before is None else b"(%d" % before
        steps = min(2 * limit, _STEPS)  # often enough
        while place is not None and len(matching) < limit:
            room = min(limit - len(matching), _BATCH)
            reply = self._run("listing", listings=listings, before=place, now=now, limit=room, steps=steps)
            entries = map(read_entry, reply[2])
            matching += [entry for entry in entries if entry.id.startswith(query.id_prefix or "")]
            place = None if reply[1] is None else b"(" + reply[1]
            steps = _STEPS
        return matching

    def changes(self, tenant: str, after: int | None, limit: int) -> tuple[list[Entry], int]:
        about: dict[str, Value] = {"tenant": tenant, "limit": min(limit, _BATCH)}
        number, shown = self._run("changes", after=after, **about)[1:]
        return [read_entry(entry) for entry in shown], int(number)

    def children(self, cache_id: str, tenant: str) -> list[Entry]:
        entries = map(read_entry, self._run("children", id=cache_id)[1])
        return sorted((entry for entry in entries if entry.tenant == tenant), key=lambda entry: entry.seq)

    def usage(self, tenant: str | None, kind: str = "") -> StoredUsage:
        """kind: the beginning of the fields that count, such as "pinned_"."""
        key = "u" if tenant is None else f"u:{tenant}"
        caches, nbytes = self._counts([f"{kind}caches@{key}", f"{kind}bytes@{key}"]).values()
        return StoredUsage(caches=caches, bytes=nbytes)

    def stored(self) -> Iterator[Entry]:
        for batch in self._walk("stored"):
            # The sweep handles entries that the server has expired.
            yield from (entry for entry in map(read_entry, batch) if entry.stored)

    def knows(self, name: str) -> bool:
        return bool(self._run("knows", name=name)[1] == b"1")

    def is_base(self, name: str) -> bool:
        return bool(self._run("is_base", name=name)[1] == b"1")

    # Changing

    def swap(self, entry: Entry, manifest: Manifest, writing: Writing | None = None, quota: Quota = NO_LIMITS) -> bool:
        new, old = entry.swapped(manifest, writing)
        names = new.retired()
        old_fields = {} if old is None else {f"gone_{field}": value for field, value in writing_fields(old).items()}
        reply = self._run(
            "swap",
            **writing_fields(names),
            **manifest_fields(manifest),
            **_promises(quota),
            **old_fields,
            write=None if writing is None else writing.name,
            entry_name=entry.name,
            version=entry.version,
        )
        _require_publishable(reply, names, quota)
        return _is_done(reply)

    def touch(self, cache_id: str, tenant: str, now: float) -> Entry | None:
        shown = self._run("touch", id=cache_id, tenant=tenant, now=now)[1]
        return read_entry(shown) if shown else None

    def mark_corrupt(self, entry: Entry, problem: str) -> bool:
        reply = self._run(
            "mark_corrupt", id=entry.id, entry_name=entry.name, problem=problem, keep_ended_s=KEEP_ENDED_S
        )
        return _is_done(reply)

    def bury(self, entry: Entry, state: Literal["expired", "evicted", "deleted"], now: float) -> bool:
        changes: dict[str, Value] = {"state": state, "now": now, "keep_ended_s": KEEP_ENDED_S}
        return _is_done(self._run("bury", id=entry.id, seq=entry.seq, version=entry.version, **changes))

    def expired(self, now: float, limit: int) -> list[Entry]:
        return [read_entry(shown, as_kept=True) for shown in self._run("expired", now=now, limit=limit)[1]]

    def unpromised(self, now: float, limit: int) -> list[Entry]:
        return [read_entry(shown, as_kept=True) for shown in self._run("unpromised", now=now, limit=limit)[1]]

    def promised(self, tenant: str | None) -> StoredUsage:
        return self.usage(tenant, "pinned_")

    def victims(self, limit: int) -> list[Entry]:
        return [read_entry(shown, as_kept=True) for shown in self._run("victims", limit=limit)[1]]

    def spliced(self, least: int, limit: int) -> list[Entry]:
        return [read_entry(shown, as_kept=True) for shown in self._run("spliced", least=least, limit=limit)[1]]

    def forget(self, before: float) -> int:
        count = kept = 0
        while True:
            forgotten, looked_at = map(int, self._run("forget", before=before, offset=kept, limit=_STEPS)[1:])
            count += forgotten
            kept += looked_at - forgotten
            if looked_at < _STEPS:
                return count

    # Care

    def problems(self) -> list[str]:
        """Compares every stored entry with all places that record it, then the sizes of those places with the sums.
        Others may change the home meanwhile, so a count is a problem only if it is off by the same amount twice."""
        problems, once = self._recount()
        twice = self._recount()[1] if any(once.values()) else once
        off = [what for what, number in once.items() if number and number == twice[what]]
        return problems + [f"index: {what} is off by {once[what]}" for what in off]

    def close(self) -> None:
        self._link.close()

    def _run(self, operation: str, **values: Value) -> list[Any]:
        """The reply of an operation. If the home has been deleted, creates it again with our key first."""
        for _ in range(_ATTEMPTS):
            reply = self._script.run(operation, self.incarnation, **values)
            if reply[0] != "lost":
                return reply
            key, incarnation = self._enter(self.key)
            if key != self.key:
                raise StoreUnavailable("the shelf in Redis was replaced by another one; open it again")
            self.incarnation = incarnation
        raise StoreUnavailable("the shelf in Redis is emptied again and again; see who else uses this server")

    def _enter(self, key: bytes) -> tuple[bytes, str]:
        """Key and incarnation of the home. The first caller creates an empty home, with `key`."""
        fresh: dict[str, Value] = {"format": HOME_FORMAT, "key": key, "incarnation": secrets.token_hex(8)}
        home_format, key, incarnation, place = self._script.run("open", "", **fresh, blobs=blobs_place(self._blobs))[1]
        if home_format != str(HOME_FORMAT).encode():
            raise StoreUnavailable(
                f"the shelf in Redis has home format {(home_format or b'?').decode(errors='replace')}, this version of "
                f"kvshelf works with {HOME_FORMAT}: use the version that made it, or another prefix"
            )
        if key is None or len(key) != 32 or not incarnation or not place:
            raise StoreUnavailable(f"{self._home} in Redis is not what kvshelf wrote there; use another prefix")
        require_blobs_place("the shelf in Redis", place.decode(errors="replace"), self._blobs)
        return key, incarnation.decode()

    def _walk(self, operation: str) -> Iterator[list[Any]]:
        """Batches of all stored entries, by seq."""
        after = "0"
        while True:
            _, last, batch = self._run(operation, after=after, limit=_BATCH)
            if last is None:
                return
            yield batch
            after = last.decode()

    def _recount(self) -> tuple[list[str], Counter[str]]:
        """Problems of single entries, and by how much each count of the home differs from their sum."""
        problems: list[str] = []
        due: Counter[str] = Counter(dict.fromkeys(_ALWAYS_COUNTED, 0))
        for rows in self._walk("audit"):
            for row in rows:
                decoded = [value.decode() for value in row]
                cache_id, problem, listings, nbytes, tenant, expires, ranked, pinned, bases, base = decoded
                if problem:
                    problems.append(f"index: {cache_id} {problem}")
                due.update({"stored": 1, "places": 1, "expiry": int(expires), "eviction": int(ranked)})
                due.update(_counted(tenant, "pinned_", 1, int(nbytes)) | {"pins": 1} if pinned == "1" else {})
                due.update({f"r:{base}": 0} if base else {})
                due.update(f"r:{base.split(':')[0]}" for base in filter(None, bases.split(",")))
                if listings:
                    due["spliced"] += int(bool(bases))
                    due.update(f"l:{listing}" for listing in listings.split(","))
                    due.update(_counted(tenant, "", 1, int(nbytes)))
        for writing in self._writes("kept"):
            if f"r:{writing.name}" not in due:
                problems.append(f"index: {writing.name} is kept and is no base")
        for writing in self._writes("held"):
            due.update(_counted(writing.tenant, "held_", int(writing.of_cache), writing.nbytes))
        counted = self._counts(sorted(due))
        return problems, Counter({what: counted[what] - number for what, number in due.items()})

    def _writes(self, operation: str) -> list[Writing]:
        writes: list[Writing] = []
        while True:
            listed = self._run(operation, offset=len(writes), limit=_STEPS)[1]
            writes += map(read_writing, listed[::2], listed[1::2])
            if len(listed) < 2 * _STEPS:
                return writes

    def _counts(self, keys: Sequence[str]) -> dict[str, int]:
        """The size of a set, or one field of a hash: "<field>@<hash>"."""
        counts: dict[str, int] = {}
        for start in range(0, len(keys), _STEPS // 2):
            some = keys[start : start + _STEPS // 2]
            counts |= zip(some, map(int, self._run("counts", keys="\0".join(some))[1]), strict=True)
        return counts


def _counted(tenant: str, kind: str, caches: int, nbytes: int) -> dict[str, int]:
    """The counts that an entry or a write adds, for its tenant and for all."""
    return {
        f"{kind}{what}@{key}": number
        for key in ("u", f"u:{tenant}")
        for what, number in (("caches", caches), ("bytes", nbytes))
    }


def _is_done(reply: Sequence[Any]) -> bool:
    return bool(reply[0] == "done")


def _require_lease(reply: Sequence[Any]) -> None:
    if reply[0] == "lapsed":
        raise lapsed()


def _promises(quota: Quota) -> dict[str, Value]:
    return {"tenant_promised_bytes": quota.tenant_promised_bytes, "promised_bytes": quota.promised_bytes}


def _require_publishable(reply: Sequence[Any], writing: Writing, quota: Quota) -> None:
    _require_lease(reply)
    if reply[0] in _promises(quota):
        raise quota.exceeded(reply[0], int(reply[1]), writing.nbytes)
    if reply[0] == "disowned":
        raise checks.not_found(writing.parent_id or "")
    if reply[0] == "baseless":
        raise BasesGone


_ENTRY: Final = TypeAdapter(Entry)


def writing_fields(writing: Writing) -> dict[str, Value]:
    """A write as the script registers it."""
    return {
        "name": writing.name,
        "tenant": writing.tenant,
        "nbytes": writing.nbytes,
        "of_cache": writing.of_cache,
        "bases": ",".join(f"{name}:{nbytes}" for name, nbytes in writing.bases) or None,
    }


def manifest_fields(manifest: Manifest) -> dict[str, Value]:
    """A manifest as the script stores and lists it."""
    columns = (manifest.tenant, manifest.document_id, manifest.model, manifest.policy, manifest.name, manifest.id)
    query = Filters(*columns, manifest.labels, manifest.parent_id)
    return {
        "id": manifest.id,
        "text": manifest.model_dump_json(),
        "expires_at": manifest.expires_at,
        "pinned": manifest.promised,
        "pinned_until": manifest.guaranteed_until,
        "listings": ",".join([_listing(manifest.tenant), *listings_of(query)]),
        "keep_ended_s": KEEP_ENDED_S,
    }


def listings_of(query: Filters) -> list[str]:
    """The listings whose common members answer a query, but for the rest of a longer `id_prefix`."""
    columns = {
        "document": query.document_id,
        "model": query.model,
        "policy": query.policy,
        "name": query.name,
        "parent": query.parent_id,
        "id": query.id_prefix and query.id_prefix[:ID_PREFIX],
    }
    listings = [_listing(query.tenant, name, value) for name, value in columns.items() if value is not None]
    listings += [_listing(query.tenant, "label", name, value) for name, value in query.labels.items()]
    return listings or [_listing(query.tenant)]


def _listing(tenant: str, *which: str) -> str:
    return digest("kvshelf.listing", tenant, *which)


def read_writing(name: bytes, record: bytes) -> Writing:
    """The inverse of `writing_fields`, from a name and the record that the script keeps under it."""
    try:
        nbytes, of_cache, tenant = record.decode().split(" ", 2)
        return Writing(
            name=name.decode(),
            cache_id=cache_of(name.decode()),
            tenant=tenant,
            nbytes=int(nbytes),
            of_cache=bool(int(of_cache)),
        )
    except ValueError as error:
        raise StoreUnavailable(
            f"a write in Redis, {name!r}, is not what kvshelf wrote there: {record!r:.200}"
        ) from error


def read_entry(shown: tuple[bytes, bytes | None], *, as_kept: bool = False) -> Entry:
    """An entry from the reply of `show` in `index.lua`: the fields, and the manifest if there is one. A ready entry
    without a manifest is expired if its expiry has passed, else corrupt. as_kept: it stays ready, as sweeps need it."""
    try:
        fields = json.loads(shown[0]) | {"text": shown[1]}
        fields["bases"] = [base.split(":") for base in filter(None, fields.get("bases", "").split(","))]
        entry = _ENTRY.validate_python(fields)
        if entry.state != "ready" or entry.text is not None or as_kept:
            return entry
        if entry.expired(float(fields["server_s"])):
            return replace(entry, state="expired")
        return replace(entry, state="corrupt", problem="its manifest is gone from the server")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreUnavailable(
            f"an entry of the shelf in Redis is not what kvshelf wrote there: {error!r:.200}"
        ) from error
