"""Writes a cache: write, verify, publish.

The order is the guarantee: register the write (a lease), make the bytes durable, read them back, set their expiry on
the server, publish the cache in one step of the index, remove the bytes that it replaces. So a crash at any moment
leaves the whole cache or none, and at worst bytes that a sweep removes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import RawIOBase
from typing import Final

from kvshelf.artifact import blob
from kvshelf.errors import BlobError, CacheNotFound, QuotaExceeded, StorageFull, StoreError, StoreUnavailable
from kvshelf.store import eviction, housekeeping, sealing
from kvshelf.store.blobs import Blobs, Name, Step, StoredFile, cache_of, new_name
from kvshelf.store.index import BasesGone, Entry, Index, Quota, Writing, lapsed
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.splice import SplicedFile, read_splice
from kvshelf.store.splice.sharing import shared_with, spliced

log = logging.getLogger("kvshelf.store")

Verify = Callable[[RawIOBase, int], bool]
"""Whether a file of so many plain bytes holds the content that was written."""

_SOURCE_ROUNDS: Final = 16

_ROUNDS: Final = 100
"""How often one write may evict before it is refused: other writers may take the space that it freed."""


@dataclass(frozen=True)
class Content:
    """Bytes to store, and their check when they are read back. Each of `parts` is sealed separately. bases: stored
    files with which the bytes are read together, as one blob (`kvshelf.store.splice`)."""

    subject: str
    parts: Sequence[Sequence[memoryview]]
    nbytes: int
    verify: Verify
    bases: tuple[Name, ...] = ()


def blob_content(cache_id: str, packed: blob.PackedBlob) -> Content:
    def same(file: RawIOBase, nbytes: int) -> bool:
        return blob.verify_file(file, nbytes).root == packed.root  # type: ignore[arg-type]

    return Content(cache_id, packed.parts, packed.nbytes, same)


def spliced_content(cache_id: str, packed: blob.PackedBlob, parent: Entry, file: StoredFile, nbytes: int) -> Content:
    """The bytes of a blob that a stored one lacks; the whole blob where they have little in common. parent: the entry
    of the other blob, which is open in `file`, of `nbytes` bytes."""
    whole = blob_content(cache_id, packed)
    assert parent.name is not None, "a blob that is open has a name"
    shared = shared_with(packed, blob.open_file(file, nbytes), file)  # type: ignore[arg-type]
    blob_parts = spliced(packed, shared, (parent.name, parent.nbytes), file, parent.bases)
    if blob_parts is None:
        return whole
    return Content(cache_id, blob_parts.parts, blob_parts.nbytes, whole.verify, blob_parts.splice.bases)


class Writer:
    """Writes contents into one home. Used by `Shelf`; any number of threads at once."""

    def __init__(self, index: Index, blobs: Blobs, rules: Rules, now: Callable[[], float], on_step: Step) -> None:
        self._index = index
        self._blobs = blobs
        self._rules = rules
        self._now = now
        self._on_step = on_step

    def put(
        self, manifest: Manifest, content: Content, *, started: float | None = None, parent_id: str | None = None
    ) -> Manifest:
        """Store a cache. started: of `time.perf_counter`; the manifest's `store_s` becomes the time from then until
        publishing begins. parent_id: a cache that must not have been deleted, and whose deletion takes this one into
        account. Returns the manifest that is visible in the end: another writer's, if that writer published first.
        Raises `CacheNotFound` for a parent that was deleted, and `BasesGone`."""
        with self.writing(manifest.id, manifest.tenant, content, parent_id=parent_id) as writing:
            self.keep_until(writing, manifest.expires_at)
        if started is not None:
            timings = manifest.timings.model_copy(update={"store_s": time.perf_counter() - started})
            manifest = manifest.model_copy(update={"timings": timings})
        try:
            return self._publish(writing, manifest)
        except (StorageFull, QuotaExceeded, CacheNotFound, BasesGone):
            self.discard(writing)
            raise
        # Any other error leaves the bytes alone: the index may have published them although its answer was lost. If it
        # has not, the lease runs out and a sweep removes them.

    def swap(
        self,
        entry: Entry,
        content: Content,
        *,
        evict: bool = True,
        manifest: Manifest | None = None,
        still: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store the blob of an entry anew. evict: whether other caches may be evicted for it. manifest: another one of
        the entry. still: asked when all is written, whether it is still wanted. False: it is not, or the entry has
        changed since. Raises `BasesGone`."""
        with self.writing(entry.id, entry.tenant, content, evict=evict) as writing:
            self.keep_until(writing, entry.expires_at)
        try:
            swapped = still() and self._index.swap(entry, manifest or entry.manifest(), writing)
        except BasesGone:
            self.discard(writing)
            raise
        if not swapped:
            self.discard(writing)
            return False
        self._on_step("swapped")
        self.discard(entry.retired())
        return True

    def would_seal_alike(self, *names: Name) -> bool:
        """Whether all are sealed with the current sealing key; without a key, whether they are plain."""
        key_id = None if self._rules.keyring is None else self._rules.keyring.sealing_id
        headers = (self._blobs.beginning(name, nbytes, sealing.HEADER_BYTES) for name, nbytes in names)
        return all(
            header is None  # missing bytes cannot be sealed again
            or (sealing.key_id_of(header) if sealing.is_sealed(header) else None) == key_id
            for header in headers
        )

    @contextmanager
    def writing(
        self,
        cache_id: str,
        tenant: str,
        content: Content,
        *,
        of_cache: bool = True,
        quota: Quota | None = None,
        parent_id: str | None = None,
        evict: bool = True,
    ) -> Iterator[Writing]:
        """Write and verify a content. An error here or in the block leaves nothing behind. cache_id: of the cache, or
        another key of its form. of_cache: see `Writing`. quota: used in place of that of the rules. parent_id, evict:
        see `put` and `swap`."""
        buffers: Iterable[memoryview] = (buffer for part in content.parts for buffer in part)
        nbytes = content.nbytes
        if self._rules.keyring is not None:
            sealed = sealing.seal(self._rules.keyring, tenant, content.subject, content.parts)
            buffers, nbytes = sealed.buffers, sealed.nbytes
        writing = Writing(new_name(cache_id), cache_id, tenant, nbytes, of_cache, content.bases, parent_id)
        self._begin(writing, self._rules.quota if quota is None else quota, evict)
        try:
            with _repeating(lambda: self._renew(writing), self._index.write_lease_s / 6):
                self._blobs.write(writing.name, buffers, nbytes, on_step=self._on_step)
                self._read_back(writing.name, nbytes, tenant, content)
                yield writing
        except BaseException:
            self.discard(writing)
            raise

    def _begin(self, writing: Writing, quota: Quota, evict: bool) -> None:
        """Register the write, and evict for it if the rules allow that."""
        rounds = 0
        while True:
            try:
                self._index.begin(writing, quota)
                return
            except (QuotaExceeded, StorageFull) as error:
                # If other data fills the medium, evicting every cache would not help: evict only once then.
                limit = 0 if not evict else _ROUNDS if "fits" in error.details else 1
                if rounds >= limit or not self._make_room(writing, quota, error, rounds):
                    raise
                rounds += 1

    def _make_room(self, writing: Writing, quota: Quota, error: QuotaExceeded | StorageFull, rounds: int) -> bool:
        """Expire and evict for a write that was refused, caches before sources. Returns whether anything went."""
        now, size = self._now(), writing.nbytes
        room = housekeeping.expire(self._index, self._blobs, now)
        # A cache larger than the whole budget must not evict all others first.
        if isinstance(error, StorageFull) and quota.budget_bytes is not None and size <= quota.budget_bytes:
            room += housekeeping.make_room(self._index, self._blobs, size, now)
            most = max(1, 1 << min(rounds, _SOURCE_ROUNDS) >> 1)  # few at first: who knows how many bytes are missing
            room = room or housekeeping.drop_sources(self._index, self._blobs, most)
        return room > 0

    def _renew(self, writing: Writing) -> None:
        try:
            self._index.renew(writing.name)
            self._blobs.renew(writing.name, writing.nbytes)
        except StoreError as error:
            # Go on: an outage may be shorter than the lease, and `publish` notices a lease that was lost.
            log.warning("the lease of a write was not renewed: %s", error)

    def _read_back(self, name: str, nbytes: int, tenant: str, content: Content) -> None:
        try:
            files = open_all(self._blobs, [(name, nbytes), *content.bases])
            if files is None and content.bases:
                raise BasesGone
            file, size = joined(files or (), self._rules, [(name, nbytes), *content.bases], tenant, content.subject)
            with file:
                if (not content.bases and size != content.nbytes) or not content.verify(file, size):
                    raise BlobError("other bytes came back", reason="digest_mismatch")
        except BlobError as error:
            if content.bases:  # one of them may be damaged
                raise BasesGone from error
            raise StoreUnavailable(
                f"the shelf on {self._blobs.home} does not keep what is written to it: {error}", stored=False
            ) from error
        self._on_step("verified")

    def keep_until(self, writing: Writing, expires_at: float | None) -> None:
        """Set when the server may drop the bytes of a write and of its bases. Raises `BasesGone`."""
        try:
            self._blobs.keep_until(writing.name, writing.nbytes, expires_at)
        except BlobError as error:
            raise lapsed() from error
        try:
            for name, nbytes in writing.bases:
                self._blobs.keep_until(name, nbytes, expires_at)
        except BlobError as error:
            raise BasesGone from error

    def _publish(self, writing: Writing, manifest: Manifest) -> Manifest:
        """Publish a cache, unless another writer published a whole one first. Returns the visible manifest."""
        cost_s = eviction.cost_s(manifest.timings.prefill_s, manifest.timings.compress_s)
        over: Entry | None = None
        while True:
            now, quota = self._now(), self._rules.quota
            published, other = self._index.publish(writing, manifest, over=over, cost_s=cost_s, now=now, quota=quota)
            if published:
                self._on_step("published")
                if other is not None:
                    housekeeping.discard(self._index, self._blobs, other)
                self._on_step("replaced")
                return manifest
            assert other is not None, "something stood in the way"
            if is_whole(self._blobs, other):
                self.discard(writing)
                return other.manifest()
            over = other

    def discard(self, writing: Writing) -> None:
        """Remove the bytes of a write, then its registration."""
        housekeeping.discard(self._index, self._blobs, writing)


def is_whole(blobs: Blobs, entry: Entry) -> bool:
    """Whether all bytes of a live entry exist, by their sizes."""
    return all(blobs.holds(name, nbytes) for name, nbytes in entry.needed())


def open_all(blobs: Blobs, names: Sequence[Name], *, once: bool = False) -> Sequence[StoredFile] | None:
    """All names as files, None if one does not exist. once: see `Blobs.open`."""
    with ExitStack() as opening:
        files: list[StoredFile] = []
        for name, nbytes in names:
            file = blobs.open(name, nbytes, once=once and len(names) == 1)
            if file is None:
                return None
            files.append(opening.enter_context(file))
        opening.pop_all()
    return files


def joined(
    files: Sequence[StoredFile], rules: Rules, names: Sequence[Name], tenant: str, subject: str
) -> tuple[StoredFile, int]:
    """The plain content of open files, at byte 0, and its size: of one file, or of a blob and its bases. The result
    owns the files, which are closed after an error. Raises `BlobError` (reason "missing") if there are no files, and as
    `sealing.unseal` and `read_splice` do."""
    if not files:
        raise BlobError("it is gone", reason="missing")
    with ExitStack() as opening:
        for file in files:
            opening.enter_context(file)
        subjects = [subject, *(cache_of(name) for name, _ in names[1:])]
        triples = zip(files, names, subjects, strict=True)
        parts = [plain(file, rules, nbytes, tenant, subject) for file, (_, nbytes), subject in triples]
        file, size = parts[0]
        if len(parts) > 1:
            splice, table = read_splice(file, size, names[1:])
            file = SplicedFile(splice, table, [file for file, _ in parts], [size for _, size in parts])
            size = splice.nbytes
        opening.pop_all()
    return file, size


def plain(file: StoredFile, rules: Rules, nbytes: int, tenant: str, subject: str) -> tuple[StoredFile, int]:
    """The plain bytes of an open file, at byte 0, and their number. The result owns the file."""
    size = file.seek(0, os.SEEK_END)
    first = bytearray(min(size, len(sealing.MAGIC)))
    file.read_ranges([(0, memoryview(first))])
    file.seek(0)
    if not sealing.is_sealed(bytes(first)):
        return file, nbytes
    if rules.keyring is None:
        raise StoreUnavailable(
            "this cache is sealed and no key file is set: start with --encryption-key-file, or set "
            "KVSHELF_ENCRYPTION_KEY_FILE"
        )
    sealed = sealing.unseal(rules.keyring, tenant, subject, file, nbytes)
    return sealed, sealed.nbytes


@contextmanager
def _repeating(call: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call a function periodically while the block runs, even during a long fsync; hence a daemon thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval_s):
            call()

    thread = threading.Thread(target=repeat, name="kvshelf-write-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
