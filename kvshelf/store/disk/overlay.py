"""A shelf in a folder of one's own, over another's that is only read.

The index of the shelf below is read from a private copy, because SQLite writes beside a database that it reads; it is
copied again once it has changed. Blobs are read where they lie. So nothing below ever changes: no byte, no file, no
time of a change. Ids are content addresses under the key of a home, so the shelf above is made with the key of the one
below.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from kvshelf.api import Timings
from kvshelf.artifact import codecs
from kvshelf.artifact.blob.frame import FORMAT_MAJOR
from kvshelf.errors import (
    CacheError,
    CacheExpired,
    CacheNotFound,
    InvalidRequest,
    SourceNotKept,
    StateConflict,
    StoreUnavailable,
)
from kvshelf.store.disk import DiskStore
from kvshelf.store.disk.database import FILE_NAME, Database, known_key
from kvshelf.store.disk.faults import translated
from kvshelf.store.disk.folder import Folder
from kvshelf.store.disk.index import SqliteIndex
from kvshelf.store.index import Entry, Filters, require_blobs_place
from kvshelf.store.jobs.transforms import KeptTransforms
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf
from kvshelf.store.types import BlobFile, FilterFields, KeepFields, Page, Receipt, Source

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache
    from kvshelf.store.bundles.signed import SignedCaches

ResultT = TypeVar("ResultT")

_TRIES: Final = 10
"""How often the index is copied until it did not change meanwhile."""

_BUSY_S: Final = 10.0
_WAL_INDEX_HEADER: Final = 48  # bytes

_UNSIGNED: Final = {
    **dict.fromkeys(("source", "certificate", "min_quality", "parent_id", "guaranteed_until")),
    "tried": (),
    "timings": Timings(),
    "pinned": False,
}
"""Fields of a manifest that no bundle signs. Its times and uses, which are not signed either, stay."""

_OLD: Final = 2
"""Copies that stay, so that who reads the last one can finish."""


class _ReadFolder(Folder):
    """A folder of blobs in which nothing is moved or removed; its copied index knows what is corrupt."""

    def remove(self, name: str, nbytes: int) -> bool:  # noqa: ARG002
        return True

    def set_aside(self, name: str, nbytes: int) -> None:
        """It stays where it is."""


class _SignedIndex(SqliteIndex):
    """An index in which a cache that differs from its signed description counts as corrupt. Its columns only name the
    manifest that is then checked, and fields that no signature covers are empty."""

    signed: SignedCaches

    def find(self, cache_id: str, tenant: str) -> Entry | None:
        entry = super().find(cache_id, tenant)
        return None if entry is None else self._signed(entry)

    def listing(self, query: Filters, now: float, before: int | None, limit: int) -> list[Entry]:
        """Only entries that are as they were signed and match then, too."""
        entries: list[Entry] = []
        while True:
            rows = super().listing(query, now, before, limit)
            checked = map(self._signed, rows)
            entries += [entry for entry in checked if entry.state == "ready" and query.takes(entry.manifest())]
            if len(rows) < limit or len(entries) >= limit:
                return entries[:limit]
            before = rows[-1].seq

    def _signed(self, entry: Entry) -> Entry:
        if entry.state != "ready":
            return entry
        try:
            manifest = entry.manifest().model_copy(update={**_UNSIGNED, "id": entry.id, "tenant": entry.tenant})
            problem = self.signed.problem(manifest)
            if problem is None:  # then its identity is what was signed, and its id must be of its tenant
                identity, key, tenant = manifest.made_identity, self.key, entry.tenant
                document = identity.document_id(key=key, tenant=tenant)
                manifest = manifest.model_copy(update={"document_id": document})
                codec = manifest.made_codec
                if identity.cache_id(key=key, tenant=tenant, codec=codec, format_major=FORMAT_MAJOR) != entry.id:
                    problem = "its tenant or the codec that it was made under is not what was signed"
        except ValueError:  # of pydantic
            problem = "its row in the index cannot be read"
        if problem is not None:
            return replace(entry, state="corrupt", problem=problem, text=None)
        return replace(entry, text=manifest.model_dump_json())


class Below:
    """The shelf in a folder that is only read. signed: which of its caches are taken; None: all."""

    def __init__(self, folder: Path, rules: Rules, signed: SignedCaches | None = None) -> None:
        """Raises `InvalidRequest` for a folder that is no shelf, and `StoreUnavailable`."""
        self.folder, self.signed = folder, signed
        self._rules = Rules(keyring=rules.keyring)
        if not (folder / FILE_NAME).is_file() or not (folder / "blobs").is_dir():
            raise InvalidRequest(f"there is no shelf with its blobs in {folder}, to lie under another", param="store")
        with translated(folder):
            blobs = os.open(folder / "blobs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._blobs = _ReadFolder(folder, blobs, os.dup(blobs))
        self._temporary = TemporaryDirectory(prefix="kvshelf-below-")
        self._copies, self._number = Path(self._temporary.name), 0
        self._lock = threading.Lock()
        self._opened: list[Shelf] = []
        self._state_copied: object = None
        self.shelf()

    def shelf(self) -> Shelf:
        with self._lock, translated(self.folder):
            if self._state() != self._state_copied:
                self._opened.append(self._copied())
                for old in self._opened[:-_OLD]:
                    old.index.close()
                self._opened = self._opened[-_OLD:]
            return self._opened[-1]

    def close(self) -> None:
        for shelf in self._opened:
            shelf.index.close()
        self._blobs.close()
        self._temporary.cleanup()

    def _files(self) -> list[Path]:
        index = self.folder / FILE_NAME
        return [file for file in (index, index.with_name(f"{index.name}-wal")) if file.exists()]

    def _state(self) -> object:
        """Differs after each write. The times of files advance in steps of milliseconds, so where writers are at work,
        their count of transactions is in it (https://sqlite.org/walformat.html, section 2.1)."""
        states = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in self._files()]
        with suppress(FileNotFoundError), (self.folder / f"{FILE_NAME}-shm").open("rb") as counts:
            return states, counts.read(_WAL_INDEX_HEADER)
        return states, b""

    def _copied(self) -> Shelf:
        for _ in range(_TRIES):
            self._number += 1
            state, copy = self._state(), self._copies / str(self._number)
            copy.mkdir()
            for file in self._files():
                shutil.copyfile(file, copy / file.name)
            (copy / FILE_NAME).chmod(0o600)
            if self._state() == state:
                self._state_copied = state
                return self._opened_copy(copy)
            shutil.rmtree(copy)
        raise StoreUnavailable(f"the index in {self.folder} changes all the time; ask again, or name a copy of it")

    def _opened_copy(self, copy: Path) -> Shelf:
        database = Database(copy, busy_s=_BUSY_S)
        try:
            if known_key(copy) is None:
                raise InvalidRequest(f"{self.folder / FILE_NAME} is no index of a shelf", param="store")
            key, place = database.create(None)
        except StoreUnavailable as error:
            raise StoreUnavailable(error.message.replace(str(copy), str(self.folder))) from error
        require_blobs_place(f"the shelf at {self.folder}", place, None)
        if self.signed is None:
            return Shelf(SqliteIndex(database, key, time.time), self._blobs, rules=self._rules)
        index = _SignedIndex(database, key, time.time)
        index.signed = self.signed
        return Shelf(index, self._blobs, rules=self._rules)


class _Transforms(KeptTransforms):
    """The transforms of a shelf and of the one below."""

    below: Below

    def get(self, digest: str) -> bytes | None:
        return super().get(digest) or self.below.shelf().transforms.get(digest)


class Overlay(DiskStore):
    """See `Store`. A cache that is not on this shelf is looked up in the one below, for the same tenant, and counts for
    no quota. A change of such a cache first copies it to this shelf; its deletion is refused. Made by `open_over`."""

    below: Below

    @classmethod
    def open_over(
        cls, home: Path, below: Path, *, rules: Rules, key: bytes | None = None, signed: SignedCaches | None = None
    ) -> Self:
        """Raises as `DiskStore.open` and `Below`, and `InvalidRequest` for a shelf with another key than the one
        below."""
        if home == below:
            raise InvalidRequest(
                f"{home} cannot lie over itself; name another folder for your own shelf", param="store"
            )
        under = Below(below, rules, signed)
        key_below = under.shelf().key
        try:
            if key not in (None, key_below) or known_key(home) not in (None, key_below):
                raise InvalidRequest(
                    f"the shelf at {home} was not made over {below}: its caches have other ids; name an empty folder",
                    param="store",
                )
            shelf = cls.open(home, rules=rules, key=key_below)
        except BaseException:
            under.close()
            raise
        shelf.below = under
        shelf.transforms = _Transforms(shelf.index.jobs, shelf.bodies)
        shelf.transforms.below = under
        return shelf

    def close(self) -> None:
        super().close()
        self.below.close()

    # Reading

    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        return self._first(lambda shelf: Shelf.stat(shelf, cache_id, tenant=tenant))

    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        return self._first(lambda shelf: Shelf.open_cache(shelf, cache_id, tenant=tenant))

    def open_parts(self, cache_id: str, *, tenant: str = "default") -> PartialCache:
        return self._first(lambda shelf: Shelf.open_parts(shelf, cache_id, tenant=tenant))

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> BlobFile:
        return self._first(lambda shelf: Shelf.open_blob(shelf, cache_id, tenant=tenant))

    def source(self, cache_id: str, *, tenant: str = "default") -> Source:
        return self._kept_of(cache_id, tenant, lambda shelf: Shelf.source(shelf, cache_id, tenant=tenant))

    def original(self, cache_id: str, *, tenant: str = "default") -> tuple[Manifest, Source]:
        return self._kept_of(cache_id, tenant, lambda shelf: Shelf.original(shelf, cache_id, tenant=tenant))

    def _kept_of(self, cache_id: str, tenant: str, read: Callable[[Shelf], ResultT]) -> ResultT:
        """As `_first`, for a source. No signature covers one, so the source of a signed cache below counts as none."""
        if self.below.signed is None:
            return self._first(read)
        try:
            return read(self)
        except (CacheNotFound, CacheExpired, SourceNotKept):
            self.stat(cache_id, tenant=tenant)
            if not self._only_below(cache_id, tenant):
                raise
            raise SourceNotKept(
                f"the source of cache {cache_id} is on the shelf below, and no signature covers it; put the document "
                "here to have it",
                param="cache_id",
            ) from None

    def _first(self, read: Callable[[Shelf], ResultT]) -> ResultT:
        """The result of a read on this shelf, else on the one below. If neither has it, raises the error of this shelf
        for a cache that it knows."""
        try:
            return read(self)
        except CacheNotFound:
            return read(self.below.shelf())
        except (CacheError, SourceNotKept) as error:
            with suppress(CacheNotFound, CacheError, SourceNotKept):
                return read(self.below.shelf())
            raise error

    def list(
        self,
        *,
        tenant: str = "default",
        ended: bool = False,
        limit: int = 20,
        after: str | None = None,
        **filters: Unpack[FilterFields],
    ) -> Page:
        """As `Store.list`: the caches of this shelf, then those below that are not on it."""
        more: dict[str, Any] = {"tenant": tenant, **filters}
        if ended:
            return super().list(ended=True, limit=limit, after=after, **more)
        manifests: list[Manifest] = []
        if after is None or not (self.index.find(after, tenant) is None or self._only_below(after, tenant)):
            page = super().list(limit=limit, after=after, **more)
            if page.has_more:
                return page
            manifests, after = list(page.data), None
        below, has_more = self.below.shelf(), True
        while has_more and len(manifests) <= limit:
            page = below.list(limit=limit, after=after, **more)
            manifests += [manifest for manifest in page.data if self._only_below(manifest.id, tenant)]
            has_more, after = page.has_more, page.data[-1].id if page.data else None
        return Page(data=tuple(manifests[:limit]), has_more=has_more or len(manifests) > limit)

    def _only_below(self, cache_id: str, tenant: str) -> bool:
        entry = self.index.find(cache_id, tenant)
        if entry is not None and entry.live(self.clock()):
            return False
        entry = self.below.shelf().index.find(cache_id, tenant)
        return entry is not None and entry.live(self.clock())

    # Writing

    def put(
        self, cache: CompressedCache, *, codec: str = "none", tenant: str = "default", **fields: Unpack[KeepFields]
    ) -> Manifest:
        cache_id = self.cache_id(cache.identity, tenant=tenant, codec=str(codecs.resolve(cache.codec, codec)))
        if fields.get("source") is None and self._only_below(cache_id, tenant):
            manifest = self.stat(cache_id, tenant=tenant)
            if manifest.recoded is None:  # else the shelf below has it smaller than it is to be
                return manifest
        if (parent_id := fields.get("parent_id")) is not None:
            self._copy_up(parent_id, tenant)
        return super().put(cache, codec=codec, tenant=tenant, **fields)

    def update(self, cache_id: str, *, tenant: str = "default", **changes: Any) -> Manifest:
        self._copy_up(cache_id, tenant)
        return super().update(cache_id, tenant=tenant, **changes)

    def keep_source(self, cache_id: str, source: Source, *, tenant: str = "default", **until: Any) -> Manifest:
        self._copy_up(cache_id, tenant)
        return super().keep_source(cache_id, source, tenant=tenant, **until)

    def keep_judgement(self, cache_id: str, judged: Judgement, *, tenant: str = "default", **options: Any) -> Manifest:
        self._copy_up(cache_id, tenant)
        return super().keep_judgement(cache_id, judged, tenant=tenant, **options)

    def delete(self, cache_id: str, *, tenant: str = "default", **how: Any) -> Receipt:
        if self._only_below(cache_id, tenant):
            raise StateConflict(
                f"cache {cache_id} is on the shelf below, in {self.below.folder}, which is only read; "
                "whoever keeps that one can delete it",
                param="cache_id",
            )
        return super().delete(cache_id, tenant=tenant, **how)

    def _copy_up(self, cache_id: str, tenant: str) -> None:
        """Copy a cache to this shelf if it is only below, without its promise or pin. Raises as `put`."""
        if not self._only_below(cache_id, tenant):
            return
        below = self.below.shelf()
        manifest = below.stat(cache_id, tenant=tenant)
        plain = manifest.model_copy(update={"source": None, "pinned": False, "guaranteed_until": None})
        self.adopt(below.get(cache_id, tenant=tenant), plain, parent_id=manifest.parent_id)
        if manifest.source is not None:
            with suppress(SourceNotKept):
                source, until = below.source(cache_id, tenant=tenant), manifest.source.expires_at
                super().keep_source(cache_id, source, tenant=tenant, expires_at=until)
