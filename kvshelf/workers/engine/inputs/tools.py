"""Tools as a model's chat template writes them: their text before a question, calls in an answer, and calls sent back.

The document is in the cache already, so the tools' text stands behind it, as a system message's does. A template says
how calls are written; those that write them as JSON objects with a name and arguments are supported (Hermes, Qwen,
Llama 3). What comes from outside (descriptions, arguments, results) stays text: it makes no control token.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvshelf.api.tools import CalledFunction, Tool, ToolAsking, ToolCall, ToolTurn
from kvshelf.errors import InvalidRequest
from kvshelf.store.artifact.identity import Boundary
from kvshelf.workers.engine.decode.detokenizer import may_begin
from kvshelf.workers.engine.decode.grammar import WRITTEN
from kvshelf.workers.model.text import QUESTION_SEPARATOR, TOOL_ROLES, TextFormat

_NAME: Final = "kvshelf_name"
_ARGUMENTS: Final = {"kvshelf_argument": 1}
_ID: Final = "kvshelf01"  # nine letters and digits, which some templates insist on


@dataclass(frozen=True)
class ToolFormat:
    """form: of the model. tools: those that an answer may call. text: what the template says of them. opening, closing:
    around the JSON of one call. name, arguments: its keys. special: the parts of `opening` and `closing` that are
    control tokens, which the text of an answer lacks."""

    form: TextFormat
    tools: tuple[Tool, ...]
    text: str
    opening: str
    closing: str
    name: str
    arguments: str
    special: Mapping[str, int]

    @classmethod
    def of(cls, form: TextFormat, tools: Sequence[Tool]) -> Self:
        """Raises `InvalidRequest` for a model whose template has no tools, or writes calls in another way."""
        said = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        text, call = _text_of(form, said), _call_of(form, said)
        at = call.find("{")
        try:
            found, length = json.JSONDecoder().raw_decode(call[at:])
        except ValueError as error:
            raise _unsupported("writes calls of tools in another way than as JSON") from error
        keys = [key for wanted in (_NAME, _ARGUMENTS) for key, value in found.items() if value == wanted]
        if len(keys) != 2:
            raise _unsupported("writes calls of tools without a name and arguments")
        opening, closing = call[:at], call[at + length :]
        special = {token: number for token, number in form.special_tokens().items() if token in opening + closing}
        name, arguments = keys
        return cls(form, tuple(tools), text, opening, closing, name, arguments, special)

    def encoded(self, boundary: Boundary | None, messages: Sequence[ToolTurn], *, told: bool = False) -> list[int]:
        """The token ids that ask a conversation with tools behind a cache, as `TextFormat.turns`."""
        return self.form.turns(boundary, self.turns(messages, told=told), roles=TOOL_ROLES)

    def turns(self, messages: Sequence[ToolTurn], *, told: bool = False) -> list[dict[str, str]]:
        """A conversation as roles and texts, the tools' text before its first unless the model was told it."""
        said = [{"role": turn.role, "content": self.written(turn.content, turn.tool_calls)} for turn in messages]
        if not told:
            said[0]["content"] = QUESTION_SEPARATOR.join([self.text, said[0]["content"]])
        return said

    def written(self, content: str, calls: Sequence[ToolCall]) -> str:
        """The text of a turn with these calls, which it is sent back as."""
        made = [self._written(call) for call in calls]
        return "\n".join([content, *made] if content or not made else made)

    def _written(self, call: ToolCall) -> str:
        values = {self.name: call.function.name, self.arguments: json.loads(call.function.arguments)}
        return self._plain(self.opening) + _as_json(values) + self._plain(self.closing)

    def answered(self, text: str, query: ToolAsking) -> tuple[str, list[ToolCall]]:
        """As `parsed`, with no more calls than the question allows."""
        if query.tool_choice == "none":
            return text, []
        content, calls = self.parsed(text)
        return content, calls if query.parallel_tool_calls else calls[:1]

    def parsed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text of an answer before its calls, and the calls; all of it as text where it is none."""
        opening, closing, start = self._begins, self._plain(self.closing).strip(), max(self._start(text), 0)
        content, rest, calls = text[:start].rstrip(), text[start:], []
        while rest.strip().startswith(opening or "{") and (call := self._call(rest.strip().removeprefix(opening))):
            made, rest = call
            calls.append(made)
            rest = rest.strip().removeprefix(closing).lstrip(" \n;,")
        return (text, []) if not calls or rest.strip() else (content, calls)

    def settled(self, text: str) -> int:
        """How much of the beginning of an answer is text before any call, whatever follows it."""
        start, opening = self._start(text), self._begins
        if start < 0:
            start = len(text) - may_begin(text, [opening])
        elif text[start + len(opening) :].lstrip()[:1] not in ("", "{"):
            return len(text)
        return len(text[:start].rstrip())

    @property
    def _begins(self) -> str:
        """What the text of a call begins with, before its JSON."""
        return self._plain(self.opening).strip()

    def _start(self, text: str) -> int:
        """Where the first call of an answer begins if there is one; -1 where none does."""
        return text.find(self._begins) if self._begins else len(text) - len(text.lstrip())

    def _call(self, text: str) -> tuple[ToolCall, str] | None:
        """The call that a text begins with, and what follows it; None where it begins with none."""
        text, names = text.lstrip(), [tool.function.name for tool in self.tools]
        try:
            found, length = json.JSONDecoder().raw_decode(text)
            if found.get(self.name) not in names or not isinstance(found.get(self.arguments), dict):
                return None
            called = CalledFunction(name=found[self.name], arguments=_as_json(found[self.arguments]))
        except (AttributeError, ValueError, RecursionError):  # no object; no JSON, or not that of a call; too deep
            return None
        return ToolCall(function=called), text[length:]

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """In llguidance's Lark dialect: one call of one of these tools, or `several`."""
        calls = [self._schema(tool) for tool in tools]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        again = '("\\n" call)*' if several else ""
        one = " ".join(filter(None, (self._literal(self.opening), "object", self._literal(self.closing))))
        return f"start: call {again}\ncall: {one}\nobject: %json {json.dumps(schema | WRITTEN)}\n"

    def _schema(self, tool: Tool) -> dict[str, Any]:
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        arguments = tool.function.parameters or nothing
        return {
            "type": "object",
            "properties": {self.name: {"const": tool.function.name}, self.arguments: arguments},
            "required": [self.name, self.arguments],
            "additionalProperties": False,
        }

    def _literal(self, text: str) -> str:
        """A text with control tokens, as a grammar names them."""
        for token, number in self.special.items():
            before, found, after = text.partition(token)
            if found:
                return " ".join(filter(None, (self._literal(before), f"<[{number}]>", self._literal(after))))
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _plain(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text


class HeldPieces:
    """The pieces of an answer, held back while they may belong to a call. settled: as `ToolFormat.settled`."""

    def __init__(self, settled: Callable[[str], int]) -> None:
        self._settled = settled
        self._text = ""
        self._held: deque[str] = deque()
        self._told = 0

    def push(self, piece: str) -> Iterator[str]:
        """Add a piece. Gives those that are text whatever follows."""
        self._text += piece
        self._held.append(piece)
        return self._until(self._settled(self._text))

    def rest(self, text: str) -> Iterator[str]:
        """What is left of the answer's text, once that is known."""
        yield from self._until(len(text))
        if self._told < len(text):
            yield text[self._told :]

    def _until(self, end: int) -> Iterator[str]:
        while self._held and self._told + len(self._held[0]) <= end:
            self._told += len(self._held[0])
            yield self._held.popleft()


_TOOLS: Final = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {}}}]
_ASKED: Final = [{"role": "system", "content": "kvshelf_system"}, {"role": "user", "content": "kvshelf_question"}]


def _text_of(form: TextFormat, tools: Sequence[object]) -> str:
    """What the template says of these tools. Raises `InvalidRequest` where it is not one text before the question."""
    without = form.rendered(_ASKED)
    text, least = (_inserted(without, form.rendered(_ASKED, tools=each)) for each in (tools, _TOOLS))
    if not least.strip():
        raise InvalidRequest("the chat template of this model has no tools; leave tools out", param="tools")
    if any(token in least for token in form.special_tokens()) or _ASKED[1]["content"] in least:
        raise _unsupported("writes tools in more places than one")
    return text.strip()


def _call_of(form: TextFormat, tools: Sequence[object]) -> str:
    """How the template writes a call of `_NAME` with `_ARGUMENTS`."""
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    made = form.rendered([*_ASKED, calling], tools=tools)
    before = form.rendered(_ASKED, tools=tools, opening=True)
    after = form.rendered([*_ASKED, {"role": "assistant", "content": _NAME}], tools=tools).rpartition(_NAME)[2]
    if not made.startswith(before):
        raise _unsupported("writes calls of tools in another place than an answer")
    return made.removeprefix(before).removesuffix(after)


def _as_json(value: object) -> str:
    """With all characters as they are, but half a surrogate pair, which no text may have, as its escape."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _inserted(before: str, after: str) -> str:
    """What stands in one text and not in the other, between what both begin and end with."""
    same = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
    left = before[same:]
    return after[same : len(after) - len(left)] if after.endswith(left) else after[same:]


def _unsupported(what: str) -> InvalidRequest:
    message = f"the chat template of this model {what}, which is not supported; leave tools out"
    return InvalidRequest(message, param="tools")
