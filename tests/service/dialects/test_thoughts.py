"""Thoughts in the shapes of three APIs, whole and streamed, as the vendors' own types read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvshelf.api import Usage
from kvshelf.api.answers import Answer, Piece, Served
from kvshelf.api.responses import ResponsesRequest
from kvshelf.api.tools import ToolCall
from kvshelf.service.dialects.completions import Completion
from kvshelf.service.dialects.messages import MessageAnswering
from kvshelf.service.dialects.responses import Responding

pytestmark = pytest.mark.anyio

THOUGHT = "The book is green."
USAGE = Usage(cache_read_tokens=9, read_tokens=7, prefill_tokens=3, completion_tokens=2)
CALL = ToolCall.model_validate({"function": {"name": "find", "arguments": "{}"}})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def answered(text: str, thought: str | None, calls: list[ToolCall]) -> Answer:
    return Answer(text, [1], "stop", USAGE, thought=thought, tool_calls=tuple(calls), served=Served(cache_id="kvs_1"))


async def pieces(answer: Answer) -> AsyncGenerator[Piece | Answer, None]:
    for word in answer.thought.split(" ") if answer.thought else []:
        yield Piece(word + " ", is_thought=True)
    if answer.text:
        yield Piece(answer.text)
    yield answer


CASES = [("On the desk.", THOUGHT, []), ("On the desk.", None, []), ("", THOUGHT, [CALL]), ("", THOUGHT, [])]


@pytest.mark.parametrize(("text", "thought", "calls"), CASES)
async def test_chat_completions(text: str, thought: str | None, calls: list[ToolCall]) -> None:
    answer = answered(text, thought, calls)
    whole = Completion("tiny").whole([answer])
    message: Any = ChatCompletion.model_validate(whole).choices[0].message
    assert (message.content or "", getattr(message, "reasoning_content", None)) == (text, thought)

    async def one() -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        async for piece in pieces(answer):
            yield 0, piece

    chunks = [chunk async for chunk in Completion("tiny").chunks(one(), with_usage=False)]
    deltas: list[Any] = [ChatCompletionChunk.model_validate(chunk).choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == text
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == (thought or "")


@pytest.mark.parametrize(("text", "thought", "calls"), CASES)
async def test_responses(text: str, thought: str | None, calls: list[ToolCall]) -> None:
    body = ResponsesRequest.model_validate({"cache_id": "kvs_1", "input": "?", "stream": True})
    events = Responding(body, body.asking(may_write=False), "tiny").events(pieces(answered(text, thought, calls)))
    told: list[Any] = [event async for event in events]
    for event in told:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    last = Response.model_validate(told[-1]["response"])
    kinds = [*["reasoning"] * bool(thought), *["message"] * (bool(text) or not calls), *["function_call"] * len(calls)]
    assert [item.type for item in last.output] == kinds
    assert last.output_text == text
    added = [(event["output_index"], event["item"]["type"]) for event in told if event["type"].endswith("item.added")]
    done = [(event["output_index"], event["item"]["type"]) for event in told if event["type"].endswith("item.done")]
    assert added == done == list(enumerate(kinds))
    said = [event["delta"] for event in told if event["type"] == "response.reasoning_text.delta"]
    assert "".join(said).strip() == (thought or "")


async def collected(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


@pytest.mark.parametrize(("text", "thought", "calls"), CASES)
async def test_messages(text: str, thought: str | None, calls: list[ToolCall]) -> None:
    answering, made = MessageAnswering("tiny", "kvs_1", 9, 0), answered(text, thought, calls)
    whole = AnthropicMessage.model_validate(answering.whole(made))
    kinds = [*["thinking"] * bool(thought), *["text"] * bool(text), *["tool_use"] * len(calls)]
    assert [block.type for block in whole.content] == kinds
    told: list[Any] = await collected(answering.events(pieces(made)))
    for event in told:
        TypeAdapter(RawMessageStreamEvent).validate_python(event)
    begun = [
        (event["index"], event["content_block"]["type"]) for event in told if event["type"] == "content_block_start"
    ]
    ended = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert begun == list(enumerate(kinds))
    assert ended == list(range(len(kinds)))
    said = [event["delta"]["thinking"] for event in told if event.get("delta", {}).get("type") == "thinking_delta"]
    assert "".join(said).strip() == (thought or "")
