"""kvshelf's own shape of answers: whole, of one cache or of several together, and in pieces."""

from __future__ import annotations

from typing import Any, Final

from kvshelf import api
from kvshelf.api.answers import Answer, Piece

_SILENT: Final = (
    *("exact", "compare", "recomputed", "passages", "logprobs", "stored_cache_id", "not_stored", "linked"),
    "reasoning_content",
)
"""Fields that an answer has only if they apply."""


def alone(answer: Answer) -> api.AnswerObject:
    """An answer as that of one cache."""
    served = answer.served
    return api.AnswerObject(
        **_fields_of(answer),
        cache_id=served.cache_id,
        policy=served.policy,
        compression_ratio=served.compression_ratio,
        recomputed=served.remade[0].reason if served.remade else None,
        stored_cache_id=served.stored_cache_id,
        not_stored=served.not_stored,
        linked=served.linked,
    )


def together(answer: Answer) -> api.JointAnswer:
    """An answer as that of all its caches together."""
    remade = list(answer.served.remade) or None
    return api.JointAnswer(
        **_fields_of(answer),
        cache_ids=list(answer.served.cache_ids),
        sources=answer.shares,
        exact=answer.exact,
        recomputed=remade,
    )


def delta(piece: Piece) -> api.AnswerDelta:
    if piece.is_thought:
        return api.AnswerDelta(text="", reasoning_content=piece)
    return api.AnswerDelta(text=piece, logprobs=piece.logprobs)


def wire(event: api.Answered | api.AnswerDelta) -> dict[str, Any]:
    """An answer or a piece of one as JSON, without the fields that do not apply."""
    silent = {name for name in _SILENT if getattr(event, name, None) is None}
    return event.model_dump(mode="json", exclude=silent)


def _fields_of(answer: Answer) -> dict[str, Any]:
    """The fields of `Answered`."""
    read_ids, passages, logprobs = answer.served.read_ids, answer.passages, answer.logprobs
    return {
        "id": answer.served.id,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "load_ms": answer.served.load_ms,
        "passages": None if passages is None else list(map(api.ReadShares.of, read_ids, passages)),
        "logprobs": None if logprobs is None else list(logprobs),
        "reasoning_content": answer.thought,
    }
