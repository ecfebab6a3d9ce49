"""A shelf in one folder: blob files, and an SQLite index that says which of them count.

    <home>/shelf.sqlite3          manifests, ledger, the home's key; WAL, readable by its owner only
    <home>/blobs/<digest>-<random>.kvb
    <home>/quarantine/            files found corrupt, kept for inspection until their cache is deleted or put again

A cache is written to a new file, made durable, read back and verified; then one transaction makes it visible; only
then is what it replaces removed. So a crash at any moment leaves the whole cache or none, and at worst a file that
`sweep` removes. Several processes may use one home; it must lie on a local file system, as SQLite's WAL demands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final, Self

from kvshelf.errors import BlobError, CacheExpired, InvalidRequest, StoreError, StoreUnavailable
from kvshelf.store import base, blob, catalog, codecs, housekeeping
from kvshelf.store.arriving import ArrivingCache
from kvshelf.store.artifact import CompressedCache
from kvshelf.store.base import UNSET, BlobFile, Page, Receipt, Store, Swept, Unset, Usage
from kvshelf.store.catalog import Entry
from kvshelf.store.database import Database
from kvshelf.store.faults import translated
from kvshelf.store.files import BlobFolder, Step, new_name
from kvshelf.store.identity import Identity
from kvshelf.store.ledger import Ledger
from kvshelf.store.manifest import Manifest, Placement, Timings, describe

KEEP_ENDED_S: Final = 30 * 86400.0
"""How long an expired id still answers "expired", and an ended request can be looked up."""


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
    def open(
        cls,
        home: Path,
        *,
        busy_s: float = 10.0,
        now: Callable[[], float] = time.time,
        on_step: Step = lambda _: None,
    ) -> Self:
        """Open the shelf in a folder; both are made if they are missing. Raises `StoreUnavailable`, `StorageFull`.

        busy_s: how long a writer waits for its turn. now: the wall clock, Unix seconds. Open it after forking:
        connections do not survive a fork.
        """
        with translated(home):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = Database(home, busy_s)
            key = database.create()
            blobs, quarantine = BlobFolder.open(home / "blobs"), BlobFolder.open(home / "quarantine")
        return cls(home, database, key, blobs, quarantine, now, on_step)

    def close(self) -> None:
        self._database.close()
        self._blobs.close()
        self._quarantine.close()

    # Ids

    def cache_id(self, identity: Identity, *, tenant: str = "default", codec: str = "none") -> str:
        text = str(codecs.Codec.parse(codec))
        return identity.cache_id(key=self._key, tenant=tenant, codec=text, format_major=blob.FORMAT_MAJOR)

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
        stored_as = codecs.resolve(cache.codec, codec)
        placement = base.placement(tenant, stored_as, expiry, labels or {}, name, pinned, timings or Timings())
        cache_id = self.cache_id(cache.identity, tenant=tenant, codec=placement.codec)
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
        packed = blob.pack(cache.encoded(placement.codec))
        file = new_name(cache_id)
        try:
            self._blobs.write(file, packed.buffers, self._on_step)
            self._read_back(file, packed)
        except BaseException:
            self._blobs.remove(file)
            raise
        manifest = describe(
            cache,
            packed,
            placement,
            cache_id=cache_id,
            document_id=self.document_id(cache.identity, tenant=placement.tenant),
            created_at=self._now(),
            store_s=time.perf_counter() - started,
        )
        # From here on an error leaves the file alone: a commit that failed may have reached the disk all the same, and
        # a file without a manifest is swept.
        visible = self._publish(manifest, file)
        if visible is not manifest:
            self._blobs.remove(file)
        return visible

    def _read_back(self, file: str, packed: blob.PackedBlob) -> None:
        written = self._blobs.read(file)
        try:
            if written is None:
                raise BlobError("the file is gone", reason="missing")
            with written:
                if blob.verify_file(written, packed.nbytes).root != packed.root:
                    raise BlobError("another blob came back", reason="digest_mismatch")
        except BlobError as error:
            raise StoreUnavailable(f"the shelf at {self.home} does not keep what is written to it: {error}") from error
        self._on_step("verified")

    def _publish(self, manifest: Manifest, file: str) -> Manifest:
        """Make a cache visible, unless another writer was first; returns the manifest that is visible then."""
        with self._database.write() as tx:
            old = catalog.find(tx, manifest.id, manifest.tenant)
            if old is not None and self._is_whole(old):
                return old.manifest()
            if self._blobs.size(file) is None:
                # A sweep took it for an orphan. It removes files under this same lock, so this cannot happen later.
                raise StoreUnavailable("the cache took longer to write than orphans are kept; put it again")
            catalog.insert(tx, manifest, file)
        self._on_step("published")
        if old is not None:
            housekeeping.discard(self._folders, [old])
        self._on_step("replaced")
        return manifest

    # Reading

    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        with self._opening(cache_id, tenant) as (entry, file):
            summary = blob.open_file(file, entry.nbytes)
            _require_root(entry, summary.root)
            arriving = ArrivingCache(summary, file, partial(self._quarantining, entry))
            if self.cache_id(arriving.identity, tenant=tenant, codec=arriving.codec) != cache_id:
                raise BlobError("its blob belongs to another cache", reason="wrong_identity")
            return arriving

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> BlobFile:
        with self._opening(cache_id, tenant) as (entry, file):
            summary = blob.verify_file(file, entry.nbytes)
            _require_root(entry, summary.root)
            file.seek(0)
            return BlobFile(BufferedReader(file), summary.nbytes, summary.root.hex())

    @contextmanager
    def _opening(self, cache_id: str, tenant: str) -> Iterator[tuple[Entry, FileIO]]:
        """The file of a cache, for the caller of the block. It is closed when the block raises."""
        with translated(self.home):
            entry, file = self._open(cache_id, tenant)
            try:
                with self._quarantining(entry):
                    yield entry, file
            except BaseException:
                file.close()
                raise

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
            raise base.corrupt(cache_id, entry.problem or "unknown", "quarantined")
        return entry

    def _open(self, cache_id: str, tenant: str) -> tuple[Entry, FileIO]:
        """Open a cache's file. If the cache is deleted or replaced in between, the index decides."""
        entry = self._ready(cache_id, tenant)
        while True:
            assert entry.file is not None, "a ready cache names its file"
            file = self._blobs.read(entry.file)
            if file is not None:
                return entry, file
            again = self._ready(cache_id, tenant)
            if again.file == entry.file:
                with self._quarantining(entry):
                    raise BlobError("its file is missing or not a regular file", reason="missing")
            entry = again

    @contextmanager
    def _quarantining(self, entry: Entry) -> Iterator[None]:
        """Inside the block, a `BlobError` sets the cache aside: who asks again hears the same without reading it."""
        try:
            with translated(self.home):
                yield
        except BlobError as error:
            # Where the shelf cannot be written to either, the verdict stands all the same and is reached again.
            with suppress(StoreError), self._database.write() as tx:
                current = catalog.find(tx, entry.id, entry.tenant)
                if current is not None and current.state == "ready" and current.file == entry.file is not None:
                    self._blobs.move(entry.file, self._quarantine)
                    catalog.mark_corrupt(tx, entry.seq, error.message)
            raise base.corrupt(entry.id, error.message, error.reason) from error

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
        base.require_limit(limit)
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
        changes = base.changes(ttl_s, expires_at, labels, name, pinned, self._now())
        self._ready(cache_id, tenant)
        with self._database.write() as tx:
            entry = catalog.find(tx, cache_id, tenant)
            if entry is not None and entry.state == "ready" and not entry.expired(self._now()):
                manifest = entry.manifest().model_copy(update=changes)
                catalog.rewrite(tx, entry.seq, manifest)
                return manifest
        return self.stat(cache_id, tenant=tenant)  # it ended in this very moment: this raises the error that fits

    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        with self._database.write(durable=False) as tx:  # on the path of every query
            catalog.touch(tx, cache_id, tenant, self._now())

    def delete(self, cache_id: str, *, tenant: str = "default") -> Receipt:
        base.require_id(cache_id)
        now = self._now()
        with translated(self.home):
            with self._database.read() as connection:
                entry = catalog.find(connection, cache_id, tenant)
            if entry is None or entry.state == "deleted":
                raise base.not_found(cache_id)
            housekeeping.bury(self._database, self._folders, [entry], "deleted", now)
        return Receipt(id=cache_id, deleted_at=now, bytes_freed=entry.nbytes, homes=("disk",))

    # Housekeeping

    def sweep(self, now: float | None = None) -> Swept:
        now = self._now() if now is None else now
        with translated(self.home):
            return Swept(
                expired=housekeeping.expire(self._database, self._folders, now),
                orphans=housekeeping.remove_orphans(self._database, self._folders, now),
                tombstones=housekeeping.forget(self._database, now - KEEP_ENDED_S),
                requests=self.ledger.forget(now - KEEP_ENDED_S),
            )

    def usage(self, *, tenant: str | None = None) -> Usage:
        with self._database.read() as connection:
            caches, nbytes = catalog.usage(connection, tenant)
        return Usage(caches=caches, bytes=nbytes)

    def check(self) -> Sequence[str]:
        with translated(self.home):
            return housekeeping.problems(self._database, self._blobs, self._quarantine, self._now())

    @property
    def _folders(self) -> tuple[BlobFolder, BlobFolder]:
        return self._blobs, self._quarantine


def _require_root(entry: Entry, root: bytes) -> None:
    """The blob is sound; it must also be the one that was stored."""
    if root.hex() != entry.manifest().blob_digest:
        raise BlobError("its file holds another blob than was stored", reason="wrong_blob")
