"""Questions about a stored cache (/v1/caches/{id}/query), or about several together (/v1/query), and which documents to
ask (/v1/caches/search)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf import api
from kvshelf.engine.decode.logprobs import Piece
from kvshelf.model.templates.thoughts import Thought
from kvshelf.service.access.keys import Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.questions import CacheQuestion
from kvshelf.service.service import TAKES_TOKENS, InService, Service
from kvshelf.workers.replica.results import Reply

router = APIRouter(prefix="/v1", tags=["queries"], responses=openapi.ERRORS)

_SILENT = ("compare", "recomputed", "passages", "logprobs", "stored_cache_id", "not_stored", "reasoning_content")
"""Fields that an answer has only if they apply."""

Shape = Callable[[CacheQuestion, Reply], api.Answered]
"""The answer of the API for a reply to a question."""


@router.post(
    "/caches/{cache_id}/query",
    response_class=JSONResponse,
    responses=openapi.json_or_events(api.AnswerObject, api.AnswerList),
    openapi_extra=openapi.body_of(api.Query),
    dependencies=[TAKES_TOKENS],
)
async def query(cache_id: str, request: Request, service: InService, caller: Reader) -> Response:
    """Answer one or more prompts from a stored cache, without prefilling its document again."""
    body = await read_json(request, api.Query, service)
    if body.compare and body.seed is None:
        # Compared answers share one seed, so that they differ by their caches and not by chance.
        body = body.model_copy(update={"seed": secrets.randbits(63)})
    question = await CacheQuestion.find(service, caller, [cache_id], body, compare=body.compare)
    if body.compare:
        answers = await until_hangup(request, _compared(question))
        return await service.computing.run(_response, question, answers)
    return await _answered(request, service, question, _alone)


@router.post(
    "/query",
    response_class=JSONResponse,
    responses=openapi.json_or_events(api.JointAnswer, api.JointAnswerList),
    openapi_extra=openapi.body_of(api.JointQuery),
    dependencies=[TAKES_TOKENS],
)
async def joint_query(request: Request, service: InService, caller: Reader) -> Response:
    """Answer one or more prompts from several stored caches together, and say what part each document had in it."""
    body = await read_json(request, api.JointQuery, service)
    question = await CacheQuestion.find(service, caller, body.cache_ids, body)
    return await _answered(request, service, question, _together)


@router.post("/caches/search", openapi_extra=openapi.body_of(api.SearchCaches), dependencies=[TAKES_TOKENS])
async def search(request: Request, service: InService, caller: Reader) -> api.SearchList:
    """Name the documents that hold most of a question's words, by summaries of their caches; the model reads the
    question alone. The caches of one model are searched, those with all `labels`."""
    body = await read_json(request, api.SearchCaches, service)
    engine = service.engine(body.model)
    work = engine.search(body, caller=caller.within(service.settings.request_deadline_s))
    return await until_hangup(request, work)


async def _answered(request: Request, service: Service, question: CacheQuestion, shape: Shape) -> Response:
    if question.asking.stream:
        return await event_stream(request, _events(question, shape))
    question, replies = await until_hangup(request, question.answered())
    answers = [shape(question, reply) for reply in replies]
    return await service.computing.run(_response, question, answers)


def _response(question: CacheQuestion, answers: Sequence[api.Answered]) -> Response:
    if question.asking.several:
        return JSONResponse({"object": "list", "data": [_wire(answer) for answer in answers]})
    return JSONResponse(_wire(answers[0]))


async def _compared(question: CacheQuestion) -> list[api.AnswerObject]:
    """The answer to each prompt, each with the full cache's answer."""
    question, replies = await question.answered()
    full = await (await question.full()).answers()
    answers = []
    for ours, theirs in zip(replies, full, strict=True):
        comparison = api.Comparison(text=theirs.text, agreement=agreement(ours.token_ids, theirs.token_ids))
        answers.append(_alone(question, ours).model_copy(update={"compare": comparison}))
    return answers


async def _events(question: CacheQuestion, shape: Shape) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as events: its pieces, then the whole answer."""
    async with aclosing(question.pieces()) as pieces:
        async for answering, piece in pieces:
            yield _wire(_delta(piece) if isinstance(piece, str) else shape(answering, piece))


def _delta(piece: str) -> api.AnswerDelta:
    if isinstance(piece, Thought):
        return api.AnswerDelta(text="", reasoning_content=piece)
    return api.AnswerDelta(text=piece, logprobs=list(piece.logprobs) if isinstance(piece, Piece) else None)


def _alone(question: CacheQuestion, reply: Reply) -> api.AnswerObject:
    return reply.model_copy(update={"recomputed": question.caches[0].recomputed})


def _together(question: CacheQuestion, reply: Reply) -> api.JointAnswer:
    return reply.joint.model_copy(update={"recomputed": question.remade})


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The fraction of positions at which two answers have the same token, up to the end of the shorter one.

    End tokens count, so that an answer that stops too early disagrees at its end.
    """
    pairs = list(zip(ours, theirs, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else float(len(ours) == len(theirs))


def _wire(event: api.Answered | api.AnswerDelta) -> dict[str, Any]:
    """An answer or a piece of one as JSON, without the fields that do not apply."""
    silent = {name for name in _SILENT if getattr(event, name, None) is None}
    return event.model_dump(mode="json", exclude=silent)
