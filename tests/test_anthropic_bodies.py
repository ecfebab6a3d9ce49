"""Anthropic's bodies as the service reads them: what becomes a cache, what is asked of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api.anthropic import CountTokensRequest, MessagesRequest
from kvshelf.api.strict import parse_request
from kvshelf.api.tools import NamedTool, ToolAsking
from kvshelf.errors import InvalidRequest

LONG = "The green book lies on shelf 4. " * 10
MARK = {"cache_control": {"type": "ephemeral"}}
ASKED = {"role": "user", "content": "Where is it?"}
FIND = {"name": "find", "input_schema": {"type": "object", "properties": {"shelf": {"type": "integer"}}}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def used(call: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "find", "input": arguments}


def result(call: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **more}


def parsed(**fields: Any) -> MessagesRequest:
    body = {"model": "tiny", "max_tokens": 8, "system": [text(LONG, **MARK)], "messages": [ASKED]}
    return parse_request(MessagesRequest, body | fields)


def turns(body: MessagesRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in body.asking.messages or ()]


def test_calls_and_results_become_turns() -> None:
    """Results stand in the order of their calls, whatever order they come in; texts follow them."""
    calls = said("assistant", text("I look."), used("a", shelf=4), used("b", shelf=5))
    back = said(
        "user",
        result("b", content=[text("Not there."), text("Really.")], is_error=True),
        result("a", content="It is there."),
        text("And now?"),
    )
    asking = parsed(messages=[ASKED, calls, back], tools=[FIND]).asking
    assert isinstance(asking, ToolAsking)
    assert [(turn.role, turn.content) for turn in asking.messages] == [
        ("user", "Where is it?"),
        ("assistant", "I look."),
        ("tool", "It is there."),
        ("tool", "Error: Not there.\n\nReally."),
        ("user", "And now?"),
    ]
    first, second = asking.messages[1].tool_calls
    assert (first.id, first.function.name, first.function.arguments) == ("a", "find", '{"shelf": 4}')
    assert second.function.arguments == '{"shelf": 5}'
    (tool,) = asking.tools
    assert tool.function.parameters == FIND["input_schema"]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_a_choice_of_tools(choice: dict[str, Any] | None, expected: str, parallel: bool) -> None:
    asking = parsed(tools=[FIND], tool_choice=choice).asking
    assert isinstance(asking, ToolAsking)
    assert (asking.tool_choice, asking.parallel_tool_calls) == (expected, parallel)


def test_one_tool_is_chosen_by_its_name() -> None:
    asking = parsed(tools=[FIND | MARK], tool_choice={"type": "tool", "name": "find"}).asking
    assert isinstance(asking, ToolAsking)
    assert isinstance(asking.tool_choice, NamedTool)
    assert asking.tool_choice.function.name == "find"


def test_without_tools_a_choice_asks_nothing() -> None:
    for choice in ({"type": "auto"}, {"type": "none"}):
        assert not isinstance(parsed(tools=[], tool_choice=choice).asking, ToolAsking)


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    body = parsed(system="Be exact.", messages=[said("user", text(LONG, **MARK)), said("user", text("First?")), ASKED])
    assert body.document == f"Be exact.\n\n{LONG}"
    assert turns(body) == [("user", "First?\n\nWhere is it?")]


def test_the_last_block_of_the_first_turn_is_the_question_even_where_it_is_marked() -> None:
    """Marked, it is kept with its answer, behind what stands before it."""
    body = parsed(system=LONG, messages=[said("user", text("Where is it?", **MARK))])
    assert body.document == LONG
    assert (turns(body), body.asking.store, body.asking.ttl_s) == ([("user", "Where is it?")], True, 300.0)
    both = parsed(system=None, messages=[said("user", text(LONG, **MARK), text("Where is it?", **MARK))])
    assert (both.document, both.asking.store) == (LONG, True)
    document_alone = parsed(system=None, messages=[said("user", text(LONG, **MARK), text("Where is it?"))])
    assert (document_alone.document, document_alone.asking.store) == (LONG, False)


def test_a_marked_turn_is_kept_with_tools_and_without() -> None:
    for tools in ([], [FIND]):
        kept = parsed(cache_control=MARK["cache_control"], tools=tools)
        assert (kept.asking.store, kept.not_kept) == (True, None)
    assert not parsed(tools=[FIND | MARK]).asking.store, "that of a tool keeps no turn"


def test_a_schema_is_the_shape_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"shelf": {"type": "integer"}}}
    form = parsed(output_config={"format": {"type": "json_schema", "schema": schema}}).asking.response_format
    assert form is not None
    assert form.model_dump()["json_schema"]["schema"] == schema
    assert parsed(output_config={}).asking.response_format is None


def test_what_is_counted_needs_no_mark() -> None:
    body = parse_request(CountTokensRequest, {"model": "tiny", "system": "Be exact.", "messages": [ASKED]})
    assert body.document is None
    assert [turn.content for turn in body.asking.messages or ()] == ["Be exact.\n\nWhere is it?"]
    marked = parse_request(
        CountTokensRequest, {"model": "tiny", "system": [text("Short.", **MARK)], "messages": [ASKED]}
    )
    assert marked.document == "Short."
    assert [turn.content for turn in marked.asking.messages or ()] == ["Where is it?"]


CALL = said("assistant", used("a"))


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"system": None, "messages": [said("user", text(LONG, **MARK))]}, "cache_control", "nothing stands before"),
        ({"system": "Be exact.", "messages": [said("user", text(LONG, **MARK))]}, "cache_control", "9 characters"),
        ({"messages": [ASKED, CALL, said("user", result("a"))]}, "tools", "give the tools"),
        ({"messages": [said("user", result("a")), CALL, ASKED]}, "messages", "has no tool_use"),
        ({"messages": [ASKED, CALL, ASKED]}, "messages", "answer no tool_use"),
        ({"messages": [ASKED, CALL, said("user", result("a"), result("a"))]}, "messages", "answer a, a"),
        (
            {"messages": [ASKED, CALL, said("user", result("b"))]},
            "messages",
            "answer b, and the turn before them has a",
        ),
        ({"messages": [ASKED, CALL, said("user", text("?"), result("a"))]}, "messages", "come first"),
        ({"messages": [said("user", used("a"))]}, None, "role user has a block of type tool_use"),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0]",
            "be an object with a type; found 'a'",
        ),
        (
            {"messages": [ASKED, said("assistant", result("a")), ASKED]},
            None,
            "role assistant has a block of type tool_r",
        ),
        ({"messages": [ASKED, CALL, said("user", result("a", content=[{"type": "image"}]))]}, None, "'image'"),
        ({"tools": [FIND, FIND]}, "tools", "same name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "'web_search_20250305'"),
        ({"tools": [{"name": "find", "input_schema": {}}]}, "tools", "of an object"),
        ({"tools": [FIND | {"defer_loading": True}]}, "defer_loading", "not supported"),
        ({"tools": [FIND], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "no tool 'x'"),
        ({"tools": [FIND], "tool_choice": {"type": "tool"}}, "tool_choice", "has a name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "give tools"),
        ({"output_config": {"effort": "low"}}, "output_config.effort", "low"),
        (
            {
                "tools": [FIND],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format",
            "leave output_config.format out",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        parsed(**({"tools": [FIND]} if "messages" in change and param != "tools" else {}), **change)
    assert param is None or refusal.value.param == param


def test_a_thread_is_refused_as_anthropic_s_client_understands() -> None:
    with pytest.raises(InvalidRequest, match="whole conversation") as refusal:
        parsed(thread={"type": "create"})
    assert refusal.value.details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
