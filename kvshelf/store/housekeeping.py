"""Housekeeping of a home: expiry, eviction, leftovers of dead writers, and a search for inconsistencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, Literal

from kvshelf.errors import StorageFull
from kvshelf.store.blobs import Blobs
from kvshelf.store.index import Entry, Index, Writing
from kvshelf.store.manifest import SourceRecord
from kvshelf.store.table import read

ORPHAN_GRACE_S: Final = 3600.0
"""How long bytes without an entry or a registered write stay: a power cut may have lost the registration of a write
that continues."""

_BATCH: Final = 200


def expire(index: Index, blobs: Blobs, now: float) -> int:
    """Turn expired caches into tombstones, then remove their bytes; returns how many."""
    count = 0
    while entries := index.expired(now, _BATCH):
        buried = sum(bury(index, blobs, entry, "expired", now) for entry in entries)
        count += buried
        if not buried:  # another process is doing it
            break
    return count


def release(index: Index, now: float) -> None:
    """End the promises whose time is over: their caches may be evicted like others from then on."""
    no_promise = {"guaranteed_until": None}
    while entries := index.unpromised(now, _BATCH):
        if not sum(index.swap(entry, entry.manifest().model_copy(update=no_promise)) for entry in entries):
            break  # another process is doing it


def bury(index: Index, blobs: Blobs, entry: Entry, state: Literal["expired", "evicted", "deleted"], now: float) -> bool:
    """Turn an entry into a tombstone, then remove its bytes. Returns False if nothing was done, see `Index.bury`."""
    try:
        buried = index.bury(entry, state, now)
    except StorageFull:
        # A full disk has no space for the tombstone, so free some: remove the bytes first. If the process dies in
        # between, the next reader finds them missing and the cache corrupt.
        if entry.name is not None:
            if index.is_base(entry.name):
                raise
            blobs.remove(entry.name, entry.nbytes)
        buried = index.bury(entry, state, now)
    if buried:
        discard(index, blobs, entry)
    return buried


def discard(index: Index, blobs: Blobs, names: Entry | Writing) -> None:
    """Remove the bytes of a replaced or buried entry, or of a write, then their registration; those of a blob that is a
    base stay. Then those of bases that were kept for it alone. After a crash, a sweep does it."""
    if names.name is not None and not index.is_base(names.name) and blobs.remove(names.name, names.nbytes):
        index.abandon(names.name)
    if names.bases:
        reclaim(index, blobs)


def make_room(index: Index, blobs: Blobs, nbytes: int, now: float) -> int:
    """Evict the caches of lowest priority until `nbytes` are freed; returns the bytes freed, fewer if no more can go.
    Pinned caches and those being read stay. Bytes that another process frees meanwhile count as well: only the index
    knows whether the space is still free."""
    release(index, now)
    freed = 0
    passed_over = 0
    while freed < nbytes:
        victims = index.victims(_BATCH + passed_over)[passed_over:]
        for victim in victims:
            if any(blobs.is_read(name) for name, _ in victim.names()):
                passed_over += 1
                continue
            bury(index, blobs, victim, "evicted", now)
            freed += victim.nbytes
            if freed >= nbytes:
                return freed
        if not victims:
            break
    return freed


def drop_sources(index: Index, blobs: Blobs, most: int) -> int:
    """Remove up to `most` sources, the oldest first; returns the bytes freed. Their caches then name no source. Sources
    go last: one is a thousandth of its cache, and the cache can be made again from it."""
    freed = 0
    for item in index.jobs.open_items("source", most):
        record = read(item, SourceRecord)
        disown(index, record)
        freed += record.body.stored_bytes if index.jobs.remove(item.id) else 0
    reclaim(index, blobs)
    return freed


def disown(index: Index, record: SourceRecord) -> None:
    """Take a source out of its cache's manifest, before the source is removed: a crash in between would leave a cache
    that says it can be made again."""
    while True:
        entry = index.find(record.manifest.id, record.manifest.tenant)
        if entry is None or entry.state != "ready" or entry.manifest().source != record.manifest.source:
            return
        if index.swap(entry, entry.manifest().model_copy(update={"source": None})):
            return


def reclaim(index: Index, blobs: Blobs) -> int:
    """Remove the bytes of abandoned writes; returns how many."""
    count = 0
    for writing in index.abandoned():
        # The registration goes last, so that the next sweep finishes after a crash here. The writer itself can publish
        # nothing: its lease has run out.
        if blobs.remove(writing.name, writing.nbytes):
            index.abandon(writing.name)
            count += 1
    return count


def remove_orphans(index: Index, blobs: Blobs, doubt_s: float = 0.0) -> int:
    """Remove unregistered bytes that are too old to belong to a write in progress; returns how many. doubt_s: by how
    much their ages may be too high."""
    return sum(blobs.remove(name, 0) for name in orphans(index, blobs, doubt_s))


def orphans(index: Index, blobs: Blobs, doubt_s: float = 0.0) -> list[str]:
    return [name for name, age_s in blobs.walk() if age_s > ORPHAN_GRACE_S + doubt_s and not index.knows(name)]


def problems(index: Index, blobs: Blobs) -> list[str]:
    """Every inconsistency, one sentence each. Blobs are not read: `Store.scrub` does that."""
    sentences = index.problems() + blobs.problems()
    entries = index.stored()
    while batch := list(islice(entries, _BATCH)):
        sentences += _problems_of(batch, blobs)
    return sentences + [f"{name} in {blobs.home} belongs to no cache" for name in orphans(index, blobs)]


def _problems_of(entries: Sequence[Entry], blobs: Blobs) -> Iterator[str]:
    ready = [(entry.id, name) for entry in entries if entry.state == "ready" for name in entry.needed()]
    whole_names = blobs.hold_each([name for _, name in ready])
    short = {cache_id for (cache_id, _), whole in zip(ready, whole_names, strict=True) if not whole}
    for entry in entries:
        if entry.state == "corrupt":
            yield f"{entry.id} is corrupt and in quarantine: {entry.problem}"
        elif entry.id in short:
            yield f"{entry.id}: its bytes are missing, or not as many as were written"
