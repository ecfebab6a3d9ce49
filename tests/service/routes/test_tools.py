"""Tools by OpenAI's own client: calls that a model must make, conversations with their results, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.service.conftest import created, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUESTION: Any = [{"role": "user", "content": "Where is the green book?"}]
FIND: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a book.",
        "parameters": {
            "type": "object",
            "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["shelf"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.slow
def test_a_conversation_with_calls(tool_service: LiveService) -> None:
    with httpx.Client(base_url=tool_service.url, timeout=120) as http:
        cache = created(http, document="The green book lies on shelf 4. " * 40, policy="full", layout="chat")
    client = openai.OpenAI(base_url=f"{tool_service.url}/v1", api_key="anything", max_retries=0)
    asked: Any = {"model": cache["model"], "tools": [FIND, CLOCK], "max_tokens": 60}
    asked["extra_body"] = {"cache_id": cache["id"]}
    chosen: Any = {"type": "function", "function": {"name": "find"}}
    said = client.chat.completions.create(messages=QUESTION, tool_choice=chosen, parallel_tool_calls=False, **asked)
    (choice,) = said.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "find"
    assert 1 <= json.loads(call.function.arguments)["shelf"] <= 9

    stream = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, stream=True, logprobs=True, **asked
    )
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert [bool(each.logprobs and each.logprobs.content) for each in choices] == [False, True]
    deltas = [choice.delta for choice in choices]
    streamed = [made for delta in deltas for made in delta.tool_calls or ()]
    assert [made.index for made in streamed] == [0]
    assert streamed[0].function is not None
    assert streamed[0].function.name in ("find", "clock")

    for choice_of_tools in ("auto", "none"):
        plain = client.chat.completions.create(messages=QUESTION, tool_choice=choice_of_tools, **asked)
        chunks = client.chat.completions.create(
            messages=QUESTION, tool_choice=choice_of_tools, stream=True, logprobs=True, **asked
        )
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert sum(map(bool, texts)) > 1, "text that is no call comes as it is made"
        assert "".join(texts) == plain.choices[0].message.content

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "<|end|> It is on shelf 4."}
    talk = [*QUESTION, choice.message, result]
    told = client.chat.completions.create(messages=talk, tool_choice="none", **asked)
    assert told.choices[0].message.tool_calls is None
    assert told.choices[0].finish_reason in ("stop", "length")
    assert told.usage is not None
    assert said.usage is not None
    assert told.usage.prompt_tokens > said.usage.prompt_tokens
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.cached_tokens == cache["tokens"]["document"]

    wrong: Any = {"type": "function", "function": {"name": "find", "parameters": {"type": "strng"}}}
    with pytest.raises(openai.BadRequestError, match="strng") as refusal:
        client.chat.completions.create(messages=QUESTION, tool_choice="required", **asked | {"tools": [wrong]})
    assert refusal.value.param == "tools"


def post(http: httpx.Client, cache: dict[str, Any], **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"cache_id": cache["id"], "messages": QUESTION} | body)


CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"shelf": 4}'}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [FIND]}, "tools", "has no tools"),
        ({"tools": [FIND, FIND]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [FIND], "store": True}, "store", "leave store out"),
        ({"tools": [FIND], "tool_choice": "required", "choices": ["a"]}, "choices", "leave choices out"),
        ({"tools": [FIND], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"messages": [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "4"}]}, "tools", "give the tools"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "4"}], "tools": [FIND]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages", "needs a content"),
        ({"messages": [{"role": "user", "content": "?", "tool_calls": [CALL]}]}, "messages", "role assistant"),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [CALL | {
            "function": {"name": "find", "arguments": "4"}}]}, *QUESTION], "tools": [FIND]}, None, "JSON object"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(
    http: httpx.Client, cache: dict[str, Any], body: dict[str, Any], param: str | None, says: str
) -> None:
    error = refused(post(http, cache, **body), 400, "invalid_request")
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_no_tools_are_none(http: httpx.Client, cache: dict[str, Any]) -> None:
    plain = post(http, cache, max_tokens=4).json()["choices"]
    assert post(http, cache, max_tokens=4, tools=[], tool_choice="none").json()["choices"] == plain
