"""How a chat template writes calls of tools, by what it writes: as JSON objects, or with tags around arguments."""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

from kvshelf.api.tools import CalledFunction, Tool, ToolCall
from kvshelf.engine.decode.grammar import WRITTEN
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import TextFormat, same_beginning

NAME: Final = "kvshelf_name"
ONE: Final = {"kvshelf_argument": 1}
_TEXTS: Final = {"kvshelf_one": "kvshelf_first", "kvshelf_two": "kvshelf_second"}
_VALUES: Final = {"kvshelf_one": 1.5, "kvshelf_two": ["kvshelf"]}
_TEXT_FIELDS: Final = {"type", "title", "description", "default", "examples", "enum", "const", "minLength", "maxLength"}
"""The keywords that a schema of a text may have where its value is written without quotes."""

Write = Callable[[Mapping[str, Any]], str]
"""What the template writes for a call of `NAME` with these arguments, up to the end of the turn."""


class ParsedCalls(NamedTuple):
    """Calls in a text, and the text behind them."""

    calls: list[ToolCall]
    rest: str


@dataclass(frozen=True)
class CallFormat(abc.ABC):
    """A way to write calls, for those that are forced and those that are read. opening, closing: around a call."""

    form: TextFormat
    opening: str
    closing: str

    @cached_property
    def _special(self) -> frozenset[str]:
        """The marks that the text of an answer lacks."""
        marks = self.form.tokens.found_in(" ".join(self._parts))
        return frozenset(mark.text for mark in marks if mark.special)

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def plain(self, text: str) -> str:
        """A part as the text of an answer has it."""
        for token in self._special:
            text = text.replace(token, "")
        return text.strip()

    @property
    def begins(self) -> tuple[str, ...]:
        """What calls begin with in the text of an answer; "" where only their own first character tells."""
        return (self.plain(self.opening),)

    @property
    @abc.abstractmethod
    def about(self) -> str:
        """What a call looks like."""

    @abc.abstractmethod
    def may_follow(self, text: str, tools: Sequence[Tool]) -> bool:
        """Whether a text may be that of a call, or its beginning, behind what opens one."""

    @abc.abstractmethod
    def read(self, text: str, tools: Sequence[Tool]) -> ParsedCalls | None:
        """The calls that a text behind an opening is, up to what closes them; None where they are none of these
        tools."""

    @abc.abstractmethod
    def rules(self, tools: Sequence[Tool]) -> list[str]:
        """Rules in llguidance's Lark dialect, one of which is `call`: any of these. Raises `InvalidRequest` for a
        schema that such calls cannot be held to."""

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """In llguidance's Lark dialect: one call of one of these tools, or `several`."""
        again = '("\\n" call)*' if several else ""
        return "\n".join([f"start: call {again}", *self.rules(tools), ""])


@dataclass(frozen=True)
class JsonCalls(CallFormat):
    """Calls of Hermes, Qwen 2.5 and 3, and Llama 3. name, arguments: keys of the object that a call is."""

    name: str
    arguments: str

    @property
    def about(self) -> str:
        return f"{self.opening.strip()}{{...}}{self.closing.strip()}"

    def may_follow(self, text: str, tools: Sequence[Tool]) -> bool:  # noqa: ARG002 - of all formats
        return text.lstrip()[:1] in ("", "{")

    def read(self, text: str, tools: Sequence[Tool]) -> ParsedCalls | None:
        text, names = text.lstrip(), [tool.function.name for tool in tools]
        try:
            call, length = json.JSONDecoder().raw_decode(text)
            if call.get(self.name) not in names or not isinstance(call.get(self.arguments), dict):
                return None
            return ParsedCalls([called(call[self.name], call[self.arguments])], text[length:])
        except (AttributeError, ValueError, RecursionError):  # no object; no JSON, or not that of a call; too deep
            return None

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        calls = [self._schema(tool) for tool in tools]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        literal = self.form.tokens.literal
        one = " ".join(filter(None, (literal(self.opening), "object", literal(self.closing))))
        return [f"call: {one}", f"object: %json {json.dumps(schema | WRITTEN)}"]

    def _schema(self, tool: Tool) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {self.name: {"const": tool.function.name}, self.arguments: parameters_of(tool)},
            "required": [self.name, self.arguments],
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class TaggedCalls(CallFormat):
    """Calls of Qwen 3.5 and Coder, GLM, and Nemotron. named: behind the name of the tool. argument: before the name of
    each argument. valued: between that and its value, which is a text as it is, or JSON. end: behind the value."""

    named: str
    argument: str
    valued: str
    end: str

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.opening, self.closing, self.named, self.argument, self.valued, self.end

    @property
    def about(self) -> str:
        parts = (self.opening, "...", self.named, self.argument, "...", self.valued, "...", self.end, self.closing)
        return "".join(part.strip() for part in parts)

    def may_follow(self, text: str, tools: Sequence[Tool]) -> bool:
        return may_be_named(text.lstrip(), tools)

    def read(self, text: str, tools: Sequence[Tool]) -> ParsedCalls | None:
        text = text.lstrip()
        if (tool := named_in(text, tools)) is None:
            return None
        rest = text[len(tool.function.name) :].lstrip()
        if not rest.startswith(self.plain(self.named)):
            return None
        rest, arguments = rest[len(self.plain(self.named)) :].lstrip(), dict[str, Any]()
        properties = (tool.function.parameters or {}).get("properties", {})
        while rest.startswith(self.plain(self.argument)):
            name, valued, rest = rest[len(self.plain(self.argument)) :].partition(self.plain(self.valued))
            value, end, rest = rest.partition(self.plain(self.end))
            if not valued or not end:
                return None
            arguments[name.strip()] = _value(self._unframed(value), properties.get(name.strip()))
            rest = rest.lstrip()
        if not rest.startswith(self.plain(self.closing)):
            return None
        return ParsedCalls([called(tool.function.name, arguments)], rest)

    def _unframed(self, value: str) -> str:
        """A value without the line breaks that the template writes around it."""
        if self.valued.endswith("\n"):
            value = value.removeprefix("\n")
        return value.removesuffix("\n") if self.end.startswith("\n") else value

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        return one_of(tools, self._rules_of)

    def _rules_of(self, number: str, tool: Tool) -> list[str]:
        literal = self.form.tokens.literal
        properties, required = arguments_of(tool)
        parts, rules = [literal(self.opening), _quoted(tool.function.name), literal(self.named)], list[str]()
        for at, (name, schema) in enumerate(properties.items()):
            parts.append(f"arg_{number}_{at}" + ("" if name in required else "?"))
            beginning = [literal(self.argument), _quoted(name), literal(self.valued)]
            value = self._value_rules(f"{number}_{at}", tool, schema)
            rules += [f"arg_{number}_{at}: {' '.join(filter(None, beginning))} {value[0]}", *value[1:]]
        return [f"call_{number}: {' '.join(filter(None, (*parts, literal(self.closing))))}", *rules]

    def _value_rules(self, number: str, tool: Tool, schema: Any) -> list[str]:
        """What a value and its end are, and the rules that this names."""
        end = self.form.tokens.literal(self.end)
        if not _is_text(schema):
            return [f"value_{number} {end}", f"value_{number}: %json {json.dumps(value_schema(schema, tool))}"]
        if others := set(schema) - _TEXT_FIELDS:
            raise cannot_hold(tool, f"has a text with {', '.join(sorted(others))}")
        if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
            return [f"({' | '.join(map(_quoted, choices))}) {end}"]
        text = f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
        if _quoted(self.end) == end:
            return [f"value_{number}", f"value_{number}[suffix={end}]: {text}"]
        # A text would take the white space before a mark, so none may be asked for there.
        return [f"value_{number} {self.form.tokens.literal(self.end.lstrip())}", f"value_{number}: {text}"]


def as_json(form: TextFormat, write: Write) -> JsonCalls | None:
    """Calls as JSON objects; None for another way."""
    written = write(ONE)
    at = written.rfind("{", 0, max(written.find(NAME), 0))
    if at < 0:
        return None
    try:
        call, length = json.JSONDecoder().raw_decode(written[at:])
    except ValueError:
        return None
    keys = [key for part in (NAME, ONE) for key, value in call.items() if value == part]
    if len(keys) != 2:
        raise unsupported("writes calls of tools without a name and arguments")
    return JsonCalls(form, written[:at], written[at + length :], *keys)


def as_tags(form: TextFormat, write: Write) -> TaggedCalls | None:
    """With two arguments a template writes all of its tags; without any, what follows the name is known apart."""
    with_texts = _between(write(_TEXTS), [NAME, *chain.from_iterable(_TEXTS.items())])
    values = chain.from_iterable((name, json.dumps(value)) for name, value in _VALUES.items())
    if with_texts is None or with_texts != _between(write(_VALUES), [NAME, *values]):
        return None  # texts are written otherwise than other values, in quotes say
    without = _between(write({}), [NAME])
    if without is None:
        return None
    opening, first, valued, between, valued_again, last = with_texts
    named, end = _whole_tags(first, without[1]), _whole_tags(between, last)
    argument, closing = first[len(named) :], last[len(end) :]
    calls = TaggedCalls(form, opening, closing, named, argument, valued, end)
    fits = (valued, argument, closing, opening) == (
        valued_again, between[len(end) :], without[1][len(named) :], without[0],
    )  # fmt: skip
    marked = all(map(calls.plain, (opening, argument, valued, end, closing)))
    return calls if fits and marked else None


def _between(text: str, places: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind these, in order; None where one is missing."""
    parts = []
    for place in places:
        before, mark, text = text.partition(place)
        if not mark:
            return None
        parts.append(before)
    return [*parts, text]


def _whole_tags(one: str, other: str) -> str:
    """What both begin with, up to the last tag that is whole."""
    same = one[: same_beginning(one, other)]
    return same[: same.rfind("<")] if same.rfind("<") > same.rfind(">") else same


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return schema.get("type", "string" if values else "") == "string" and all(isinstance(text, str) for text in values)


def _value(text: str, schema: Any) -> Any:
    """A value of JSON, unless it is to be a text or is none."""
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def one_of(tools: Sequence[Tool], rules_of: Callable[[str, Tool], Iterable[str]]) -> list[str]:
    """The rule `call` of one of these tools, and the rules of each. rules_of: those of one, by its number."""
    calls = " | ".join(f"call_{at}" for at in range(len(tools)))
    return [f"call: {calls}", *chain.from_iterable(rules_of(str(at), tool) for at, tool in enumerate(tools))]


def arguments_of(tool: Tool) -> tuple[Mapping[str, Any], Collection[str]]:
    """The schemas of a tool's arguments by their names, and the names of those that it requires. Raises
    `InvalidRequest` for one that it does not describe."""
    schema = tool.function.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(required) <= set(properties):
        raise cannot_hold(tool, "requires arguments that it does not describe")
    return properties, required


def value_schema(schema: Any, tool: Tool) -> dict[str, Any]:
    """The schema of an argument of a tool, with what it may refer to."""
    root = tool.function.parameters or {}
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**(schema if isinstance(schema, Mapping) else {}), **WRITTEN, **definitions}


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: of none where it describes none."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def may_be_named(text: str, tools: Sequence[Tool]) -> bool:
    """Whether a text begins with the name of one of these tools, or may once more of it is there."""
    return any(tool.function.name.startswith(text) or text.startswith(tool.function.name) for tool in tools)


def named_in(text: str, tools: Sequence[Tool]) -> Tool | None:
    """The tool with whose name a text begins."""
    longest_first = sorted(tools, key=lambda tool: -len(tool.function.name))
    return next((tool for tool in longest_first if text.startswith(tool.function.name)), None)


def called(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """With all characters as they are, but half a surrogate pair, which no text may have, as its escape."""
    text = json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return ToolCall(function=CalledFunction(name=name, arguments=text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def cannot_hold(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the chat template of this model writes arguments in a way of its own, and {tool.function.name} {why}, which "
        "such a call cannot be held to; take tool_choice auto, or a plainer schema",
        param="tools",
    )


def unsupported(what: str) -> InvalidRequest:
    message = f"the chat template of this model {what}, which is not supported; leave tools out"
    return InvalidRequest(message, param="tools")
