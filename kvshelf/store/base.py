"""The contract of a store, for every kind of home."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self, Unpack

from kvshelf.api.caches import Erasure
from kvshelf.artifact.identity import Identity
from kvshelf.errors import CacheError, CacheNotFound
from kvshelf.store import types
from kvshelf.store.blobs import Health
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.jobs.batches import BatchTable
from kvshelf.store.jobs.files import FileTable
from kvshelf.store.jobs.links import LinkTable
from kvshelf.store.jobs.metering import Metering
from kvshelf.store.jobs.named import CertificateTable, WorkflowTable
from kvshelf.store.jobs.requests import RequestTable
from kvshelf.store.jobs.responses import Responses
from kvshelf.store.jobs.transforms import KeptTransforms
from kvshelf.store.ladder.table import LadderTable
from kvshelf.store.manifest import Judgement, Manifest, StoredUsage

RENEW_SHARE: Final = 0.01
"""A cache that uses renew lives on for at least 1 - `RENEW_SHARE` of its `ttl_renew_s` after each use."""

_MOST_PARENTS: Final = 4096
"""The longest conversation whose parents are followed from its last turn."""

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache


class Store(Protocol):
    """Keeps caches. Several threads and several processes may use one store at once. Ids are content addresses that
    include the tenant: an id of another tenant and an id that never existed raise the same `CacheNotFound`, word for
    word. Every method may raise `StoreUnavailable` when the home does not work."""

    requests: RequestTable
    responses: Responses
    files: FileTable
    transforms: KeptTransforms
    certificates: CertificateTable
    workflows: WorkflowTable
    links: LinkTable
    batches: BatchTable
    metering: Metering
    ladder: LadderTable

    def put(
        self,
        cache: CompressedCache,
        *,
        codec: str = "none",
        tenant: str = "default",
        **fields: Unpack[types.KeepFields],
    ) -> Manifest:
        """Store a cache: write, verify what was written, then make it visible. Durable when it returns.

        `codec` is a text of `kvshelf.artifact.codecs`; "none" adds no encoding to the cache. The manifest and
        the id hold the canonical text of the codec. fields: of `Keep`. ttl_renew_s: see `touch`. source, source_ttl_s:
        see `keep_source`. judged: the cache's measured quality. parent_id: the stored cache that this one extends. The
        home then keeps only the bytes that the parent lacks, and deletes the parent only together with this cache (see
        `delete`).
        If this cache is on the shelf already, nothing is written and its manifest is returned unchanged, labels and
        expiry included; only a source is added as by `keep_source`. An expired or corrupt cache is replaced, and of
        one that a ladder has coded smaller the blob and what is known of its quality. Sets
        `store_s` in the manifest's timings. Raises `InvalidRequest` (arguments, or a cache that the codec or the format
        cannot hold), `QuotaExceeded`, `StorageFull`, `CacheNotFound` if the parent is unknown or was deleted, even
        while this cache was being written; nothing is visible after an error. A parent that has expired is no error.
        """

    def now(self) -> float:
        """The time by the home's clock, Unix seconds: what expires is compared with it, on every machine."""

    def expiry(self, ttl_s: float | None, expires_at: float | None) -> float | None:
        """When a cache put now would expire (Unix seconds, None: never), by the rules of this shelf. Raises
        `InvalidRequest`, so that a request can be refused before any work."""

    def admit(self, tenant: str) -> None:
        """Raises `QuotaExceeded` when the tenant's quota is used up already, before any work is wasted."""

    def require_promise(self, guaranteed_until: float, expires_at: float | None, *, tenant: str = "default") -> None:
        """Refuse a promise before any work: raises `InvalidRequest` for a time that is over or after the cache's end,
        and `QuotaExceeded` where the budget of promises is used up. expires_at: as `expiry` says."""

    def get(self, cache_id: str, *, tenant: str = "default") -> CompressedCache:
        """Read a cache; every digest and its content address are checked on every read.

        Raises `CacheNotFound` (unknown, deleted, another tenant's), `CacheExpired` (also one that was evicted to make
        room: `details["reason"]` says which), `CacheCorrupt`. A corrupt one is set aside and stays `CacheCorrupt` until
        it is deleted or put again.
        """
        with self.open_cache(cache_id, tenant=tenant) as arriving:
            arriving.read(together=True)
            return arriving.cache()

    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        """Open a cache to read it layer by layer while it is used; its header and content address are checked. Raises
        as `get` does; a damaged layer is found when it is read. Reading may finish although the cache is deleted
        meanwhile. Close the result before the store."""

    def open_parts(self, cache_id: str, *, tenant: str = "default") -> PartialCache:
        """Open a cache of which only some runs of rows are read; its header and content address are checked.

        Raises as `get` does; damage is found when it is read. The parts of a sealed cache are read layer by layer,
        because a segment is sealed as a whole. Reading may go on although the cache is deleted meanwhile. Close the
        result before the store.
        """

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> types.BlobFile:
        """The stored bytes, verified, for a download. Raises as `get` does."""

    def source(self, cache_id: str, *, tenant: str = "default") -> types.Source:
        """The document's text or token ids, verified. Raises `SourceNotKept` where none is kept, and as `get` does. A
        damaged one is removed; its cache stays."""

    def original(self, cache_id: str, *, tenant: str = "default") -> tuple[Manifest, types.Source]:
        """The manifest and the source, to make a cache again: even one that was evicted, has expired or is corrupt. The
        manifest of one that is gone is as it was when it was last changed. Raises `SourceNotKept`, `CacheNotFound`."""

    def keep_source(
        self, cache_id: str, source: types.Source, *, tenant: str = "default", **end: Unpack[types.EndFields]
    ) -> Manifest:
        """Keep a source for a stored cache. The caller vouches that it is the cache's document.

        It stays until its own end, which is set as that of a cache is, also if the cache goes before; `delete` removes
        it. One that is kept already stays, but a text takes the place of token ids, and a later end that of an earlier
        one. It counts for the tenant's quota. Raises as `put` and `get` do.
        """

    def keep_judgement(
        self, cache_id: str, judged: Judgement, *, tenant: str = "default", if_revision: Collection[str] | None = None
    ) -> Manifest:
        """Replace the measured quality in a stored cache's manifest. if_revision, errors: as of `update`."""

    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        """The manifest; the blob is not read. Raises as `get` does."""

    def list(
        self,
        *,
        tenant: str = "default",
        ended: bool = False,
        limit: int = 20,
        after: str | None = None,
        **filters: Unpack[types.FilterFields],
    ) -> types.Page:
        """Live caches of a tenant, newest first. A cache must match every filter (`document_id`, `model`, `policy`,
        `name`, `id_prefix`, `parent_id`), and have every label in `labels`.

        ended: instead of these, the caches that have expired or were evicted, and whose source is kept; each as it was,
        with the time until which the source stays.

        `id_prefix` is the beginning of ids, `kvs_` and at least four of the digits after it. `parent_id` is the cache
        that the listed ones extend.

        `after` is the last id of the page before. The order never changes, and deleting that cache does not lose the
        place. Raises `InvalidRequest` for a limit outside 1 to 1,000, another `id_prefix`, or an `after` this tenant
        never had.
        """

    def changes(self, after: str | None, *, tenant: str = "default") -> types.Changes | None:
        """Caches of a tenant that were put, changed or ended after a place; uses are no changes. None as `after` gives
        no changes, but the place that is now: who then lists all caches, and asks for what changed since, knows them.

        None if the shelf has lost everything since, or the place is no longer known: list all again. A cache that ends
        by its expiry may be in none. Places are good for `KEEP_CHANGES_S`.
        """

    def update(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        if_revision: Collection[str] | None = None,
        **changes: Unpack[types.ChangeFields],
    ) -> Manifest:
        """Change these fields of a manifest: `ttl_s`, `expires_at`, `ttl_renew_s`, `labels`, `name`, `pinned`,
        `guaranteed_until`. None as `ttl_s` or `expires_at` means no expiry; labels are replaced as a whole.

        Raises as `get` does, and `InvalidRequest`. A pinned cache is never evicted for space, but it expires.
        if_revision: change the cache only if its `Manifest.revision` is one of these, else raise `EtagMismatch`. Of
        several callers with the same revision, in any processes, one succeeds.
        """

    def delete(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        if_revision: Collection[str] | None = None,
        cascade: bool = False,
    ) -> types.Receipt:
        """Remove a cache and its source, even if the cache has expired, was evicted or is corrupt. Readers that have it
        open can finish. Raises `CacheNotFound`.

        cascade: also remove all caches that extend it, and those that extend these, the last ones first. Without it,
        such a cache raises `CacheHasChildren`: its bytes would live on in them. An interrupted cascade has removed some
        of them whole; call it again.
        if_revision: as for `update`; it then raises as `get` does.
        """

    def erase(self, subject: Subject, *, dry_run: bool = False, limit_s: float | None = None) -> Erasure:
        """Erase everything of a subject: its caches and those that extend them, what is derived from them, and lines
        of files and journals that name them (`kvshelf.store.erasure.eraser`). Call it again after a kill, or for the
        rest if it took longer than `limit_s`. Raises `StateConflict` while another process does it."""

    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        """Record that the cache was used now. Does nothing if the cache is gone. If the cache has an expiry and a
        `ttl_renew_s`, and that time from now is later than its expiry by at least `RENEW_SHARE` of it, that becomes its
        expiry. So a use never shortens a life, and of many uses few write."""

    def sweep(self, now: float | None = None) -> types.Swept:
        """Remove expired items and the remains of crashes. Safe while others write; call it every few minutes."""

    def compact(self) -> int:
        """Write caches anew, each as a whole, that lie in many files because caches were extended again and again.
        Returns how many. Safe while others write; call it after `sweep`."""

    def cache_id(self, identity: Identity, *, tenant: str = "default", codec: str = "none") -> str:
        """The id a cache with this identity has here under a codec, whether it is stored or not. Texts of the same
        codec give the same id. Raises `InvalidRequest` for a text that is no codec."""

    def document_id(self, identity: Identity, *, tenant: str = "default") -> str:
        """The id that all caches of one document carry here."""

    def usage(self, *, tenant: str | None = None) -> StoredUsage:
        """Caches and bytes of one tenant, or of all."""

    def health(self) -> Health:
        """Whether the home answers and may be used. Quick: unlike `check`, it does not walk the home."""

    def check(self) -> Sequence[str]:
        """Every inconsistency, one sentence each; empty if the home is sound. Does not read blobs."""

    def scrub(self) -> Iterator[types.Scrubbed]:
        """Read every cache of every tenant to its end, quarantine the corrupt ones, and report on each."""

    def close(self) -> None:
        """Let go of files and connections. The store cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lineage(store: Store, manifest: Manifest) -> Iterator[Manifest]:
    """A cache and those that it grew from, the nearest first, as far as they can be read."""
    yield manifest
    for _ in range(_MOST_PARENTS):
        if manifest.parent_id is None:
            return
        try:
            manifest = store.stat(manifest.parent_id, tenant=manifest.tenant)
        except (CacheNotFound, CacheError):
            return
        yield manifest
