"""Copies of caches in a folder on a local disk, for all processes of a machine.

The folder is a shelf of its own (`kvshelf.store.disk`) with the key of its home. So a home that lost everything can be
opened with this key again, and the ids of its caches stay the same.

    <folder>/tier     marks the folder as a tier, not a home; holds the incarnation of the home
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvshelf.atomic import written
from kvshelf.errors import BlobError, CacheError, CacheNotFound, InvalidRequest, SourceNotKept, StoreUnavailable
from kvshelf.store.disk import DiskStore, database
from kvshelf.store.disk.faults import translated
from kvshelf.store.index import Quota
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.tiers.tiers import Tier
from kvshelf.store.types import BlobFile, Scrubbed, Source

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache

ReadT = TypeVar("ReadT")

_NOTE: Final = "tier"
_CHANGING: Final = {"expires_at", "ttl_renew_s", "labels", "name", "pinned", "guaranteed_until", "quality"}


class DiskTier(Tier):
    """See `Tier`. Made by `open`. Drops the copies of lowest priority; pinned caches stay."""

    name = "disk"

    def __init__(self, store: DiskStore, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.store = store
        self._note = store.home / _NOTE
        self._keeping = threading.Lock()  # one at a time: other threads would take the freed space

    @staticmethod
    def known_key(folder: Path) -> bytes | None:
        """The key of the home that the copies in a folder belong to, None if the folder is no tier yet. Raises
        `StoreUnavailable` for a folder that is a home itself."""
        key = database.known_key(folder)
        if key is not None and not (folder / _NOTE).is_file():
            raise StoreUnavailable(f"{folder} is a home for caches and no tier of copies; name an empty folder")
        return key

    @classmethod
    def open(
        cls,
        folder: Path,
        max_bytes: int,
        *,
        key: bytes,
        keyring: Keyring | None = None,
        now: Callable[[], float] = time.time,
    ) -> Self:
        """Open the tier in a folder, or make it in an empty one. key: the home's. Raises `StoreUnavailable`, also for a
        folder that is a home or has copies for another home."""
        cls.known_key(folder)
        with translated(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / _NOTE).touch()  # before the key: a folder with a key and no note is a home
        rules = Rules(quota=Quota(budget_bytes=max_bytes), keyring=keyring)
        store = DiskStore.open(folder, key=key, rules=rules, now=now)
        if store.key != key:
            store.close()
            raise StoreUnavailable(
                f"{folder} holds copies for another home than this one; name another folder, or empty it"
            )
        return cls(store, max_bytes)

    def noted(self) -> str:
        """Kept in a file, because copies outlive the process; read each time, because other processes write it."""
        with translated(self.store.home):
            return self._note.read_text()

    def note(self, incarnation: str) -> None:
        with translated(self.store.home), written(self._note, private=True) as file:
            file.write(incarnation.encode())

    def keep(self, manifest: Manifest, cache: CompressedCache) -> None:
        if manifest.bytes_stored > self.max_bytes or self._has(manifest):
            return
        with self._keeping, suppress(BlobError):  # the cache does not belong to the manifest
            self.drop(manifest.id, manifest.tenant)  # a copy of another blob, or a damaged one
            self.store.adopt(cache, manifest)

    def keep_source(self, manifest: Manifest, source: Source) -> None:
        if self._has(manifest) and manifest.source is not None:
            until = manifest.source.expires_at
            with suppress(InvalidRequest):  # its time is over by now
                self.store.keep_source(manifest.id, source, tenant=manifest.tenant, expires_at=until)

    def confirm(self, manifest: Manifest) -> None:
        copy = self.find(manifest.id, manifest.tenant)
        if copy is None:
            return
        if copy.blob_digest != manifest.blob_digest:
            self.drop(manifest.id, manifest.tenant)
            return
        changing = {name: getattr(manifest, name) for name in _CHANGING}
        if (until := manifest.guaranteed_until) is not None and until <= self.store.now():
            changing["guaranteed_until"] = None  # a sweep of the home has yet to see it
        if {name: getattr(copy, name) for name in _CHANGING} != changing:
            self.store.update(manifest.id, tenant=manifest.tenant, **changing)

    def find(self, cache_id: str, tenant: str, *, recent: bool = False) -> Manifest | None:  # noqa: ARG002
        """All copies are recent: deletions on this machine reach them at once, other deletions with the next sweep."""
        with suppress(CacheNotFound, CacheError):
            return self.store.stat(cache_id, tenant=tenant)
        return None

    def open_cache(self, manifest: Manifest) -> ArrivingCache | None:
        return self._read(manifest, lambda: self.store.open_cache(manifest.id, tenant=manifest.tenant))

    def open_parts(self, manifest: Manifest) -> PartialCache | None:
        return self._read(manifest, lambda: self.store.open_parts(manifest.id, tenant=manifest.tenant))

    def open_blob(self, manifest: Manifest) -> BlobFile | None:
        return self._read(manifest, lambda: self.store.open_blob(manifest.id, tenant=manifest.tenant))

    def source(self, manifest: Manifest) -> Source | None:
        copy = self.find(manifest.id, manifest.tenant)
        info = None if copy is None else copy.source
        if info is None or manifest.source is None or info.digest != manifest.source.digest:  # its time may differ
            return None
        with suppress(SourceNotKept):
            return self._read(manifest, lambda: self.store.source(manifest.id, tenant=manifest.tenant))
        return None

    def touch(self, cache_id: str, tenant: str) -> None:
        self.store.touch(cache_id, tenant=tenant)

    def drop(self, cache_id: str, tenant: str) -> bool:
        try:
            self.store.delete(cache_id, tenant=tenant)
        except CacheNotFound:
            return False
        return True

    def manifests(self) -> Iterator[Manifest]:
        return self.store.manifests()

    def sweep(self, now: float | None) -> None:
        self.store.sweep(now)
        self.store.drop_lone_sources()

    def problems(self) -> list[str]:
        return list(self.store.check())

    def scrub(self) -> Iterator[Scrubbed]:
        return self.store.scrub()

    def close(self) -> None:
        self.store.close()

    def _has(self, manifest: Manifest) -> bool:
        copy = self.find(manifest.id, manifest.tenant)
        return copy is not None and copy.blob_digest == manifest.blob_digest

    def _read(self, manifest: Manifest, read: Callable[[], ReadT]) -> ReadT | None:
        """The result of `read` on the copy of the manifest's blob; None if there is no good copy."""
        if not self._has(manifest):
            return None
        try:
            return read()
        except (CacheNotFound, CacheError):  # dropped meanwhile, or damaged
            self.drop(manifest.id, manifest.tenant)
            return None
