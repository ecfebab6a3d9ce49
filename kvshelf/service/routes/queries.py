"""/v1/caches/{id}/query: questions about a stored cache."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import AnswerDelta, AnswerList, AnswerObject, Comparison, Query
from kvshelf.service.access.keys import Caller, Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.errors import miss_reason
from kvshelf.service.http.events import event_stream
from kvshelf.service.recompute import UNUSABLE, Original
from kvshelf.service.state import TAKES_TOKENS, InService, Service, off_loop, until_hangup
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.results import Reply

router = APIRouter(prefix="/v1/caches", tags=["queries"], responses=openapi.ERRORS)


@router.post(
    "/{cache_id}/query",
    response_class=JSONResponse,
    responses=openapi.json_or_events(AnswerObject, AnswerList),
    openapi_extra=openapi.body_of(Query),
    dependencies=[TAKES_TOKENS],
)
async def query(cache_id: str, request: Request, service: InService, caller: Reader) -> Response:
    """Answer one or more prompts from a stored cache, without prefilling its document again."""
    body = await read_json(request, Query, service.settings)
    asking = await _Asking.begin(service, caller, cache_id, body)
    if body.stream:
        return await event_stream(request, asking.events())
    answers = await until_hangup(request, asking.answers())
    if isinstance(body.prompt, list):
        return JSONResponse({"object": "list", "data": [_wire(answer) for answer in answers]})
    return JSONResponse(_wire(answers[0]))


class _Asking:
    """One query. `original` is None if a miss is an error and nothing is compared."""

    def __init__(
        self, service: Service, caller: Caller, body: Query, manifest: Manifest, original: Original | None
    ) -> None:
        self._service = service
        self._tenant = caller.tenant
        self._deadline_s = service.settings.request_deadline_s
        # Compared answers share one seed, so that they differ by their caches and not by chance.
        seeded = body.compare and body.seed is None
        self._query = body.model_copy(update={"seed": secrets.randbits(63)}) if seeded else body
        self._manifest = manifest
        self._original = original

    @classmethod
    async def begin(cls, service: Service, caller: Caller, cache_id: str, body: Query) -> _Asking:
        """Look up the cache. Raises the errors of `Store.stat` or `Original.find`."""
        if body.compare or body.on_miss == "recompute":
            original = await Original.find(service, caller, cache_id, recompute=body.on_miss == "recompute")
            return cls(service, caller, body, original.manifest, original)
        with service.metrics.asking():
            manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
        return cls(service, caller, body, manifest, None)

    async def answers(self) -> list[AnswerObject]:
        """The answer to each prompt, each with the full cache's answer if the caller wants to compare."""
        manifest, reason = self._manifest, None
        try:
            replies = await self._replies(manifest)
        except UNUSABLE as miss:
            manifest, reason = await self._again(miss), miss_reason(miss)
            replies = await self._replies(manifest)
        answers: list[AnswerObject] = [reply.model_copy(update={"recomputed": reason}) for reply in replies]
        if not self._query.compare:
            return answers
        assert self._original is not None
        full = await self._replies(await self._original.full())
        compared = [_comparison(ours, theirs) for ours, theirs in zip(replies, full, strict=True)]
        return [answer.model_copy(update={"compare": found}) for answer, found in zip(answers, compared, strict=True)]

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as events: its pieces, then the whole answer."""
        begun = False
        try:
            async with aclosing(self._pieces(self._manifest)) as events:
                async for event in events:
                    begun = True
                    yield event
            return
        except UNUSABLE as miss:
            if begun:
                raise
            manifest, reason = await self._again(miss), miss_reason(miss)
        async with aclosing(self._pieces(manifest, reason)) as events:
            async for event in events:
                yield event

    async def _replies(self, manifest: Manifest) -> list[Reply]:
        engine = self._service.engine_for(manifest)
        return await engine.query(manifest.id, self._query, tenant=self._tenant, deadline_s=self._deadline_s)

    async def _pieces(self, manifest: Manifest, recomputed: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        engine = self._service.engine_for(manifest)
        replies = engine.stream(manifest.id, self._query, tenant=self._tenant, deadline_s=self._deadline_s)
        async with aclosing(replies):
            async for piece in replies:
                if isinstance(piece, str):
                    yield AnswerDelta(text=piece).model_dump(mode="json")
                else:
                    yield _wire(piece.model_copy(update={"recomputed": recomputed}))

    async def _again(self, miss: Any) -> Manifest:
        if self._query.on_miss == "error" or self._original is None:
            raise miss
        return await self._original.again(miss)


def _comparison(ours: Reply, full: Reply) -> Comparison:
    return Comparison(text=full.text, agreement=agreement(ours.token_ids, full.token_ids))


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The fraction of positions at which two answers have the same token, up to the end of the shorter one.

    End tokens count, so that an answer that stops too early disagrees at its end.
    """
    pairs = list(zip(ours, theirs, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else float(len(ours) == len(theirs))


def _wire(answer: AnswerObject) -> dict[str, Any]:
    """An answer as JSON, without `compare` and `recomputed` if they are None."""
    silent = {name for name in ("compare", "recomputed") if getattr(answer, name) is None}
    return answer.model_dump(mode="json", exclude=silent)
