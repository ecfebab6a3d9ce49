"""Reads a cache: finds, opens and checks it, and quarantines a corrupt one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvshelf.errors import BlobError, CacheCorrupt, CacheExpired, StoreError
from kvshelf.store import checks
from kvshelf.store.blobs import Blobs, StoredFile
from kvshelf.store.index import Entry, Index
from kvshelf.store.jobs.sources import Sources
from kvshelf.store.rules import Rules
from kvshelf.store.writer import joined, open_all


class Reader:
    """Reads caches of one home. Used by `Shelf`; any number of threads at once."""

    def __init__(self, index: Index, blobs: Blobs, rules: Rules, sources: Sources, now: Callable[[], float]) -> None:
        self._index = index
        self._sources = sources
        self._blobs = blobs
        self._rules = rules
        self.clock = now

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
        if entry is None and self._sources.find(cache_id, tenant) is not None:  # its tombstone was forgotten
            raise _expired(cache_id)
        if entry is None or entry.state == "deleted":
            raise checks.not_found(cache_id)
        if entry.state == "evicted":
            raise CacheExpired(
                f"cache {cache_id} was evicted to make room; compress its document again",
                param="cache_id",
                reason="evicted",
            )
        if entry.expired(self.clock()):
            raise _expired(cache_id)
        if entry.text is None:
            raise _quarantined(entry)
        return entry

    @contextmanager
    def opening(self, cache_id: str, tenant: str, *, once: bool = False) -> Iterator[tuple[Entry, StoredFile, int]]:
        """The plain blob of a cache and its size; the caller closes it. Closed here if the block raises. once: see
        `Blobs.open`."""
        entry, files = self._open(cache_id, tenant, once)
        with self.quarantining(entry):
            file, nbytes = joined(files, self._rules, entry.needed(), tenant, cache_id)
            try:
                yield entry, file, nbytes
            except BaseException:
                file.close()
                raise

    def _open(self, cache_id: str, tenant: str, once: bool) -> tuple[Entry, Sequence[StoredFile]]:
        """Open a cache's blob and its bases. If the cache is deleted or replaced meanwhile, the index decides."""
        entry = self.ready(cache_id, tenant)
        while True:
            files = open_all(self._blobs, entry.needed(), once=once)
            if files is not None:
                return entry, files
            again = self.ready(cache_id, tenant)
            if again.name == entry.name:
                with self.quarantining(entry):
                    which = "its file, or one of its bases," if entry.bases else "its file"
                    raise BlobError(f"{which} is missing or not a regular file", reason="missing")
            entry = again

    @contextmanager
    def quarantining(self, entry: Entry) -> Iterator[None]:
        """A `BlobError` in the block quarantines the cache: later reads fail at once, without reading its bytes. A blob
        that other caches have as a base stays in place: what they use of it may be sound."""
        try:
            yield
        except BlobError as error:
            # If the shelf cannot be written either, the next read finds the damage again.
            with suppress(StoreError):
                ((name, nbytes),) = entry.names()
                if self._index.mark_corrupt(entry, error.message) and not self._index.is_base(name):
                    self._blobs.set_aside(name, nbytes)
            raise checks.corrupt(entry.id, error.message, error.reason) from error


def _expired(cache_id: str) -> CacheExpired:
    return CacheExpired(
        f"cache {cache_id} has expired; compress its document again", param="cache_id", reason="expired"
    )


def _quarantined(entry: Entry) -> CacheCorrupt:
    return checks.corrupt(entry.id, entry.problem or "unknown", "quarantined")
