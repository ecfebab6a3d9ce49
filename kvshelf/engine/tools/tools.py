"""Tools as a model's chat template writes them: text before a question, calls in an answer, and calls sent back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvshelf.api import Asking
from kvshelf.api.tools import Tool, ToolAsking, ToolCall
from kvshelf.artifact.identity import Boundary
from kvshelf.engine.decode.detokenizer import may_begin
from kvshelf.engine.tools.calls import NAME, ONE, CallFormat, Write, as_json, as_tags, unsupported
from kvshelf.engine.tools.harmony import as_harmony
from kvshelf.engine.tools.pythonic import as_python
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import Broken, TemplateOptions, TextFormat, same_beginning

_ID: Final = "kvshelf01"  # nine letters and digits, which some templates insist on


@dataclass(frozen=True)
class ToolFormat:
    """form: of the model. tools: those that an answer may call. text: what the template says of them; it stands behind
    the document, which is in the cache already. calls: how the template writes one. several: whether an answer may have
    more calls than one. What comes from outside (descriptions, arguments, results) makes no control token."""

    form: TextFormat
    tools: tuple[Tool, ...]
    text: str
    calls: CallFormat
    several: bool

    @classmethod
    def of(cls, form: TextFormat, tools: Sequence[Tool]) -> Self:
        """Raises `InvalidRequest` for a model whose template has no tools, or writes calls in another way."""
        bare = _text_of(form, [{"type": "function", "function": {"name": NAME, "description": "", "parameters": {}}}])
        if _turn_marks(form) & {mark.text for mark in form.tokens.found_in(bare)}:  # tools have a turn of their own
            raise unsupported("writes tools in more places than one")
        shown = _shown(tools)
        text = _text_of(form, shown)
        calls = _call_format(form, lambda arguments: _call_of(form, shown, arguments))
        return cls(form, tuple(tools), text, calls, _takes_several(form, shown))

    @property
    def about(self) -> str:
        """How calls are written, in words."""
        return f"{'several' if self.several else 'one'} in an answer, as {self.calls.about}"

    def intro(self, broken: Broken) -> str:
        """What the template says of the tools, with what is from outside in it broken."""
        shown = _shown(self.tools)
        safe = broken(shown)
        return self.text if safe == shown else _text_of(self.form, safe)

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
        while rest.startswith(opening or "{") and (parsed := self.calls.read(rest.removeprefix(opening), self.tools)):
            calls += parsed.calls
            rest = parsed.rest.strip().removeprefix(closing).strip(" \n;,")
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
        while places := [(at, -len(mark), mark) for mark in begins if (at := text.find(mark, start)) >= 0]:
            at, _, opening = min(places)  # of several at one place the longest
            if self.calls.may_follow(text[at + len(opening) :], self.tools):
                return at, opening
            start = at + 1
        return -1, begins[0]

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """In llguidance's Lark dialect: one call of one of these tools, or `several`."""
        return self.calls.grammar(tools, several=several and self.several)


_TURNS: Final = [{"role": "system", "content": "kvshelf_system"}, {"role": "user", "content": "kvshelf_question"}]


def _shown(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as a template is shown them."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def _text_of(form: TextFormat, tools: Sequence[Any]) -> str:
    """What the template says of these tools. Raises `InvalidRequest` where that is nothing, or several texts."""
    name = tools[0]["function"]["name"]
    without, beside = (_around(form.template.write(_TURNS, tools=shown)) for shown in (None, tools))
    inserted = [_inserted(*pair) for pair in zip(without, beside, strict=True)]
    texts = [text for text in inserted if name in text]
    if not texts:
        raise InvalidRequest("the chat template of this model has no tools; leave tools out", param="tools")
    if len(texts) > 1:
        raise unsupported("writes tools in more places than one")
    return _trimmed(texts[0], _turn_marks(form))


def _around(text: str) -> list[str]:
    """What stands before, between and behind the contents of `_TURNS`."""
    parts, rest = [], text
    for message in _TURNS:
        before, content, rest = rest.partition(message["content"])
        if not content:
            raise unsupported("has no place for a system message")
        parts.append(before)
    return [*parts, rest]


def _turn_marks(form: TextFormat) -> frozenset[str]:
    """The marks with which the template begins and ends turns."""
    messages = [*_TURNS, {"role": "assistant", "content": "kvshelf_answer"}, _TURNS[1]]
    return frozenset(mark.text for mark in form.tokens.found_in(form.template.write(messages, opening=True)))


def _trimmed(text: str, marks: Collection[str]) -> str:
    """A text without the marks and the white space at its ends."""
    text = text.strip()
    while text and (mark := next((mark for mark in marks if text.startswith(mark) or text.endswith(mark)), None)):
        text = (text.removeprefix(mark) if text.startswith(mark) else text.removesuffix(mark)).strip()
    return text


def _calling(arguments: Mapping[str, Any], calls: int = 1) -> dict[str, Any]:
    """A turn of so many calls of `NAME`."""
    call = {"type": "function", "id": _ID, "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * calls}


def _call_of(form: TextFormat, tools: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """How the template writes a call of `NAME`, up to the end of the turn."""
    calling = _calling(arguments)
    result = {"role": "tool", "content": "kvshelf_result", "tool_call_id": _ID, "name": NAME}
    opened = form.template.write(_TURNS, tools=tools, opening=True).rpartition(_TURNS[1]["content"])[2]
    answered, last = (
        form.template.write([*_TURNS, *messages], tools=tools).rpartition(_TURNS[1]["content"])[2]
        for messages in ([calling, result], [calling])
    )
    written = answered[same_beginning(answered, opened) :]
    if form.thoughts is not None and (at := written.find(form.thoughts.closing, 0, written.find(NAME))) >= 0:
        written = written[at + len(form.thoughts.closing) :].lstrip()
    at = max(written.find(NAME), 0)
    behind = written[at:]
    # What begins the turn of a result ends no call: without one it is not there.
    return written[:at] + _until_turn(form, behind[: same_beginning(behind, last[last.find(NAME) :])])


def _takes_several(form: TextFormat, tools: Sequence[Any]) -> bool:
    try:
        return form.template.write([*_TURNS, _calling(ONE, 2)], tools=tools).count(NAME) > 1
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
    rest = before[same:]
    return after[same : len(after) - len(rest)] if after.endswith(rest) else after[same:]


def _call_format(form: TextFormat, write: Write) -> CallFormat:
    """How a template writes calls. Raises `InvalidRequest` for a way that is none of these."""
    for recognize in (as_harmony, as_python, as_json, as_tags):
        if (calls := recognize(form, write)) is not None:
            return calls
    raise unsupported(
        "writes calls of tools neither as JSON, nor as Python, nor in channels, nor with tags around each argument"
    )


def count(
    form: TextFormat,
    tools: ToolFormat | None,
    variables: Mapping[str, Any],
    query: Asking,
    document: str | None,
    boundary: Boundary | None,
    cached: Mapping[str, Any],
) -> int:
    """How many tokens a document, if there is one, and the messages behind it have. tools: of the query. variables: of
    the template. boundary: of the cache that the messages are behind instead, and `cached` the variables of its
    document; None: they begin the conversation. Raises `InvalidRequest` for messages that the template refuses."""
    before = 0
    if document is not None:
        encoded = form.document(document, "chat")
        before, boundary = len(encoded.token_ids), encoded.boundary
    if isinstance(query, ToolAsking):
        messages = [turn.template_fields for turn in query.messages]
    else:
        messages = [message.model_dump() for message in query.messages or ()]
    options, intro = TemplateOptions({**cached, **variables}, cached=cached), None if tools is None else tools.intro
    return before + len(form.prompt(boundary, messages, opening=True, options=options, intro=intro).token_ids)
