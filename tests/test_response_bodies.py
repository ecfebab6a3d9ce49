"""What a body of /v1/responses asks."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api.responses import FunctionTool, ResponsesRequest
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
        ("tool", "", []),
        ("tool", "shelf 4", []),
        ("assistant", "", ["find"]),
    ]
    assert asking.tools[0].function.description == "A book."
    assert (asking.tool_choice, asking.parallel_tool_calls, asking.store) == ("auto", True, True)


def test_the_tools_of_the_response_before_are_told_already() -> None:
    asked = body(tools=[FIND], tool_choice={"type": "function", "name": "find"})
    same, other = FunctionTool(**FIND), FunctionTool(**FIND | {"description": "A tree."})
    told = [asked.asking(may_write=False, told=tools) for tools in ([same], [other], [], None)]
    assert [each.told for each in told if isinstance(each, ToolAsking)] == [True, False, False, False]
    assert [tool.function.name for tool in told[0].callable] == ["find"]  # type: ignore[attr-defined]
    assert not told[0].store


@pytest.mark.parametrize("field", ["input", "tools", "include"])
def test_a_list_fails_at_its_first_bad_element(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(**{field: [{"type": "x"}] * 100})
    assert (refused.value.param or "").startswith(f"{field}[0]")
    assert "more problem" not in refused.value.message
