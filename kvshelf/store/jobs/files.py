"""Files that callers upload and batches leave: bytes with a name, streamed in and out, never held in memory.

The bytes lie in `Blobs` beside those of caches, sealed alike, and count for the tenant's quota. They are stored as a
cache is: registered, written, read back, and only then made visible, by one step of the job table.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable
from io import BufferedReader, RawIOBase
from typing import BinaryIO, Final

from blake3 import blake3

from kvshelf.errors import BlobError, FileNotFound
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.jobs.table import Item, JobTable, read, require_after
from kvshelf.store.manifest import Record
from kvshelf.store.sealing import PARTS_LIMIT
from kvshelf.store.types import BlobFile
from kvshelf.store.writer import Content

FILE_PREFIX: Final = "file:"
"""Tells a sealed file from a sealed cache."""

_PART: Final = 1 << 20
"""Bytes. What a reader of a sealed file holds in memory, at least."""

_BATCH: Final = 100


class FileRecord(Record):
    """One file. Times are Unix seconds, sizes bytes; `digest` is BLAKE3 in hex.

    name, stored_bytes: of the bytes in `Blobs`; None for an empty file.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    nbytes: int
    digest: str
    name: str | None
    stored_bytes: int
    created_at: float
    expires_at: float | None


class Files:
    """The files of one home. Two tenants see nothing of each other. Raises as `JobTable` and `Blobs` do."""

    def __init__(self, table: JobTable, bodies: Bodies, now: Callable[[], float]) -> None:
        self._table = table
        self._bodies = bodies
        self._now = now

    def create(
        self,
        file: BinaryIO,
        *,
        tenant: str,
        filename: str,
        purpose: str,
        ttl_s: float | None = None,
        beyond_quota: bool = False,
    ) -> FileRecord:
        """Keep the content of a file of the operating system. Raises `QuotaExceeded`, `StorageFull`.

        beyond_quota: accept it even if the tenant's quota has no room for it; it counts all the same.
        """
        file_id = f"file_{secrets.token_hex(20)}"
        nbytes = file.seek(0, 2)
        content, digest = _content(file_id, file, nbytes)
        now = self._now()
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            nbytes=nbytes,
            digest=digest,
            name=None,
            stored_bytes=0,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )
        if nbytes == 0:  # the sealed format has no form for nothing
            self._table.add(_item(record))
            return record

        def keep(name: str, stored_bytes: int) -> bool:
            nonlocal record
            record = record.model_copy(update={"name": name, "stored_bytes": stored_bytes})
            return self._table.add(_item(record)) is not None

        self._bodies.write(tenant, content, keep, beyond_quota=beyond_quota)
        return record

    def get(self, file_id: str, *, tenant: str) -> FileRecord:
        """Raises `FileNotFound` for an unknown id, an expired one, and another tenant's, with the same message."""
        item = self._table.find(file_id, tenant)
        if item is None or item.kind != "file" or (item.due is not None and item.due <= self._now()):
            raise FileNotFound(f"there is no file {file_id[:80]!r}", param="file_id")
        return _record(item)

    def list(
        self, *, tenant: str, limit: int, after: str | None = None, purpose: str | None = None
    ) -> tuple[list[FileRecord], bool]:
        """A tenant's files, newest first, and whether there are more. Raises `InvalidRequest` where `after` is none."""
        require_after(self._table, tenant, after)
        found: list[FileRecord] = []
        while True:
            items = self._table.listing("file", tenant, after, _BATCH)
            now = self._now()
            live = (_record(item) for item in items if item.due is None or item.due > now)
            found += (record for record in live if purpose in (None, record.purpose))
            if len(found) > limit or len(items) < _BATCH:
                return found[:limit], len(found) > limit
            after = items[-1].id

    def open(self, file_id: str, *, tenant: str) -> BlobFile:
        """The content, seekable. It is not verified: a reader of all of it can compare its digest (`digest_of`).

        A reader may finish when the file is deleted meanwhile. Raises `FileNotFound`.
        """
        record = self.get(file_id, tenant=tenant)
        return BlobFile(BufferedReader(self._opened(record), _PART), record.nbytes, record.digest)

    def _opened(self, record: FileRecord) -> RawIOBase:
        if record.name is None:
            return _Empty()
        try:
            return self._bodies.open(record.name, record.stored_bytes, record.tenant, FILE_PREFIX + record.id)
        except BlobError as error:
            raise FileNotFound(
                f"the content of file {record.id} is lost or damaged ({error}); upload it again", param="file_id"
            ) from error

    def delete(self, file_id: str, *, tenant: str) -> FileRecord:
        """Raises `FileNotFound`."""
        record = self.get(file_id, tenant=tenant)
        # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
        if not self._table.remove(record.id):
            return self.get(file_id, tenant=tenant)  # another caller was faster
        if record.name is not None:
            self._bodies.remove(record.name, record.stored_bytes)
        return record

    def sweep(self, now: float) -> int:
        """Remove what has expired; returns how many."""
        count = self._table.forget("file", now)
        self._bodies.sweep()
        return count


class _Empty(RawIOBase):
    """A file without a byte."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:  # noqa: ARG002 - the only place is 0
        return 0

    def readinto(self, buffer: object, /) -> int:  # noqa: ARG002
        return 0


def _content(file_id: str, file: BinaryIO, nbytes: int) -> tuple[Content, str]:
    """A file as parts that are sealed apart, of a megabyte or as many as the format has; and its digest."""
    view = memoryview(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) if nbytes else b"")
    size = max(_PART, -(-nbytes // PARTS_LIMIT))
    parts = [[view[start : start + size]] for start in range(0, nbytes, size)]
    hasher = blake3()
    for (part,) in parts:
        hasher.update(part)
    written = hasher.hexdigest()

    def same(stored: RawIOBase, found: int) -> bool:
        return found == nbytes and digest_of(stored) == written

    return Content(FILE_PREFIX + file_id, parts, nbytes, same), written


def digest_of(file: RawIOBase | BinaryIO) -> str:
    """The digest of what is left of a file, as `FileRecord` has it."""
    hasher = blake3()
    while piece := file.read(_PART):
        hasher.update(piece)
    return hasher.hexdigest()


def _item(record: FileRecord) -> Item:
    return Item("file", record.id, record.tenant, record.model_dump_json(), due=record.expires_at, held=record.name)


def _record(item: Item) -> FileRecord:
    return read(item, FileRecord)
