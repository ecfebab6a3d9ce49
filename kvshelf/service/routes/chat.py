"""/v1/chat/completions: OpenAI's shapes; a stored cache is the beginning of the conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import Query, Usage
from kvshelf.api.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatUsage,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
)
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.events import event_stream
from kvshelf.service.state import TAKES_TOKENS, InService, off_loop, until_hangup
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
    head = _Head("chatcmpl-" + secrets.token_hex(12), int(time.time()), manifest.model)
    query, deadline_s = _query(body), service.settings.request_deadline_s
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        replies = engine.stream(body.cache_id, query, tenant=caller.tenant, deadline_s=deadline_s)
        return await event_stream(request, _events(replies, head, with_usage=with_usage))
    work = engine.query(body.cache_id, query, tenant=caller.tenant, deadline_s=deadline_s)
    (reply,) = await until_hangup(request, work)
    choice = ChatChoice(message=AssistantMessage(content=reply.text), finish_reason=reply.finish_reason)
    completion = ChatCompletion(
        id=head.id, created=head.created, model=head.model, choices=[choice], usage=_usage(reply.usage)
    )
    return JSONResponse(completion.model_dump(mode="json"))


@dataclass(frozen=True)
class _Head:
    """What all chunks of one completion have in common."""

    id: str
    created: int
    model: str

    def chunk(self, delta: Delta, finish_reason: Any = None) -> dict[str, Any]:
        choice = ChunkChoice(delta=delta, finish_reason=finish_reason)
        chunk = ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[choice])
        wire = chunk.model_dump(mode="json", exclude={"usage"})
        # OpenAI's deltas hold only new fields: absent content is left out, not null.
        wire["choices"][0]["delta"] = delta.model_dump(exclude_none=True)
        return wire

    def last(self, usage: ChatUsage) -> dict[str, Any]:
        chunk = ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)
        return chunk.model_dump(mode="json")


async def _events(
    replies: AsyncGenerator[str | Reply, None], head: _Head, *, with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    # If usage is requested, every chunk but the last has a null `usage`, as in OpenAI's streams.
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    started = False
    async with aclosing(replies):
        async for piece in replies:
            if not started:
                yield head.chunk(Delta(role="assistant", content="")) | extra
                started = True
            if isinstance(piece, str):
                yield head.chunk(Delta(content=piece)) | extra
                continue
            yield head.chunk(Delta(), piece.finish_reason) | extra
            if with_usage:
                yield head.last(_usage(piece.usage))


def _query(body: ChatCompletionRequest) -> Query:
    return Query(
        messages=[message.plain() for message in body.messages],
        max_tokens=body.token_limit,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=body.stop,
    )


def _usage(usage: Usage) -> ChatUsage:
    prompt = usage.cache_read_tokens + usage.prefill_tokens
    return ChatUsage(
        prompt_tokens=prompt,
        completion_tokens=usage.completion_tokens,
        total_tokens=prompt + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cache_read_tokens),
    )
