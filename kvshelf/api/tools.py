"""Tools in OpenAI's shape: what a model may call, its calls, and a question that comes with them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Tag

from kvshelf.api.queries import Asking
from kvshelf.api.shapes import SHAPES, param_of
from kvshelf.api.strict import MAX_MESSAGES, AnyFields, ObjectText, RequestBody, Role, ToolName, by_form, misuse

MAX_TOOLS = 128


class Function(RequestBody):
    """`parameters`: a JSON schema of an object; without it, the function takes none. `strict` has no effect: calls that
    `tool_choice` asks for always fit."""

    name: ToolName
    description: str | None = None
    parameters: AnyFields | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: Function


class CalledFunction(RequestBody):
    """`arguments`: a JSON object as text."""

    name: ToolName
    arguments: ObjectText


class ToolCall(RequestBody):
    id: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        default_factory=lambda: "call_" + secrets.token_hex(12)
    )
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def template_fields(self) -> dict[str, Any]:
        """As a chat template reads it: the arguments are an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class NamedFunction(RequestBody):
    name: ToolName


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


MODE_OR_ONE: Final = by_form(str, "(mode)", "(one)")

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(mode)")] | Annotated[NamedTool, Tag("(one)")], MODE_OR_ONE
]
Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ToolTurn(RequestBody):
    """A turn of a conversation with tools. tool_calls, reasoning_content: of an assistant. tool_call_id: of a tool."""

    role: Literal[Role, "tool"]
    content: str
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning_content: str | None = None
    tool_call_id: str | None = None

    @property
    def template_fields(self) -> dict[str, Any]:
        """As a chat template reads it: without empty fields, and the arguments of calls as objects."""
        optional = {
            "tool_calls": [call.template_fields for call in self.tool_calls],
            "reasoning_content": self.reasoning_content,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": self.content} | {name: value for name, value in optional.items() if value}


def in_call_order(turns: list[ToolTurn]) -> list[ToolTurn]:
    """The turns, with the results of tools in the order of their calls, because a template names no calls. Results of
    calls that are not there come last, as they stand."""
    ordered: list[ToolTurn] = []
    places: dict[str | None, int] = {}
    for are_results, run in groupby(turns, key=lambda turn: turn.role == "tool"):
        if are_results:
            ordered += sorted(run, key=lambda turn: places.get(turn.tool_call_id, len(places)))
        else:
            ordered += run
            places = {call.id: place for place, call in enumerate(ordered[-1].tool_calls)}
    return ordered


class ToolAsking(Asking):
    """A question whose answer may be calls of tools."""

    messages: Annotated[  # type: ignore[assignment]
        list[ToolTurn], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(in_call_order)
    ]
    tools: Tools
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer must call one of; none where it need not."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []


def require_tools(tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, calls: bool) -> None:
    """For a validator. calls: whether the conversation has calls or results of tools."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise misuse("tools", "two tools have the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise misuse("tool_choice", f"there is no tool {choice.function.name!r}; there is {', '.join(names) or 'none'}")
    if choice == "required" and not names:
        raise misuse("tool_choice", "a call is required, and there are no tools; give tools")
    if calls and not names:
        raise misuse("tools", "the messages have calls of tools; give the tools, too")


def require_unshaped(body: Any, choice: str | NamedTool | None) -> None:
    """For a validator: an answer that must be a call has no other shape."""
    shaped = next((param_of(body, name) for name in SHAPES if getattr(body, name) is not None), None)
    if shaped is not None and choice not in (None, "none", "auto"):
        raise misuse(shaped, f"tool_choice says what the answer must be; leave {shaped} out")
