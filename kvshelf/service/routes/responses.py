"""/v1/responses: OpenAI's shapes. What a response keeps is a stored turn, and `previous_response_id` asks that."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.responses import ResponseDeleted, ResponseObject, ResponsesRequest
from kvshelf.errors import CacheError, CacheNotFound, InvalidRequest, KvshelfError
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.bodies import read_json
from kvshelf.service.dialects.responses import Responding
from kvshelf.service.http import openapi
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.questions import CacheQuestion
from kvshelf.service.service import TAKES_TOKENS, InService
from kvshelf.store.base import Store
from kvshelf.store.jobs.responses import not_found

router = APIRouter(prefix="/v1/responses", tags=["responses"], responses=openapi.ERRORS)


@router.post(
    "",
    response_class=JSONResponse,
    responses=openapi.json_or_events(ResponseObject),
    openapi_extra=openapi.body_of(ResponsesRequest),
    dependencies=[TAKES_TOKENS],
)
async def respond(request: Request, service: InService, caller: Reader) -> Response:
    """Answer behind a stored cache, behind several together, or behind an earlier response."""
    body = await read_json(request, ResponsesRequest, service)
    cache_id = await off_loop(_before, service.store, caller.tenant, body)
    asking = body.asking(may_write="write" in caller.scopes)
    question = await CacheQuestion.find(service, caller, body.cache_ids or [cache_id], asking, body.model)
    responding = Responding(body, asking, question.engine.model)
    if body.stream:
        events = responding.events(question.pieces())
        return await event_stream(request, _keeping(service.store, caller.tenant, events))
    _, (answer,) = await until_hangup(request, question.answered())
    response = await service.computing.run(responding.whole, answer)
    kept = await off_loop(_keep, service.store, caller.tenant, response)
    return await service.computing.run(JSONResponse, kept)


@router.get("/{response_id}", response_class=JSONResponse, responses={200: {"model": ResponseObject}})
async def get_response(response_id: str, service: InService, caller: Reader, stream: bool = False) -> Response:
    """A stored response as it was given, for 30 days and as long as its turn is on the shelf."""
    if stream:
        raise InvalidRequest("a response is not streamed again; leave stream out", param="stream")
    body = await off_loop(_read_stored, service.store, caller.tenant, response_id)
    return Response(body, media_type="application/json")


@router.delete("/{response_id}")
async def delete_response(response_id: str, service: InService, caller: Writer) -> ResponseDeleted:
    """Delete a response and, unless another one said the same, the cache of its turn. One that later responses go on
    from cannot be deleted before these (409)."""
    await off_loop(_delete, service.store, caller.tenant, response_id)
    return ResponseDeleted(id=response_id)


def _before(store: Store, tenant: str, body: ResponsesRequest) -> str:
    """The one cache to ask."""
    if body.previous_response_id is None:
        return str(body.cache_id)
    return store.responses.get(body.previous_response_id, tenant=tenant, param="previous_response_id").cache_id


async def _keeping(
    store: Store, tenant: str, events: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(events):
        async for event in events:
            if event["type"] in ("response.completed", "response.incomplete"):
                event["response"] = await off_loop(_keep, store, tenant, event["response"])
            yield event


def _keep(store: Store, tenant: str, response: dict[str, Any]) -> dict[str, Any]:
    """Keep a response whose turn is stored, under an id of its own: that of the turn's cache follows from the whole
    answer, and clients want an id from the first event on. Returns it, with the reason where it could not be kept."""
    cache_id = response.get("stored_cache_id")
    if cache_id is None:
        return response
    try:
        store.responses.keep(response["id"], json.dumps(response).encode(), tenant=tenant, cache_id=cache_id)
        store.responses.get(response["id"], tenant=tenant)  # its turn may have ended meanwhile
    except KvshelfError as error:
        return response | {"not_stored": error.message}
    return response


def _read_stored(store: Store, tenant: str, response_id: str) -> bytes:
    record = store.responses.get(response_id, tenant=tenant)
    try:
        store.stat(record.cache_id, tenant=tenant)
    except (CacheError, CacheNotFound) as gone:
        raise not_found(response_id) from gone
    return store.responses.read(record)


def _delete(store: Store, tenant: str, response_id: str) -> None:
    record = store.responses.get(response_id, tenant=tenant)
    if store.responses.of_cache(record.cache_id, tenant=tenant) == [record]:
        with suppress(CacheError, CacheNotFound):  # it is gone already
            store.delete(record.cache_id, tenant=tenant)
    store.responses.remove(record)
