"""OpenAI's chat completions, over whatever answers them. Needs no Ray."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import Source, Usage, openai
from kvshelf.api.queries import Remade
from kvshelf.api.shapes import Logprob
from kvshelf.api.strict import FinishReason
from kvshelf.api.tools import ToolCall
from kvshelf.engine.decode.logprobs import Piece
from kvshelf.errors import InvalidRequest
from kvshelf.model.templates.thoughts import Thought
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.waiting import until_hangup
from kvshelf.workers.replica.calls import Computing
from kvshelf.workers.replica.results import Reply

OURS: Final = {"sources", "stored_cache_id", "not_stored", "recomputed"}
"""The fields of an `Ending` that are not OpenAI's."""


class Ending(NamedTuple):
    """What follows the last text of an answer. sources: None where one cache was asked as one. stored_cache_id,
    not_stored, recomputed: as of a `ChatCompletion`. tokens: how likely each was, if that was asked for. tool_calls: of
    an answer that has some. thought: what the model thought before the answer."""

    finish_reason: FinishReason
    usage: Usage
    sources: list[Source] | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    recomputed: list[Remade] | None = None
    tokens: list[Logprob] | None = None
    tool_calls: list[ToolCall] | None = None
    thought: str | None = None

    @property
    def reason(self) -> openai.ChatReason:
        """Why it ended, as OpenAI says it."""
        return "tool_calls" if self.tool_calls else self.finish_reason

    @property
    def ours(self) -> dict[str, Any]:
        """Fields beside OpenAI's, those that apply."""
        return {name: value for name in OURS if (value := getattr(self, name)) is not None}


def ending_of(reply: Reply, remade: list[Remade] | None = None, *, together: bool) -> Ending:
    """together: whether several caches were asked as several. remade: those that were made again for it."""
    sources = list(reply.sources) if together else None
    stored = (reply.stored_cache_id, reply.not_stored)
    calls = reply.tool_calls or None
    return Ending(
        reply.finish_reason, reply.usage, sources, *stored, remade, reply.logprobs, calls, reply.reasoning_content
    )


class ChatBackend(Protocol):
    """What answers one chat completion: replicas, or vLLM servers. model: its name in the answer."""

    @property
    def model(self) -> str: ...

    def pieces(self) -> AsyncGenerator[tuple[int, str | Ending], None]:
        """The pieces of the text of each choice, by its index, and its ending."""

    async def answers(self) -> list[tuple[str, Ending]]:
        """The text of each choice, and its ending."""


async def completed(
    request: Request, body: openai.ChatCompletionRequest, backend: ChatBackend, computing: Computing, written: int = 0
) -> Response:
    """The answer to a chat completion: as a whole, or as events. computing: makes what may be long. written: see
    `Completion`."""
    completion = Completion(backend.model, written)
    if body.stream:
        return await event_stream(request, completion.chunks(backend.pieces(), with_usage=_wants_usage(body)))
    answers = await until_hangup(request, backend.answers())
    return await computing.run(lambda: JSONResponse(completion.whole(answers)))


@dataclass(frozen=True)
class Completion:
    """One completion: what all its chunks have in common, and its shapes. written: the tokens of the document that this
    request put on the shelf."""

    model: str
    written: int = 0
    id: str = field(default_factory=lambda: "chatcmpl-" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[tuple[str, Ending]]) -> dict[str, Any]:
        """A `ChatCompletion` as JSON. answers: the text of each choice, and its ending."""
        choices = [
            openai.ChatChoice(
                index=index,
                message=openai.AssistantMessage(
                    content=text or None if end.tool_calls else text,
                    reasoning_content=end.thought,
                    tool_calls=end.tool_calls,
                ),
                logprobs=None if end.tokens is None else openai.ChoiceLogprobs(content=end.tokens),
                finish_reason=end.reason,
            )
            for index, (text, end) in enumerate(answers)
        ]
        ours, usage = answers[0][1].ours, self._usage([end.usage for _, end in answers])
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
        self, pieces: AsyncGenerator[tuple[int, str | Ending], None], *, with_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Each `ChatCompletionChunk` as JSON. pieces: of the text of each choice, by its index, and its ending."""
        # If usage is requested, every chunk but the last has a null `usage`, as in OpenAI's streams.
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        sent_tokens: dict[int, int] = {}  # of each choice that has begun, the tokens whose logprobs went out
        ended: list[Usage] = []

        def chunk(index: int, delta: openai.Delta, tokens: Sequence[Logprob] = ()) -> dict[str, Any]:
            choice = openai.ChunkChoice(index=index, delta=delta, logprobs=_logprobs(tokens))
            return self._chunk(choice) | extra

        async with aclosing(pieces):
            async for index, piece in pieces:
                if index not in sent_tokens:
                    yield chunk(index, openai.Delta(role="assistant", content=""))
                    sent_tokens[index] = 0
                if isinstance(piece, Thought):
                    yield chunk(index, openai.Delta(reasoning_content=piece))
                elif isinstance(piece, str):
                    tokens = piece.logprobs if isinstance(piece, Piece) else ()
                    yield chunk(index, openai.Delta(content=piece), tokens)
                    sent_tokens[index] += len(tokens)
                else:
                    ended.append(piece.usage)
                    yield self._chunk(_closing(index, piece, sent_tokens[index]), **piece.ours) | extra
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
        return self.whole([("", Ending("length", usage))])

    def _usage(self, usages: Sequence[Usage]) -> openai.ChatUsage:
        """Of all choices: they have one prompt, which counts once."""
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


def require_model(model: str | None, cache_id: str, names: tuple[str, str]) -> None:
    """Refuse the name of a model that is not the cache's. names: under which the cache was made and is served."""
    if model not in (None, *names):
        raise InvalidRequest(f"cache {cache_id} is of model {names[0]!r}, not {model!r}", param="model")


def _wants_usage(body: openai.ChatCompletionRequest) -> bool:
    """Whether a stream is to end with its usage."""
    return body.stream_options is not None and body.stream_options.include_usage


def _closing(index: int, end: Ending, sent_tokens: int) -> openai.ChunkChoice:
    """The end of a choice. sent_tokens: the tokens whose logprobs went out before."""
    calls = [openai.DeltaCall(index=at, **call.model_dump()) for at, call in enumerate(end.tool_calls or ())]
    left = _logprobs((end.tokens or ())[sent_tokens:])
    return openai.ChunkChoice(
        index=index, delta=openai.Delta(tool_calls=calls or None), logprobs=left, finish_reason=end.reason
    )


def _logprobs(tokens: Sequence[Logprob]) -> openai.ChoiceLogprobs | None:
    """What a chunk says of its tokens, in OpenAI's shape."""
    return openai.ChoiceLogprobs(content=list(tokens)) if tokens else None


def _sum(costs: Iterable[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None
