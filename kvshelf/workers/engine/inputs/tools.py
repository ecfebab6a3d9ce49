"""Tools as a model's chat template writes them: their text before a question, calls in an answer, and calls sent back.

The document is in the cache already, so the tools' text stands behind it, as a system message's does. A template says
how calls are written; those that write them as JSON objects with a name and arguments are supported (Hermes, Qwen,
Llama 3). What comes from outside (descriptions, arguments, results) stays text: it makes no control token.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvshelf.api.tools import CalledFunction, Tool, ToolAsking, ToolCall
from kvshelf.errors import InvalidRequest
from kvshelf.workers.engine.decode.detokenizer import may_begin
from kvshelf.workers.engine.decode.grammar import WRITTEN
from kvshelf.workers.model.text import Broken, TextFormat, same_beginning

_NAME: Final = "kvshelf_name"
_ARGUMENTS: Final = {"kvshelf_argument": 1}
_ID: Final = "kvshelf01"  # nine letters and digits, which some templates insist on


@dataclass(frozen=True)
class ToolFormat:
    """form: of the model. tools: those that an answer may call. text: what the template says of them. opening, closing:
    around the JSON of one call. name, arguments: its keys. special: the parts of `opening` and `closing` that the text
    of an answer lacks. several: whether an answer may have more calls than one."""

    form: TextFormat
    tools: tuple[Tool, ...]
    text: str
    opening: str
    closing: str
    name: str
    arguments: str
    special: frozenset[str]
    several: bool

    @classmethod
    def of(cls, form: TextFormat, tools: Sequence[Tool]) -> Self:
        """Raises `InvalidRequest` for a model whose template has no tools, or writes calls in another way."""
        said = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        _require_one_place(form)
        text, call = _text_of(form, said), _call_of(form, said)
        at = call.rfind("{", 0, max(call.find(_NAME), 0))
        try:
            found, length = json.JSONDecoder().raw_decode(call[max(at, 0) :])
        except ValueError as error:
            raise _unsupported("writes calls of tools in another way than as JSON") from error
        keys = [key for wanted in (_NAME, _ARGUMENTS) for key, value in found.items() if value == wanted]
        if at < 0 or len(keys) != 2:
            raise _unsupported("writes calls of tools without a name and arguments")
        opening, closing = call[:at], _until_turn(form, call[at + length :])
        special = frozenset(mark.text for mark in form.tokens.found_in(opening + closing) if mark.special)
        name, arguments = keys
        several = _takes_several(form, said)
        return cls(form, tuple(tools), text, opening, closing, name, arguments, special, several)

    @property
    def about(self) -> str:
        """How calls are written, in words."""
        several = "several" if self.several else "one"
        return f"{several} in an answer, as {self.opening.strip()}{{...}}{self.closing.strip()}"

    def intro(self, broken: Broken) -> str:
        """What the template says of the tools, with what is from outside in it broken."""
        said = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]
        safe = broken(said)
        return self.text if safe == said else _text_of(self.form, safe)

    def answered(self, text: str, query: ToolAsking) -> tuple[str, list[ToolCall]]:
        """As `parsed`, with no more calls than the question allows."""
        if query.tool_choice == "none":
            return text, []
        content, calls = self.parsed(text)
        return content, calls if query.parallel_tool_calls and self.several else calls[:1]

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
        again = '("\\n" call)*' if several and self.several else ""
        one = " ".join(
            filter(None, (self.form.tokens.literal(self.opening), "object", self.form.tokens.literal(self.closing)))
        )
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


_ASKED: Final = [{"role": "system", "content": "kvshelf_system"}, {"role": "user", "content": "kvshelf_question"}]


def _text_of(form: TextFormat, tools: Sequence[Any]) -> str:
    """What the template says of these tools. Raises `InvalidRequest` where that is nothing, or several texts."""
    name = tools[0]["function"]["name"]
    without, told = (_around(form.template.write(_ASKED, tools=each)) for each in (None, tools))
    found = [_inserted(*pair) for pair in zip(without, told, strict=True)]
    texts = [text for text in found if name in text]
    if not texts:
        raise InvalidRequest("the chat template of this model has no tools; leave tools out", param="tools")
    if len(texts) > 1:
        raise _unsupported("writes tools in more places than one")
    return _trimmed(texts[0], _turn_marks(form))


def _require_one_place(form: TextFormat) -> None:
    """Raises `InvalidRequest` where tools are more than a text before the question, a turn of their own, say."""
    text = _text_of(form, [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {}}}])
    if _turn_marks(form) & {mark.text for mark in form.tokens.found_in(text)}:
        raise _unsupported("writes tools in more places than one")


def _around(text: str) -> list[str]:
    """What stands before, between and behind the contents of `_ASKED`."""
    parts, rest = [], text
    for said in _ASKED:
        before, found, rest = rest.partition(said["content"])
        if not found:
            raise _unsupported("has no place for a system message")
        parts.append(before)
    return [*parts, rest]


def _turn_marks(form: TextFormat) -> frozenset[str]:
    """The marks with which the template begins and ends turns."""
    answered = [*_ASKED, {"role": "assistant", "content": "kvshelf_answer"}, _ASKED[1]]
    return frozenset(mark.text for mark in form.tokens.found_in(form.template.write(answered, opening=True)))


def _trimmed(text: str, marks: Collection[str]) -> str:
    """A text without the marks and the white space at its ends."""
    while (said := text.strip()) and (
        mark := next((each for each in marks if said.startswith(each) or said.endswith(each)), None)
    ):
        text = said.removeprefix(mark) if said.startswith(mark) else said.removesuffix(mark)
    return text.strip()


def _call_of(form: TextFormat, tools: Sequence[Any]) -> str:
    """How the template writes a call of `_NAME` with `_ARGUMENTS`, which its result follows, and what stands there."""
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "kvshelf_result", "tool_call_id": _ID, "name": _NAME}
    opened = form.template.write(_ASKED, tools=tools, opening=True).rpartition(_ASKED[1]["content"])[2]
    made = form.template.write([*_ASKED, calling, result], tools=tools).rpartition(_ASKED[1]["content"])[2]
    written = made[same_beginning(made, opened) :]
    if form.thoughts is not None and (at := written.find(form.thoughts.closing, 0, written.find(_NAME))) >= 0:
        written = written[at + len(form.thoughts.closing) :].lstrip()
    return written


def _takes_several(form: TextFormat, tools: Sequence[Any]) -> bool:
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    try:
        form.template.write([*_ASKED, {"role": "assistant", "content": "", "tool_calls": [call, call]}], tools=tools)
    except InvalidRequest:
        return False
    return True


def _until_turn(form: TextFormat, text: str) -> str:
    """A template's text up to what ends the turn."""
    turns = _turn_marks(form)
    end = next(
        (run.start for run in form.tokens.runs(text) if run.is_mark and text[run.start : run.end].strip() in turns),
        len(text),
    )
    return text[:end]


def _as_json(value: object) -> str:
    """With all characters as they are, but half a surrogate pair, which no text may have, as its escape."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _inserted(before: str, after: str) -> str:
    """What stands in one text and not in the other, between what both begin and end with."""
    same = same_beginning(before, after)
    left = before[same:]
    return after[same : len(after) - len(left)] if after.endswith(left) else after[same:]


def _unsupported(what: str) -> InvalidRequest:
    message = f"the chat template of this model {what}, which is not supported; leave tools out"
    return InvalidRequest(message, param="tools")
