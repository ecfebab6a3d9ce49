"""Bytes that items of the job table hold: contents of files, bodies of requests. They lie in `Blobs` beside those of
caches, sealed alike, and count for the tenant's quota."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import RawIOBase

from kvshelf.errors import BlobError, StoreError
from kvshelf.store import housekeeping
from kvshelf.store.blobs import Blobs
from kvshelf.store.index import Index
from kvshelf.store.rules import Rules
from kvshelf.store.writer import Content, Writer, plain


class Bodies:
    """The bodies of one home. Raises as `Blobs` does."""

    def __init__(self, index: Index, blobs: Blobs, writer: Writer, rules: Rules) -> None:
        self._index = index
        self._blobs = blobs
        self._writer = writer
        self._rules = rules

    def write(
        self, tenant: str, content: Content, store: Callable[[str, int], bool], *, beyond_quota: bool = False
    ) -> None:
        """Make a body durable, verify it, and only then have `store` put it into the job table.

        store: is told its name and size in `Blobs`, and returns whether an item holds it now (`Item.held`); else it is
        removed. beyond_quota: accept it even if the tenant's quota has no room for it. Raises `QuotaExceeded`,
        `StorageFull`.
        """
        quota = self._rules.quota
        allowed = replace(quota, max_bytes=None) if beyond_quota else quota
        self._writer.put_file(f"kvs_{secrets.token_hex(20)}", tenant, content, store, quota=allowed)

    def open(self, name: str, stored_bytes: int, tenant: str, subject: str) -> RawIOBase:
        """The plain bytes, seekable. Raises `BlobError` if they are gone or damaged; see `sealing.unseal`."""
        file = self._blobs.open(name, stored_bytes)
        if file is None:
            raise BlobError("it is gone", reason="missing")
        try:
            return plain(file, self._rules, stored_bytes, tenant, subject)[0]
        except BaseException:
            file.close()
            raise

    def remove(self, name: str, stored_bytes: int) -> None:
        """Remove a body that no item holds any more. If the home does not work, a sweep removes it."""
        with suppress(StoreError):
            self._blobs.remove(name, stored_bytes)
            self._index.abandon(name)

    def sweep(self) -> None:
        """Remove the bodies that no item holds any more."""
        housekeeping.reclaim(self._index, self._blobs)
