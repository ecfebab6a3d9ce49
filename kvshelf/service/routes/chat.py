"""/v1/chat/completions: OpenAI's shapes; stored caches are the beginning of the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.answers import Answer, Piece
from kvshelf.api.openai import ChatCompletion, MarkedCompletionRequest
from kvshelf.service.access.keys import Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.dialects.completions import Completion
from kvshelf.service.http import openapi
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.questions import CacheQuestion, beginning
from kvshelf.service.service import TAKES_TOKENS, InService
from kvshelf.workers.replica.calls import relayed

router = APIRouter(prefix="/v1/chat", tags=["chat"], responses=openapi.ERRORS)


@router.post(
    "/completions",
    response_class=JSONResponse,
    responses=openapi.json_or_events(ChatCompletion),
    openapi_extra=openapi.body_of(MarkedCompletionRequest),
    dependencies=[TAKES_TOKENS],
)
async def complete(request: Request, service: InService, caller: Reader) -> Response:
    """Continue a conversation that begins with a stored cache, with several together, or with a document that a
    `prompt_cache_breakpoint` ends."""
    body = await read_json(request, MarkedCompletionRequest, service)
    cache_ids, written = body.cache_ids or [str(body.cache_id)], 0
    if body.document is not None:
        needs = body.asking if body.may_be_refused else None
        begun = await until_hangup(request, beginning(service, caller, body.creation, needs=needs))
        cache_ids, written = [begun.manifest.id], 0 if begun.existing else begun.manifest.num_tokens
    question = await CacheQuestion.find(service, caller, cache_ids, body.asking, body.model)
    completion = Completion(question.engine.model, written, together=body.cache_ids is not None)
    if body.prewarm:
        return JSONResponse(completion.unasked(sum(cache.manifest.num_tokens for cache in question.caches)))
    if body.stream:
        pieces = _pieces(question.each_alone())
        return await event_stream(request, completion.chunks(pieces, with_usage=body.wants_usage))
    _, answers = await until_hangup(request, question.answered())
    return await service.computing.run(lambda: JSONResponse(completion.whole(answers)))


def _pieces(questions: Sequence[CacheQuestion]) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
    """The pieces of all choices as they come, each with the index of its choice."""

    async def fetch(
        index: int, question: CacheQuestion, queue: asyncio.Queue[tuple[int, Piece | Answer] | None]
    ) -> None:
        async with aclosing(question.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))

    async def fetch_all(queue: asyncio.Queue[tuple[int, Piece | Answer] | None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, question in enumerate(questions):
                    group.create_task(fetch(index, question, queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    return relayed(fetch_all)
