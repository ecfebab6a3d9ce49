"""/v1/chat/completions: OpenAI's shapes; stored caches are the beginning of the conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.openai import ChatCompletion, ChatCompletionRequest
from kvshelf.service.access.keys import Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.completions import Completion, Ending, asking_of, require_model, wants_usage
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.recompute import Question
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
    """Continue a conversation that begins with a stored cache, or with several together."""
    body = await read_json(request, ChatCompletionRequest, service)
    together = body.cache_ids is not None
    question = await Question.find(service, caller, body.cache_ids or [str(body.cache_id)], asking_of(body))
    manifest = question.caches[0].manifest
    require_model(body, manifest.id, (manifest.model, question.engine.model))
    completion = Completion(manifest.model)
    if body.stream:
        pieces = _pieces(question, together=together)
        return await event_stream(request, completion.chunks(pieces, with_usage=wants_usage(body)))
    question, (reply,) = await until_hangup(request, question.answered())
    return JSONResponse(completion.whole(reply.text, _ending(question, reply, together=together)))


async def _pieces(question: Question, *, together: bool) -> AsyncGenerator[str | Ending, None]:
    async with aclosing(question.pieces()) as pieces:
        async for found, piece in pieces:
            yield piece if isinstance(piece, str) else _ending(found, piece, together=together)


def _ending(question: Question, reply: Reply, *, together: bool) -> Ending:
    sources = list(reply.sources) if together else None
    stored = (reply.stored_cache_id, reply.not_stored)
    return Ending(reply.finish_reason, reply.usage, sources, *stored, question.remade)
