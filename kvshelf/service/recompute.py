"""A query as the service processes it, with the caches that it may recompute from a kept source."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from kvshelf.api import CreateCache, Message, Query
from kvshelf.errors import (
    CacheCorrupt,
    CacheError,
    CacheExpired,
    Forbidden,
    KvshelfError,
    ModelMismatch,
    SourceNotKept,
)
from kvshelf.service.access.keys import Caller
from kvshelf.service.http.errors import miss_reason
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.state import Service
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.policies import POLICIES
from kvshelf.workers.replica.results import Reply

UNUSABLE: Final = (CacheCorrupt, CacheExpired, ModelMismatch)
"""Errors of a cache that is or was on the shelf and cannot be used."""

FULL_TTL_S: Final = 600.0
"""Seconds to keep a full cache made for a comparison, so that the next comparisons do not prefill again."""

_SAME_DOCUMENT = ("model", "document", "layout", "boundary")


@dataclass(frozen=True)
class Question:
    """A query, its cache, and the cache's kept source if the query may need it: text, or messages as JSON.

    The source is read before the cache, even if the cache is known to be corrupt: its bytes are checked separately.
    """

    service: Service
    caller: Caller
    query: Query
    manifest: Manifest
    source: str | None = None

    @classmethod
    async def find(cls, service: Service, caller: Caller, cache_id: str, query: Query) -> Question:
        """Look up the cache. Raises as `Store.stat` does; if the query may recompute the cache, `SourceNotKept` for a
        cache that was lost together with its source."""
        store, tenant, recompute = service.store, caller.tenant, query.on_miss == "recompute"
        if not (query.compare or recompute):
            with service.metrics.asking():
                return cls(service, caller, query, await off_loop(store.stat, cache_id, tenant=tenant))
        if "write" not in caller.scopes:
            raise Forbidden("on_miss: recompute and compare may store caches; they need a key with the scope 'write'")
        try:
            with service.metrics.asking():
                manifest, source = await off_loop(_found, store, cache_id, tenant, recompute=recompute)
        except CacheError as miss:
            if not recompute:
                raise
            raise _lost(miss) from miss
        return cls(service, caller, query, manifest, source)

    async def answers(self, manifest: Manifest) -> list[Reply]:
        """The answers of one cache."""
        engine, deadline_s = self.service.engine_for(manifest), self.service.settings.request_deadline_s
        return await engine.query(manifest.id, self.query, tenant=self.caller.tenant, deadline_s=deadline_s)

    def stream(self, manifest: Manifest) -> AsyncGenerator[str | Reply, None]:
        """The one answer of a cache in pieces, and then as a whole."""
        engine, deadline_s = self.service.engine_for(manifest), self.service.settings.request_deadline_s
        return engine.stream(manifest.id, self.query, tenant=self.caller.tenant, deadline_s=deadline_s)

    async def again(self, miss: KvshelfError) -> Manifest:
        """Compress the document again after a miss, with the same parameters. A changed model gives another cache id.

        Raises the miss itself if the query does not ask for this.
        """
        if self.query.on_miss == "error":
            raise miss
        if self.source is None:
            raise _lost(miss) from miss
        made = await self._create(self._spec(self.source))
        if self.manifest.pinned and not made.pinned:
            update = self.service.store.update
            made = await off_loop(update, made.id, tenant=self.caller.tenant, pinned=True)
        return made

    async def full(self) -> Manifest:
        """The full cache of the document: from the shelf, or compressed now and kept for `FULL_TTL_S`."""
        found = await self._stored_full()
        if found is not None:
            return found
        if self.source is None:
            raise SourceNotKept(
                f"to compare, cache {self.manifest.id} needs a cache of the same document with the policy full and the "
                "codec none on the shelf, or its own source; create it with keep_source",
                param="compare",
            )
        again = self._spec(self.source)
        full = CreateCache.model_construct(
            document=again.document, messages=again.messages, layout=again.layout, policy="full", ttl_s=FULL_TTL_S
        )
        return await self._create(full)

    async def _stored_full(self) -> Manifest | None:
        document_id = self.manifest.document_id
        listing = self.service.store.list
        page = await off_loop(listing, tenant=self.caller.tenant, document_id=document_id, policy="full", limit=100)
        ours = self.manifest.identity
        for found in page.data:
            same = all(found.identity[field] == ours[field] for field in _SAME_DOCUMENT)
            if same and found.codec == "none":
                return found
        return None

    async def _create(self, spec: CreateCache) -> Manifest:
        engine = self.service.engine_for(self.manifest)
        deadline_s = self.service.settings.request_deadline_s
        spec = spec.model_copy(update={"model": engine.model})
        return (await engine.create(spec, tenant=self.caller.tenant, deadline_s=deadline_s)).manifest

    def _spec(self, source: str) -> CreateCache:
        """The creation that made the cache, with all the parameters it used: none is left to a default."""
        manifest, identity = self.manifest, self.manifest.identity
        takes_budget = POLICIES[manifest.policy].takes_budget if manifest.policy in POLICIES else True
        is_text = identity["boundary"] in ("text", "document")
        return CreateCache.model_construct(  # validated when it was a request
            document=source if is_text else None,
            messages=None if is_text else [Message(**message) for message in json.loads(source)],
            layout=identity["layout"],
            policy=manifest.policy,
            policy_params=manifest.policy_params,
            compression_ratio=manifest.compression_ratio if takes_budget else None,
            codec=manifest.codec,
            expected_questions=list(identity["expected_questions"]),
            ttl_s=None if manifest.expires_at is None else manifest.expires_at - manifest.created_at,
            name=manifest.name,
            labels=manifest.labels,
            keep_source=True,
        )


def _found(store: Store, cache_id: str, tenant: str, *, recompute: bool) -> tuple[Manifest, str | None]:
    try:
        manifest = store.stat(cache_id, tenant=tenant)
        return manifest, store.source(cache_id, tenant=tenant) if manifest.has_source else None
    except CacheCorrupt as miss:
        if not recompute:
            raise
        try:
            return store.original(cache_id, tenant=tenant)
        except SourceNotKept:
            raise miss from None


def _lost(miss: KvshelfError) -> SourceNotKept:
    return SourceNotKept(
        f"the cache cannot be made again, because its source was not kept or has gone with it; send the document "
        f"again. {miss.message}",
        param="on_miss",
        miss_reason=miss_reason(miss),
    )
