"""Text to token ids where only the template's own marks become control tokens.

A tokenizer's added tokens open and end turns, calls of tools and thoughts, whether they are flagged special or not. In
text from outside they are spelled out. Texts that are joined give the ids of the whole text: no word gets a space that
nobody wrote.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, Final, Literal, NamedTuple

from tokenizers import Encoding, Tokenizer

Place = Literal["first", "behind mark", "behind text"]
"""The place of a text: at the beginning, or after a control token or more text."""

_LEAST_EDGE: Final = 2
"""Characters of a mark at a text's beginning or end from which on they are broken, lest a neighbour completes it."""


class Mark(NamedTuple):
    """An added token. left, right: whether it takes the white space before and after it. normalized: whether it is
    searched after the normalizer, which then writes nothing between it and the text after it."""

    id: int
    text: str
    special: bool
    left: bool
    right: bool
    normalized: bool


class Run(NamedTuple):
    """Characters of a text, from `start` to the one before `end`, and their tokens: a mark with the white space that it
    takes, or the text between two marks."""

    start: int
    end: int
    token_ids: list[int]
    is_mark: bool


class Tokens:
    """The tokenizer of one model. Thread-safe: encoding changes no state.

    Added tokens that are white space alone, as some tokenizers have for runs of it, or one character, are no marks.
    """

    def __init__(self, backend: Tokenizer) -> None:
        settings = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        self.control = Tokenizer.from_str(backend.to_str())
        self.control.no_padding()
        self.control.no_truncation()
        added = [token for token in settings["added_tokens"] if _opens(token["content"])]
        flags = ("special", "lstrip", "rstrip", "normalized")
        self.marks = {t["content"]: Mark(t["id"], t["content"], *(t[flag] for flag in flags)) for t in added}
        self._mark_ids = frozenset(mark.id for mark in self.marks.values())
        longest_first = sorted(self.marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._edges = frozenset(
            part for mark in longest_first for at in range(_LEAST_EDGE, len(mark)) for part in (mark[:at], mark[at:])
        )
        # Copies of their own: switching one shared tokenizer between "marks are text" and "are tokens" would race with
        # other threads. Each added token counts as special there, because only special ones can be switched off.
        for token in settings["added_tokens"]:
            token["special"] = _opens(token["content"])
        self._first = _textual(settings)
        unspaced, self._spaces_marks = _unspaced(settings)
        self._behind = self._first if unspaced == settings else _textual(unspaced)
        self._spelled: dict[int, list[int]] = {}  # filled by use; two threads may write the same

    def showing(self, text: str) -> Tokenizer:
        """A tokenizer whose decoder writes the marks of a text although they are flagged special."""
        marks = {mark.text for mark in self.found_in(text) if mark.special}
        if not marks:
            return self.control
        settings = json.loads(self.control.to_str())
        for token in settings["added_tokens"]:
            token["special"] &= token["content"] not in marks
        return Tokenizer.from_str(json.dumps(settings))

    def encode(self, text: str, place: Place = "behind text") -> list[int]:
        """Token ids of a text from outside: no mark is among them, whatever it says."""
        ids: list[int] = _encoding(self._encoder(place), text).ids
        if self._mark_ids.isdisjoint(ids):
            return ids
        return [spelled for token in ids for spelled in self._as_text(token)]

    def spans(self, text: str, place: Place = "behind text") -> list[tuple[int, int]]:
        """The first character of each token of a text, and the one after its last."""
        encoding = _encoding(self._encoder(place), text)
        if self._mark_ids.isdisjoint(encoding.ids):
            return list(encoding.offsets)
        both = zip(encoding.ids, encoding.offsets, strict=True)  # a mark is spelled out in several tokens
        return [span for token, span in both for _ in self._as_text(token)]

    def encode_marked(self, text: str, place: Place = "first") -> list[int]:
        """Token ids of a template's text: its marks are control tokens."""
        return [token for run in self.runs(text, place=place) for token in run.token_ids]

    def runs(self, text: str, breaker: str = "", place: Place = "first") -> Iterator[Run]:
        """As `encode_marked`, each mark and each text between two of them by itself. breaker: the character that
        `broken` put into the texts from outside; it is taken out again."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            mark, start, end = self.marks[match.group()], match.start(), match.end()
            if mark.left:
                start -= len(text[at:start]) - len(text[at:start].rstrip())
            if mark.right:
                end += len(text[end:]) - len(text[end:].lstrip())
            if start > at:
                yield self._run(text, at, start, breaker, place)
            yield Run(start, end, [mark.id], True)
            at, place = end, "behind text" if mark.normalized else "behind mark"
        if at < len(text):
            yield self._run(text, at, len(text), breaker, place)

    def _run(self, text: str, start: int, end: int, breaker: str, place: Place) -> Run:
        return Run(start, end, self.encode(_without(text[start:end], breaker), place), False)

    def tokens_until(self, text: str, runs: Sequence[Run], places: Sequence[int], breaker: str = "") -> list[int]:
        """For each of these places in a text, how many tokens of its runs end there or before."""
        ends = [run.end for run in runs]
        before = list(accumulate((len(run.token_ids) for run in runs), initial=0))
        counts = []
        for place in places:
            whole = bisect_right(ends, place)
            counts.append(before[whole])
            if whole < len(runs) and runs[whole].start < place:
                run = runs[whole]
                part, all_of_it = (_without(text[run.start : at], breaker) for at in (place, run.end))
                counts[-1] += sum(last <= len(part) for _, last in self.spans(all_of_it))
        return counts

    def has_marks(self, text: str) -> bool:
        """Whether a text spells a mark, or a part of one at its edge that a neighbour may complete."""
        return self._pattern is not None and (self._pattern.search(text) is not None or self._edge(text) != (0, 0))

    def broken(self, text: str, breaker: str, but: Collection[str] = ()) -> str:
        """A text with this character, which it lacks, in each mark that it spells, and in parts of one at its ends.
        but: marks that stay whole."""
        if self._pattern is None:
            return text

        def part(match: re.Match[str]) -> str:
            mark = match.group()
            return mark if mark in but else mark[0] + breaker + mark[1:]

        begins, ends = self._edge(text)
        if ends:
            text = text[:-1] + breaker + text[-1]
        if begins:
            text = text[0] + breaker + text[1:]
        while (broken := self._pattern.sub(part, text)) != text:  # a mark may contain another one
            text = broken
        return text

    def literal(self, text: str) -> str:
        """A template's text as a grammar in llguidance's Lark dialect: its marks are tokens, flagged special or not."""
        return " ".join(
            f"<[{run.token_ids[0]}]>" if run.is_mark else json.dumps(text[run.start : run.end], ensure_ascii=False)
            for run in self.runs(text)
        )

    def found_in(self, text: str) -> list[Mark]:
        """The marks of a template's text, in order."""
        return [self.marks[mark] for mark in self._pattern.findall(text)] if self._pattern is not None else []

    def _edge(self, text: str) -> tuple[int, int]:
        """How many characters of a mark a text begins and ends with, if they are not the whole mark."""
        longest = max(map(len, self._edges), default=0)
        sizes = range(_LEAST_EDGE, min(longest, len(text)) + 1)
        begins = next((size for size in sizes if text[:size] in self._edges), 0)
        ends = next((size for size in sizes if text[-size:] in self._edges), 0)
        return begins, ends

    def _encoder(self, place: Place) -> Tokenizer:
        spaced = place == "first" or (place == "behind mark" and self._spaces_marks)
        return self._first if spaced else self._behind

    def _as_text(self, token: int) -> list[int]:
        """The ids that spell a mark: some models of tokenizers find one in text, too."""
        if token not in self._mark_ids:
            return [token]
        if token not in self._spelled:
            content = self.control.id_to_token(token) or ""
            self._spelled[token] = [id_ for letter in content for id_ in _encoding(self._behind, letter).ids]
        return self._spelled[token]


def _encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    # As a batch of one: `Tokenizer.encode` holds the interpreter's lock, and all other threads wait for the text.
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def unused_characters(texts: Sequence[str], count: int) -> list[str]:
    """So many characters for private use that are in none of these texts."""
    used = set().union(*texts) if texts else set()
    private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0x10FFFE)))
    return list(islice((letter for letter in private if letter not in used), count))


def _opens(text: str) -> bool:
    """Whether an added token can be one that opens or ends something."""
    return len(text) > 1 and bool(text.replace("▁", " ").strip())


def _without(text: str, breaker: str) -> str:
    return text.replace(breaker, "") if breaker else text


def _textual(settings: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _unspaced(settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The settings of a tokenizer, changed so that it writes no space before a text, and whether they have it write one
    after each mark, too."""
    spaces_marks = False

    def without(part: Any) -> Any:
        nonlocal spaces_marks
        if not isinstance(part, dict):
            return part
        kind, part = part.get("type"), dict(part)
        for inner in ("normalizers", "pretokenizers"):
            if inner in part:
                part[inner] = [kept for one in part[inner] if (kept := without(one)) is not None]
        if kind == "Prepend":
            spaces_marks = True
            return None
        if kind == "Metaspace" and part.get("prepend_scheme") != "never":
            spaces_marks |= part.get("prepend_scheme") == "always"
            part |= {"prepend_scheme": "never"}
            part.pop("add_prefix_space", None)
        if kind == "ByteLevel" and part.get("add_prefix_space"):
            spaces_marks = True
            part["add_prefix_space"] = False
        return part

    parts = {name: without(settings.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return settings | parts, spaces_marks
