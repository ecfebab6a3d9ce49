"""/v1/messages: Anthropic's shapes. A conversation begins with a cache, which `cache_control` makes or finds. And how
many tokens a conversation has."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.anthropic import CountTokensRequest, MessageError, MessageObject, MessagesRequest, TokenCount
from kvshelf.errors import NotFound
from kvshelf.service.access.keys import KeyCaller, Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.dialects.messages import MessageAnswering
from kvshelf.service.http import openapi
from kvshelf.service.http.errors import MESSAGES
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.questions import CacheQuestion, beginning
from kvshelf.service.service import TAKES_TOKENS, InService, Service

router = APIRouter(prefix=MESSAGES, tags=["messages"], responses=openapi.errors_of(MessageError))


@router.post(
    "",
    response_class=JSONResponse,
    responses=openapi.json_or_events(MessageObject),
    openapi_extra=openapi.body_of(MessagesRequest),
    dependencies=[TAKES_TOKENS],
)
async def create(request: Request, service: InService, caller: Reader) -> Response:
    """Answer the last message of a conversation whose beginning is on the shelf, or goes there with this request."""
    body = await read_json(request, MessagesRequest, service)
    service.engine(body.model, NotFound)
    question, answering = await until_hangup(request, _begun(service, caller, body))
    if body.stream:
        return await event_stream(request, answering.events(question.pieces()))
    if not body.max_tokens:
        return JSONResponse(answering.unasked(body.not_kept))
    _, (answer,) = await until_hangup(request, question.answered())
    return JSONResponse(answering.whole(answer))


@router.post("/count_tokens", openapi_extra=openapi.body_of(CountTokensRequest), dependencies=[TAKES_TOKENS])
async def count_tokens(request: Request, service: InService, caller: Reader) -> TokenCount:
    """The tokens of a conversation, those of its cache included. Nothing is cached or asked; those that are made to be
    counted count as used."""
    body = await read_json(request, CountTokensRequest, service)
    return TokenCount(input_tokens=await until_hangup(request, _counted(service, caller, body)))


async def _counted(service: Service, caller: KeyCaller, body: CountTokensRequest) -> int:
    engine, cached, boundary, variables = service.engine(body.model, NotFound), 0, None, {}
    if body.cache_id is not None:
        question = await CacheQuestion.find(service, caller, [body.cache_id], body.asking, body.model)
        manifest = question.caches[0].manifest
        cached, boundary = manifest.num_tokens, manifest.identity["boundary"]
        variables = manifest.identity.get("variables", {})
    within = service.within(caller)
    return cached + await engine.count(body.asking, body.document, boundary, variables, caller=within)


async def _begun(service: Service, caller: KeyCaller, body: MessagesRequest) -> tuple[CacheQuestion, MessageAnswering]:
    """A question behind its cache, and the message that answers it."""
    cache_id, created = body.cache_id, False
    if cache_id is None:
        needs = body.asking if body.tools or body.output_config else None
        begun = await beginning(service, caller, body.creation, needs=needs)
        cache_id, created = begun.manifest.id, not begun.existing
    question = await CacheQuestion.find(service, caller, [cache_id], body.asking, body.model)
    tokens = question.caches[0].manifest.num_tokens
    read, written = (0, tokens) if created else (tokens, 0)
    return question, MessageAnswering(body.model, cache_id, read, written)
