"""Anthropic's messages: an answer as a whole, and as events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvshelf.api.anthropic import AnswerBlock, MessageObject, MessageUsage, StopReason
from kvshelf.workers.replica.results import Reply


@dataclass(frozen=True)
class Answering:
    """A message that is being made. asked: the cache behind which the question is. read, created: the tokens of that
    cache; it was on the shelf, or this request made it."""

    model: str
    asked: str
    read: int
    created: int
    id: str = field(default_factory=lambda: "msg_" + secrets.token_hex(12))

    def whole(self, reply: Reply) -> dict[str, Any]:
        """A `MessageObject` as JSON."""
        return self._wire(
            content=[AnswerBlock(text=reply.text)] if reply.text else [],
            stop_reason=_reason(reply),
            stop_sequence=reply.stop,
            usage=self._usage(reply),
            stored_cache_id=reply.stored_cache_id,
            not_stored=reply.not_stored,
        )

    async def events(self, pieces: AsyncGenerator[str | Reply, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Each event as JSON. The first has the counts that are known before the answer, `message_delta` has all."""
        known = MessageUsage(
            input_tokens=0,
            cache_creation_input_tokens=self.created,
            cache_read_input_tokens=self.read,
            output_tokens=0,
        )
        begun, written = False, False
        async with aclosing(pieces):
            async for piece in pieces:
                if not begun:
                    message = self._wire(content=[], stop_reason=None, stop_sequence=None, usage=known)
                    yield {"type": "message_start", "message": message}
                    begun = True
                if isinstance(piece, Reply):
                    if written:
                        yield {"type": "content_block_stop", "index": 0}
                    yield self._delta(piece)
                    yield {"type": "message_stop"}
                elif piece:
                    if not written:
                        block = AnswerBlock(text="").model_dump()
                        yield {"type": "content_block_start", "index": 0, "content_block": block}
                        written = True
                    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}

    def _delta(self, reply: Reply) -> dict[str, Any]:
        kept = {"stored_cache_id": reply.stored_cache_id, "not_stored": reply.not_stored}
        return {
            "type": "message_delta",
            "delta": {"stop_reason": _reason(reply), "stop_sequence": reply.stop},
            "usage": self._usage(reply).model_dump(),
        } | {name: value for name, value in kept.items() if value is not None}

    def _wire(self, **fields: Any) -> dict[str, Any]:
        message = MessageObject(id=self.id, model=self.model, cache_id=self.asked, **fields)
        silent = {name for name in ("stored_cache_id", "not_stored") if getattr(message, name) is None}
        return message.model_dump(mode="json", exclude=silent)

    def _usage(self, reply: Reply) -> MessageUsage:
        prefilled = reply.usage.prefill_tokens
        kept = prefilled if reply.stored_cache_id is not None else 0
        return MessageUsage(
            input_tokens=prefilled - kept,
            cache_creation_input_tokens=self.created + kept,
            cache_read_input_tokens=reply.usage.cache_read_tokens - self.created,
            output_tokens=reply.usage.completion_tokens,
        )


def _reason(reply: Reply) -> StopReason:
    if reply.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if reply.stop is None else "stop_sequence"
