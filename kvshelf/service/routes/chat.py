"""/v1/chat/completions: OpenAI's shapes; stored caches are the beginning of the conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api.openai import ChatCompletion, ChatCompletionRequest
from kvshelf.service.access.keys import Reader
from kvshelf.service.asked import ending_of, pieces_of, question_to
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.completions import Completion, wants_usage
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.state import TAKES_TOKENS, InService

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
    question = await question_to(service, caller, body.cache_ids or [str(body.cache_id)], body.asking, body.model)
    completion = Completion(question.caches[0].manifest.model)
    if body.stream:
        pieces = pieces_of(question, together=together)
        return await event_stream(request, completion.chunks(pieces, with_usage=wants_usage(body)))
    question, (reply,) = await until_hangup(request, question.answered())
    return JSONResponse(completion.whole(reply.text, ending_of(question, reply, together=together)))
