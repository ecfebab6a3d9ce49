"""OpenAI's responses: an answer as a whole, and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvshelf.api import Asking, Usage
from kvshelf.api.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
    TextOptions,
)
from kvshelf.api.shapes import AnyText
from kvshelf.service.http.completions import OURS, Ending


@dataclass(frozen=True)
class Responding:
    """One response: what all its shapes have in common."""

    body: ResponsesRequest
    asking: Asking
    model: str
    id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(16))
    message_id: str = field(default_factory=lambda: "msg_" + secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, end: Ending) -> dict[str, Any]:
        """A finished `ResponseObject` as JSON."""
        status: Status = "completed" if end.finish_reason == "stop" else "incomplete"
        return self._wire(
            status=status,
            incomplete_details=None if status == "completed" else IncompleteDetails(),
            output=[self._message(status, text)],
            usage=_usage(end),
            **end.ours,
        )

    async def events(self, pieces: AsyncGenerator[str | Ending, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Each event as JSON, numbered."""
        number = 0
        async with aclosing(self._events(pieces)) as events:
            async for event in events:
                yield event | {"sequence_number": number}
                number += 1

    async def _events(self, pieces: AsyncGenerator[str | Ending, None]) -> AsyncGenerator[dict[str, Any], None]:
        place = {"output_index": 0, "item_id": self.message_id, "content_index": 0}
        text, begun = "", False
        async with aclosing(pieces):
            async for piece in pieces:
                if not begun:
                    for event in self._opening(place):
                        yield event
                    begun = True
                if isinstance(piece, str):
                    text += piece
                    yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
                else:
                    for event in self._closing(place, self.whole(text, piece), text):
                        yield event

    def _opening(self, place: dict[str, Any]) -> list[dict[str, Any]]:
        begun = self._wire(status="in_progress", output=[])
        message = self._message("in_progress", None).model_dump(mode="json")
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": message},
            {"type": "response.content_part.added", **place, "part": OutputText(text="").model_dump(mode="json")},
        ]

    def _closing(self, place: dict[str, Any], response: dict[str, Any], text: str) -> list[dict[str, Any]]:
        message = response["output"][0]
        return [
            {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
            {"type": "response.content_part.done", **place, "part": message["content"][0]},
            {"type": "response.output_item.done", "output_index": 0, "item": message},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def _message(self, status: Status, text: str | None) -> OutputMessage:
        content = [] if text is None else [OutputText(text=text)]
        return OutputMessage(id=self.message_id, status=status, content=content)

    def _wire(self, **fields: Any) -> dict[str, Any]:
        response = ResponseObject(
            id=self.id,
            created_at=self.created,
            instructions=self.body.instructions,
            max_output_tokens=self.body.max_output_tokens,
            metadata=self.body.metadata or {},
            model=self.model,
            previous_response_id=self.body.previous_response_id,
            store=self.asking.store,
            temperature=self.asking.temperature,
            text=self.body.text or TextOptions(format=AnyText(type="text")),
            top_p=self.asking.top_p,
            **fields,
        )
        return response.model_dump(mode="json", exclude=OURS - fields.keys())


def _usage(end: Ending) -> ResponseUsage:
    usage: Usage = end.usage
    read, prefilled = usage.cache_read_tokens, usage.prefill_tokens
    written = prefilled if end.stored_cache_id is not None else 0
    return ResponseUsage(
        input_tokens=read + prefilled,
        input_tokens_details=InputTokensDetails(cached_tokens=read, cache_write_tokens=written),
        output_tokens=usage.completion_tokens,
        total_tokens=read + prefilled + usage.completion_tokens,
        prefill_token_equivalents=usage.prefill_token_equivalents,
        prefill_token_equivalents_saved=usage.prefill_token_equivalents_saved,
    )
