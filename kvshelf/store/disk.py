"""A shelf in one folder: blob files, and an SQLite index that says which of them count.

    <home>/shelf.sqlite3          manifests, ledger, the home's key; WAL, readable by its owner only
    <home>/blobs/<digest>-<random>.kvb
    <home>/quarantine/            files found corrupt, kept for inspection until their cache is deleted or put again

A cache is written to a new file, made durable, read back and verified; then one transaction makes it visible; only
then is what it replaces removed. So a crash at any moment leaves the whole cache or none, and at worst a file that
`sweep` removes. Several processes may use one home; it must lie on a local file system, as SQLite's WAL demands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import torch

from kvshelf.errors import BlobError, CacheCorrupt, CacheExpired, InvalidRequest, StoreUnavailable
from kvshelf.store import base, blob, catalog
from kvshelf.store.artifact import CompressedCache
from kvshelf.store.base import UNSET, BlobFile, Page, Placement, Receipt, Store, Swept, Unset, Usage
from kvshelf.store.catalog import Entry
from kvshelf.store.database import Database
from kvshelf.store.faults import translated
from kvshelf.store.files import BlobFolder, Step, is_name, new_name
from kvshelf.store.identity import Identity
from kvshelf.store.ledger import Ledger
from kvshelf.store.manifest import Manifest, Timings, describe

ORPHAN_GRACE_S: Final = 3600.0
"""A file that no manifest names is left alone for this long: it may be a cache being written."""

KEEP_ENDED_S: Final = 30 * 86400.0
"""How long an expired id still answers "expired", and an ended request can be looked up."""


def _no_step(name: str) -> None:
    """Nobody watches."""


class DiskStore(Store):
    """See `Store` for the contract. Made by `open`."""

    def __init__(
        self,
        home: Path,
        database: Database,
        key: bytes,
        blobs: BlobFolder,
        quarantine: BlobFolder,
        now: Callable[[], float],
        on_step: Step,
    ) -> None:
        self.home = home
        self.ledger = Ledger(database, now)
        self._database = database
        self._key = key
        self._blobs = blobs
        self._quarantine = quarantine
        self._now = now
        self._on_step = on_step

    @classmethod
    def open(cls, home: Path, *, now: Callable[[], float] = time.time, on_step: Step = _no_step) -> Self:
        """Open the shelf in a folder; both are made if they are missing. Raises `StoreUnavailable`, `StorageFull`.

        Open it after forking: connections do not survive a fork.
        """
        with translated(home):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = Database(home)
            key = database.create()
            blobs, quarantine = BlobFolder.open(home / "blobs"), BlobFolder.open(home / "quarantine")
        return cls(home, database, key, blobs, quarantine, now, on_step)

    def close(self) -> None:
        self._database.close()
        self._blobs.close()
        self._quarantine.close()

    # Ids

    def cache_id(self, identity: Identity, *, tenant: str = "default", codec: str = "none") -> str:
        return identity.cache_id(key=self._key, tenant=tenant, codec=codec, format_major=blob.FORMAT_MAJOR)

    def document_id(self, identity: Identity, *, tenant: str = "default") -> str:
        return identity.document_id(key=self._key, tenant=tenant)

    # Writing

    def put(
        self,
        cache: CompressedCache,
        *,
        codec: str = "none",
        tenant: str = "default",
        ttl_s: float | None = None,
        expires_at: float | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "",
        pinned: bool = False,
        timings: Timings | None = None,
    ) -> Manifest:
        expiry = base.require_expiry(ttl_s, expires_at, self._now())
        placement = Placement(
            tenant=base.require_text(tenant, "tenant", empty=False),
            codec=base.require_codec(codec),
            expires_at=expiry,
            labels=base.require_labels(labels or {}),
            name=base.require_text(name, "name"),
            pinned=bool(pinned),
            timings=timings or Timings(),
        )
        cache_id = self.cache_id(cache.identity, tenant=tenant, codec=codec)
        with translated(self.home):
            existing = self._whole(cache_id, tenant)
            return existing.manifest() if existing is not None else self._store(cache, cache_id, placement)

    def _whole(self, cache_id: str, tenant: str) -> Entry | None:
        """The entry of a cache that need not be written again."""
        with self._database.read() as connection:
            entry = catalog.find(connection, cache_id, tenant)
        return entry if entry is not None and self._is_whole(entry) else None

    def _is_whole(self, entry: Entry) -> bool:
        return (
            entry.state == "ready"
            and not entry.expired(self._now())
            and entry.file is not None
            and self._blobs.size(entry.file) == entry.nbytes
        )

    def _store(self, cache: CompressedCache, cache_id: str, placement: Placement) -> Manifest:
        started = time.perf_counter()
        packed = blob.pack(cache)
        file = new_name(cache_id)
        published = False
        try:
            self._blobs.write(file, packed.buffers, self._on_step)
            self._read_back(file, packed)
            manifest = Manifest(
                **describe(cache, packed),
                id=cache_id,
                document_id=self.document_id(cache.identity, tenant=placement.tenant),
                tenant=placement.tenant,
                codec=placement.codec,
                timings=placement.timings.model_copy(update={"store_s": time.perf_counter() - started}),
                created_at=self._now(),
                expires_at=placement.expires_at,
                pinned=placement.pinned,
                name=placement.name,
                labels=dict(placement.labels),
            )
            visible, published = self._publish(manifest, file)
            return visible
        finally:
            if not published:
                self._blobs.remove(file)

    def _read_back(self, file: str, packed: blob.PackedBlob) -> None:
        try:
            with self._blobs.read(file) as written:
                root = blob.verify_file(written, packed.nbytes).root
        except BlobError as error:
            raise StoreUnavailable(f"the shelf at {self.home} does not keep what is written to it: {error}") from error
        if root != packed.root:
            raise StoreUnavailable(
                f"the shelf at {self.home} does not keep what is written to it: another blob came back"
            )
        self._on_step("verified")

    def _publish(self, manifest: Manifest, file: str) -> tuple[Manifest, bool]:
        """Make a cache visible, unless another writer was first. Returns what is visible, and whether it is `file`."""
        with self._database.write() as tx:
            old = catalog.find(tx, manifest.id, manifest.tenant)
            if old is not None and self._is_whole(old):
                return old.manifest(), False
            if self._blobs.size(file) is None:
                # A sweep took it for an orphan. It removes files under this same lock, so this cannot happen later.
                raise StoreUnavailable("the cache took longer to write than orphans are kept; put it again")
            catalog.insert(tx, manifest, file)
        self._on_step("published")
        self._discard(old)
        self._on_step("replaced")
        return manifest, True

    def _discard(self, entry: Entry | None) -> None:
        """Remove the file of an entry that no longer counts."""
        if entry is not None and entry.file is not None:
            self._blobs.remove(entry.file)
            self._quarantine.remove(entry.file)

    # Reading

    def get(self, cache_id: str, *, tenant: str = "default") -> CompressedCache:
        with translated(self.home):
            entry, file = self._open(cache_id, tenant)
            try:
                with file:
                    cache = blob.decode(_read_whole(file, entry.nbytes))
            except BlobError as error:
                self._set_aside(entry, str(error), error.reason)
            if self.cache_id(cache.identity, tenant=tenant, codec=entry.manifest().codec) != cache_id:
                self._set_aside(entry, "its blob belongs to another cache", "wrong_identity")
            return cache

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> BlobFile:
        with translated(self.home):
            entry, file = self._open(cache_id, tenant)
            try:
                summary = blob.verify_file(file, entry.nbytes)
            except BlobError as error:
                file.close()
                self._set_aside(entry, str(error), error.reason)
            if summary.root.hex() != entry.manifest().blob_digest:
                file.close()
                self._set_aside(entry, "its blob belongs to another cache", "wrong_identity")
            file.seek(0)
            return BlobFile(BufferedReader(file), summary.nbytes, summary.root.hex())

    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        return self._ready(cache_id, tenant).manifest()

    def _ready(self, cache_id: str, tenant: str) -> Entry:
        """The entry of a cache that may be read, or the error that says why it may not."""
        base.require_id(cache_id)
        with self._database.read() as connection:
            entry = catalog.find(connection, cache_id, tenant)
        if entry is None or entry.state == "deleted":
            raise base.not_found(cache_id)
        if entry.expired(self._now()):
            raise CacheExpired(f"cache {cache_id} has expired; compress its document again", param="cache_id")
        if entry.state == "corrupt":
            raise _corrupt(cache_id, entry.problem or "unknown", "quarantined")
        return entry

    def _open(self, cache_id: str, tenant: str) -> tuple[Entry, FileIO]:
        """Open a cache's file. If the cache is deleted or replaced in between, the index decides."""
        entry = self._ready(cache_id, tenant)
        while True:
            assert entry.file is not None, "a ready cache names its file"
            try:
                file = self._blobs.read(entry.file)
            except OSError as error:
                again = self._ready(cache_id, tenant)
                if again.file == entry.file:
                    self._set_aside(entry, f"its file cannot be opened ({error.strerror or error})", "unreadable")
                entry = again
                continue
            if os.fstat(file.fileno()).st_size == entry.nbytes:
                return entry, file
            file.close()
            self._set_aside(entry, "its file has another size than was written", "truncated")

    def _set_aside(self, entry: Entry, problem: str, reason: str) -> NoReturn:
        """Quarantine a cache and raise `CacheCorrupt`; whoever asks again hears the same without reading it."""
        assert entry.file is not None
        with self._database.write() as tx:
            current = catalog.find(tx, entry.id, entry.tenant)
            if current is not None and current.file == entry.file and current.state == "ready":
                self._blobs.move(entry.file, self._quarantine)
                catalog.mark_corrupt(tx, entry.seq, problem)
        raise _corrupt(entry.id, problem, reason)

    def list(
        self,
        *,
        tenant: str = "default",
        document_id: str | None = None,
        model: str | None = None,
        policy: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= base.PAGE_LIMIT:
            raise InvalidRequest(f"limit must be a number from 1 to {base.PAGE_LIMIT}, not {limit!r}", param="limit")
        columns = {"document_id": document_id, "model": model, "policy": policy}
        for param, value in columns.items():
            base.require_text(value or "", param)
        wanted = base.require_labels(labels or {})
        with self._database.read() as connection:
            before = None
            if after is not None:
                cursor = catalog.find(connection, base.require_text(after, "after"), tenant)
                if cursor is None:
                    raise InvalidRequest(f"after: there is no cache {after[:80]!r} to continue from", param="after")
                before = cursor.seq
            found = catalog.listing(connection, tenant, columns, wanted, self._now(), before, limit + 1)
        return Page(data=tuple(entry.manifest() for entry in found[:limit]), has_more=len(found) > limit)

    # Changing

    def update(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        ttl_s: float | Unset | None = UNSET,
        expires_at: float | Unset | None = UNSET,
        labels: Mapping[str, str] | Unset = UNSET,
        name: str | Unset = UNSET,
        pinned: bool | Unset = UNSET,
    ) -> Manifest:
        changes: dict[str, Any] = {}
        if not (isinstance(ttl_s, Unset) and isinstance(expires_at, Unset)):
            ttl, at = (None if isinstance(value, Unset) else value for value in (ttl_s, expires_at))
            changes["expires_at"] = base.require_expiry(ttl, at, self._now())
        if not isinstance(labels, Unset):
            changes["labels"] = base.require_labels(labels)
        if not isinstance(name, Unset):
            changes["name"] = base.require_text(name, "name")
        if not isinstance(pinned, Unset):
            changes["pinned"] = bool(pinned)
        self._ready(cache_id, tenant)
        with self._database.write() as tx:
            entry = catalog.find(tx, cache_id, tenant)
            if entry is not None and entry.state == "ready" and not entry.expired(self._now()):
                manifest = entry.manifest().model_copy(update=changes)
                catalog.rewrite(tx, entry.seq, manifest)
                return manifest
        return self.stat(cache_id, tenant=tenant)  # it ended in this very moment: this raises the error that fits

    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        with self._database.write() as tx:
            catalog.touch(tx, cache_id, tenant, self._now())

    def delete(self, cache_id: str, *, tenant: str = "default") -> Receipt:
        base.require_id(cache_id)
        now = self._now()
        with translated(self.home):
            with self._database.write() as tx:
                entry = catalog.find(tx, cache_id, tenant)
                if entry is None or entry.state == "deleted":
                    raise base.not_found(cache_id)
                catalog.bury(tx, entry.seq, "deleted", now)
            self._discard(entry)
        return Receipt(id=cache_id, deleted_at=now, bytes_freed=entry.nbytes, homes=("disk",))

    # Housekeeping

    def sweep(self, now: float | None = None) -> Swept:
        now = self._now() if now is None else now
        with translated(self.home):
            with self._database.write() as tx:
                ended = catalog.expired(tx, now)
                for entry in ended:
                    catalog.bury(tx, entry.seq, "expired", now)
                tombstones = catalog.forget(tx, now - KEEP_ENDED_S)
            for entry in ended:
                self._discard(entry)
            orphans = self._sweep_orphans(now)
        requests = self.ledger.forget(now - KEEP_ENDED_S)
        return Swept(expired=len(ended), orphans=orphans, tombstones=tombstones, requests=requests)

    def _sweep_orphans(self, now: float) -> int:
        removed = 0
        for folder in (self._blobs, self._quarantine):
            for file in self._orphans(folder, now):
                with self._database.write() as tx:  # the lock that publishing takes: see _publish
                    removed += not catalog.names_file(tx, file) and folder.remove(file)
        return removed

    def _orphans(self, folder: BlobFolder, now: float) -> Sequence[str]:
        old = [name for name, changed in folder.entries() if is_name(name) and changed < now - ORPHAN_GRACE_S]
        with self._database.read() as connection:
            return [name for name in old if not catalog.names_file(connection, name)]

    def usage(self, *, tenant: str | None = None) -> Usage:
        with self._database.read() as connection:
            caches, nbytes = catalog.usage(connection, tenant)
        return Usage(caches=caches, bytes=nbytes)

    def check(self) -> Sequence[str]:
        with translated(self.home):
            with self._database.read() as connection:
                problems = [f"index: {row[0]}" for row in connection.execute("PRAGMA quick_check") if row[0] != "ok"]
                entries = catalog.stored(connection)
            for entry in entries:
                if entry.state == "corrupt":
                    problems.append(f"{entry.id} is corrupt and in quarantine: {entry.problem}")
                elif entry.file is None or self._blobs.size(entry.file) != entry.nbytes:
                    problems.append(f"{entry.id}: its file is missing or has another size than was written")
            for folder in (self._blobs, self._quarantine):
                problems += [f"{folder.path / name} belongs to no cache" for name in self._orphans(folder, self._now())]
                problems += [
                    f"{folder.path / name} is not a blob file" for name, _ in folder.entries() if not is_name(name)
                ]
        return problems


def _corrupt(cache_id: str, problem: str, reason: str) -> CacheCorrupt:
    return CacheCorrupt(
        f"cache {cache_id} is corrupt ({problem}); it is never used. Compress its document again.",
        param="cache_id",
        reason=reason,
    )


def _read_whole(file: FileIO, size: int) -> memoryview:
    """A file's bytes in a buffer of their own: in a memory map, bytes could still change after they were verified."""
    buffer = torch.empty(size, dtype=torch.uint8).numpy().data  # unlike bytearray, not cleared before it is filled
    done = 0
    while done < size:
        count = file.readinto(buffer[done:])
        if not count:
            raise BlobError(f"the file ended after {done} of {size} bytes", reason="truncated")
        done += count
    return buffer
