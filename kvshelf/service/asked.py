"""What the routes of OpenAI's and Anthropic's APIs do alike with a question."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvshelf.api import Asking
from kvshelf.service.access.keys import Caller
from kvshelf.service.http.completions import Ending, require_model
from kvshelf.service.recompute import Question
from kvshelf.service.state import Service
from kvshelf.workers.replica.results import Reply


async def question_to(
    service: Service, caller: Caller, cache_ids: Sequence[str], asking: Asking, model: str | None
) -> Question:
    """As `Question.find`. Raises `InvalidRequest` for a model that the request names and that is not the caches'."""
    question = await Question.find(service, caller, cache_ids, asking)
    manifest = question.caches[0].manifest
    require_model(model, manifest.id, (manifest.model, question.engine.model))
    return question


async def pieces_of(question: Question, *, together: bool) -> AsyncGenerator[str | Ending, None]:
    """The pieces of the answer's text, and its ending. together: whether several caches were asked together."""
    async with aclosing(question.pieces()) as pieces:
        async for found, piece in pieces:
            yield piece if isinstance(piece, str) else ending_of(found, piece, together=together)


def ending_of(question: Question, reply: Reply, *, together: bool) -> Ending:
    sources = list(reply.sources) if together else None
    stored = (reply.stored_cache_id, reply.not_stored)
    return Ending(reply.finish_reason, reply.usage, sources, *stored, question.remade, reply.logprobs)
