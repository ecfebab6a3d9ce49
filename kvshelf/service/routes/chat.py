"""/v1/chat/completions: OpenAI's shapes; a stored cache is the beginning of the conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.openai import ChatCompletion, ChatCompletionRequest
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.completions import Completion, Ending, query_of, wants_usage
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.state import TAKES_TOKENS, InService
from kvshelf.workers.replica.results import Reply

router = APIRouter(prefix="/v1/chat", tags=["chat"], responses=openapi.ERRORS)


@router.post(
    "/completions",
    response_class=JSONResponse,
    responses=openapi.json_or_events(ChatCompletion),
    openapi_extra=openapi.body_of(ChatCompletionRequest),
    dependencies=[TAKES_TOKENS],
)
async def complete(request: Request, service: InService, caller: Reader) -> Response:
    """Continue a conversation that begins with a stored cache."""
    body = await read_json(request, ChatCompletionRequest, service)
    assert body.cache_id is not None  # the type refuses a body without it
    with service.metrics.asking():
        manifest = await off_loop(service.store.stat, body.cache_id, tenant=caller.tenant)
    engine = service.engine_for(manifest)
    if body.model not in (None, manifest.model, engine.model):
        raise InvalidRequest(f"cache {body.cache_id} is of model {manifest.model!r}, not {body.model!r}", param="model")
    query, completion, deadline_s = query_of(body), Completion(manifest.model), service.settings.request_deadline_s
    if body.stream:
        replies = engine.stream(body.cache_id, query, tenant=caller.tenant, deadline_s=deadline_s)
        return await event_stream(request, completion.chunks(_pieces(replies), with_usage=wants_usage(body)))
    work = engine.query(body.cache_id, query, tenant=caller.tenant, deadline_s=deadline_s)
    (reply,) = await until_hangup(request, work)
    return JSONResponse(completion.whole(reply.text, Ending(reply.finish_reason, reply.usage)))


async def _pieces(replies: AsyncGenerator[str | Reply, None]) -> AsyncGenerator[str | Ending, None]:
    async with aclosing(replies):
        async for piece in replies:
            yield piece if isinstance(piece, str) else Ending(piece.finish_reason, piece.usage)
