"""OpenAI's responses: an answer as a whole, and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvshelf.api import Asking, responses
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.shapes import Logprob
from kvshelf.api.tools import ToolCall
from kvshelf.service.dialects.completions import OURS, ours_of, reason_of


@dataclass(frozen=True)
class Responding:
    """One response: what all its shapes have in common."""

    body: responses.ResponsesRequest
    asking: Asking
    model: str
    id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(16))
    message_id: str = field(default_factory=lambda: "msg_" + secrets.token_hex(16))
    thought_id: str = field(default_factory=lambda: "rs_" + secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """A finished `ResponseObject` as JSON."""
        status: responses.Status = "incomplete" if reason_of(answer) == "length" else "completed"
        text, calls = answer.text, [_call(call) for call in answer.tool_calls]
        # The tokens of calls are those of no text.
        message = [] if calls and not text else [self._message(status, text, () if calls else answer.logprobs)]
        thought = [] if answer.thought is None else [self._thought("completed", answer.thought)]
        return self._wire(
            status=status,
            incomplete_details=None if status == "completed" else responses.IncompleteDetails(),
            output=[*thought, *message, *calls],
            usage=_usage(answer),
            **ours_of(answer, together=self.body.cache_ids is not None),
        )

    async def events(self, pieces: AsyncGenerator[Piece | Answer, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Each event as JSON, numbered."""
        number = 0
        async with aclosing(self._events(pieces)) as events:
            async for event in events:
                yield event | {"sequence_number": number}
                number += 1

    async def _events(self, pieces: AsyncGenerator[Piece | Answer, None]) -> AsyncGenerator[dict[str, Any], None]:
        place: dict[str, Any] = {"output_index": 0, "item_id": self.message_id, "content_index": 0}
        text, thought, begun = "", "", False
        async with aclosing(pieces):
            async for piece in pieces:
                if not begun:
                    response = self._wire(status="in_progress", output=[])
                    for kind in ("response.created", "response.in_progress"):
                        yield {"type": kind, "response": response}
                    begun = True
                if not text and (isinstance(piece, Answer) or not piece.is_thought):
                    for event in self._thought_closing(thought):
                        yield event
                if isinstance(piece, Answer):
                    for event in self._closing(place, self.whole(piece), opened=bool(text)):
                        yield event
                elif piece.is_thought:
                    at = {"output_index": 0, "item_id": self.thought_id}
                    if not thought:
                        item = self._thought("in_progress", None).model_dump(mode="json")
                        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
                        place["output_index"] = 1
                    thought += piece
                    yield {"type": "response.reasoning_text.delta", **at, "content_index": 0, "delta": piece}
                else:
                    if not text:
                        for event in self._opening(place):
                            yield event
                    text += piece
                    logprobs = [token.model_dump(mode="json") for token in piece.logprobs or ()]
                    yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": logprobs}

    def _thought_closing(self, thought: str) -> Iterator[dict[str, Any]]:
        """The end of the thoughts, if there were any."""
        if not thought:
            return
        at = {"output_index": 0, "item_id": self.thought_id}
        item = self._thought("completed", thought).model_dump(mode="json")
        yield {"type": "response.reasoning_text.done", **at, "content_index": 0, "text": thought}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}

    def _thought(self, status: responses.Status, text: str | None) -> responses.OutputReasoning:
        content = [] if text is None else [responses.ReasoningPart(type="reasoning_text", text=text)]
        return responses.OutputReasoning(id=self.thought_id, status=status, content=content)

    def _opening(self, place: dict[str, Any]) -> list[dict[str, Any]]:
        message = self._message("in_progress", None).model_dump(mode="json")
        return [
            {"type": "response.output_item.added", "output_index": place["output_index"], "item": message},
            {
                "type": "response.content_part.added",
                **place,
                "part": responses.OutputText(text="").model_dump(mode="json"),
            },
        ]

    def _closing(self, place: dict[str, Any], response: dict[str, Any], *, opened: bool) -> Iterator[dict[str, Any]]:
        """opened: whether the message has begun."""
        for index, item in enumerate(response["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "reasoning":
                continue
            if item["type"] == "message":
                if not opened:
                    yield from self._opening(place)
                (part,) = item["content"]
                content = {"text": part["text"], "logprobs": part["logprobs"]}
                yield {"type": "response.output_text.done", **place, **content}
                yield {"type": "response.content_part.done", **place, "part": part}
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                yield {"type": "response.output_item.added", "output_index": index, "item": begun}
                yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
                content = {"name": item["name"], "arguments": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **at, **content}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{response['status']}", "response": response}

    def _message(
        self, status: responses.Status, text: str | None, logprobs: Sequence[Logprob] | None = None
    ) -> responses.OutputMessage:
        content = [] if text is None else [responses.OutputText(text=text, logprobs=list(logprobs or ()))]
        return responses.OutputMessage(id=self.message_id, status=status, content=content)

    def _wire(self, **fields: Any) -> dict[str, Any]:
        response = responses.ResponseObject(
            id=self.id,
            created_at=self.created,
            instructions=self.body.instructions,
            max_output_tokens=self.asking.max_tokens,
            metadata=self.body.metadata or {},
            model=self.model,
            parallel_tool_calls=self.body.parallel_tool_calls is not False,
            previous_response_id=self.body.previous_response_id,
            store=self.asking.store,
            temperature=self.asking.temperature,
            text=self.body.text or responses.TextOptions(format=responses.FlatText(type="text")),
            tool_choice=self.body.tool_choice or "auto",
            tools=self.body.tools or [],
            top_logprobs=self.body.top_logprobs or 0,
            top_p=self.asking.top_p,
            **fields,
        )
        return response.model_dump(mode="json", exclude=OURS - fields.keys())


def _call(call: ToolCall) -> responses.OutputCall:
    name, arguments = call.function.name, call.function.arguments
    item_id = "fc_" + call.id.removeprefix("call_")
    return responses.OutputCall(id=item_id, call_id=call.id, name=name, arguments=arguments, status="completed")


def _usage(answer: Answer) -> responses.ResponseUsage:
    usage = answer.usage
    read, prefilled = usage.cache_read_tokens, usage.prefill_tokens
    written = prefilled if answer.served.stored_cache_id is not None else 0
    return responses.ResponseUsage(
        input_tokens=read + prefilled,
        input_tokens_details=responses.InputTokensDetails(cached_tokens=read, cache_write_tokens=written),
        output_tokens=usage.completion_tokens,
        total_tokens=read + prefilled + usage.completion_tokens,
        prefill_token_equivalents=usage.prefill_token_equivalents,
        prefill_token_equivalents_saved=usage.prefill_token_equivalents_saved,
    )
