"""Anthropic's messages: an answer as a whole, and as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvshelf.api import anthropic
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.tools import ToolCall


@dataclass(frozen=True)
class MessageAnswering:
    """A message that is being made. cache_id: the cache behind which the question is. read, created: the tokens of that
    cache; it was on the shelf, or this request made it."""

    model: str
    cache_id: str
    read: int
    created: int
    id: str = field(default_factory=lambda: "msg_" + secrets.token_hex(12))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A `MessageObject` as JSON."""
        text: list[anthropic.AnswerBlock] = [anthropic.AnswerText(text=answer.text)] if answer.text else []
        if answer.thought is not None:
            text.insert(0, anthropic.AnswerThinking(thinking=answer.thought))
        message = self._wire(
            content=[*text, *map(_called, answer.tool_calls)],
            stop_reason=_reason(answer),
            stop_sequence=answer.stop,
            usage=self._usage(answer),
        )
        return message | _kept(answer.served.stored_cache_id, answer.served.not_stored)

    def unasked(self, not_stored: str | None) -> dict[str, Any]:
        """A `MessageObject` without an answer as JSON: the cache is there, and nothing was asked."""
        message = self._wire(content=[], stop_reason="max_tokens", stop_sequence=None, usage=self._known_usage)
        return message | _kept(None, not_stored)

    async def events(self, pieces: AsyncGenerator[Piece | Answer, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Each event as JSON. The first has the counts that are known before the answer, `message_delta` has all."""
        begun, thought, written, index = False, False, False, 0
        async with aclosing(pieces):
            async for piece in pieces:
                if not begun:
                    message = self._wire(content=[], stop_reason=None, stop_sequence=None, usage=self._known_usage)
                    yield {"type": "message_start", "message": message}
                    begun = True
                thinks = isinstance(piece, Piece) and piece.is_thought
                if thinks and not thought:
                    yield _start(0, anthropic.AnswerThinking(thinking=""))
                    thought = True
                if thought and not thinks and not index and (isinstance(piece, Answer) or piece):
                    signed = {"type": "signature_delta", "signature": ""}
                    yield {"type": "content_block_delta", "index": 0, "delta": signed}
                    yield {"type": "content_block_stop", "index": 0}
                    index = 1
                if isinstance(piece, Answer):
                    for event in self._ending(piece, index, written=written):
                        yield event
                elif thinks:
                    delta = {"type": "thinking_delta", "thinking": piece}
                    yield {"type": "content_block_delta", "index": 0, "delta": delta}
                elif piece:
                    if not written:
                        yield _start(index, anthropic.AnswerText(text=""))
                        written = True
                    delta = {"type": "text_delta", "text": piece}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}

    def _ending(self, answer: Answer, first: int, *, written: bool) -> Iterator[dict[str, Any]]:
        """The events behind the text. first: the index of its block. written: whether there was any."""
        if written:
            yield {"type": "content_block_stop", "index": first}
        for index, call in enumerate(map(_called, answer.tool_calls), first + int(written)):
            yield _start(index, call.model_copy(update={"input": {}}))
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call.input, ensure_ascii=False)}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stop}
        usage = self._usage(answer).model_dump()
        kept = _kept(answer.served.stored_cache_id, answer.served.not_stored)
        yield {"type": "message_delta", "delta": ended, "usage": usage} | kept
        yield {"type": "message_stop"}

    @property
    def _known_usage(self) -> anthropic.MessageUsage:
        """The usage that is known before the answer."""
        return anthropic.MessageUsage(
            input_tokens=0,
            cache_creation_input_tokens=self.created,
            cache_read_input_tokens=self.read,
            output_tokens=0,
        )

    def _wire(self, **fields: Any) -> dict[str, Any]:
        message = anthropic.MessageObject(id=self.id, model=self.model, cache_id=self.cache_id, **fields)
        return message.model_dump(mode="json", exclude={"stored_cache_id", "not_stored"})

    def _usage(self, answer: Answer) -> anthropic.MessageUsage:
        prefilled = answer.usage.prefill_tokens
        kept = prefilled if answer.served.stored_cache_id is not None else 0
        return anthropic.MessageUsage(
            input_tokens=prefilled - kept,
            cache_creation_input_tokens=self.created + kept,
            cache_read_input_tokens=answer.usage.cache_read_tokens - self.created,
            output_tokens=answer.usage.completion_tokens,
        )


def _kept(stored_cache_id: str | None, not_stored: str | None) -> dict[str, str]:
    """The fields that say whether the turn was kept, where it was to be."""
    fields = {"stored_cache_id": stored_cache_id, "not_stored": not_stored}
    return {name: value for name, value in fields.items() if value is not None}


def _start(index: int, block: anthropic.AnswerBlock) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block.model_dump()}


def _called(call: ToolCall) -> anthropic.AnswerCall:
    call_id = "toolu_" + call.id.removeprefix("call_")
    return anthropic.AnswerCall(id=call_id, name=call.function.name, input=json.loads(call.function.arguments))


def _reason(answer: Answer) -> anthropic.StopReason:
    if answer.tool_calls:
        return "tool_use"
    if answer.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if answer.stop is None else "stop_sequence"
