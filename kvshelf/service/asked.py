"""What the routes of OpenAI's and Anthropic's APIs do alike with a question."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvshelf.api import Asking
from kvshelf.service.access.keys import Caller
from kvshelf.service.http.completions import Ending, ending_of, require_model
from kvshelf.service.recompute import Question
from kvshelf.service.state import Service


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
            yield piece if isinstance(piece, str) else ending_of(piece, found.remade, together=together)
