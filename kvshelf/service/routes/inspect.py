"""/v1/caches/{id}/kept and /prompt: which tokens of its document a cache kept, and which a question builds."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from kvshelf.api import queries
from kvshelf.api.inspect import BuiltPrompt, KeptOf, KeptTokens
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import KeyCaller, Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.service import TAKES_TOKENS, InService, Service, written
from kvshelf.workers.replica.api import ReplicaApi

router = APIRouter(prefix="/v1/caches/{cache_id}", tags=["caches"], responses=openapi.ERRORS)

FirstLayer = Annotated[int, Query(ge=0, lt=2**31, description="the first layer to return bitmaps of")]


@router.get("/kept", response_model=KeptTokens)
async def kept(
    cache_id: str, request: Request, service: InService, caller: Reader, first_layer: FirstLayer = 0
) -> Response:
    """Which tokens of its document a cache kept, by layer and head. `source_not_kept` if the source is not stored."""
    entries = await _kept_tokens(request, service, caller, cache_id, None, first_layer)
    return await service.computing.run(written, entries)


@router.post("/kept", response_model=KeptTokens, openapi_extra=openapi.body_of(KeptOf), dependencies=[TAKES_TOKENS])
async def kept_of(
    cache_id: str, request: Request, service: InService, caller: Reader, first_layer: FirstLayer = 0
) -> Response:
    """As GET, with the caller's own copy of the document. `state_conflict` if that is a different document. Its
    tokens count as used."""
    body = await read_json(request, KeptOf, service)
    entries = await _kept_tokens(request, service, caller, cache_id, body, first_layer)
    service.limits.spend_tokens(caller.tenant, entries.num_tokens)
    return await service.computing.run(written, entries)


@router.post(
    "/prompt", response_model=BuiltPrompt, openapi_extra=openapi.body_of(queries.Query), dependencies=[TAKES_TOKENS]
)
async def prompt(cache_id: str, request: Request, service: InService, caller: Reader) -> Response:
    """The prompt that one question to a cache builds, token by token, as `/query` would read it: nothing is answered.
    The document's tokens are listed where its source is kept."""
    body = await read_json(request, queries.Query, service)
    if body.several:
        raise InvalidRequest("one prompt is shown at a time; send one, and leave n out", param="prompt")
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    engine = service.engine_for_all([manifest])
    limit_s = service.settings.request_deadline_s
    call = engine.remote.call_within(limit_s, ReplicaApi.prompt, cache_id, body, caller=caller.within(limit_s))
    shown = await until_hangup(request, call)
    service.limits.spend_tokens(caller.tenant, sum(part.num_tokens for part in shown.parts))
    return await service.computing.run(written, shown)


async def _kept_tokens(
    request: Request, service: Service, caller: KeyCaller, cache_id: str, body: KeptOf | None, first_layer: int
) -> KeptTokens:
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    engine = service.reader(manifest)
    engine.remote.require_bounded(body)
    # A replica reads the whole cache and holds it until it has answered.
    async with service.whole.turn(caller.tenant, service.settings.request_deadline_s) as left_s:
        call = engine.remote.call_within(
            left_s, ReplicaApi.inspect, cache_id, body, caller=caller.within(left_s), first_layer=first_layer
        )
        return await until_hangup(request, call)
