"""/v1/caches/{id}/append, /turns and /remake: documents that grow, the conversations behind them, and successors under
another model."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from kvshelf.api import AppendCache, CacheObject, RemakeCache, StoredTurn, TurnList
from kvshelf.api.caches import SaidMessage
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.bodies import read_document, read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.questions import remade
from kvshelf.service.routes.caches import require_tokenizer
from kvshelf.service.service import TAKES_TOKENS, InService, cache_response, written
from kvshelf.store.base import Store, lineage
from kvshelf.store.manifest import Manifest

router = APIRouter(prefix="/v1/caches/{cache_id}", tags=["caches"], responses=openapi.ERRORS)

_MOST_CHILDREN: Final = 20


@router.post(
    "/append",
    status_code=201,
    response_model=CacheObject,
    openapi_extra=openapi.body_of(AppendCache, form=True),
    dependencies=[TAKES_TOKENS],
)
async def append(cache_id: str, request: Request, service: InService, caller: Writer) -> Response:
    """Read more of a document behind its cache, and store the cache of all as a new one. Only what is new goes through
    the model, and only what is new takes space; the cache that it was appended to stays as it is."""
    body = await read_document(request, service, caller, AppendCache)
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    engine = service.engine_for_all([manifest])
    require_tokenizer(service, engine.model, body)
    await off_loop(service.store.expiry, body.ttl_s, body.expires_at)
    work = engine.append(cache_id, body, body.policy or manifest.policy, caller=service.within(caller))
    return cache_response((await until_hangup(request, work)).caches[0])


@router.post(
    "/remake",
    status_code=201,
    response_model=CacheObject,
    responses=openapi.EXISTING,
    openapi_extra=openapi.body_of(RemakeCache),
    dependencies=[TAKES_TOKENS],
)
async def remake(cache_id: str, request: Request, service: InService, caller: Writer) -> Response:
    """Make a cache of the same document under another model that is served here, from the kept source, with the same
    name, labels, policy, parameters, codec, lifetime and pin. The cache itself stays as it is."""
    body = await read_json(request, RemakeCache, service)
    return cache_response(await until_hangup(request, remade(service, caller, cache_id, body.model)))


@router.get("/turns", response_model=TurnList)
async def turns(cache_id: str, service: InService, caller: Reader) -> Response:
    """The caches that one grew from, the oldest first and itself last, with what each appended. A cache whose parent
    has expired or was evicted begins the list."""
    return await service.listing.run(_turns, service.store, cache_id, caller.tenant)


def _turns(store: Store, cache_id: str, tenant: str) -> Response:
    chain = list(lineage(store, store.stat(cache_id, tenant=tenant)))[::-1]
    before = [0, *(manifest.num_tokens for manifest in chain)]
    data = [_turn(store, manifest, shorter) for manifest, shorter in zip(chain, before, strict=False)]
    return written(TurnList(data=data))


def _turn(store: Store, manifest: Manifest, shorter: int) -> StoredTurn:
    """shorter: tokens of its parent, 0 if that is not known."""
    children = store.list(tenant=manifest.tenant, parent_id=manifest.id, limit=_MOST_CHILDREN).data
    messages = None
    if manifest.has_source and manifest.identity["parent"]:
        source = store.source(manifest.id, tenant=manifest.tenant)
        messages = [_shown(message) for message in json.loads(source)] if isinstance(source, str) else None
    return StoredTurn(
        cache_id=manifest.id,
        parent_id=manifest.parent_id,
        messages=messages,
        tokens=manifest.num_tokens - shorter,
        total_tokens=manifest.num_tokens,
        policy=manifest.policy,
        compression_ratio=manifest.compression_ratio,
        name=manifest.name,
        created_at=manifest.created_at,
        children=[child.id for child in children],
    )


def _shown(message: dict[str, Any]) -> SaidMessage:
    """A message with its calls of tools in its text."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return SaidMessage(role=message["role"], content="\n".join(filter(None, [message["content"], *calls])))
