"""Reads a cache: finds, opens and checks it, and quarantines a corrupt one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader

from kvshelf.errors import BlobError, CacheCorrupt, CacheExpired, SourceNotKept, StoreError
from kvshelf.store import checks
from kvshelf.store.blobs import Blobs, Name, StoredFile
from kvshelf.store.index import Entry, Index
from kvshelf.store.manifest import source_digest
from kvshelf.store.rules import Rules
from kvshelf.store.writer import SOURCE_PREFIX, joined, open_all, opened


class Reader:
    """Reads caches of one home. Used by `Shelf`; any number of threads at once."""

    def __init__(self, index: Index, blobs: Blobs, rules: Rules, now: Callable[[], float]) -> None:
        self._index = index
        self._blobs = blobs
        self._rules = rules
        self._now = now

    def ready(self, cache_id: str, tenant: str) -> Entry:
        """The entry of a readable cache. Raises the error that says why it is not readable."""
        entry = self.kept(cache_id, tenant)
        if entry.state == "corrupt":
            raise _quarantined(entry)
        return entry

    def kept(self, cache_id: str, tenant: str) -> Entry:
        """As `ready`, but returns the entry of a corrupt cache as well, if it still has its manifest."""
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
        if entry.text is None:
            raise _quarantined(entry)
        return entry

    @contextmanager
    def opening(self, cache_id: str, tenant: str, *, once: bool = False) -> Iterator[tuple[Entry, StoredFile, int]]:
        """The plain blob of a cache and its size; the caller closes it. Closed here if the block raises.

        once: see `Blobs.open`.
        """
        entry, names, files = self._open(cache_id, tenant, once)
        with self.quarantining(entry):
            file, nbytes = joined(files, self._rules, names, tenant, cache_id)
            try:
                yield entry, file, nbytes
            except BaseException:
                file.close()
                raise

    def _open(self, cache_id: str, tenant: str, once: bool) -> tuple[Entry, Sequence[Name], Sequence[StoredFile]]:
        """Open a cache's blob and its bases. If the cache is deleted or replaced meanwhile, the index decides."""
        entry = self.ready(cache_id, tenant)
        while True:
            assert entry.name is not None, "a ready cache has a blob"
            names = [(entry.name, entry.nbytes), *entry.bases]
            files = open_all(self._blobs, names, once=once)
            if files is not None:
                return entry, names, files
            again = self.ready(cache_id, tenant)
            if again.name == entry.name:
                with self.quarantining(entry):
                    which = "its file, or one of its bases," if entry.bases else "its file"
                    raise BlobError(f"{which} is missing or not a regular file", reason="missing")
            entry = again

    def source(self, entry: Entry) -> str:
        """The text of an entry, verified. Raises `SourceNotKept` if none was kept, `CacheCorrupt`."""
        if entry.source is None:
            raise SourceNotKept(
                f"the text of cache {entry.id} was not kept; create it with keep_source to have it", param="cache_id"
            )
        subject = SOURCE_PREFIX + entry.id
        with self.quarantining(entry, (entry.source, entry.source_bytes)):
            file, nbytes = opened(self._blobs, self._rules, entry.source, entry.source_bytes, entry.tenant, subject)
            with BufferedReader(file) as whole:
                text = whole.read(nbytes)
            if source_digest(text) != entry.manifest().source_digest:
                raise BlobError("its source is not what was written: its digest differs", reason="digest_mismatch")
        return text.decode()

    @contextmanager
    def quarantining(self, entry: Entry, read: tuple[str, int] | None = None) -> Iterator[None]:
        """A `BlobError` in the block quarantines the cache: later reads fail at once, without reading its bytes.

        read: name and size of the bytes that the block reads; the blob by default. The source of a cache with a corrupt
        blob stays in place, so that the cache can be recomputed from it, and so does a blob that other caches have as a
        base: what they use of it may be sound.
        """
        try:
            yield
        except BlobError as error:
            # If the shelf cannot be written either, the next read finds the damage again.
            with suppress(StoreError):
                name, nbytes = read or entry.names()[0]
                if self._index.mark_corrupt(entry, error.message) and not self._index.is_base(name):
                    self._blobs.set_aside(name, nbytes)
            raise checks.corrupt(entry.id, error.message, error.reason) from error


def _quarantined(entry: Entry) -> CacheCorrupt:
    return checks.corrupt(entry.id, entry.problem or "unknown", "quarantined")


def require_root(entry: Entry, root: bytes) -> None:
    """A sound blob must also be the one that was stored."""
    if root.hex() != entry.manifest().blob_digest:
        raise BlobError("its file holds another blob than was stored", reason="wrong_blob")
