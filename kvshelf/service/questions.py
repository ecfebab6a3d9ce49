"""A question as the service processes it, with the caches that it may make again from their kept sources."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvshelf import errors
from kvshelf.api import Asking, CreateCache
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.queries import Remade
from kvshelf.api.strict import MissReason
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.service.access.keys import KeyCaller
from kvshelf.service.dialects.completions import require_model
from kvshelf.service.engines import EngineClient, each_alone, require_adapter
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.observe.questions import miss_reason
from kvshelf.service.service import Service
from kvshelf.service.workflows import ModelHints, hints_for
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import Source, TokenIds
from kvshelf.workers.replica.api import Created, Stored
from kvshelf.workers.replica.create.recreation import Recreation, document_fields, recreation
from kvshelf.workers.replica.create.spec import require_policy

UNUSABLE: Final = (errors.CacheCorrupt, errors.CacheExpired, errors.ModelMismatch)
"""Errors of a cache that is or was on the shelf and cannot be used."""

FULL_TTL_S: Final = 600.0
"""Seconds to keep a full cache made for a comparison, so that the next comparisons do not prefill again."""

_SAME_DOCUMENT = ("model", "document", "layout", "boundary")


@dataclass(frozen=True)
class AskedCache:
    """A cache of a question, and its kept source if the query may need it.

    requested_id: in the query. manifest: of the cache that answers. recomputed: why that one was made again, if it was.
    """

    requested_id: str
    manifest: Manifest
    source: Source | None = None
    recomputed: MissReason | None = None


@dataclass(frozen=True)
class CacheQuestion:
    """A question to one cache or to several together, and the engine that answers it."""

    service: Service
    caller: KeyCaller
    asking: Asking
    caches: tuple[AskedCache, ...]
    engine: EngineClient
    hints: ModelHints = field(default_factory=dict)

    @classmethod
    async def find(
        cls,
        service: Service,
        caller: KeyCaller,
        cache_ids: Sequence[str],
        asking: Asking,
        model: str | None = None,
        *,
        compare: bool = False,
    ) -> CacheQuestion:
        """Look up the caches. model: that the request names. Raises as `Store.stat`, `hints_for` and `require_model`
        do, `InvalidRequest` for caches of several models, and `ModelMismatch` for one of a model that nobody runs. If a
        cache may be made again, `Service.successor` makes it; `SourceNotKept` for one that was lost together with its
        source."""
        recompute = asking.on_miss == "recompute"
        service.engine(None, adapter=asking.adapter)  # one that is not served is refused before the store is asked
        if (compare or recompute or asking.store) and "write" not in caller.scopes:
            raise errors.Forbidden(
                "store, compare and on_miss: recompute may store caches; they need a key with the scope 'write'"
            )

        def look_up(cache_id: str) -> AskedCache:
            source = compare or recompute
            return _look_up(service.store, cache_id, caller.tenant, source=source, recompute=recompute)

        try:
            with service.metrics.asking():
                hints: ModelHints = {}
                if (at := asking.workflow) is not None:
                    hints = await off_loop(hints_for, service.store, at, asking.program, caller.tenant)
                    if "write" not in caller.scopes:  # as next_use_s of a PATCH
                        hints = {}
                caches = await off_loop(lambda: tuple(map(look_up, cache_ids)))
                engine = service.engine_for_all(
                    [cache.manifest for cache in caches],
                    lambda manifest: service.successor(manifest, asking.adapter) if recompute else None,
                )
                require_adapter(service.engines, service.identities, asking, cache_ids[0], engine.model)
        except errors.CacheError as miss:
            if not recompute:
                raise
            raise _lost(miss) from miss
        manifest = caches[0].manifest
        require_model(model, manifest.id, (manifest.model, engine.model, asking.adapter and engine.parent))
        return cls(service, caller, asking, caches, engine, hints)

    @property
    def cache_ids(self) -> list[str]:
        """The caches that answer."""
        return [cache.manifest.id for cache in self.caches]

    def _name_remade(self, answer: Answer) -> Answer:
        """The answer, which names the caches of the query that were made again."""
        remade = [
            Remade(cache_id=cache.requested_id, reason=cache.recomputed) for cache in self.caches if cache.recomputed
        ]
        return answer.also(remade=tuple(remade)) if remade else answer

    async def answered(self) -> tuple[CacheQuestion, list[Answer]]:
        """The answer to each prompt, and the question with the caches that gave them: some may have been made again."""
        question, caller = self, self.service.within(self.caller)
        while True:
            try:
                answers = await self.engine.query(
                    question.cache_ids, self.asking, caller=caller, on_turn=self._foretell
                )
                return question, list(map(question._name_remade, answers))
            except UNUSABLE as miss:
                question = await question.again(miss)

    async def pieces(self) -> AsyncGenerator[Piece | Answer, None]:
        """The one answer in pieces, and then as a whole. No cache is made again once a piece is there."""
        question, caller, begun = self, self.service.within(self.caller), False
        while True:
            pieces = self.engine.stream(question.cache_ids, self.asking, caller=caller, on_turn=self._foretell)
            try:
                async with aclosing(pieces):
                    async for piece in pieces:
                        begun = True
                        yield question._name_remade(piece) if isinstance(piece, Answer) else piece
                return
            except UNUSABLE as miss:
                if begun:
                    raise
                question = await question.again(miss)

    def each_alone(self) -> list[CacheQuestion]:
        """A question for each answer of this one. The first tells what is asked next."""
        first, *others = each_alone(self.asking)
        return [replace(self, asking=first), *(replace(self, asking=asking, hints={}) for asking in others)]

    def _foretell(self) -> None:
        """Tell replicas what the question's workflow asks next, while they answer: not before its turn, when it could
        still be refused, and other questions need the memory."""
        for model, hints in self.hints.items():
            if model in self.service.engines:
                self.service.engines[model].foretell(hints, caller=self.caller.within(None))

    async def again(self, miss: errors.KvshelfError) -> CacheQuestion:
        """The question with the cache of this miss compressed again, with the same parameters. A changed model gives
        another cache id, and nothing else does.

        Raises the miss itself if the query does not ask for this, if the cache has been made again already, or if token
        ids are those of another tokenizer. `ModelMismatch` if another cache came out.
        """
        at = self._missed(miss)
        cache = self.caches[at]
        if self.asking.on_miss == "error" or cache.recomputed:
            raise miss
        if cache.source is None:
            raise _lost(miss) from miss
        stored = await _make_again(self.service, self.caller, self.engine, cache, miss)
        cache = replace(cache, manifest=stored.manifest, recomputed=miss_reason(miss))
        return replace(self, caches=(*self.caches[:at], cache, *self.caches[at + 1 :]))

    def _missed(self, miss: errors.KvshelfError) -> int:
        """The place of the cache that a miss is about. Of several, a replica names it; otherwise raises the miss."""
        if len(self.caches) == 1:
            return 0
        if (named := miss.details.get("cache_id")) not in self.cache_ids:
            raise miss
        return self.cache_ids.index(named)

    async def full_answers(self) -> list[Answer]:
        """The answer of the full cache of the one document to each prompt. That cache is on the shelf, or it is
        compressed now and kept for `FULL_TTL_S`."""
        (cache,), caller = self.caches, self.service.within(self.caller)
        full_cache = await self._stored_full(cache.manifest)
        if full_cache is None:
            if cache.source is None or _is_linked(self.service, self.engine, cache.manifest):
                raise errors.SourceNotKept(
                    f"to compare, cache {cache.manifest.id} needs a cache of the same document with the policy full "
                    "and the codec none on the shelf, made by the same weights, or its own source where these weights "
                    "are served; create it with keep_source",
                    param="compare",
                )
            fields = document_fields(cache.manifest, cache.source)
            spec = Recreation.model_construct(**fields, policy="full", ttl_s=FULL_TTL_S, model=self.engine.model)
            full_cache = (await self.engine.create(spec, caller=caller)).manifest
        return await self.engine.query([full_cache.id], self.asking, caller=caller)

    async def _stored_full(self, manifest: Manifest) -> Manifest | None:
        criteria = {"document_id": manifest.document_id, "policy": "full", "limit": 100}
        page = await off_loop(self.service.store.list, tenant=self.caller.tenant, **criteria)
        for candidate in page.data:
            same = all(candidate.identity[field] == manifest.identity[field] for field in _SAME_DOCUMENT)
            if same and candidate.codec == "none":
                return candidate
        return None


async def remade(service: Service, caller: KeyCaller, cache_id: str, model: str | None) -> Stored:
    """The cache of the same document under a served model, made from the kept source with the same parameters. A cache
    of that model is its own. The source is kept for the new one, too.

    Raises as `Store.stat` and `Store.source`, `SourceNotKept` for one that was appended, and `ModelMismatch` for token
    ids of another tokenizer.
    """
    engine = service.engine(model)
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    try:
        service.identities[engine.model].unlinked.require_match(ModelIdentity(**manifest.identity["model"]))
        return Stored(manifest, existing=True)
    except errors.ModelMismatch as other:
        cache = await off_loop(_look_up, service.store, cache_id, caller.tenant, source=True, recompute=False)
        if cache.source is None:
            raise errors.SourceNotKept(
                f"cache {cache_id} cannot be made under {engine.model!r}, because its source is not kept, or it was "
                "appended to another; send the document again",
                param="cache_id",
            ) from other
        return await _make_again(service, caller, engine, cache, other)


async def _make_again(
    service: Service, caller: KeyCaller, engine: EngineClient, cache: AskedCache, miss: errors.KvshelfError
) -> Stored:
    """Compress the cache of a miss again from its source, by the engine's model. Raises as `CacheQuestion.again`."""
    assert cache.source is not None
    moved = isinstance(miss, errors.ModelMismatch) or _is_linked(service, engine, cache.manifest)
    if moved and isinstance(cache.source, TokenIds):
        ours, theirs = service.identities[engine.model], cache.manifest.identity["model"]
        if (ours.tokenizer, ours.template) != (theirs["tokenizer"], theirs["template"]):
            raise miss
    spec = recreation(cache.manifest, cache.source, keep=moved, now=service.store.now()).model_copy(
        update={"model": engine.model}
    )
    created = await engine.create(spec, caller=service.within(caller))
    manifest = created.manifest
    if manifest.id != cache.requested_id and not moved:
        raise errors.ModelMismatch(
            f"from the source of cache {cache.requested_id} this version of kvshelf makes another cache, "
            f"{manifest.id}: its policy or format is another one now. Ask that one instead",
            param="cache_id",
            cache_id=cache.requested_id,
        )
    promises: dict[str, Any] = {"pinned": True} if cache.manifest.pinned and not manifest.pinned else {}
    until = cache.manifest.guaranteed_until
    if until is not None and until > service.store.now() and not manifest.guaranteed_until:
        promises["guaranteed_until"] = until
    if promises:
        manifest = await off_loop(service.store.update, manifest.id, tenant=caller.tenant, **promises)
    return Stored(manifest, created.existing)


def _is_linked(service: Service, engine: EngineClient, manifest: Manifest) -> bool:
    """Whether the engine's model asks a cache that other weights made, by a link."""
    return service.identities[engine.model].links(ModelIdentity(**manifest.identity["model"]))


def _look_up(store: Store, cache_id: str, tenant: str, *, source: bool, recompute: bool) -> AskedCache:
    """source: whether the kept source is read, too: now, before the cache is. recompute: whether a lost cache may be
    made again from it."""
    try:
        manifest = store.stat(cache_id, tenant=tenant)
    except (errors.CacheCorrupt, errors.CacheExpired) as miss:
        if not recompute:
            raise
        try:
            manifest, kept = store.original(cache_id, tenant=tenant)
        except errors.SourceNotKept:
            raise miss from None
        if not _is_whole(manifest):
            raise
        return AskedCache(cache_id, manifest, kept)
    with suppress(errors.SourceNotKept):  # it is damaged, or its time is over
        if source and _is_whole(manifest):
            return AskedCache(cache_id, manifest, store.source(cache_id, tenant=tenant))
    return AskedCache(cache_id, manifest)


def _is_whole(manifest: Manifest) -> bool:
    """Whether the kept source is all of the cache's document, and not what was appended to another cache."""
    return manifest.has_source and not manifest.identity["parent"]


def _lost(miss: errors.KvshelfError) -> errors.SourceNotKept:
    return errors.SourceNotKept(
        f"the cache cannot be made again, because its source was not kept, or not so long; send the document again. "
        f"{miss.message}",
        param="on_miss",
        miss_reason=miss_reason(miss),
    )


async def beginning(service: Service, caller: KeyCaller, spec: CreateCache, *, needs: Asking | None) -> Created:
    """The cache of a conversation's beginning: it is on the shelf, or this request makes it. needs: what is asked
    behind it, where the model may be unable to do that; then this is refused before a cache is made."""
    caller.require("write")
    require_policy(spec)
    engine = service.engine(spec.model, errors.NotFound, adapter=spec.adapter)
    if needs is not None:
        await engine.count(needs, None, "document", {}, caller=service.within(caller))
    return await engine.create(spec, caller=service.within(caller))
