"""How a cache is read from the shelf: found, opened, checked, and set aside if it is not what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, RawIOBase

from kvshelf.errors import BlobError, CacheExpired, SourceNotKept, StoreError
from kvshelf.store import checks
from kvshelf.store.blobs import Blobs
from kvshelf.store.index import Entry, Index
from kvshelf.store.manifest import source_digest
from kvshelf.store.rules import Rules
from kvshelf.store.writer import SOURCE_PREFIX, open_plain, plain


class Reader:
    """Reads caches of one home. Used by `Shelf`; any number of threads at once."""

    def __init__(self, index: Index, blobs: Blobs, rules: Rules, now: Callable[[], float]) -> None:
        self._index = index
        self._blobs = blobs
        self._rules = rules
        self._now = now

    def ready(self, cache_id: str, tenant: str) -> Entry:
        """The entry of a cache that may be read, or the error that says why it may not."""
        entry = self.kept(cache_id, tenant)
        if entry.state == "corrupt":
            raise checks.corrupt(cache_id, entry.problem or "unknown", "quarantined")
        return entry

    def kept(self, cache_id: str, tenant: str) -> Entry:
        """As `ready`, and the entry of one that is corrupt."""
        checks.require_id(cache_id)
        entry = self._index.find(cache_id, tenant)
        if entry is None or entry.state == "deleted":
            raise checks.not_found(cache_id)
        if entry.state == "evicted":
            raise CacheExpired(
                f"cache {cache_id} was evicted to make room; compress its document again",
                param="cache_id",
                reason="evicted",
            )
        if entry.expired(self._now()):
            raise CacheExpired(
                f"cache {cache_id} has expired; compress its document again", param="cache_id", reason="expired"
            )
        return entry

    @contextmanager
    def opening(self, cache_id: str, tenant: str, *, once: bool = False) -> Iterator[tuple[Entry, RawIOBase, int]]:
        """The plain blob of a cache, for the caller of the block. It is closed when the block raises. once: see
        `Blobs.open`."""
        entry, file = self._open(cache_id, tenant, once)
        try:
            with self.quarantining(entry):
                yield entry, *plain(file, self._rules, entry.nbytes, tenant, cache_id)
        except BaseException:
            file.close()
            raise

    def _open(self, cache_id: str, tenant: str, once: bool) -> tuple[Entry, RawIOBase]:
        """Open a cache's blob. If the cache is deleted or replaced in between, the index decides."""
        entry = self.ready(cache_id, tenant)
        while True:
            assert entry.name is not None, "a ready cache has a blob"
            file = self._blobs.open(entry.name, entry.nbytes, once=once)
            if file is not None:
                return entry, file
            again = self.ready(cache_id, tenant)
            if again.name == entry.name:
                with self.quarantining(entry):
                    raise BlobError("its file is missing or not a regular file", reason="missing")
            entry = again

    def source(self, entry: Entry) -> str:
        """The text of an entry, verified. Raises `SourceNotKept` where none was kept, `CacheCorrupt`."""
        if entry.source is None:
            raise SourceNotKept(
                f"the text of cache {entry.id} was not kept; create it with keep_source to have it", param="cache_id"
            )
        subject = SOURCE_PREFIX + entry.id
        with self.quarantining(entry, (entry.source, entry.source_bytes)):
            opened = open_plain(self._blobs, self._rules, entry.source, entry.source_bytes, entry.tenant, subject)
            with opened as (file, nbytes), BufferedReader(file) as whole:
                text = whole.read(nbytes)
            if source_digest(text) != entry.manifest().source_digest:
                raise BlobError("its source is not what was written: its digest differs", reason="digest_mismatch")
        return text.decode()

    @contextmanager
    def quarantining(self, entry: Entry, read: tuple[str, int] | None = None) -> Iterator[None]:
        """Inside the block, a `BlobError` sets the cache aside: who asks again hears the same without reading it.

        read: what is read in the block, its name and size; the blob if nothing is said. The source of a cache whose
        blob is corrupt stays where it is, for the cache can be made again from it.
        """
        try:
            yield
        except BlobError as error:
            # Where the shelf cannot be written to either, the verdict stands all the same and is reached again.
            with suppress(StoreError):
                if self._index.mark_corrupt(entry, error.message):
                    self._blobs.set_aside(*(read or entry.names()[0]))
            raise checks.corrupt(entry.id, error.message, error.reason) from error


def require_root(entry: Entry, root: bytes) -> None:
    """The blob is sound; it must also be the one that was stored."""
    if root.hex() != entry.manifest().blob_digest:
        raise BlobError("its file holds another blob than was stored", reason="wrong_blob")
