"""OpenAI's chat completions: answers as a whole, and as chunks. Needs no Ray."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.api import Usage, openai
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.shapes import Logprob
from kvshelf.errors import InvalidRequest

OURS: Final = {"sources", "exact", "stored_cache_id", "not_stored", "recomputed", "linked"}
"""The fields of an answer that are not OpenAI's, see `ours_of`."""


def reason_of(answer: Answer) -> openai.ChatReason:
    """Why an answer ended, as OpenAI says it."""
    return "tool_calls" if answer.tool_calls else answer.finish_reason


def ours_of(answer: Answer, *, together: bool) -> dict[str, Any]:
    """The fields beside OpenAI's, those that apply. together: whether several caches were asked as several."""
    served = answer.served
    fields = {
        "sources": answer.shares if together else None,
        "exact": answer.exact,
        "stored_cache_id": served.stored_cache_id,
        "not_stored": served.not_stored,
        "recomputed": list(served.remade) or None,
        "linked": served.linked,
    }
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Completion:
    """One completion: what all its chunks have in common, and its shapes. written: the tokens of the document that this
    request put on the shelf. together: as of `ours_of`."""

    model: str
    written: int = 0
    together: bool = False
    id: str = field(default_factory=lambda: "chatcmpl-" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `ChatCompletion` as JSON. answers: of each choice."""
        choices = [
            openai.ChatChoice(
                index=index,
                message=openai.AssistantMessage(
                    content=answer.text or None if answer.tool_calls else answer.text,
                    reasoning_content=answer.thought,
                    tool_calls=list(answer.tool_calls) or None,
                ),
                logprobs=None if answer.logprobs is None else openai.ChoiceLogprobs(content=list(answer.logprobs)),
                finish_reason=reason_of(answer),
            )
            for index, answer in enumerate(answers)
        ]
        ours = ours_of(answers[0], together=self.together)
        usage = self._usage([answer.usage for answer in answers])
        completion = openai.ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage, **ours
        )
        wire = completion.model_dump(mode="json", exclude=OURS - ours.keys())
        for choice in wire["choices"]:
            for name in ("tool_calls", "reasoning_content"):
                if choice["message"][name] is None:  # OpenAI's are absent then
                    del choice["message"][name]
        return wire

    async def chunks(
        self, pieces: AsyncGenerator[tuple[int, Piece | Answer], None], *, with_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Each `ChatCompletionChunk` as JSON. pieces: of each choice, by its index, and its answer."""
        # If usage is requested, every chunk but the last has a null `usage`, as in OpenAI's streams.
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        sent_tokens: dict[int, int] = {}  # of each choice that has begun, the tokens whose logprobs went out
        ended: list[Usage] = []

        def chunk(index: int, delta: openai.Delta, tokens: Sequence[Logprob] = ()) -> dict[str, Any]:
            choice = openai.ChunkChoice(index=index, delta=delta, logprobs=_logprobs(tokens))
            return self._chunk(choice) | extra

        async with aclosing(pieces):
            async for index, piece in pieces:
                # OpenAI's client fails if a choice begins before those of lower indexes.
                for begun in range(len(sent_tokens), index + 1):
                    yield chunk(begun, openai.Delta(role="assistant", content=""))
                    sent_tokens[begun] = 0
                if isinstance(piece, Answer):
                    ended.append(piece.usage)
                    ours = ours_of(piece, together=self.together)
                    yield self._chunk(_closing(index, piece, sent_tokens[index]), **ours) | extra
                elif piece.is_thought:
                    yield chunk(index, openai.Delta(reasoning_content=piece))
                else:
                    tokens = piece.logprobs or ()
                    yield chunk(index, openai.Delta(content=piece), tokens)
                    sent_tokens[index] += len(tokens)
        if with_usage:
            yield self._last(ended)

    def _chunk(self, choice: openai.ChunkChoice, **ours: Any) -> dict[str, Any]:
        chunk = openai.ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[choice], **ours)
        wire = chunk.model_dump(mode="json", exclude={"usage"} | (OURS - ours.keys()))
        # OpenAI's deltas hold only new fields: absent content is left out, not null.
        wire["choices"][0]["delta"] = choice.delta.model_dump(exclude_none=True)
        return wire

    def _last(self, usages: Sequence[Usage]) -> dict[str, Any]:
        usage = self._usage(usages)
        chunk = openai.ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=usage)
        return chunk.model_dump(mode="json", exclude=OURS)

    def unasked(self, tokens: int) -> dict[str, Any]:
        """A `ChatCompletion` without an answer as JSON. tokens: of the caches that are there now."""
        usage = Usage(cache_read_tokens=tokens, read_tokens=0, prefill_tokens=0, completion_tokens=0)
        return self.whole([Answer("", [], "length", usage)])

    def _usage(self, usages: Sequence[Usage]) -> openai.ChatUsage:
        """The usage of all choices: they have one prompt, which counts once."""
        first, answered = usages[0], sum(usage.completion_tokens for usage in usages)
        prompt = first.cache_read_tokens + first.prefill_tokens
        return openai.ChatUsage(
            prompt_tokens=prompt,
            completion_tokens=answered,
            total_tokens=prompt + answered,
            prompt_tokens_details=openai.PromptTokensDetails(
                cached_tokens=first.cache_read_tokens - self.written, cache_write_tokens=self.written
            ),
            prefill_token_equivalents=_sum(usage.prefill_token_equivalents for usage in usages),
            prefill_token_equivalents_saved=_sum(usage.prefill_token_equivalents_saved for usage in usages),
        )


def require_model(model: str | None, cache_id: str, names: Sequence[str | None]) -> None:
    """Refuse the name of a model that is not the cache's. names: under which the cache was made and is served, and of a
    question that names the adapter, that of its model."""
    if model not in (None, *names):
        raise InvalidRequest(f"cache {cache_id} is of model {names[0]!r}, not {model!r}", param="model")


def _closing(index: int, answer: Answer, sent_tokens: int) -> openai.ChunkChoice:
    """The end of a choice. sent_tokens: the tokens whose logprobs went out before."""
    calls = [openai.DeltaCall(index=at, **call.model_dump()) for at, call in enumerate(answer.tool_calls)]
    unsent = _logprobs((answer.logprobs or ())[sent_tokens:])
    return openai.ChunkChoice(
        index=index, delta=openai.Delta(tool_calls=calls or None), logprobs=unsent, finish_reason=reason_of(answer)
    )


def _logprobs(tokens: Sequence[Logprob]) -> openai.ChoiceLogprobs | None:
    """What a chunk says of its tokens, in OpenAI's shape."""
    return openai.ChoiceLogprobs(content=list(tokens)) if tokens else None


def _sum(costs: Iterable[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None
