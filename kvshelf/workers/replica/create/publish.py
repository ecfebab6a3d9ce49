"""Publishing: finds the caches of a creation on the shelf and puts new ones there. Blocks; for threads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final, Literal

from kvshelf.api import AppendCache, CertifiedBy, CreateCache, Timings, Tried
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.quality import VERSION
from kvshelf.errors import CacheError, CacheNotFound, EtagMismatch, InvalidRequest, StateConflict
from kvshelf.store.base import Store
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.types import Source
from kvshelf.workers.replica.create.auto import AutoChoice, PolicyChoice
from kvshelf.workers.replica.create.existing import as_requested
from kvshelf.workers.replica.create.recreation import Recreation
from kvshelf.workers.replica.create.spec import source_of


@dataclass(frozen=True)
class Publisher:
    """The store as one creation uses it. ids: of its levels' caches, whether they are stored or not. parent: the cache
    that the document is appended to, if it is. source: to be kept with each, for `source_ttl_s`. certificate: by which
    the level is chosen."""

    store: Store
    tenant: str
    spec: CreateCache | AppendCache
    ids: tuple[str, ...]
    parent: Manifest | None = None
    source: Source | None = None
    source_ttl_s: float | None = None
    certificate: CertifiedBy | None = None

    @classmethod
    def of(
        cls,
        store: Store,
        tenant: str,
        spec: CreateCache | AppendCache,
        levels: Sequence[Level],
        parent: Manifest | None = None,
        certificate: CertifiedBy | None = None,
    ) -> Publisher:
        """Raises `InvalidRequest` for an unknown codec, and for a source that would live too long."""
        ids = tuple(store.cache_id(level.identity, tenant=tenant, codec=level.codec) for level in levels)
        source = source_of(spec, levels[0].job.document)
        source_ttl_s = spec.source_ttl_s if isinstance(spec, CreateCache) else None
        try:
            store.expiry(source_ttl_s, None)
        except InvalidRequest as error:
            raise InvalidRequest(f"source_{error.message}", param="source_ttl_s") from error
        if isinstance(spec, Recreation):
            certificate = certificate or spec.judged.certificate
        return cls(store, tenant, spec, ids, parent, source, source_ttl_s, certificate)

    @property
    def floor(self) -> float | None:
        """The quality that was asked for: no ladder goes below it."""
        if isinstance(self.spec, Recreation) and self.spec.min_quality is None:
            return self.spec.judged.min_quality
        return getattr(self.spec, "min_quality", None)

    def on_shelf(self) -> dict[str, Manifest]:
        """The caches on the shelf, by id, without expired and corrupt ones, which `put` replaces."""
        manifests: dict[str, Manifest] = {}
        for cache_id in self.ids:
            with suppress(CacheNotFound, CacheError):
                manifests[cache_id] = self.store.stat(cache_id, tenant=self.tenant)
        return manifests

    def known(
        self, selection: PolicyChoice, shelf: Mapping[str, Manifest], refused: Mapping[str, Tried]
    ) -> Manifest | None:
        """The cache on the shelf that a selection would choose, or None if that is not known.

        There are three sources: the qualities of the caches themselves, the levels tried when one of them was chosen,
        and the levels `refused` before. They are not mixed, because they count bytes differently. None says
        anything of a cache that a ladder has coded smaller: it is made again. Raises as `PolicyChoice.run` does if no
        level is good enough.
        """
        measured = {cache_id: _measured(manifest) for cache_id, manifest in shelf.items()}
        recoded = {cache_id for cache_id, manifest in shelf.items() if manifest.recoded is not None}
        for source in (measured, *(_tried(manifest) for manifest in shelf.values()), refused):
            chosen = selection.known([None if cache_id in recoded else source.get(cache_id) for cache_id in self.ids])
            for cache_id, level in zip(self.ids, selection.levels, strict=True):
                if level is chosen and cache_id in shelf.keys() - recoded:
                    return shelf[cache_id]
        return None

    def put(self, choice: AutoChoice, queue_s: float) -> Manifest:
        """Store a level, with all levels that were tried, so that the same choice need not be made again. A cache that
        was on the shelf gets the new measurements. Raises as `Store.put` does."""
        level, compression = choice.level, choice.compression
        self._require_parent()
        # A level that was dropped before any work has no id.
        pairs = zip(chain(self.ids, repeat(None)), choice.tried, strict=False)
        tried = tuple(outcome.model_copy(update={"cache_id": cache_id}) for cache_id, outcome in pairs)
        judged = Judgement(
            quality=compression.quality, tried=tried, certificate=self.certificate, min_quality=self.floor
        )
        if level.transforms is not None:
            self.store.transforms.keep(level.transforms.digest, level.transforms.data)
        manifest = self.store.put(
            compression.cache,
            codec=level.codec,
            tenant=self.tenant,
            ttl_s=self.spec.ttl_s,
            expires_at=self.spec.expires_at,
            ttl_renew_s=self.spec.ttl_renew_s,
            guaranteed_until=getattr(self.spec, "guaranteed_until", None),
            labels=self.spec.labels,
            name=self.spec.name or ("" if self.parent is None else name_behind(self.parent, "append")),
            timings=Timings(queue_s=queue_s, prefill_s=compression.prefill_s, compress_s=compression.compress_s),
            source=self.source,
            source_ttl_s=self.source_ttl_s,
            judged=judged,
            parent_id=None if self.parent is None else self.parent.id,
        )
        # Another process may have put it meanwhile.
        digest = manifest.blob_digest
        manifest = as_requested(self.store, manifest, labels=self.spec.labels, name=self.spec.name)
        return self._judged(manifest, judged, digest)

    def _require_parent(self) -> None:
        """Raises `StateConflict` if the parent has another blob than the one that was appended to, as after a ladder:
        what names the former one as its parent would be found behind no cache."""
        with suppress(CacheNotFound, CacheError):  # without its parent a cache is whole, too
            if self.parent is not None:
                parent = self.store.stat(self.parent.id, tenant=self.tenant)
                if parent.blob_digest != self.parent.blob_digest:
                    raise StateConflict(f"cache {parent.id} was coded anew while it was appended to; append again")

    def _judged(self, manifest: Manifest, judged: Judgement, digest: str) -> Manifest:
        """A stored cache with what is known of it now. digest: of the blob of which the quality is known; a ladder may
        have put another one in its place."""
        while True:
            if manifest.blob_digest != digest:
                judged = judged.model_copy(update={"quality": None})
            before = Judgement(**{name: getattr(manifest, name) for name in Judgement.model_fields})
            newest = Judgement(**{name: getattr(judged, name) or value for name, value in before})
            floors = [floor for floor in (before.min_quality, judged.min_quality) if floor is not None]
            newest = newest.model_copy(update={"min_quality": max(floors, default=None)})
            if newest == before:
                return manifest
            try:
                keep = self.store.keep_judgement
                return keep(manifest.id, newest, tenant=self.tenant, if_revision=[manifest.revision])
            except EtagMismatch:  # it was changed since it was read
                manifest = self.store.stat(manifest.id, tenant=self.tenant)

    def as_asked(self, manifest: Manifest) -> Manifest:
        """An existing cache with what this request adds: labels, a name, a later expiry, a certificate, a kept source
        or more time for it."""
        spec = self.spec
        manifest = as_requested(self.store, manifest, labels=spec.labels, name=spec.name, lifetime=spec)
        judged = Judgement(certificate=self.certificate, min_quality=self.floor)
        manifest = self._judged(manifest, judged, manifest.blob_digest)
        if self.source is not None:
            keep = self.store.keep_source
            manifest = keep(manifest.id, self.source, tenant=manifest.tenant, ttl_s=self.source_ttl_s)
        return manifest


_SHORT_ID: Final = len("kvs_") + 8
_MOST_NAME: Final = 256
"""Characters, as of a request's `name`."""
_GROWN: Final = re.compile(r"(.*), (append|turn) ([1-9]\d{0,5})", re.DOTALL)


def name_behind(parent: Manifest, kind: Literal["append", "turn"]) -> str:
    """The name of a cache behind another one, where nobody gives it one: `report.txt, turn 1`, then `report.txt, turn
    2`."""
    name, number = parent.name or parent.id[:_SHORT_ID], 1
    if (grown := _GROWN.fullmatch(name)) and grown[2] == kind:
        name, number = grown[1], int(grown[3]) + 1
    added = f", {kind} {number}"
    return name[: _MOST_NAME - len(added)] + added


def lifetime_of(manifest: Manifest) -> dict[str, Any]:
    """The fields of a creation that give a cache the lifetime of one that was just used."""
    if manifest.ttl_renew_s is None:
        return {"expires_at": manifest.expires_at}
    return {"ttl_s": manifest.ttl_renew_s, "ttl_renew": True}


def _measured(manifest: Manifest) -> Tried:
    """A stored cache as a level that was tried."""
    return comparable(
        Tried(
            policy=manifest.policy,
            compression_ratio=manifest.compression_ratio,
            codec=manifest.codec,
            bytes=manifest.bytes_stored,
            quality=manifest.quality,
        )
    )


def _tried(manifest: Manifest) -> dict[str, Tried]:
    """The levels that were tried when this cache was chosen, by the ids of their caches."""
    return {tried.cache_id: comparable(tried) for tried in manifest.tried if tried.cache_id is not None}


def comparable(tried: Tried) -> Tried:
    """The level, without its quality if another version measured it: such numbers do not compare."""
    if tried.quality is None or tried.quality.version == VERSION:
        return tried
    return tried.model_copy(update={"quality": None})
