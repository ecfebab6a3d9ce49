"""Bytes that items of the job table hold: contents of files, bodies of requests. Like the bytes of caches, they lie in
`Blobs` and are sealed. They are registered, written, read back, and only then made visible, by one step of the job
table.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import RawIOBase
from typing import BinaryIO, Final

from blake3 import blake3

from kvshelf.errors import BlobError, StorageFull, StoreError
from kvshelf.store.blobs import Blobs
from kvshelf.store.index import Index
from kvshelf.store.manifest import StoredBody
from kvshelf.store.rules import Rules
from kvshelf.store.sealing import PARTS_LIMIT
from kvshelf.store.table import Item
from kvshelf.store.writer import Content, Writer, joined, open_all

PART: Final = 1 << 20
"""Least bytes of a sealed part, except the last one. A reader of a sealed body holds one part in memory."""


class Bodies:
    """The bodies of one home. Raises as `Blobs` does."""

    def __init__(self, index: Index, blobs: Blobs, writer: Writer, rules: Rules) -> None:
        self._index = index
        self._blobs = blobs
        self.writer = writer
        self._rules = rules

    def write(
        self,
        tenant: str,
        subject: str,
        data: memoryview,
        store: Callable[[StoredBody | None], Item | None],
        *,
        beyond_quota: bool = False,
    ) -> Item | None:
        """Make bytes durable, verify them, and only then have `store` put them into the job table. subject: what the
        bytes belong to, see `sealing`. store: gets the body (None for no bytes), and returns the item that now holds it
        (`Item.held`); if it returns None, the bytes are removed. The bytes count for the tenant. beyond_quota: even if
        its quota has no room for them. Raises `QuotaExceeded`, `StorageFull`."""
        if not data:  # the sealed format cannot hold zero bytes
            return store(None)
        quota = replace(self._rules.quota, max_bytes=None) if beyond_quota else self._rules.quota
        digest = blake3(data).hexdigest()
        size = max(PART, -(-len(data) // PARTS_LIMIT))
        parts = [[data[start : start + size]] for start in range(0, len(data), size)]
        content = Content(subject, parts, len(data), lambda file, _: digest_of(file) == digest)
        key = f"kvs_{secrets.token_hex(20)}"
        writing = self.writer.writing(key, tenant, content, of_cache=False, quota=quota)
        with writing as written:
            # Forever: an item of the job table ends with a sweep, whatever the server's clock says.
            self.writer.keep_until(written, None)
        try:
            stored = store(StoredBody(name=written.name, stored_bytes=written.nbytes, digest=digest))
        except StorageFull:
            self.writer.discard(written)
            raise
        if stored is None:
            self.writer.discard(written)
        return stored

    def open(self, body: StoredBody, tenant: str, subject: str) -> RawIOBase:
        """The plain bytes, seekable. Raises `BlobError` if they are gone or damaged; see `sealing.unseal`."""
        names = [(body.name, body.stored_bytes)]
        return joined(open_all(self._blobs, names) or (), self._rules, names, tenant, subject)[0]

    def read(self, body: StoredBody, tenant: str, subject: str) -> bytes:
        """All plain bytes, verified. Raises as `open` does."""
        with self.open(body, tenant, subject) as file:
            data = file.read()
        if blake3(data).hexdigest() != body.digest:
            raise BlobError("other bytes came back", reason="digest_mismatch")
        return data

    def end_owned(self, owner: str, tenant: str) -> int:
        """Remove the items of an owner that was deleted, with their bytes; returns how many bytes. After a crash, a
        sweep does it: they are due."""
        return sum(self.end(item) for item in self._index.jobs.owned(owner, tenant))

    def end(self, item: Item) -> int:
        """Remove an item with its bytes; returns how many bytes."""
        # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
        if not self._index.jobs.remove(item.id) or (body := body_of(item)) is None:
            return 0
        self.remove(body)
        return body.stored_bytes

    def remove(self, body: StoredBody) -> None:
        """Remove a body that no item holds any more. If the home does not work, a sweep removes it."""
        with suppress(StoreError):
            if self._blobs.remove(body.name, body.stored_bytes):
                self._index.abandon(body.name)


def body_of(item: Item) -> StoredBody | None:
    return None if item.held is None else StoredBody.model_validate(json.loads(item.text)["body"])


def digest_of(file: RawIOBase | BinaryIO) -> str:
    """The digest of the rest of a file, in the form of `StoredBody.digest`."""
    hasher = blake3()
    while piece := file.read(PART):
        hasher.update(piece)
    return hasher.hexdigest()
