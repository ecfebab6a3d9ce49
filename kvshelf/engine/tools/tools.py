"""Tools as a model's chat template writes them: their text before a question, calls in an answer, and calls sent back.

The document is in the cache already, so the tools' text stands behind it, as a system message's does. A template says
how calls are written (`inputs.calls`). What comes from outside (descriptions, arguments, results) stays text: it makes
no control token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvshelf.api.tools import Tool, ToolAsking, ToolCall
from kvshelf.engine.decode.detokenizer import may_begin
from kvshelf.engine.tools.calls import NAME, CallFormat, Write, as_json, as_tags, unsupported
from kvshelf.engine.tools.harmony import as_harmony
from kvshelf.engine.tools.pythonic import as_python
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import Broken, TextFormat, same_beginning

_ID: Final = "kvshelf01"  # nine letters and digits, which some templates insist on


@dataclass(frozen=True)
class ToolFormat:
    """form: of the model. tools: those that an answer may call. text: what the template says of them. calls: how it
    writes one. several: whether an answer may have more calls than one."""

    form: TextFormat
    tools: tuple[Tool, ...]
    text: str
    calls: CallFormat
    several: bool

    @classmethod
    def of(cls, form: TextFormat, tools: Sequence[Tool]) -> Self:
        """Raises `InvalidRequest` for a model whose template has no tools, or writes calls in another way."""
        said = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        _require_one_place(form)
        text = _text_of(form, said)
        calls = _call_format(form, lambda arguments: _call_of(form, said, arguments))
        return cls(form, tuple(tools), text, calls, _takes_several(form, said))

    @property
    def about(self) -> str:
        """How calls are written, in words."""
        return f"{'several' if self.several else 'one'} in an answer, as {self.calls.about}"

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
        start, opening = self._start(text)
        content, rest = text[: max(start, 0)].rstrip(), text[max(start, 0) :].strip()
        closing, calls = self.calls.plain(self.calls.closing), list[ToolCall]()
        while rest.startswith(opening or "{") and (found := self.calls.read(rest.removeprefix(opening), self.tools)):
            calls += found.calls
            rest = found.rest.strip().removeprefix(closing).strip(" \n;,")
        return (text, []) if not calls or rest.strip() else (content, calls)

    def settled(self, text: str) -> int:
        """How much of the beginning of an answer is text before any call, whatever follows it."""
        start, opening = self._start(text)
        if start < 0:
            start = len(text) - may_begin(text, self.calls.begins)
        elif not opening and not self.calls.may_follow(text[start:], self.tools):
            return len(text)
        return len(text[:start].rstrip())

    def _start(self, text: str) -> tuple[int, str]:
        """Where the first call of an answer begins if there is one, and with what; -1 where none does."""
        begins = self.calls.begins
        if begins == ("",):
            return len(text) - len(text.lstrip()), ""
        start = 0
        while found := [(at, -len(each), each) for each in begins if (at := text.find(each, start)) >= 0]:
            at, _, opening = min(found)  # of several at one place the longest
            if self.calls.may_follow(text[at + len(opening) :], self.tools):
                return at, opening
            start = at + 1
        return -1, begins[0]

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """In llguidance's Lark dialect: one call of one of these tools, or `several`."""
        return self.calls.grammar(tools, several=several and self.several)


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
        raise unsupported("writes tools in more places than one")
    return _trimmed(texts[0], _turn_marks(form))


def _require_one_place(form: TextFormat) -> None:
    """Raises `InvalidRequest` where tools are more than a text before the question, a turn of their own, say."""
    text = _text_of(form, [{"type": "function", "function": {"name": NAME, "description": "", "parameters": {}}}])
    if _turn_marks(form) & {mark.text for mark in form.tokens.found_in(text)}:
        raise unsupported("writes tools in more places than one")


def _around(text: str) -> list[str]:
    """What stands before, between and behind the contents of `_ASKED`."""
    parts, rest = [], text
    for said in _ASKED:
        before, found, rest = rest.partition(said["content"])
        if not found:
            raise unsupported("has no place for a system message")
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


def _call_of(form: TextFormat, tools: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """How the template writes a call of `NAME`, up to the end of the turn."""
    call = {"type": "function", "id": _ID, "function": {"name": NAME, "arguments": arguments}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "kvshelf_result", "tool_call_id": _ID, "name": NAME}
    opened = form.template.write(_ASKED, tools=tools, opening=True).rpartition(_ASKED[1]["content"])[2]
    made, last = (
        form.template.write([*_ASKED, *said], tools=tools).rpartition(_ASKED[1]["content"])[2]
        for said in ([calling, result], [calling])
    )
    written = made[same_beginning(made, opened) :]
    if form.thoughts is not None and (at := written.find(form.thoughts.closing, 0, written.find(NAME))) >= 0:
        written = written[at + len(form.thoughts.closing) :].lstrip()
    at = max(written.find(NAME), 0)
    behind = written[at:]
    # What begins the turn of a result ends no call: without one it is not there.
    return written[:at] + _until_turn(form, behind[: same_beginning(behind, last[last.find(NAME) :])])


def _takes_several(form: TextFormat, tools: Sequence[Any]) -> bool:
    call = {"type": "function", "id": _ID, "function": {"name": NAME, "arguments": {"kvshelf_argument": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    try:
        return form.template.write([*_ASKED, called], tools=tools).count(NAME) > 1
    except InvalidRequest:
        return False


def _until_turn(form: TextFormat, text: str) -> str:
    """A template's text up to what ends the turn."""
    turns = _turn_marks(form)
    end = next(
        (run.start for run in form.tokens.runs(text) if run.is_mark and text[run.start : run.end].strip() in turns),
        len(text),
    )
    return text[:end]


def _inserted(before: str, after: str) -> str:
    """What stands in one text and not in the other, between what both begin and end with."""
    same = same_beginning(before, after)
    left = before[same:]
    return after[same : len(after) - len(left)] if after.endswith(left) else after[same:]


def _call_format(form: TextFormat, write: Write) -> CallFormat:
    """How a template writes calls. Raises `InvalidRequest` for a way that is none of these."""
    for known in (as_harmony, as_python, as_json, as_tags):
        if (found := known(form, write)) is not None:
            return found
    raise unsupported(
        "writes calls of tools neither as JSON, nor as Python, nor in channels, nor with tags around each argument"
    )
