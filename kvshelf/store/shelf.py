"""The logic of every home: an index says which caches exist, `Blobs` holds their bytes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Final, Unpack

from kvshelf import errors
from kvshelf.api import Timings
from kvshelf.api.caches import Erasure
from kvshelf.artifact import blob, codecs
from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.blob.frame import FORMAT_MAJOR, BlobSummary
from kvshelf.artifact.identity import Identity
from kvshelf.store import checks, housekeeping, types
from kvshelf.store.base import RENEW_SHARE, Store
from kvshelf.store.blobs import Blobs, Health, RangesFile, Step
from kvshelf.store.erasure.eraser import Eraser, Subject
from kvshelf.store.index import KEEP_ENDED_S, BasesGone, Entry, Filters, Index
from kvshelf.store.jobs.batches import BatchTable
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.jobs.clock import Doubt
from kvshelf.store.jobs.files import FileTable
from kvshelf.store.jobs.links import LinkTable
from kvshelf.store.jobs.metering import Metering
from kvshelf.store.jobs.named import CertificateTable, WorkflowTable
from kvshelf.store.jobs.requests import RequestTable
from kvshelf.store.jobs.responses import Responses
from kvshelf.store.jobs.sources import Sources
from kvshelf.store.jobs.transforms import KeptTransforms
from kvshelf.store.ladder.table import LadderTable
from kvshelf.store.manifest import Judgement, Manifest, SourceRecord, StoredUsage, describe, described_blob
from kvshelf.store.reader import Reader
from kvshelf.store.rules import Rules
from kvshelf.store.table import read
from kvshelf.store.writer import Content, Writer, blob_content, is_whole, spliced_content

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache

log = logging.getLogger("kvshelf.store")

_CHANGES: Final = 1000
"""Changes that are read at once."""


class Shelf(Store):
    """See `Store` for the contract. A single home without tiers."""

    def __init__(
        self,
        index: Index,
        blobs: Blobs,
        *,
        rules: Rules | None = None,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] | None = None,
        on_step: Step = lambda _: None,
    ) -> None:
        """now: the home's clock, Unix seconds. elapsed: see `Doubt`, None: `now`. on_step: called at each step of a
        write, see `Blobs.write`."""
        self.index = index
        self.blobs = blobs
        self._rules = rules or Rules()
        self.clock = now
        self._doubt = Doubt(index.jobs, now, elapsed or now)
        self.walked_at = -math.inf
        self._writer = Writer(index, blobs, self._rules, now, on_step)
        self.bodies = bodies = Bodies(index, blobs, self._writer, self._rules)
        self.sources = Sources(index.jobs, bodies, now, partial(housekeeping.disown, index))
        self.reader = Reader(index, blobs, self._rules, self.sources, now)
        self.files = FileTable(index.jobs, bodies, now)
        self.responses = Responses(index.jobs, bodies, self._rules, now)
        self.requests = RequestTable(index.jobs, bodies, now, index.key)
        self.batches = BatchTable(index.jobs)
        self.metering = Metering(index.jobs, index.key)
        self.transforms = KeptTransforms(index.jobs, bodies)
        self.certificates = CertificateTable(index.jobs)
        self.workflows = WorkflowTable(index.jobs)
        self.ladder = LadderTable(index, self._writer, self.sources, self._doubt.deadline)
        self.links = LinkTable(index.jobs)

    def close(self) -> None:
        self.index.close()
        self.blobs.close()

    # Ids

    @property
    def key(self) -> bytes:
        """The secret that keys this home's content addresses."""
        return self.index.key

    @property
    def incarnation(self) -> str:
        return self.index.incarnation

    def cache_id(self, identity: Identity, *, tenant: str = "default", codec: str = "none") -> str:
        text = str(codecs.Codec.parse(codec))
        return identity.cache_id(key=self.index.key, tenant=tenant, codec=text, format_major=FORMAT_MAJOR)

    def document_id(self, identity: Identity, *, tenant: str = "default") -> str:
        return identity.document_id(key=self.index.key, tenant=tenant)

    # Writing

    def put(
        self,
        cache: CompressedCache,
        *,
        codec: str = "none",
        tenant: str = "default",
        **fields: Unpack[types.KeepFields],
    ) -> Manifest:
        from kvshelf.artifact.cache import CompressedCache  # here, because it imports torch

        checks.require_names("put", fields, types.KeepFields)
        if not isinstance(cache, CompressedCache):
            raise errors.InvalidRequest(
                f"{type(cache).__name__} is no CompressedCache; CompressedCache.from_bytes reads a blob", param="cache"
            )
        until, parent_id = self.expiry(fields.get("source_ttl_s"), None), fields.get("parent_id")
        source, judged, promise = fields.get("source"), fields.get("judged"), fields.get("guaranteed_until")
        described: dict[str, Any] = {
            "expires_at": self.expiry(fields.get("ttl_s"), fields.get("expires_at")),
            "ttl_renew_s": self._rules.renewal(fields.get("ttl_renew_s")),
            "tenant": checks.require_text(tenant, "tenant", empty=False),
            "labels": checks.require_labels(fields.get("labels") or {}),
            "name": checks.require_text(fields.get("name", ""), "name"),
            "pinned": checks.require_flag(fields.get("pinned"), "pinned"),
            "guaranteed_until": promise,
            "timings": fields.get("timings") or Timings(),
            **dict(judged or Judgement()),
        }
        checks.require_promise(promise, described["expires_at"], self.clock())
        if source is not None:
            checks.require_source(source)
        codec = str(codecs.resolve(cache.codec, codec))
        cache_id = self.cache_id(cache.identity, tenant=tenant, codec=codec)
        if parent_id is not None:
            self._require_parent(parent_id, cache_id, tenant)
        entry = self.index.find(cache_id, tenant)
        started, packed = time.perf_counter(), None
        if entry is not None and entry.live(self.clock()) and is_whole(self.blobs, entry):
            stored: Manifest | None = entry.manifest()
            if entry.manifest().recoded is not None:
                packed = cache.encoded(codec).pack()
                stored = self._as_made(entry, packed, judged)
            if stored is not None and source is not None:
                return self.keep_source(cache_id, source, tenant=tenant, expires_at=until)
            if stored is not None:
                return stored
        packed = packed or cache.encoded(codec).pack()
        described |= {
            "id": cache_id,
            "document_id": self.document_id(cache.identity, tenant=tenant),
            "parent_id": parent_id,
        }
        manifest = describe(cache, packed, created_at=self.clock(), **described)
        with self._holding(manifest, source, until) as sourced:
            put = partial(self._writer.put, sourced, started=started, parent_id=parent_id)
            with ExitStack() as parent:  # open until the cache is published, so that nobody evicts it for the cache
                try:
                    manifest = put(self._blob_content(cache_id, packed, parent_id, tenant, parent))
                except BasesGone:
                    manifest = put(blob_content(cache_id, packed))
        if self.sources.claim(manifest) or source is None:
            return manifest
        return self.keep_source(cache_id, source, tenant=tenant, expires_at=until)

    def _as_made(self, entry: Entry, packed: PackedBlob, judged: Judgement | None) -> Manifest | None:
        """Put back the blob of a cache that a ladder has coded smaller, which counts as a use. Returns the manifest;
        None if the cache has ended meanwhile. Caches that extend it stay as they are: whole with what they need. Raises
        as `put` does; a promised cache must fit among the promises with its new size."""
        for _ in range(_ROUNDS):
            manifest = entry.manifest()
            if manifest.recoded is None:  # another creation was first
                return manifest
            if manifest.promised:
                self._require_promisable(entry.tenant, packed.nbytes - entry.nbytes)
            changes = described_blob(packed) | {"recoded": None, "quality": judged and judged.quality}
            manifest = manifest.model_copy(update=changes)
            if self._writer.swap(entry, blob_content(entry.id, packed), manifest=manifest):
                self.index.touch(entry.id, entry.tenant, self.clock())
                return manifest
            try:
                entry = self.reader.ready(entry.id, entry.tenant)  # it was changed meanwhile
            except (errors.CacheNotFound, errors.CacheError):
                return None
        raise errors.StateConflict(
            f"cache {entry.id} was changed {_ROUNDS} times while it was made again; try again when it is at rest"
        )

    @contextmanager
    def _holding(self, manifest: Manifest, source: types.Source | None, until: float | None) -> Iterator[Manifest]:
        """The manifest of a cache that is to be published, with its source: `source`, or one that an earlier cache of
        this id has left. If the block raises, a source that nobody has claimed is removed."""
        record = self.sources.find(manifest.id, manifest.tenant)
        info = None if record is None else record.manifest.source
        if source is not None:
            info = self.sources.hold(manifest, source, until)
        try:
            yield manifest.model_copy(update={"source": info})
        except BaseException:
            self.sources.remove(manifest.id, manifest.tenant, unclaimed=True)
            raise

    def _require_parent(self, parent_id: str, cache_id: str, tenant: str) -> None:
        entry = self.index.find(checks.require_id(parent_id), tenant)
        if entry is None or entry.state == "deleted":
            raise checks.not_found(parent_id)
        if parent_id == cache_id:
            raise errors.InvalidRequest("parent_id: a cache does not extend itself", param="parent_id")

    def _blob_content(
        self, cache_id: str, packed: PackedBlob, parent_id: str | None, tenant: str, opened: ExitStack
    ) -> Content:
        """The bytes of a blob that the blob of its parent lacks; the whole blob if that cannot be read. The parent
        stays open in `opened`."""
        if parent_id is None:
            return blob_content(cache_id, packed)
        try:
            with self.reader.opening(parent_id, tenant) as (entry, file, nbytes):
                opened.enter_context(file)
                return spliced_content(cache_id, packed, entry, file, nbytes)
        except (errors.CacheNotFound, errors.CacheError):
            return blob_content(cache_id, packed)

    def now(self) -> float:
        return self.clock()

    def expiry(self, ttl_s: float | None, expires_at: float | None) -> float | None:
        return self._rules.expiry(ttl_s, expires_at, self.clock())

    def adopt(self, cache: CompressedCache, manifest: Manifest, *, parent_id: str | None = None) -> None:
        """Store a cache under an existing manifest: copy it to a tier, or give it back to its home, with its parent. A
        tier knows no parents: its copies go one by one. Raises `BlobError` if the manifest belongs to another blob, and
        as `put` does; a parent may be unknown here."""
        packed = cache.pack()
        if packed.root.hex() != manifest.blob_digest:
            raise errors.BlobError("the manifest belongs to another blob", reason="wrong_blob")
        self._writer.put(manifest, blob_content(manifest.id, packed), parent_id=parent_id)

    def mend(self, cache: CompressedCache, cache_id: str, *, tenant: str) -> None:
        """Replace the bytes of a corrupt cache from a copy; its manifest stays. Does nothing if the cache changed.
        Raises as `adopt` and `get` do."""
        entry, packed = self.reader.kept(cache_id, tenant), cache.pack()
        if packed.root.hex() != entry.manifest().blob_digest:
            raise errors.BlobError("the copy is another blob", reason="wrong_blob")
        self._writer.swap(entry, blob_content(cache_id, packed))

    def admit(self, tenant: str) -> None:
        quota = self._rules.quota
        if quota.max_caches is None and quota.max_bytes is None:
            return
        usage = self.index.usage(tenant)
        if quota.used_up(usage):
            housekeeping.expire(self.index, self.blobs, self._doubt.deadline())
            usage = self.index.usage(tenant)
        if quota.used_up(usage):
            raise errors.QuotaExceeded(
                f"the quota is used up: {usage.caches} caches of {quota.max_caches or 'any number'}, {usage.bytes} "
                f"bytes of {quota.max_bytes or 'any number'}; delete caches first"
            )

    def require_promise(self, guaranteed_until: float, expires_at: float | None, *, tenant: str = "default") -> None:
        checks.require_promise(guaranteed_until, expires_at, self.clock())
        self._require_promisable(tenant, 1)

    def _require_promisable(self, tenant: str, nbytes: int) -> None:
        self._rules.quota.require_promisable(lambda whose: self.index.promised(whose).bytes, tenant, nbytes)

    def keep_source(
        self, cache_id: str, source: types.Source, *, tenant: str = "default", **end: Unpack[types.EndFields]
    ) -> Manifest:
        checks.require_names("keep_source", end, types.EndFields)
        checks.require_source(source)
        until = self.expiry(end.get("ttl_s"), end.get("expires_at"))
        while True:
            entry = self.reader.ready(cache_id, tenant)
            with self._holding(entry.manifest(), source, until) as manifest:
                swapped = entry.manifest().source == manifest.source or self.index.swap(entry, manifest)
                if swapped and self.sources.claim(manifest):
                    return manifest

    def keep_judgement(
        self, cache_id: str, judged: Judgement, *, tenant: str = "default", if_revision: Collection[str] | None = None
    ) -> Manifest:
        return self._changed(cache_id, tenant, dict(judged), if_revision)

    # Reading

    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        from kvshelf.artifact.opened.arriving import ArrivingCache  # here, because it imports torch

        with self.reader.opening(cache_id, tenant, once=True) as (entry, file, nbytes):
            summary = blob.open_file(file, nbytes)  # type: ignore[arg-type]
            self._require_own(cache_id, tenant, entry, summary)
            guard = partial(self.reader.quarantining, entry)
            return ArrivingCache(summary, file, guard, read_ahead=self.blobs.read_ahead)

    def open_parts(self, cache_id: str, *, tenant: str = "default") -> PartialCache:
        from kvshelf.artifact.opened.partial import PartialCache  # here, because it imports torch

        with self.reader.opening(cache_id, tenant) as (entry, file, nbytes):
            summary = blob.open_file(RangesFile(file), nbytes)  # type: ignore[arg-type]
            self._require_own(cache_id, tenant, entry, summary)
            return PartialCache(summary, file, partial(self.reader.quarantining, entry))

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> types.BlobFile:
        with self.reader.opening(cache_id, tenant) as (entry, file, nbytes):
            summary = blob.verify_file(file, nbytes)  # type: ignore[arg-type]
            self._require_own(cache_id, tenant, entry, summary)
            file.seek(0)
            return types.BlobFile(BufferedReader(file), summary.nbytes, summary.root.hex())

    def _require_own(self, cache_id: str, tenant: str, entry: Entry, summary: BlobSummary) -> None:
        """Raise `BlobError` unless a sound blob is the one that was stored, and belongs to its id."""
        if summary.root.hex() != entry.manifest().blob_digest:
            raise errors.BlobError("its file holds another blob than was stored", reason="wrong_blob")
        header, recoded = summary.header, entry.manifest().recoded
        identity, codec = header.to_identity(), header.codec
        if recoded is not None:  # the id is of the codec under which the cache was made, which no transforms belong to
            identity, codec = replace(identity, transforms=""), recoded.codec
        if self.cache_id(identity, tenant=tenant, codec=codec) != cache_id:
            raise errors.BlobError("its blob belongs to another cache", reason="wrong_identity")

    def source(self, cache_id: str, *, tenant: str = "default") -> types.Source:
        entry = self.reader.ready(cache_id, tenant)
        try:
            return self.sources.read(self._source_record(cache_id, tenant))
        except errors.SourceNotKept:
            info = entry.manifest().source
            if info is not None and (info.expires_at is None or info.expires_at <= self._doubt.deadline()):
                self.index.swap(entry, entry.manifest().model_copy(update={"source": None}))
            raise

    def original(self, cache_id: str, *, tenant: str = "default") -> tuple[Manifest, types.Source]:
        checks.require_id(cache_id)
        entry = self.index.find(cache_id, tenant)
        if entry is not None and entry.state == "deleted":
            raise checks.not_found(cache_id)
        if entry is None and self.sources.find(cache_id, tenant) is None:
            raise checks.not_found(cache_id)
        record = self._source_record(cache_id, tenant)
        manifest = record.manifest if entry is None or entry.text is None else entry.manifest()
        return manifest, self.sources.read(record)

    def _source_record(self, cache_id: str, tenant: str) -> SourceRecord:
        record = self.sources.find(cache_id, tenant)
        if record is None:
            raise errors.SourceNotKept(
                f"the source of cache {cache_id} is not kept; create it with keep_source to have it", param="cache_id"
            )
        return record

    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        return self.reader.ready(cache_id, tenant).manifest()

    def remembers(self, cache_id: str, *, tenant: str = "default") -> bool:
        """Whether this home has a cache or its tombstone. `CacheNotFound` alone does not distinguish a deleted cache
        from one that the home never had, or lost."""
        return self.index.find(checks.require_id(cache_id), tenant) is not None

    def manifests(self) -> Iterator[Manifest]:
        """The manifests of all live caches of all tenants."""
        return (entry.manifest() for entry in self.index.stored() if entry.live(self.clock()))

    def list(
        self,
        *,
        tenant: str = "default",
        ended: bool = False,
        limit: int = 20,
        after: str | None = None,
        **filters: Unpack[types.FilterFields],
    ) -> types.Page:
        checks.require_limit(limit)
        columns: dict[str, Any] = {**filters, "labels": checks.require_labels(filters.get("labels") or {})}
        query = Filters(tenant, **columns)
        for param in ("document_id", "model", "policy", "name", "parent_id"):
            checks.require_text(getattr(query, param) or "", param)
        if query.id_prefix is not None:
            checks.require_id_prefix(query.id_prefix)
        if ended:
            return self._ended(query, limit, after)
        before = None
        if after is not None:
            cursor = self.index.find(checks.require_text(after, "after"), tenant)
            if cursor is None:
                raise errors.InvalidRequest(f"after: there is no cache {after[:80]!r} to continue from", param="after")
            before = cursor.seq
        entries = self.index.listing(query, self.clock(), before, limit + 1)
        return types.Page(data=tuple(entry.manifest() for entry in entries[:limit]), has_more=len(entries) > limit)

    def changes(self, after: str | None, *, tenant: str = "default") -> types.Changes | None:
        incarnation, _, number = (after or "").rpartition(":")
        if after is not None and (incarnation != self.index.incarnation or not number.isdecimal()):
            return None
        entries, now = self.index.changes(tenant, int(number) if after is not None else None, _CHANGES)
        if after is not None and incarnation != self.index.incarnation:  # found by this very call
            return None
        present = self.clock()
        return types.Changes(
            data=tuple(entry.manifest() for entry in entries if entry.live(present)),
            ended=tuple(entry.id for entry in entries if not entry.live(present)),
            place=f"{self.index.incarnation}:{now}",
            has_more=after is not None and str(now) != number,
        )

    def _ended(self, query: Filters, limit: int, after: str | None) -> types.Page:
        manifests: list[Manifest] = []
        for manifest in self.sources.manifests(query.tenant, after):
            entry = self.index.find(manifest.id, query.tenant)
            if query.takes(manifest) and (entry is None or not entry.live(self.clock())):
                manifests.append(manifest)
            if len(manifests) > limit:
                break
        return types.Page(data=tuple(manifests[:limit]), has_more=len(manifests) > limit)

    # Changing

    def update(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        if_revision: Collection[str] | None = None,
        **changes: Unpack[types.ChangeFields],
    ) -> Manifest:
        fields = checks.changes(changes)
        if {"ttl_s", "expires_at"} & changes.keys():
            ttl_s, expires_at = changes.get("ttl_s"), changes.get("expires_at")
            fields["expires_at"] = self._rules.changed_expiry(ttl_s, expires_at, self.clock())
        if "ttl_renew_s" in changes:
            fields["ttl_renew_s"] = self._rules.renewal(changes["ttl_renew_s"])
        if (until := changes.get("guaranteed_until")) is not None:
            checks.require_promise(until, None, self.clock())
        return self._changed(cache_id, tenant, fields, if_revision)

    def _changed(
        self, cache_id: str, tenant: str, changes: Mapping[str, Any], if_revision: Collection[str] | None
    ) -> Manifest:
        """The manifest after a change of some fields."""
        while True:
            entry = self.reader.ready(cache_id, tenant)
            manifest = entry.manifest()
            checks.require_revision(manifest, if_revision)
            manifest = manifest.model_copy(update=changes)
            if {"expires_at", "guaranteed_until"} & changes.keys() and manifest.guaranteed_until is not None:
                checks.require_promise(manifest.guaranteed_until, manifest.expires_at, 0.0)
            if self._swapped(entry, manifest):  # else it was changed since it was looked up
                if manifest.has_source:
                    self.sources.claim(manifest)
                return manifest

    def _swapped(self, entry: Entry, manifest: Manifest) -> bool:
        """`Index.swap`. In Redis the chunks must outlive the manifest: extend their expiry first, and never shorten it,
        because another caller may be extending it."""
        old, new = entry.expires_at, manifest.expires_at
        if old is not None and (new is None or new > old):
            with self.reader.quarantining(entry):
                for name, nbytes in entry.needed():
                    self.blobs.keep_until(name, nbytes, new)
        return self.index.swap(entry, manifest, quota=self._rules.quota)

    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        now = self.clock()
        entry = self.index.touch(cache_id, tenant, now)
        while entry is not None and (renewed := self._renewed(entry, now)) is not None:
            if self._swapped(entry, renewed):
                return
            entry = self.index.find(cache_id, tenant)  # it was changed meanwhile

    def _renewed(self, entry: Entry, now: float) -> Manifest | None:
        """The manifest of an entry after a use, None if the use does not move its expiry."""
        if entry.expires_at is None or not entry.live(now):
            return None
        manifest = entry.manifest()
        if manifest.ttl_renew_s is None:
            return None
        until = now + min(manifest.ttl_renew_s, self._rules.max_ttl_s or math.inf)
        if until - entry.expires_at < RENEW_SHARE * manifest.ttl_renew_s:
            return None
        return manifest.model_copy(update={"expires_at": until})

    def delete(
        self,
        cache_id: str,
        *,
        tenant: str = "default",
        if_revision: Collection[str] | None = None,
        cascade: bool = False,
    ) -> types.Receipt:
        checks.require_id(cache_id)
        now = self.clock()
        descendants: list[str] = []
        freed = 0
        while True:
            entry = self.index.find(cache_id, tenant) if if_revision is None else self.reader.ready(cache_id, tenant)
            if entry is None or entry.state == "deleted":
                # Perhaps its tombstone was forgotten before its source, or a deletion was interrupted.
                freed += self._end_derived(cache_id, tenant)
                if not freed:
                    raise checks.not_found(cache_id)
                self.index.purge(at_once=False)
                return types.Receipt(id=cache_id, deleted_at=now, bytes_freed=freed, homes=(self.blobs.home,))
            if if_revision is not None:
                checks.require_revision(entry.manifest(), if_revision)
            for child in self._descendants(entry, now, cascade=cascade):
                if (nbytes := self._bury(child, now)) is not None:
                    descendants.append(child.id)
                    freed += nbytes
            if (nbytes := self._bury(entry, now)) is not None:
                self.index.purge(at_once=False)
                ids, homes = tuple(descendants), (self.blobs.home,)
                return types.Receipt(
                    id=cache_id, deleted_at=now, bytes_freed=freed + nbytes, homes=homes, descendants=ids
                )

    def erase(self, subject: Subject, *, dry_run: bool = False, limit_s: float | None = None) -> Erasure:
        return self.eraser(self).erase(subject, dry_run=dry_run, limit_s=limit_s)

    def eraser(self, store: Store) -> Eraser:
        """The eraser of this home. store: this one, or the one that has tiers in front of it."""
        parts = (self.index, self.bodies, self.files, self.batches, self.metering, self.blobs.home, self.clock)
        return Eraser(*parts, delete=store.delete, sweep=store.sweep)

    def _bury(self, entry: Entry, now: float) -> int | None:
        """Delete a cache and what is derived from it; returns the bytes freed, None if the cache was changed since."""
        if not housekeeping.bury(self.index, self.blobs, entry, "deleted", now):
            return None
        return entry.nbytes + self._end_derived(entry.id, entry.tenant)

    def _end_derived(self, cache_id: str, tenant: str) -> int:
        """Remove what is derived from a cache that is deleted; returns the bytes freed."""
        # A source that was not claimed yet has no owner.
        return self.bodies.end_owned(cache_id, tenant) + self.sources.remove(cache_id, tenant)

    def _descendants(self, entry: Entry, now: float, *, cascade: bool) -> Sequence[Entry]:
        """The stored caches that extend a cache, the deepest first, to be deleted before it; expired ones end here.
        Raises `CacheHasChildren` for live and corrupt ones without `cascade`."""
        children: dict[str, Entry] = {}
        parents = [entry]
        now = min(now, self._doubt.deadline())
        for parent in parents:  # which grows meanwhile
            for child in self.index.children(parent.id, parent.tenant):
                if child.id not in children:
                    children[child.id] = child
                    parents.append(child)
        stored = [child for child in reversed(children.values()) if child.stored]
        expired = {
            child.id
            for child in stored
            if child.expired(now) and housekeeping.bury(self.index, self.blobs, child, "expired", now)
        }
        stored = [child for child in stored if child.id not in expired]
        if stored and not cascade:
            raise checks.has_children(entry.id, len(stored))
        return stored

    # Housekeeping

    def sweep(self, now: float | None = None) -> types.Swept:
        now, doubt_s = (self._doubt.deadline(), self._doubt.seconds) if now is None else (now, 0.0)
        orphans = housekeeping.reclaim(self.index, self.blobs)
        every_s = self.blobs.walk_every_s
        if every_s is not None and time.monotonic() - self.walked_at >= every_s:
            self.walked_at = time.monotonic()
            orphans += housekeeping.remove_orphans(self.index, self.blobs, doubt_s)
        jobs = self.index.jobs
        self._settle_sources(now)
        housekeeping.release(self.index, now)
        expired = housekeeping.expire(self.index, self.blobs, now)  # and what they own is due, for the next lines
        swept = types.Swept(
            expired=expired,
            orphans=orphans,
            tombstones=self.index.forget(now - KEEP_ENDED_S),
            requests=jobs.forget("request", now),
            responses=jobs.forget("response", now),
            files=jobs.forget("file", now),
            batches=jobs.forget("batch", now),
            sources=jobs.forget("source", now),
            usage=jobs.forget("usage", now),
        )
        jobs.forget("erasure", now)
        housekeeping.reclaim(self.index, self.blobs)  # the bytes that the forgotten jobs held
        self.index.purge(at_once=True)
        return swept

    def _settle_sources(self, now: float) -> None:
        """A source that is due for removal has either lost its writer before the writer claimed it for a cache that
        names it, or its time is over, and its cache must say so."""
        for item in self.index.jobs.due_items("source", now):
            record = read(item, SourceRecord)
            entry = self.index.find(record.manifest.id, item.tenant)
            if record.claimed:
                housekeeping.disown(self.index, record)
            elif entry is not None and entry.state == "ready" and entry.manifest().source == record.manifest.source:
                self.sources.claim(entry.manifest())

    def drop_lone_sources(self) -> None:
        """Remove the sources whose caches are not here, as a tier must: nothing would tell it of their deletion."""
        for manifest in (record.manifest for record in self.sources.all()):
            entry = self.index.find(manifest.id, manifest.tenant)
            if entry is None or not entry.live(self.clock()):
                self.sources.remove(manifest.id, manifest.tenant)
        self.index.purge(at_once=True)

    def compact(self) -> int:
        count = 0
        full: set[str] = set()  # tenants; to read their other caches as well would be in vain
        for entry in self.index.spliced(_COMPACT_BASES, _COMPACT_BATCH):
            if entry.tenant in full:
                continue
            try:
                packed = self.get(entry.id, tenant=entry.tenant).pack()
                count += self._writer.swap(entry, blob_content(entry.id, packed), evict=False)
            except (errors.CacheNotFound, errors.CacheError):
                pass  # it ended meanwhile, or is corrupt
            except (errors.QuotaExceeded, errors.StorageFull) as error:
                log.warning("cache %s lies in %d files and stays there: %s", entry.id, len(entry.bases) + 1, error)
                full.add(entry.tenant)
        return count

    def usage(self, *, tenant: str | None = None) -> StoredUsage:
        return self.index.usage(tenant)

    def health(self) -> Health:
        self.index.usage(None)
        return self.blobs.health()

    def check(self) -> Sequence[str]:
        return housekeeping.problems(self.index, self.blobs)

    def scrub(self) -> Iterator[types.Scrubbed]:
        for entry in self.index.stored():
            problem = entry.problem if entry.state == "corrupt" else self._read_through(entry)
            if problem != _GONE:
                yield _scrubbed(entry, problem)
        for record in self.sources.all():
            problem = _problem(partial(self.sources.read, record))
            if problem is not None:
                yield _scrubbed(record, problem)

    def _read_through(self, entry: Entry) -> str | None:
        """The problem of a cache, None if it is sound, `_GONE` if it ended meanwhile."""
        try:
            self.open_blob(entry.id, tenant=entry.tenant).close()
            self.open_cache(entry.id, tenant=entry.tenant).close()
        except errors.KvshelfError as error:
            return _GONE if error.code in ("cache_not_found", "cache_expired") else error.message
        return None

    def reseal(self) -> Iterator[types.Scrubbed]:
        """Rewrite every cache and source that is not sealed with the keyring's first key; without a keyring, every one
        that is sealed. Manifests stay as they are. An interrupted run continues where it stopped."""
        for entry in self.index.stored():
            if entry.state == "ready" and not self._writer.would_seal_alike(*entry.needed()):
                yield _scrubbed(entry, self._seal_anew(entry))
        for record in self.sources.all():
            if not self._writer.would_seal_alike((record.body.name, record.body.stored_bytes)):
                yield _scrubbed(record, _problem(partial(self.sources.seal_anew, record)))

    def _seal_anew(self, entry: Entry) -> str | None:
        """Returns the problem, None if there was none or the cache ended meanwhile."""
        try:
            for _ in range(_ROUNDS):
                with ExitStack() as parent, suppress(BasesGone):
                    if self._writer.swap(entry, self._content(entry, parent)):
                        return None
                entry = self.reader.ready(entry.id, entry.tenant)  # it was changed meanwhile
        except errors.KvshelfError as error:
            return None if error.code in ("cache_not_found", "cache_expired") else error.message
        return f"it was changed {_ROUNDS} times while it was sealed anew; try again when it is at rest"

    def _content(self, entry: Entry, opened: ExitStack) -> Content:
        """The blob of a cache, read and verified: without its parent's bytes if the parent is sealed anew already. The
        parent stays open in `opened`."""
        packed = self.get(entry.id, tenant=entry.tenant).pack()
        parent_id = entry.parent_id if entry.bases else None
        parent = None if parent_id is None else self.index.find(parent_id, entry.tenant)
        if parent is None or parent.state != "ready" or not self._writer.would_seal_alike(*parent.needed()):
            parent_id = None
        return self._blob_content(entry.id, packed, parent_id, entry.tenant, opened)


_ROUNDS: Final = 10

_COMPACT_BASES = 8
"""A cache with so many bases is written anew: in object storage, each costs a request of its own."""

_COMPACT_BATCH = 1000

_GONE = "gone"


def _scrubbed(what: Entry | SourceRecord, problem: str | None) -> types.Scrubbed:
    if isinstance(what, SourceRecord):
        manifest, nbytes = what.manifest, what.body.stored_bytes
        return types.Scrubbed(id=manifest.id, tenant=manifest.tenant, bytes=nbytes, problem=problem)
    return types.Scrubbed(id=what.id, tenant=what.tenant, bytes=what.nbytes, problem=problem)


def _problem(act: Callable[[], object]) -> str | None:
    """The message of an action's error, None if there was none."""
    try:
        act()
    except errors.KvshelfError as error:
        return error.message
    return None
