"""Files that callers upload and batches leave: bytes with a name, streamed in and out, never held in memory."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable, Container
from dataclasses import replace
from io import BufferedReader, BytesIO
from tempfile import TemporaryFile
from typing import BinaryIO, Final

from blake3 import blake3

from kvshelf.errors import BlobError, FileNotFound
from kvshelf.store.jobs.bodies import PART, Bodies
from kvshelf.store.manifest import StoredBody, StoredRecord
from kvshelf.store.table import Item, JobTable, read, require_after
from kvshelf.store.types import BlobFile

FILE_PREFIX: Final = "file:"
"""Tells a sealed file from a sealed cache."""

_BATCH: Final = 100


class FileRecord(StoredRecord):
    """One file. Times are Unix seconds. body: None for an empty file."""

    id: str
    tenant: str
    filename: str
    purpose: str
    nbytes: int
    body: StoredBody | None = None
    created_at: float
    expires_at: float | None

    @property
    def digest(self) -> str:
        """BLAKE3 in hex."""
        return blake3().hexdigest() if self.body is None else self.body.digest


class FileTable:
    """The files of one home. Two tenants see nothing of each other. Raises as `JobTable` and `Blobs` do."""

    def __init__(self, table: JobTable, bodies: Bodies, now: Callable[[], float]) -> None:
        self.table = table
        self.bodies = bodies
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
        batch_id: str | None = None,
    ) -> FileRecord:
        """Keep the content of a file of the operating system. Raises `QuotaExceeded`, `StorageFull`. batch_id: of the
        batch whose result it is. When it goes, so does the journal of that batch, if it has ended. beyond_quota: accept
        it even if the tenant's quota has no room for it; it counts all the same."""
        now = self._now()
        record = FileRecord(
            id=f"file_{secrets.token_hex(20)}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            nbytes=file.seek(0, 2),
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )

        def keep(body: StoredBody | None) -> Item | None:
            return self.table.add(replace(_item(record.model_copy(update={"body": body})), owner=batch_id))

        content = mmap.mmap(file.fileno(), record.nbytes, access=mmap.ACCESS_READ) if record.nbytes else b""
        subject = FILE_PREFIX + record.id
        stored = self.bodies.write(tenant, subject, memoryview(content), keep, beyond_quota=beyond_quota)
        assert stored is not None, "no other file has this id"
        return read(stored, FileRecord)

    def get(self, file_id: str, *, tenant: str) -> FileRecord:
        """Raises `FileNotFound` for an unknown id, an expired one, and another tenant's, with the same message."""
        item = self.table.find(file_id, tenant)
        if item is None or item.kind != "file" or (item.due is not None and item.due <= self._now()):
            raise FileNotFound(f"there is no file {file_id[:80]!r}", param="file_id")
        return read(item, FileRecord)

    def list(
        self, *, tenant: str, limit: int, after: str | None = None, purpose: str | None = None
    ) -> tuple[list[FileRecord], bool]:
        """A tenant's files, newest first, and whether more follow. Raises `InvalidRequest` for an unknown `after`."""
        require_after(self.table, tenant, after)
        records: list[FileRecord] = []
        while True:
            items = self.table.listing("file", tenant, after, _BATCH)
            now = self._now()
            live = (read(item, FileRecord) for item in items if item.due is None or item.due > now)
            records += (record for record in live if purpose in (None, record.purpose))
            if len(records) > limit or len(items) < _BATCH:
                return records[:limit], len(records) > limit
            after = items[-1].id

    def open(self, file_id: str, *, tenant: str) -> BlobFile:
        """The content, seekable and not verified. A caller that reads all of it can compare the digest (`digest_of`). A
        reader can finish even if the file is deleted meanwhile. Raises `FileNotFound`."""
        record = self.get(file_id, tenant=tenant)
        if record.body is None:
            return BlobFile(BytesIO(), 0, record.digest)
        try:
            opened = self.bodies.open(record.body, tenant, FILE_PREFIX + file_id)
        except BlobError as error:
            raise FileNotFound(
                f"the content of file {file_id} is lost or damaged ({error}); upload it again", param="file_id"
            ) from error
        return BlobFile(BufferedReader(opened, PART), record.nbytes, record.digest)

    def erase_lines(self, file_id: str, numbers: Container[int], *, tenant: str) -> None:
        """Empty lines of a file, numbered from 0; the others keep their numbers. Raises `FileNotFound`."""
        record = self.get(file_id, tenant=tenant)
        item = self.table.find(file_id, tenant)
        if item is None or record.body is None:
            return
        with TemporaryFile() as after:
            with self.open(file_id, tenant=tenant) as before:  # closed before its bytes are removed: a reader delays it
                after.writelines(b"\n" if number in numbers else line for number, line in enumerate(before.file))
            after.flush()
            nbytes = after.tell()
            content = memoryview(mmap.mmap(after.fileno(), nbytes, access=mmap.ACCESS_READ))

            def keep(body: StoredBody | None) -> Item | None:
                changed = _item(record.model_copy(update={"body": body, "nbytes": nbytes}))
                return self.table.change(replace(changed, version=item.version, owner=item.owner))

            if self.bodies.write(tenant, FILE_PREFIX + file_id, content, keep, beyond_quota=True) is not None:
                self.bodies.remove(record.body)

    def delete(self, file_id: str, *, tenant: str) -> FileRecord:
        """Raises `FileNotFound`."""
        record = self.get(file_id, tenant=tenant)
        # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
        if not self.table.remove(record.id):
            return self.get(file_id, tenant=tenant)  # another caller was faster
        if record.body is not None:
            self.bodies.remove(record.body)
        return record


def _item(record: FileRecord) -> Item:
    body_name = record.body.name if record.body else None
    return Item("file", record.id, record.tenant, record.model_dump_json(), due=record.expires_at, held=body_name)
