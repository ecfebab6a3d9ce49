"""The transforms without which no cache under codec klt can be read: a file for each digest, kept as long as the home.

They belong to no tenant and count for none.
"""

from __future__ import annotations

from typing import Final

from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.manifest import StoredBody, StoredRecord
from kvshelf.store.table import HOME, Item, JobTable, read

TRANSFORMS_PREFIX: Final = "transforms:"
"""Tells sealed transforms from a sealed cache or file."""


class _Kept(StoredRecord):
    digest: str
    body: StoredBody


class KeptTransforms:
    """The transforms of one home, by digest. Raises as `JobTable` and `Blobs` do."""

    def __init__(self, table: JobTable, bodies: Bodies) -> None:
        self._table = table
        self._bodies = bodies

    def keep(self, digest: str, data: bytes) -> None:
        """Keep a file, unless it is there. Durable when it returns. Raises `StorageFull`."""
        if self._find(digest) is not None:
            return

        def store(body: StoredBody | None) -> Item | None:
            assert body is not None, "a file of transforms is not empty"
            text = _Kept(digest=digest, body=body).model_dump_json()
            return self._table.add(Item("transforms", _id(digest), HOME, text, held=body.name))

        self._bodies.write(HOME, TRANSFORMS_PREFIX + digest, memoryview(data), store, beyond_quota=True)

    def get(self, digest: str) -> bytes | None:
        """A file; None if the home has none of this digest. Raises `CacheCorrupt` for a damaged one."""
        record = self._find(digest)
        if record is None:
            return None
        try:
            return self._bodies.read(record.body, HOME, TRANSFORMS_PREFIX + digest)
        except BlobError as error:
            raise CacheCorrupt(
                f"the transforms {digest[:16]} on the shelf are damaged ({error}); put their file into the calibration "
                "folder again, or make them anew with kvshelf calibrate",
                transforms=digest,
            ) from error

    def _find(self, digest: str) -> _Kept | None:
        item = self._table.find(_id(digest), HOME)
        return None if item is None else read(item, _Kept)


def _id(digest: str) -> str:
    return f"klt_{digest}"
