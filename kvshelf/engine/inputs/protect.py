"""The rules of `protect`, and the tokens of a document that they select."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvshelf.artifact.identity import MAX_PROTECTED_SPANS, Boundary
from kvshelf.errors import InvalidRequest
from kvshelf.model.lines import is_heading, matching
from kvshelf.model.templates.template import Message
from kvshelf.model.text import EncodedDocument, TextFormat

Span = tuple[int, int]
Chars = tuple[int, int, int]
"""The place of a message, 0 for a text, and characters of it: from the first up to the one behind the last."""

MAX_PLACES: Final = 20_000
"""Most places of a document that one rule may select, before those that touch are joined."""
_MAX_READINGS: Final = 16
"""Rules that look at every line: a million short lines take half a second each."""
_FORMS: Final = "system, headings, first:N, text:..., lines:REGEX, chars:A-B, message:I, message:I:A-B or tokens:A-B"


@dataclass(frozen=True)
class DocumentRules:
    """The rules of one document. texts: its text, or that of each message; empty where it is token ids. messages: of a
    conversation. behind: the boundary of the cache to which the document is appended, if it is. chars: as of
    `images.with_images`, if it has images."""

    rules: Sequence[str]
    encoded: EncodedDocument
    form: TextFormat | None
    texts: Sequence[str]
    messages: Sequence[Message] | None
    behind: Boundary | None = None
    chars: Sequence[Span] | None = None

    def spans(self) -> tuple[Span, ...]:
        """The tokens that the rules select, as of an `Identity`. Raises `InvalidRequest` that names the rule, for a
        rule that cannot be read, that selects nothing of this document, or that reaches beyond its end."""
        readings = sum(isinstance(rule, str) and rule.startswith(("lines", "headings")) for rule in self.rules)
        if readings > _MAX_READINGS:
            raise InvalidRequest(
                f"protect has {readings} rules of lines and headings, and {_MAX_READINGS} are taken; join patterns "
                "with |",
                param="protect",
            )
        spans: list[Span] = []
        for rule in self.rules:
            name, _, rest = rule.partition(":") if isinstance(rule, str) else ("", "", "")
            find = _READERS.get(name)
            if find is None or (name in ("system", "headings") and rest):
                raise refused(rule, f"it is none of {_FORMS}")
            selected = [(first, end) for first, end in find(self, rule, rest) if first < end]
            if not selected:
                raise refused(rule, "nothing in the document is that")
            spans += selected
        joined = joined_spans(spans)
        if len(joined) > MAX_PROTECTED_SPANS:
            raise InvalidRequest(
                f"protect holds {len(joined)} spans of the document, and {MAX_PROTECTED_SPANS} are taken; protect "
                "fewer, or longer ones",
                param="protect",
            )
        return joined

    @property
    def num_tokens(self) -> int:
        return len(self.encoded.token_ids)

    def of_chars(self, rule: str, places: Iterable[Chars]) -> list[Span]:
        """The tokens that hold characters of a text or of messages."""
        chars = list(islice(places, MAX_PLACES + 1))
        if len(chars) > MAX_PLACES:
            raise refused(rule, f"it is about more than {MAX_PLACES} places; protect fewer, or longer ones")
        if not self.texts or self.form is None:
            raise refused(
                rule, "this document is token ids, of which nobody knows the text; take first:N or tokens:A-B"
            )
        for at, first, end in chars:
            if not first < end <= len(self.texts[at]):
                where = f"messages[{at}]" if self.messages is not None else "the document"
                raise refused(rule, f"{where} has {len(self.texts[at])} characters; give some of them, as 10-90")
        if self.messages is not None:
            if self.behind == "document" and self.messages[0]["role"] == "system":
                raise refused(
                    rule,
                    "behind a document the template writes a system message into the user's text, and does not tell "
                    "where; take first:N or tokens:A-B",
                )
            return self.form.message_spans(self.messages, self.encoded, chars, self.behind)
        text, tokens = self.texts[0], self.chars
        if tokens is None:
            tokens = self.form.spans(text, self.encoded) if self.behind is None else self.form.tokens.spans(text)
        before = self.num_tokens - len(tokens)
        starts, ends = [start for start, _ in tokens], [end for _, end in tokens]
        return [(before + bisect_right(ends, first), before + bisect_left(starts, end)) for _, first, end in chars]


def _system(document: DocumentRules, rule: str, rest: str) -> list[Span]:  # noqa: ARG001
    first = document.messages[0] if document.messages else None
    if first is None or first["role"] != "system":
        raise refused(rule, "the document has no system message; give messages that begin with one")
    ((_, end),) = document.of_chars(rule, [(0, 0, len(first["content"]))])
    return [(0, end)]  # with what the template writes before it


def _headings(document: DocumentRules, rule: str, rest: str) -> list[Span]:  # noqa: ARG001
    return document.of_chars(rule, _lines(document.texts, is_heading))


def _first(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    count = _number(rule, rest)
    end = document.encoded.protected_prefix + count
    if not count > 0 or end > document.num_tokens:
        most = document.num_tokens - document.encoded.protected_prefix
        raise refused(rule, f"the document has {most} tokens; give from 1 to so many")
    return [(0, end)]


def _text(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    if not rest:
        raise refused(rule, "it names no text")
    return document.of_chars(
        rule, (chars for at, text in enumerate(document.texts) for chars in _occurrences(at, text, rest))
    )


def _matching(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    """Whole lines: the engine of patterns whose time is in proportion to the text says whether a line matches, and not
    where."""
    try:
        matches = matching(rest)
    except ValueError as error:
        raise refused(rule, str(error)) from error
    return document.of_chars(rule, _lines(document.texts, lambda line, _: matches(line)))


def _chars(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    if document.messages is not None:
        raise refused(rule, "a conversation has several texts; take message:I:A-B")
    return document.of_chars(rule, [(0, *_range(rule, rest))])


def _message(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    place, _, chars = rest.partition(":")
    at = _number(rule, place)
    if document.messages is None or at >= len(document.messages):
        raise refused(rule, f"the document has {len(document.messages or ())} messages; the first is message:0")
    first, end = _range(rule, chars) if chars else (0, len(document.texts[at]))
    return document.of_chars(rule, [(at, first, end)])


def _tokens(document: DocumentRules, rule: str, rest: str) -> list[Span]:
    first, end = _range(rule, rest)
    if not first < end <= document.num_tokens:
        raise refused(rule, f"the document has {document.num_tokens} tokens; give some of them, as 0-64")
    return [(first, end)]


_READERS: Final[dict[str, Callable[[DocumentRules, str, str], list[Span]]]] = {
    "system": _system,
    "headings": _headings,
    "first": _first,
    "text": _text,
    "lines": _matching,
    "chars": _chars,
    "message": _message,
    "tokens": _tokens,
}


def refused(rule: Any, why: str) -> InvalidRequest:
    return InvalidRequest(f"protect {rule!r:.120}: {why}", param="protect")


def _number(rule: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise refused(rule, f"{text!r:.40} is no number of at most nine digits")
    return int(text)


def _range(rule: str, text: str) -> Span:
    first, _, end = text.partition("-")
    return _number(rule, first), _number(rule, end)


def _occurrences(at: int, text: str, part: str) -> Iterator[Chars]:
    """The places of `part` in a text, from left to right, without overlaps."""
    first = text.find(part)
    while first >= 0:
        yield at, first, first + len(part)
        first = text.find(part, first + len(part))


def _lines(texts: Sequence[str], matches: Callable[[str, str], bool]) -> Iterator[Chars]:
    """The lines that match, by their own text and that of the next."""
    for at, text in enumerate(texts):
        lines, first = text.split("\n"), 0
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if line.strip() and matches(line.rstrip("\r"), following):
                yield at, first, first + len(line)
            first += len(line) + 1


def joined_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Ascending; spans that touch are joined."""
    joined: list[Span] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return tuple(joined)
