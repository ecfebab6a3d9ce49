"""/v1/responses: OpenAI's shapes. What a response keeps is a stored turn, and `previous_response_id` asks that.

Its id is a label of the turn's cache, because clients want one id from the first event on, and the id of the cache
follows from the whole answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.responses import ResponseObject, ResponsesRequest
from kvshelf.api.strict import MAX_LABELS
from kvshelf.errors import CacheError, CacheNotFound, EtagMismatch, NotFound
from kvshelf.service.access.keys import Caller, Reader
from kvshelf.service.asked import pieces_of, question_to
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.completions import Ending, ending_of
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.responses import Responding
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.state import TAKES_TOKENS, InService
from kvshelf.store.base import Store

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
    cache_ids = body.cache_ids or [await off_loop(_cache_of, service.store, caller, body)]
    asking, together = body.asking(may_write="write" in caller.scopes), body.cache_ids is not None
    question = await question_to(service, caller, cache_ids, asking, body.model)
    responding = Responding(body, asking, question.caches[0].manifest.model)
    if body.stream:
        pieces = _labelled(service.store, caller, pieces_of(question, together=together), responding.id)
        return await event_stream(request, responding.events(pieces))
    question, (reply,) = await until_hangup(request, question.answered())
    await off_loop(_label, service.store, caller, reply.stored_cache_id, responding.id)
    return JSONResponse(responding.whole(reply.text, ending_of(reply, question.remade, together=together)))


def _cache_of(store: Store, caller: Caller, body: ResponsesRequest) -> str:
    """The one cache to ask. Raises `NotFound` for that of a response that kept nothing."""
    if body.previous_response_id is None:
        return str(body.cache_id)
    for manifest in store.list(tenant=caller.tenant, labels={body.previous_response_id: ""}, limit=1).data:
        return manifest.id
    raise NotFound(
        f"there is no response {body.previous_response_id!r}: it was not stored, or it has expired; send the whole "
        "conversation with cache_id",
        param="previous_response_id",
    )


async def _labelled(
    store: Store, caller: Caller, pieces: AsyncGenerator[str | Ending, None], response_id: str
) -> AsyncGenerator[str | Ending, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, Ending):
                await off_loop(_label, store, caller, piece.stored_cache_id, response_id)
            yield piece


def _label(store: Store, caller: Caller, cache_id: str | None, response_id: str) -> None:
    """Let a stored turn be found by its response. Equal answers share a turn, which has the newest of their ids."""
    while cache_id is not None:
        with suppress(CacheError, CacheNotFound):  # it is gone already; so says the next request
            manifest = store.stat(cache_id, tenant=caller.tenant)
            kept = list(manifest.labels.items())[-(MAX_LABELS - 1) :]
            try:
                labels = dict([*kept, (response_id, "")])
                store.update(cache_id, tenant=caller.tenant, labels=labels, if_revision=[manifest.revision])
            except EtagMismatch:
                continue  # an equal answer came at the same time
        return
