"""/v1/caches/{id}/query: ask a stored cache."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.client.types import AnswerDelta, AnswerList, AnswerObject, Query, Usage
from kvshelf.service import openapi
from kvshelf.service.body import read_json
from kvshelf.service.events import event_stream
from kvshelf.service.keys import Reader
from kvshelf.service.state import InService, off_loop, until_hangup
from kvshelf.workers.generation import Sampling
from kvshelf.workers.replica import Asked, Replied

router = APIRouter(prefix="/v1/caches", tags=["queries"], responses=openapi.ERRORS)


@router.post(
    "/{cache_id}/query",
    response_class=JSONResponse,
    responses=openapi.json_or_events(AnswerObject, AnswerList),
    openapi_extra=openapi.body_of(Query),
)
async def query(cache_id: str, request: Request, service: InService, caller: Reader) -> Response:
    """Answer one or several prompts from a stored cache, without prefilling its document again."""
    body = await read_json(request, Query, service.settings)
    asked = _asked(body)
    with service.metrics.asking():
        manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    engine = service.engine_for(manifest)
    deadline_s = service.settings.request_deadline_s
    if body.stream:
        replies = engine.stream(cache_id, asked, tenant=caller.tenant, deadline_s=deadline_s)
        return await event_stream(request, _events(cache_id, replies))
    replied = await until_hangup(request, engine.query(cache_id, asked, tenant=caller.tenant, deadline_s=deadline_s))
    answers = [answer_object(cache_id, reply) for reply in replied]
    content = AnswerList(data=answers) if isinstance(body.prompt, list) else answers[0]
    return JSONResponse(content.model_dump(mode="json"))


async def _events(cache_id: str, replies: AsyncGenerator[str | Replied, None]) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(replies):
        async for piece in replies:
            event = AnswerDelta(text=piece) if isinstance(piece, str) else answer_object(cache_id, piece)
            yield event.model_dump(mode="json")


def _asked(body: Query) -> Asked:
    sampling = Sampling(body.max_tokens, body.temperature, body.top_p, body.seed, stop_texts(body.stop))
    if body.messages is not None:
        return Asked(([message.model_dump() for message in body.messages],), sampling)
    assert body.prompt is not None  # the type asks for exactly one of the two
    return Asked(tuple(body.prompt) if isinstance(body.prompt, list) else (body.prompt,), sampling)


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def answer_object(cache_id: str, reply: Replied) -> AnswerObject:
    usage = reply.answer.usage
    return AnswerObject(
        id="ans_" + secrets.token_hex(12),
        cache_id=cache_id,
        text=reply.answer.text,
        finish_reason=reply.answer.finish_reason,
        usage=Usage(
            cache_read_tokens=usage.cache_read_tokens,
            prefill_tokens=usage.prefill_tokens,
            completion_tokens=usage.completion_tokens,
        ),
        load_ms=round(reply.load_ms, 3),
        policy=reply.policy,
        compression_ratio=reply.compression_ratio,
    )
