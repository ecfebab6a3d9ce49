"""OpenAI's chat completions, over whatever answers them. Needs no Ray."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvshelf.api import Asking, Source, Usage
from kvshelf.api.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatUsage,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
)
from kvshelf.api.queries import Remade
from kvshelf.api.strict import FinishReason
from kvshelf.errors import InvalidRequest

_OURS: Final = {"sources", "stored_cache_id", "not_stored", "recomputed"}


class Ending(NamedTuple):
    """What follows the last text of an answer. sources: None where one cache was asked as one. stored_cache_id,
    not_stored, recomputed: as of a `ChatCompletion`."""

    finish_reason: FinishReason
    usage: Usage
    sources: list[Source] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None

    @property
    def ours(self) -> dict[str, Any]:
        """Fields beside OpenAI's, those that apply."""
        return {name: value for name in _OURS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Completion:
    """One completion: what all its chunks have in common, and its shapes."""

    model: str
    id: str = field(default_factory=lambda: "chatcmpl-" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, end: Ending) -> dict[str, Any]:
        """A `ChatCompletion` as JSON."""
        choice = ChatChoice(message=AssistantMessage(content=text), finish_reason=end.finish_reason)
        completion = ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=[choice], usage=_usage(end.usage), **end.ours
        )
        return completion.model_dump(mode="json", exclude=_OURS - end.ours.keys())

    async def chunks(
        self, pieces: AsyncGenerator[str | Ending, None], *, with_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Each `ChatCompletionChunk` as JSON. pieces: of the text, and its ending."""
        # If usage is requested, every chunk but the last has a null `usage`, as in OpenAI's streams.
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        started = False
        async with aclosing(pieces):
            async for piece in pieces:
                if not started:
                    yield self._chunk(Delta(role="assistant", content="")) | extra
                    started = True
                if isinstance(piece, str):
                    yield self._chunk(Delta(content=piece)) | extra
                    continue
                yield self._chunk(Delta(), piece.finish_reason, **piece.ours) | extra
                if with_usage:
                    yield self._last(piece.usage)

    def _chunk(self, delta: Delta, finish_reason: FinishReason | None = None, **ours: Any) -> dict[str, Any]:
        choice = ChunkChoice(delta=delta, finish_reason=finish_reason)
        chunk = ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[choice], **ours)
        wire = chunk.model_dump(mode="json", exclude={"usage"} | (_OURS - ours.keys()))
        # OpenAI's deltas hold only new fields: absent content is left out, not null.
        wire["choices"][0]["delta"] = delta.model_dump(exclude_none=True)
        return wire

    def _last(self, usage: Usage) -> dict[str, Any]:
        chunk = ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=_usage(usage))
        return chunk.model_dump(mode="json", exclude=_OURS)


def asking_of(body: ChatCompletionRequest) -> Asking:
    """The question that a body asks."""
    return Asking(
        messages=[message.plain() for message in body.messages],
        max_tokens=body.token_limit,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=body.stop,
        select=body.select,
        suffix=body.suffix,
        store=bool(body.store),
        ttl_s=body.ttl_s,
        tool=body.tool,
        on_miss=body.on_miss,
    )


def require_model(body: ChatCompletionRequest, cache_id: str, names: tuple[str, str]) -> None:
    """Refuse the name of a model that is not the cache's. names: under which the cache was made and is served."""
    if body.model not in (None, *names):
        raise InvalidRequest(f"cache {cache_id} is of model {names[0]!r}, not {body.model!r}", param="model")


def wants_usage(body: ChatCompletionRequest) -> bool:
    """Whether a stream is to end with its usage."""
    return body.stream_options is not None and body.stream_options.include_usage


def _usage(usage: Usage) -> ChatUsage:
    prompt = usage.cache_read_tokens + usage.prefill_tokens
    return ChatUsage(
        prompt_tokens=prompt,
        completion_tokens=usage.completion_tokens,
        total_tokens=prompt + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cache_read_tokens),
        prefill_token_equivalents=usage.prefill_token_equivalents,
        prefill_token_equivalents_saved=usage.prefill_token_equivalents_saved,
    )
