"""Calls of tools as Python writes them, in a list: `[weather(town="Kiel"), clock()]` (Llama 3.2 and 4, LFM2)."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvshelf.api.tools import Tool
from kvshelf.engine.decode.grammar import WRITTEN
from kvshelf.engine.tools import calls
from kvshelf.model.text import TextFormat

_DEEPEST: Final = 64
_SPACE: Final = re.compile(r"\s*")
_TEXT: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ARGUMENT: Final = re.compile(r"([^\W\d]\w*+)\s*+=")
_WORD: Final = re.compile(r"[A-Za-z]+")
_WORDS: Final[dict[str, Any]] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


@dataclass(frozen=True)
class PythonCalls(calls.CallFormat):
    """Arguments are named. Their values are literals of Python or of JSON, as models mix them: `True` and `true`, texts
    in either quotes. opening, closing: around the list, with its brackets."""

    @property
    def about(self) -> str:
        return f"{self.opening.strip()}name(argument=value), ...{self.closing.strip()}"

    def may_follow(self, text: str, tools: Sequence[Tool]) -> bool:
        return calls.may_be_named(text.lstrip(), tools)

    def read(self, text: str, tools: Sequence[Tool]) -> calls.ParsedCalls | None:
        reader, parsed = _LiteralReader(text), []
        try:
            while True:
                if (tool := calls.named_in(text[reader.skip() :], tools)) is None:
                    return None
                reader.at += len(tool.function.name)
                parsed.append(calls.called(tool.function.name, reader.arguments()))
                if not reader.took(","):
                    break
        except (ValueError, RecursionError):
            return None
        rest = text[reader.skip() :]
        return calls.ParsedCalls(parsed, rest) if rest.startswith(self.plain(self.closing)) else None

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        return calls.one_of(tools, self._rules_of)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        literal = self.form.tokens.literal
        again = '(", " call)*' if several else ""
        start = f"start: {literal(self.opening)} call {again} {literal(self.closing)}"
        return "\n".join([start, *self.rules(tools), ""])

    def _rules_of(self, number: str, tool: Tool) -> Iterator[str]:
        """A call, and what may follow each argument: `more` behind another one, `first` behind none."""
        properties, required = calls.arguments_of(tool)
        if odd := [name for name in properties if not name.isidentifier()]:
            raise calls.cannot_hold(tool, f"has an argument {odd[0]!r}, which is no name in Python")
        yield f'call_{number}: {json.dumps(tool.function.name)} "(" first_{number}_0 ")"'
        for at, (name, schema) in enumerate(properties.items()):
            argument, after = f"arg_{number}_{at}", f"more_{number}_{at + 1}"
            for before, comma in (("first", ""), ("more", '", " ')):
                left_out = "" if name in required else f" | {before}_{number}_{at + 1}"
                yield f"{before}_{number}_{at}: {comma}{argument} {after}{left_out}"
            yield from self._argument_rules(argument, name, schema, tool)
        yield from (f'{before}_{number}_{len(properties)}: ""' for before in ("first", "more"))

    @staticmethod
    def _argument_rules(rule: str, name: str, schema: Any, tool: Tool) -> Iterator[str]:
        plain = isinstance(schema, Mapping) and schema.keys() <= {"type", "title", "description", *WRITTEN}
        if plain and schema.get("type") in ("boolean", "null"):
            value = '("True" | "False")' if schema["type"] == "boolean" else '"None"'
            yield f"{rule}: {json.dumps(name + '=')} {value}"
        else:
            yield f"{rule}: {json.dumps(name + '=')} value_{rule}"
            yield f"value_{rule}: %json {json.dumps(calls.value_schema(schema, tool))}"


@dataclass
class _LiteralReader:
    """Reads literals from a place in a text on, and evaluates nothing. Raises `ValueError` where there is none."""

    text: str
    at: int = 0

    def skip(self) -> int:
        """The place of what is no white space."""
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.at

    def took(self, sign: str) -> bool:
        """Whether a sign stands there, which is then read."""
        stands = self.text.startswith(sign, self.skip())
        self.at += len(sign) if stands else 0
        return stands

    def require(self, sign: str) -> None:
        if not self.took(sign):
            raise ValueError(f"{sign} is missing")

    def matched(self, match: Callable[[str, int], re.Match[str] | None]) -> re.Match[str] | None:
        literal = match(self.text, self.skip())
        self.at = literal.end() if literal else self.at
        return literal

    def arguments(self) -> dict[str, Any]:
        """Named arguments in parentheses."""
        arguments: dict[str, Any] = {}
        self.require("(")
        for _ in self._parts(")"):
            if (name := self.matched(_ARGUMENT.match)) is None or name[1] in arguments:
                raise ValueError("an argument has no name of its own")
            arguments[name[1]] = self.value()
        return arguments

    def value(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("it is too deep")
        if text := self.matched(_TEXT.match):
            return _unquoted(text[0])
        if digits := self.matched(_NUMBER.match):
            number = json.loads(digits[0])
            if not math.isfinite(number):
                raise ValueError("it is too large")
            return number
        for opening, closing in ("[]", "()"):
            if self.took(opening):
                return [self.value(depth + 1) for _ in self._parts(closing)]
        if self.took("{"):
            return self._fields(depth)
        word = self.matched(_WORD.match)
        if word is None or word[0] not in _WORDS:
            raise ValueError("it is no literal")
        return _WORDS[word[0]]

    def _parts(self, closing: str) -> Iterator[None]:
        """Stops at the beginning of each part of a list, up to its end. A comma may stand behind the last one."""
        first = True
        while not self.took(closing):
            if not first:
                self.require(",")
                if self.took(closing):
                    return
            yield
            first = False

    def _fields(self, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in self._parts("}"):
            if (name := self.matched(_TEXT.match)) is None:
                raise ValueError("a field has no name")
            self.require(":")
            fields[_unquoted(name[0])] = self.value(depth + 1)
        return fields


def _unquoted(literal: str) -> str:
    """A text: as JSON where it is that, with line breaks as they are, and else as Python."""
    if literal[0] == '"':
        try:
            return str(json.loads(literal, strict=False))
        except ValueError:
            pass
    return _ESCAPE.sub(lambda escape: _unescaped(escape[1]), literal[1:-1])


def _unescaped(escape: str) -> str:
    """The character of an escape, without its backslash; an escape that Python does not know stays as it is."""
    if len(escape) > 1:
        number = int(escape[1:], 16)
        if number > sys.maxunicode:
            raise ValueError("it is no character")
        return chr(number)
    return _ESCAPES.get(escape, f"\\{escape}")


def as_python(form: TextFormat, write: calls.Write) -> PythonCalls | None:
    """Calls as Python; None for another way."""
    ((name, value),) = calls.ONE.items()
    opening, call, closing = write(calls.ONE).partition(f"{calls.NAME}({name}={value})")
    if not call or not opening.rstrip().endswith("[") or not closing.lstrip().startswith("]"):
        return None
    return PythonCalls(form, opening, closing)
