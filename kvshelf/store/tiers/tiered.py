"""Tiers in front of a home: local copies make reads faster and bridge an outage of the home.

The home is authoritative. Every read asks it for the manifest first, one round trip that reveals expiry and deletion;
only the bytes come from a copy of the same blob. A copy's own manifest counts in three cases:

    the home cannot be reached          reads are answered from copies
    the home has lost everything        (its incarnation changed) it gets back the copies that it does not know
    the home's blob is corrupt          it gets back a good one

A failing tier is logged; the home answers instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from kvshelf import errors
from kvshelf.api.caches import Erasure
from kvshelf.store.base import Store
from kvshelf.store.blobs import Health
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.tiers import Tier, Tiers
from kvshelf.store.types import BlobFile, Receipt, Scrubbed, Source, Swept

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

log = logging.getLogger("kvshelf.store")

_Word = Literal["live", "lost", "away"]
"""The home's answer about a cache: it has the cache; it lost or damaged the cache; it cannot be reached."""


class _Lost(errors.CacheNotFound):
    """The home lost everything and does not know this cache; it may have had it before."""


def _at_home(call: Callable[Concatenate[Store, P], ResultT]) -> Callable[Concatenate[TieredStore, P], ResultT]:
    """The call of the home as the store's own."""

    @wraps(call)
    def method(self: TieredStore, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        answer: ResultT = getattr(self.home, call.__name__)(*args, **kwargs)
        return answer

    return method


class TieredStore(Store):
    """See `Store` for the contract. Each process opens its own; all of them may share the home and a disk tier."""

    def __init__(self, home: Shelf, tiers: Sequence[Tier]) -> None:
        """tiers: fastest first. This store closes the home and the tiers."""
        self.requests = home.requests
        self.files = home.files
        self.responses = home.responses
        self.transforms = home.transforms
        self.certificates = home.certificates
        self.workflows = home.workflows
        self.links = home.links
        self.batches = home.batches
        self.metering = home.metering
        self.ladder = home.ladder
        self.home = home
        self.tiers = Tiers(tiers)
        self._giving_back = threading.Lock()
        for tier in tiers:
            with self.tiers.tolerant(tier):
                if not tier.noted():
                    tier.note(home.incarnation)

    def close(self) -> None:
        with ExitStack() as closing:  # closes all of them even if one raises; the home last
            closing.callback(self.home.close)
            for tier in self.tiers.all:
                closing.callback(tier.close)

    # Reading

    def stat(self, cache_id: str, *, tenant: str = "default") -> Manifest:
        return self._look_up(cache_id, tenant)[0]

    def open_cache(self, cache_id: str, *, tenant: str = "default") -> ArrivingCache:
        return self._open(*self._look_up(cache_id, tenant))

    def open_parts(self, cache_id: str, *, tenant: str = "default") -> PartialCache:
        """As `Store.open_parts`, without a copy to the tiers. A damaged copy in memory is dropped and raises
        `CacheCorrupt`, because records are views of it: open the cache again."""
        return self._open_parts(*self._look_up(cache_id, tenant))

    def open_blob(self, cache_id: str, *, tenant: str = "default") -> BlobFile:
        manifest, _ = self._look_up(cache_id, tenant)
        return self.tiers.first(lambda tier: tier.open_blob(manifest)) or self.home.open_blob(cache_id, tenant=tenant)

    def source(self, cache_id: str, *, tenant: str = "default") -> Source:
        manifest, _ = self._look_up(cache_id, tenant)
        source = self.tiers.source(manifest)
        if source is None:
            source = self.home.source(cache_id, tenant=tenant)
            self.tiers.keep_source(manifest, source)
        return source

    def original(self, cache_id: str, *, tenant: str = "default") -> tuple[Manifest, Source]:
        try:
            return self.stat(cache_id, tenant=tenant), self.source(cache_id, tenant=tenant)
        except errors.CacheError:  # it is gone, or corrupt here and in all tiers
            return self.home.original(cache_id, tenant=tenant)

    def _look_up(self, cache_id: str, tenant: str) -> tuple[Manifest, _Word]:
        """The manifest of a readable cache, from a copy if necessary."""
        try:
            return self._ask_home(cache_id, tenant), "live"
        except (errors.StoreUnavailable, errors.CacheNotFound, errors.CacheError) as error:
            copy = self._stand_in(cache_id, tenant, error)
            return copy, "away" if isinstance(error, errors.StoreUnavailable) else "lost"

    def _ask_home(self, cache_id: str, tenant: str) -> Manifest:
        """As `Shelf.stat`; raises `_Lost` for a cache that the home may have had before it lost everything."""
        try:
            return self.home.stat(cache_id, tenant=tenant)
        except errors.CacheNotFound:
            if not self._older_than_home():
                raise
        remembered = self.home.remembers(cache_id, tenant=tenant)
        try:
            return self.home.stat(cache_id, tenant=tenant)  # another process may have given it back by now
        except errors.CacheNotFound as error:
            if remembered:
                raise  # it was deleted since
            raise _Lost(error.message, param=error.param) from error

    def _stand_in(self, cache_id: str, tenant: str, error: errors.KvshelfError) -> Manifest:
        """The manifest of a copy that counts although the home raised `error`; without such a copy, raises `error`."""
        witnesses: Sequence[Tier] = self._older_than_home() if isinstance(error, _Lost) else ()
        if isinstance(error, errors.StoreUnavailable | errors.CacheCorrupt):
            witnesses = self.tiers.all
        recent = not isinstance(error, errors.CacheCorrupt)
        copy = self.tiers.first(lambda tier: tier.find(cache_id, tenant, recent=recent), witnesses)
        if copy is not None:
            return copy
        if not isinstance(error, errors.StoreUnavailable):
            self.tiers.drop(cache_id, tenant)
        raise error

    def _older_than_home(self) -> Sequence[Tier]:
        """The tiers that have copies from before the home lost everything."""
        noted = self.tiers.call_all(lambda tier: tier.noted())
        return [tier for tier, incarnation in noted if incarnation not in ("", self.home.incarnation)]

    def _open(self, manifest: Manifest, word: _Word, first: int = 0) -> ArrivingCache:
        """Open a manifest's blob in the first tier that has it, from tier `first` on, or at home. word: see `_Word`."""
        for index, tier in enumerate(self.tiers.all[first:], first):
            with self.tiers.tolerant(tier):
                if word == "live":
                    tier.confirm(manifest)
                arriving = tier.open_cache(manifest)
                if arriving is not None:
                    arriving.place = tier.name
                    arriving.elsewhere = partial(self._open, manifest, word, index + 1)
                    if word == "lost" or (word == "live" and index):
                        arriving.on_read = partial(self._share, manifest, self.tiers.all[:index])
                    return arriving
        arriving = self.home.open_cache(manifest.id, tenant=manifest.tenant)
        arriving.on_read = partial(self._share, manifest, self.tiers.all)
        return arriving

    def _open_parts(self, manifest: Manifest, word: _Word, first: int = 0) -> PartialCache:
        for index, tier in enumerate(self.tiers.all[first:], first):
            with self.tiers.tolerant(tier):
                if word == "live":
                    tier.confirm(manifest)
                parts = tier.open_parts(manifest)
                if parts is not None:
                    parts.place = tier.name
                    parts.elsewhere = partial(self._open_parts, manifest, word, index + 1)
                    return parts
        return self.home.open_parts(manifest.id, tenant=manifest.tenant)

    def _share(self, manifest: Manifest, tiers: Sequence[Tier], cache: CompressedCache) -> None:
        """After a read or a write: copy the cache to `tiers`, and to the home if the home has lost it."""
        self.tiers.call_all(lambda tier: tier.keep(manifest, cache), tiers)
        # Look it up again: a caller may have deleted the cache meanwhile, before there was a copy to drop.
        with suppress(errors.KvshelfError):  # the reader has its cache, and the next sweep tries again
            if self._look_up(manifest.id, manifest.tenant)[1] == "lost":
                self._give_back(manifest, cache)

    # Giving back

    def _give_back(self, manifest: Manifest, cache: CompressedCache) -> None:
        """Store a cache at home again, with its source if a tier has the source. Raises as `Shelf.adopt` does."""
        with self._giving_back:  # one at a time: many threads notice the loss at once
            source = self.tiers.source(manifest)
            try:
                self._ask_home(manifest.id, manifest.tenant)
                return  # the home has the cache already
            except errors.CacheCorrupt:
                # The home's manifest counts: its labels, expiry or pin may be newer than the copy's.
                self.home.mend(cache, manifest.id, tenant=manifest.tenant)
            except _Lost:
                plain = manifest.model_copy(update={"source": None})
                self.home.adopt(cache, plain, parent_id=manifest.parent_id)
            if source is not None and manifest.source is not None:
                until = manifest.source.expires_at
                self.home.keep_source(manifest.id, source, tenant=manifest.tenant, expires_at=until)
            log.info("gave cache %s back to its home", manifest.id)

    def _insist(self, cache_id: str, tenant: str, call: Callable[[], ResultT]) -> ResultT:
        """Call the home about one cache. If the home lost the cache and a tier has a copy, first give it back."""
        try:
            return call()
        except (errors.CacheNotFound, errors.CacheError):
            manifest, word = self._look_up(cache_id, tenant)
        if word == "lost":
            with self._open(manifest, word) as arriving:
                arriving.on_read = None
                arriving.read()
                self._give_back(manifest, arriving.cache())
        return call()

    # Writing

    def put(
        self, cache: CompressedCache, *, codec: str = "none", source: Source | None = None, **fields: Any
    ) -> Manifest:
        encoded = cache.encoded(codec)
        manifest = self.home.put(encoded, codec=codec, source=source, **fields)
        self._share(manifest, self.tiers.all, encoded)
        if source is not None:
            self.tiers.keep_source(manifest, source)
        return manifest

    def keep_source(self, cache_id: str, source: Source, *, tenant: str = "default", **until: Any) -> Manifest:
        keep = partial(self.home.keep_source, cache_id, source, tenant=tenant, **until)
        manifest = self._insist(cache_id, tenant, keep)
        self.tiers.keep_source(manifest, source)
        return manifest

    def keep_judgement(self, cache_id: str, judged: Judgement, *, tenant: str = "default", **options: Any) -> Manifest:
        keep = partial(self.home.keep_judgement, cache_id, judged, tenant=tenant, **options)
        manifest = self._insist(cache_id, tenant, keep)
        self.tiers.confirm(manifest)
        return manifest

    def update(self, cache_id: str, *, tenant: str = "default", **changes: Any) -> Manifest:
        manifest = self._insist(cache_id, tenant, partial(self.home.update, cache_id, tenant=tenant, **changes))
        self.tiers.confirm(manifest)
        return manifest

    def delete(self, cache_id: str, *, tenant: str = "default", **how: Any) -> Receipt:
        receipt = self._insist(cache_id, tenant, partial(self.home.delete, cache_id, tenant=tenant, **how))
        for descendant in receipt.descendants:
            self.tiers.drop(descendant, tenant)
        return receipt.model_copy(update={"homes": (*receipt.homes, *self.tiers.drop(cache_id, tenant))})

    def erase(self, subject: Subject, *, dry_run: bool = False, limit_s: float | None = None) -> Erasure:
        receipt = self.home.eraser(self).erase(subject, dry_run=dry_run, limit_s=limit_s)
        return receipt.model_copy(update={"homes": [*receipt.homes, *(tier.name for tier in self.tiers.all)]})

    def touch(self, cache_id: str, *, tenant: str = "default") -> None:
        self.tiers.call_all(lambda tier: tier.touch(cache_id, tenant))
        self.home.touch(cache_id, tenant=tenant)

    # Housekeeping

    def sweep(self, now: float | None = None) -> Swept:
        """As `Store.sweep`. Also drops copies that the home no longer has, and gives back what it lost."""
        swept = self.home.sweep(now)
        self.tiers.call_all(self._compare)
        self.tiers.call_all(lambda tier: tier.sweep(now))  # last: it also empties the WAL of what was dropped
        return swept

    def _compare(self, tier: Tier) -> None:
        incarnation, all_compared = self.home.incarnation, True
        for copy in tier.manifests():
            stat = partial(self.home.stat, copy.id, tenant=copy.tenant)
            try:
                tier.confirm(self._insist(copy.id, copy.tenant, stat))
            except (errors.CacheNotFound, errors.CacheError):
                pass  # `_insist` has dropped its copies
            except errors.QuotaExceeded:
                all_compared = False  # other tenants may have quota left
            except errors.StoreError as error:
                log.warning("the copies of the %s tier were not all compared with the home: %s", tier.name, error)
                return
        if all_compared:
            tier.note(incarnation)

    def check(self) -> Sequence[str]:
        return [*self.home.check(), *self.tiers.problems()]

    def scrub(self) -> Iterator[Scrubbed]:
        """As `Store.scrub`. Repairs a corrupt cache at once if a tier has a good copy, and still reports it. Of the
        copies, only damaged ones are reported."""
        for scrubbed in self.home.scrub():
            if scrubbed.problem is not None:
                stat = partial(self.home.stat, scrubbed.id, tenant=scrubbed.tenant)
                with suppress(errors.KvshelfError):  # no good copy, or no repair: the problem is reported either way
                    self._insist(scrubbed.id, scrubbed.tenant, stat)
            yield scrubbed
        yield from self.tiers.scrub()

    # Answered by the home alone
    compact = _at_home(Store.compact)
    now = _at_home(Store.now)
    expiry = _at_home(Store.expiry)
    admit = _at_home(Store.admit)
    require_promise = _at_home(Store.require_promise)
    list = _at_home(Store.list)
    changes = _at_home(Store.changes)
    cache_id = _at_home(Store.cache_id)
    document_id = _at_home(Store.document_id)
    usage = _at_home(Store.usage)

    def health(self) -> Health:
        """As `Store.health`; a recent failure of a tier is a warning."""
        home = self.home.health()
        warnings = [f"the {name} tier does not work; caches come from the home" for name in self.tiers.failing()]
        return replace(home, warnings=(*home.warnings, *warnings))
