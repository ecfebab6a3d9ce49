"""What a body of /v1/responses asks."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api.responses import ResponsesRequest
from kvshelf.api.strict import parse_request
from kvshelf.api.tools import ToolAsking
from kvshelf.errors import InvalidRequest

FIND: Any = {"type": "function", "name": "find", "description": "A book.", "parameters": {"type": "object"}}


def body(**fields: Any) -> ResponsesRequest:
    return parse_request(ResponsesRequest, {"cache_id": "kvs_1", "input": "?"} | fields)


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}", "id": "fc_1"}


def result(name: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


def test_items_are_turns_of_a_conversation_with_tools() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where"}, {"type": "input_text", "text": "?"}]},
        {"type": "message", "role": "assistant", "content": "I look.", "id": "msg_1", "status": "completed"},
        call("find"),
        call("clock"),
        result("clock", ""),
        result("find", [{"type": "input_text", "text": "shelf"}, {"type": "input_text", "text": " 4"}]),
        call("find"),
    ]
    asking = body(input=items, tools=[FIND], instructions="Be exact.").asking(may_write=True)
    assert isinstance(asking, ToolAsking)
    assert [
        (turn.role, turn.content, [each.function.name for each in turn.tool_calls]) for turn in asking.messages
    ] == [
        ("system", "Be exact.", []),
        ("user", "Where?", []),
        ("assistant", "I look.", ["find", "clock"]),
        ("tool", "shelf 4", []),  # in the order of the calls
        ("tool", "", []),
        ("assistant", "", ["find"]),
    ]
    assert asking.tools[0].function.description == "A book."
    assert (asking.tool_choice, asking.parallel_tool_calls, asking.store) == ("auto", True, True)


def test_a_tool_is_called_by_its_name() -> None:
    asked = body(tools=[FIND], tool_choice={"type": "function", "name": "find"}).asking(may_write=False)
    assert isinstance(asked, ToolAsking)
    assert [tool.function.name for tool in asked.callable] == ["find"]
    assert not asked.store


def test_thoughts_are_sent_back_with_their_answer() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = [{"role": "user", "content": "?"}, thought, {"role": "assistant", "content": "So."}]
    asking = body(input=[*said, said[0]], reasoning={"effort": "none"}).asking(may_write=False)
    assert [message.model_dump() for message in asking.messages or ()] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
        {"role": "user", "content": "?"},
    ]
    assert asking.reasoning_effort == "none"


@pytest.mark.parametrize("field", ["input", "tools", "include"])
def test_a_list_fails_at_its_first_bad_element(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(**{field: [{"type": "x"}] * 100})
    assert (refused.value.param or "").startswith(f"{field}[0]")
    assert "more problem" not in refused.value.message
