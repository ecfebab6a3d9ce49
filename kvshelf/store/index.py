"""The index of a home: which caches there are, and which writes are in progress. Every method is one atomic step.

Only `publish` makes a cache visible. A writer first registers a name with `begin`. The registration is a lease that
fences the writer: once the lease has run out, the writer can publish nothing.

A name stays registered until its bytes are removed. Names that give way to a newer cache or to a tombstone become
abandoned writes, until `abandon` is called for them. A blob that gives way while another entry has it as a base is kept
instead, and counts for its tenant; it becomes an abandoned write in the step that ends the last reference to it.

After `StorageFull`, the step was not taken; after `StoreUnavailable`, it may have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from kvshelf.errors import InvalidRequest, QuotaExceeded, StorageFull, StoreUnavailable
from kvshelf.store.blobs import Blobs, Leases, Name
from kvshelf.store.manifest import Manifest, StoredUsage
from kvshelf.store.table import JobTable

EntryState = Literal["ready", "corrupt", "expired", "evicted", "deleted"]

ID_PREFIX: Final = len("kvs_") + 4
"""Characters of an id after which an index finds it: among a million caches, 15 have the same four digits."""

KEEP_CHANGES_S: Final = 86400.0
"""How long `Index.changes` has a change, or a later one of the same entry, at least."""

KEEP_ENDED_S: Final = 30 * 86400.0
"""How long tombstones and ended requests can still be looked up."""


@dataclass(frozen=True)
class Entry:
    """One cache id of one tenant. `expired`, `evicted` and `deleted` are tombstones: no manifest and no names.

    seq: orders listings; never repeats, and a cache that is put again gets a new one. version: counts changes of the
    manifest. name: of the blob in `Blobs`. nbytes: its size there, encryption included. uses: times the cache was
    touched. priority: see `kvshelf.store.eviction`. pinned: see `Manifest.promised`. bases: blobs of other caches that
    hold a part of this one's bytes (`kvshelf.store.splice`). parent_id: the cache that this one extends; a tombstone
    keeps it.
    """

    seq: int
    id: str
    tenant: str
    state: EntryState
    version: int
    name: str | None = None
    nbytes: int = 0
    expires_at: float | None = None
    last_used_at: float | None = None
    uses: int = 0
    cost_s: float = 0.0
    priority: float = 0.0
    pinned: bool = False
    ended_at: float | None = None
    problem: str | None = None
    bases: tuple[Name, ...] = ()
    parent_id: str | None = None
    text: str | None = None
    """The manifest's JSON."""

    @property
    def stored(self) -> bool:
        """Whether the entry has bytes: it is no tombstone."""
        return self.state in ("ready", "corrupt")

    def live(self, now: float) -> bool:
        return self.state == "ready" and not self.expired(now)

    def expired(self, now: float) -> bool:
        return self.state == "expired" or (self.expires_at is not None and self.expires_at <= now)

    def manifest(self) -> Manifest:
        assert self.text is not None, "a tombstone has no manifest"
        manifest = Manifest.model_validate_json(self.text)
        return manifest.model_copy(update={"last_used_at": self.last_used_at, "uses": self.uses})

    def names(self) -> list[Name]:
        """Every name in `Blobs` that belongs to the entry, with its size."""
        return [] if self.name is None else [(self.name, self.nbytes)]

    def needed(self) -> list[Name]:
        """Every name that reading the entry takes: its own, and those of its bases."""
        return [*self.names(), *self.bases]

    def retired(self) -> Writing:
        """The names and bases that the entry loses when it ends."""
        return Writing(self.name or "", self.id, self.tenant, self.nbytes, bases=self.bases)

    def swapped(self, manifest: Manifest, writing: Writing | None) -> tuple[Entry, Writing | None]:
        """The entry with another manifest and the blob of a write, and the blob and bases that the write replaces."""
        entry = replace(
            self,
            version=self.version + 1,
            expires_at=manifest.expires_at,
            pinned=manifest.promised,
            problem=None,
            state="ready",
            text=manifest.model_dump_json(),
        )
        if writing is None:
            return entry, None
        return replace(entry, name=writing.name, nbytes=writing.nbytes, bases=writing.bases), self.retired()


@dataclass(frozen=True)
class Writing:
    """A write in progress: a name in `Blobs` with its size, which is reserved for the tenant.

    of_cache: whether the bytes become the blob of an entry; False for those that an item of the job table will hold,
    and for a blob that is kept as a base alone. bases, parent_id: those of the entry that the write becomes; they are
    registered with the entry, not before.
    """

    name: str
    cache_id: str
    tenant: str
    nbytes: int
    of_cache: bool = True
    bases: tuple[Name, ...] = ()
    parent_id: str | None = None


@dataclass(frozen=True)
class Quota:
    """Limits of one tenant, and of all tenants together (`budget_bytes`, `promised_bytes`); None: no limit. The budgets
    of promises count the bytes of ready entries that are pinned, `max_bytes` and `budget_bytes` those of all entries
    (`Entry.nbytes`) and of what the items of the job table hold."""

    max_caches: int | None = None
    max_bytes: int | None = None
    budget_bytes: int | None = None
    tenant_promised_bytes: int | None = None
    promised_bytes: int | None = None

    def used_up(self, usage: StoredUsage) -> bool:
        """Whether a tenant with this usage may keep no more."""
        caches, nbytes = self.max_caches, self.max_bytes
        return (caches is not None and usage.caches >= caches) or (nbytes is not None and usage.bytes >= nbytes)

    def require_promisable(self, promised_bytes: Callable[[str | None], int], tenant: str, size: int) -> None:
        """Raise `QuotaExceeded` unless `size` bytes more may be promised. promised_bytes: of a tenant; None: of all."""
        for limit, whose in (("tenant_promised_bytes", tenant), ("promised_bytes", None)):
            most = getattr(self, limit)
            if most is not None and (used := promised_bytes(whose)) + size > most:
                raise self.exceeded(limit, used, size)

    def exceeded(self, limit: str, used: int, size: int) -> QuotaExceeded | StorageFull:
        """The error for a write of `size` bytes beyond one of the limits. limit: the limit's name. used: caches or
        bytes that already count. `fits` in the error's details says whether the bytes would fit if there were no
        others; if so, the caller may evict and retry."""
        if limit in ("tenant_promised_bytes", "promised_bytes"):
            most = getattr(self, limit)
            return QuotaExceeded(
                f"{used} of {most} bytes are promised to stay{'' if limit == 'promised_bytes' else ' by this tenant'} "
                f"({limit}), {max(0, most - used)} are free, and this cache has {size}; take a promise or a pin back, "
                "or wait for the end of one",
                param="guaranteed_until",
            )
        if limit == "max_caches":
            return QuotaExceeded(
                f"{used} caches are on the shelf, as many as may be ({self.max_caches}); delete some first"
            )
        if limit == "max_bytes":
            text = f"{used} of {self.max_bytes} bytes are taken and {size} more are needed; delete caches first"
            return QuotaExceeded(text, fits=self.max_bytes is None or size <= self.max_bytes)
        text = f"{size} bytes do not fit into the shelf's budget of {self.budget_bytes}"
        return StorageFull(text, fits=self.budget_bytes is None or size <= self.budget_bytes)


NO_LIMITS: Final = Quota()


@dataclass(frozen=True)
class Filters:
    """The filters of a listing, joined by "and"; None or empty: any. id_prefix: of `kvs_...`, at least `ID_PREFIX`
    characters."""

    tenant: str
    document_id: str | None = None
    model: str | None = None
    policy: str | None = None
    name: str | None = None
    id_prefix: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    parent_id: str | None = None

    def takes(self, manifest: Manifest) -> bool:
        """Whether a cache of the tenant matches all filters."""
        equal = all(
            getattr(self, name) in (None, getattr(manifest, name))
            for name in ("document_id", "model", "policy", "name", "parent_id")
        )
        return equal and manifest.id.startswith(self.id_prefix or "") and self.labels.items() <= manifest.labels.items()


class BasesGone(Exception):
    """A base of a write has ended since, and nothing was done: the caller writes the cache whole."""


class Index(Protocol):
    """The source of truth of a home. Several threads and several processes may use it at once. A change is durable when
    its method returns, unless the method says otherwise. `now` is the home's clock (Unix seconds) as `Store.now` tells
    it. Methods raise `StoreUnavailable` and `StorageFull` when the home does not work."""

    key: bytes
    """32 secret bytes that key the content addresses of this home."""

    jobs: JobTable

    write_lease_s: float
    """How long a writer may be silent; usually `WRITE_LEASE_S`."""

    incarnation: str = ""
    """Changes when the home has lost everything, as a server without persistence does at a restart."""

    # Writing

    def begin(self, writing: Writing, quota: Quota) -> None:
        """Register a write and reserve its bytes for the tenant. Need not survive a power cut.

        Ready and reserved bytes of the tenant together must stay within the quota, else `QuotaExceeded`; those of all
        tenants within `budget_bytes`, else `StorageFull` (the caller evicts and asks again). Nothing is registered
        then. An entry of the same id does not count, because the write replaces it. A write that is not `of_cache`
        replaces nothing and adds no cache.
        """

    def renew(self, name: str) -> None:
        """Extend the lease of a write to `write_lease_s` from now. Raises `StoreUnavailable` if it has run out."""

    def abandon(self, name: str) -> None:
        """Forget a write and its reservation, after its bytes were removed. Ignores an unknown name."""

    def abandoned(self) -> list[Writing]:
        """Writes whose lease has run out, and replaced or buried names whose bytes are not removed yet. The call
        revokes them: none can be renewed or published any more, even if a clock is set back. The caller removes their
        bytes, then calls `abandon`."""

    def publish(
        self,
        writing: Writing,
        manifest: Manifest,
        *,
        over: Entry | None,
        cost_s: float,
        now: float,
        quota: Quota = NO_LIMITS,
    ) -> tuple[bool, Entry | None]:
        """Make a cache visible, which ends its write.

        If a live entry has the id and its blob is not that of `over`, nothing is changed: (False, that entry).
        Otherwise the cache replaces any entry of its id: (True, the replaced entry if it had a name, else None). That
        name is then among the `abandoned`, or kept. cost_s: seconds to make the cache again, for eviction.

        Raises `StoreUnavailable` if the lease of the write has run out, `CacheNotFound` if an ancestor of the cache
        (its parent, the parent's parent) was deleted, `QuotaExceeded` for a pin beyond the budgets of promises in
        `quota`, and `BasesGone` unless each base is the blob of a stored entry of
        this tenant, or kept. Nothing is changed then.
        """

    # Reading

    def find(self, cache_id: str, tenant: str) -> Entry | None:
        """The entry of an id, if it belongs to this tenant."""

    def listing(self, query: Filters, now: float, before: int | None, limit: int) -> list[Entry]:
        """Live entries, newest first, with a seq below `before`."""

    def changes(self, tenant: str, after: int | None, limit: int) -> tuple[list[Entry], int]:
        """The entries of a tenant, in any state, that changed after a place, uses aside, in the order of their last
        changes; and the place to ask from next. after None: no entries, and the place that is now.

        An entry whose cache was put again has given way to the new one. Entries that ended may be missing where they
        had an expiry, from that on, and entries that changed longer ago than `KEEP_CHANGES_S`.
        """

    def children(self, cache_id: str, tenant: str) -> list[Entry]:
        """The entries in any state that have this cache as their parent; the cache itself need not exist."""

    def usage(self, tenant: str | None) -> StoredUsage:
        """Ready entries and their bytes. tenant None: of all tenants."""

    def stored(self) -> Iterator[Entry]:
        """All ready and corrupt entries, read in batches: there may be a million."""

    def knows(self, name: str) -> bool:
        """Whether an entry or a write in progress has this name in `Blobs`, or it is kept."""

    def is_base(self, name: str) -> bool:
        """Whether a stored entry has this name as a base. Once a name has given way, it does not become one again."""

    # Changing

    def swap(self, entry: Entry, manifest: Manifest, writing: Writing | None = None, quota: Quota = NO_LIMITS) -> bool:
        """Put another manifest into a ready entry, with the manifest's expiry, labels and pin.

        writing: give the entry the blob of this write as well, which ends the write; see `Entry.swapped`. The replaced
        one is then among the `abandoned`, or kept. A new blob makes a corrupt entry ready again. False: the entry
        has ended or changed since (name, version), and nothing is done. Raises `StoreUnavailable` if the lease of the
        write has run out, and for a new pin `QuotaExceeded`, and `BasesGone` as `publish` does.
        """

    def touch(self, cache_id: str, tenant: str, now: float) -> Entry | None:
        """Count a use of a ready entry. Returns the entry if it has an expiry, which the use may be about to move. Runs
        for every query, so it need not survive a power cut."""

    def mark_corrupt(self, entry: Entry, problem: str) -> bool:
        """Mark a ready entry corrupt; it keeps its name. False: the entry is no longer ready, or has another blob."""

    def bury(self, entry: Entry, state: Literal["expired", "evicted", "deleted"], now: float) -> bool:
        """Turn a stored entry into a tombstone, without data of callers. Its name is then among the `abandoned`, or
        kept.

        False, and nothing done: the entry was put again since (its seq differs), or is a tombstone already. "deleted"
        also replaces tombstones of other states, requires an unchanged version, and that no descendant is stored.
        "evicted" requires that the entry's blob is no base: evicting it would free nothing. "expired" requires that the
        entry has expired at `now`.
        """

    def expired(self, now: float, limit: int) -> list[Entry]:
        """Stored entries that have expired."""

    def unpromised(self, now: float, limit: int) -> list[Entry]:
        """Ready entries that are pinned until a time that is over."""

    def promised(self, tenant: str | None) -> StoredUsage:
        """Ready entries that are pinned, and their bytes. tenant None: of all tenants."""

    def victims(self, limit: int) -> list[Entry]:
        """Ready entries that are not pinned and whose blob is no base, those with the lowest priority first."""

    def spliced(self, least: int, limit: int) -> list[Entry]:
        """Ready entries with at least so many bases."""

    def forget(self, before: float) -> int:
        """Drop tombstones that ended before a time; returns how many. One with children stays as long as they do: it
        says whose descendants they are."""

    def purge(self, *, at_once: bool) -> None:  # noqa: ARG002 - most homes have nothing to do
        """Let nothing that was removed stay in the home's own files. at_once: or perhaps with a later call."""
        return

    def problems(self) -> list[str]:
        """Inconsistencies within the index, one sentence each."""

    def close(self) -> None:
        """Let go of connections."""


def lapsed() -> StoreUnavailable:
    """`stored=False` in its details: the store is healthy but this write failed. Callers give up a document after
    several such failures."""
    return StoreUnavailable("the cache took longer to write than a writer may be silent; put it again", stored=False)


MakeBlobs = Callable[[Index, Leases], Blobs]
"""Opens the place of a home's blobs, where that is not beside its index."""


def blobs_place(blobs: MakeBlobs | None) -> str:
    """The text under which an index records the place of its blobs: "beside" it, or "objects"."""
    return "beside" if blobs is None else "objects"


def require_blobs_place(home: str, recorded: str, blobs: MakeBlobs | None) -> None:
    """Raises `InvalidRequest` if a home is opened with its blobs in another kind of place than they were written to:
    every cache would seem to have lost its bytes."""
    if recorded == blobs_place(blobs):
        return
    parameter = "has no blobs=" if blobs is None else "has blobs="
    place = "in object storage" if recorded == "objects" else "beside its index"
    raise InvalidRequest(f"the blobs of {home} lie {place}, and the URL of the store {parameter}", param="store")
