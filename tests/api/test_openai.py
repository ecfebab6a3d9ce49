"""Bodies of OpenAI's two APIs: what says nothing, what is refused and by which name, and results of tools."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api.openai import DEFAULT_MAX_TOKENS, ChatCompletionRequest
from kvshelf.api.responses import ResponsesRequest
from kvshelf.api.strict import parse_request
from kvshelf.api.tools import ToolAsking
from kvshelf.errors import InvalidRequest

QUESTION: Any = {"role": "user", "content": "Which of the two is warmer?"}
TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, {"cache_id": "kvs_1", "messages": [QUESTION]} | fields)


def responses(**fields: Any) -> ResponsesRequest:
    return parse_request(ResponsesRequest, {"cache_id": "kvs_1", "input": "?"} | fields)


def test_what_changes_nothing_is_accepted_however_it_is_written() -> None:
    for neutral in ({"frequency_penalty": 0.0}, {"presence_penalty": 0.0}, {"verbosity": "medium"}):
        assert chat(**neutral) == chat()
    for name in ("moderation", "verbosity", "web_search_options"):
        assert chat(**{name: None}) == chat()
    assert responses(max_output_tokens=None).asking(may_write=False).max_tokens == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize("wrong", [{"frequency_penalty": False}, {"presence_penalty": 0.5}, {"verbosity": "low"}])
def test_what_changes_something_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="is not supported"):
        chat(**wrong)


def test_a_role_that_is_none_is_named_as_people_write_it() -> None:
    with pytest.raises(InvalidRequest, match="'developer' or 'tool'; found 'function'") as refused:
        chat(messages=[{"role": "function", "content": "x"}])
    assert refused.value.param == "messages[0].role"
    with pytest.raises(InvalidRequest, match="or 'developer'; found 'tool'") as refused:
        responses(input=[{"role": "tool", "content": "x"}])
    assert refused.value.param == "input[0].role"


def call(call_id: str) -> Any:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def result(call_id: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


def test_results_stand_in_the_order_of_their_calls() -> None:
    """A template names no calls, so a model would take each result for that of another call."""
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]}
    again = {"role": "assistant", "content": None, "tool_calls": [call("d"), call("c")]}
    talk = [QUESTION, calls, result("b"), result("a"), again, result("c"), result("d")]
    asking = chat(messages=talk, tools=TOOLS).asking
    assert isinstance(asking, ToolAsking)
    assert [turn.tool_call_id for turn in asking.messages] == [None, None, "a", "b", None, "d", "c"]

    items = [{"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"} for name in "ab"]
    items += [{"type": "function_call_output", "call_id": name, "output": "1"} for name in "ba"]
    flat = [{"type": "function", "name": "weather"}]
    asking = responses(input=[QUESTION, *items], tools=flat).asking(may_write=False)
    assert isinstance(asking, ToolAsking)
    assert [turn.tool_call_id for turn in asking.messages] == [None, None, "a", "b"]


def test_a_result_has_its_call_before_it() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a")]}
    with pytest.raises(InvalidRequest, match="there is no call 'b' before its result") as refused:
        chat(messages=[QUESTION, calls, result("b")], tools=TOOLS)
    assert refused.value.param == "messages[2].tool_call_id"
    assert chat(messages=[result("b")], tools=TOOLS).asking, "its call may be in the cache"
