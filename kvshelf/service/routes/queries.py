"""/v1/caches/{id}/query: questions about a stored cache."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import AnswerDelta, AnswerList, AnswerObject, Comparison, Query
from kvshelf.api.strict import MissReason
from kvshelf.service.access.keys import Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.errors import miss_reason
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.recompute import UNUSABLE, Question
from kvshelf.service.state import TAKES_TOKENS, InService
from kvshelf.store.manifest import Manifest

router = APIRouter(prefix="/v1/caches", tags=["queries"], responses=openapi.ERRORS)


@router.post(
    "/{cache_id}/query",
    response_class=JSONResponse,
    responses=openapi.json_or_events(AnswerObject, AnswerList),
    openapi_extra=openapi.body_of(Query),
    dependencies=[TAKES_TOKENS],
)
async def query(cache_id: str, request: Request, service: InService, caller: Reader) -> Response:
    """Answer one or more prompts from a stored cache, without prefilling its document again."""
    body = await read_json(request, Query, service)
    if body.compare and body.seed is None:
        # Compared answers share one seed, so that they differ by their caches and not by chance.
        body = body.model_copy(update={"seed": secrets.randbits(63)})
    question = await Question.find(service, caller, cache_id, body)
    if body.stream:
        return await event_stream(request, _events(question))
    answers = await until_hangup(request, _answers(question))
    if isinstance(body.prompt, list):
        return JSONResponse({"object": "list", "data": [_wire(answer) for answer in answers]})
    return JSONResponse(_wire(answers[0]))


async def _answers(question: Question) -> list[AnswerObject]:
    """The answer to each prompt, each with the full cache's answer if the caller wants to compare."""
    reason = None
    try:
        replies = await question.answers(question.manifest)
    except UNUSABLE as miss:
        reason = miss_reason(miss)
        replies = await question.answers(await question.again(miss))
    answers: list[AnswerObject] = [reply.model_copy(update={"recomputed": reason}) for reply in replies]
    if not question.query.compare:
        return answers
    full = await question.answers(await question.full())
    compared = [
        Comparison(text=theirs.text, agreement=agreement(ours.token_ids, theirs.token_ids))
        for ours, theirs in zip(replies, full, strict=True)
    ]
    return [answer.model_copy(update={"compare": found}) for answer, found in zip(answers, compared, strict=True)]


async def _events(question: Question) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as events: its pieces, then the whole answer."""
    begun = False
    try:
        async with aclosing(_pieces(question, question.manifest)) as events:
            async for event in events:
                begun = True
                yield event
        return
    except UNUSABLE as miss:
        if begun:
            raise
        manifest, reason = await question.again(miss), miss_reason(miss)
    async with aclosing(_pieces(question, manifest, reason)) as events:
        async for event in events:
            yield event


async def _pieces(
    question: Question, manifest: Manifest, recomputed: MissReason | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(question.stream(manifest)) as replies:
        async for piece in replies:
            if isinstance(piece, str):
                yield AnswerDelta(text=piece).model_dump(mode="json")
            else:
                yield _wire(piece.model_copy(update={"recomputed": recomputed}))


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The fraction of positions at which two answers have the same token, up to the end of the shorter one.

    End tokens count, so that an answer that stops too early disagrees at its end.
    """
    pairs = list(zip(ours, theirs, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else float(len(ours) == len(theirs))


def _wire(answer: AnswerObject) -> dict[str, Any]:
    """An answer as JSON, without `compare` and `recomputed` if they are None."""
    silent = {name for name in ("compare", "recomputed") if getattr(answer, name) is None}
    return answer.model_dump(mode="json", exclude=silent)
