"""Questions about a stored cache (/v1/caches/{id}/query), or about several together (/v1/query), and which documents to
ask (/v1/caches/search)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf import api
from kvshelf.api.answers import Answer
from kvshelf.service.access.keys import Reader
from kvshelf.service.bodies import read_json
from kvshelf.service.dialects import own
from kvshelf.service.http import openapi
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.questions import CacheQuestion
from kvshelf.service.service import TAKES_TOKENS, InService, Service

router = APIRouter(prefix="/v1", tags=["queries"], responses=openapi.ERRORS)

Shape = Callable[[Answer], api.Answered]
"""The answer of the API."""


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
    return await _answered(request, service, question, own.alone)


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
    return await _answered(request, service, question, own.together)


@router.post("/caches/search", openapi_extra=openapi.body_of(api.SearchCaches), dependencies=[TAKES_TOKENS])
async def search(request: Request, service: InService, caller: Reader) -> api.SearchList:
    """Name the documents that hold most of a question's words, by summaries of their caches; the model reads the
    question alone. The caches of one model are searched, those with all `labels`."""
    body = await read_json(request, api.SearchCaches, service)
    engine = service.engine(body.model)
    return await until_hangup(request, engine.search(body, caller=service.within(caller)))


async def _answered(request: Request, service: Service, question: CacheQuestion, shape: Shape) -> Response:
    if question.asking.stream:
        return await event_stream(request, _events(question, shape))
    _, answers = await until_hangup(request, question.answered())
    return await service.computing.run(_response, question, map(shape, answers))


def _response(question: CacheQuestion, answers: Iterable[api.Answered]) -> Response:
    data = [own.wire(answer) for answer in answers]
    return JSONResponse({"object": "list", "data": data} if question.asking.several else data[0])


async def _compared(question: CacheQuestion) -> list[api.AnswerObject]:
    """The answer to each prompt, each with the full cache's answer."""
    question, answers = await question.answered()
    compared = []
    for ours, theirs in zip(answers, await question.full_answers(), strict=True):
        comparison = api.Comparison(text=theirs.text, agreement=agreement(ours.token_ids, theirs.token_ids))
        compared.append(own.alone(ours).model_copy(update={"compare": comparison}))
    return compared


async def _events(question: CacheQuestion, shape: Shape) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as events: its pieces, then the whole answer."""
    async with aclosing(question.pieces()) as pieces:
        async for piece in pieces:
            yield own.wire(shape(piece) if isinstance(piece, Answer) else own.delta(piece))


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The fraction of positions at which two answers have the same token, up to the end of the shorter one.

    End tokens count, so that an answer that stops too early disagrees at its end.
    """
    pairs = list(zip(ours, theirs, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else float(len(ours) == len(theirs))
