"""Splits a text that is longer than a model takes into parts that fit, at the ends of paragraphs where it has some."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

_ENDS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n[^\S\n]*\n\s*",  # a paragraph
        r"\n",  # a line
        r"[.?!][\"')\]’”]*\s+|[。？！]",  # noqa: RUF001  a sentence; the full-width ones are meant
        r"\s+",  # a word
    )
)
"""What a part may end with, the best first."""

_CHARACTERS_PER_TOKEN: Final = 4
"""A guess for the first part, as tokens are found only by encoding the text; later parts take the last one's length."""

TokenStarts = Callable[[str], list[int]]
"""The place of the first character of each token of a text."""


class Span(NamedTuple):
    """The characters of one part, from `start` to before `end`."""

    start: int
    end: int


def spans(text: str, token_starts: TokenStarts, *, size: int, overlap: int) -> list[Span]:
    """The parts of a text, in order: each of at most `size` tokens, and together all of it.

    A part ends with the last paragraph that ends in its second half; without one, with the last line, sentence or word.
    The next part begins at least `overlap` tokens before that end, at most twice as many where a paragraph, a line, a
    sentence or a word begins there. `overlap` is at most a quarter of `size`, so that parts go forward.
    """
    assert 0 <= overlap <= size // 4, "each part must go beyond the overlap"
    found: list[Span] = []
    start, length = 0, size * _CHARACTERS_PER_TOKEN
    while True:
        starts = _ahead(text, start, token_starts, size, length)
        if len(starts) <= size:
            return [*found, Span(start, len(text))]
        end = _end(text, start, starts, token_starts, size)
        found.append(Span(start, end))
        start, length = _overlapping(text, found[-1], starts, overlap), (end - start) * 5 // 4


def _ahead(text: str, start: int, token_starts: TokenStarts, size: int, length: int) -> list[int]:
    """Where tokens begin, from `start` on: those of the whole rest, or more than `size`. length: characters to try."""
    while True:
        starts = [start + at for at in token_starts(text[start : start + length])]
        if len(starts) > size or start + length >= len(text):
            return starts
        length *= 2


def _end(text: str, start: int, starts: list[int], token_starts: TokenStarts, size: int) -> int:
    """Where a part that begins at `start` ends. Its tokens are counted, because a cut changes those beside it."""
    room = size
    while True:
        end = _break(text, starts[room // 2], max(start + 1, starts[room]))
        excess = len(token_starts(text[start:end])) - size
        if excess <= 0:
            return end
        room -= excess


def _overlapping(text: str, part: Span, starts: list[int], overlap: int) -> int:
    """Where the part after `part` begins."""
    if not overlap:
        return part.end
    tokens = bisect_left(starts, part.end)
    return _break(text, starts[max(1, tokens - 2 * overlap)], starts[max(1, tokens - overlap)])


def _break(text: str, low: int, high: int) -> int:
    """The best place to cut a text behind `low` and up to `high`: the last end of the best kind, else `high`."""
    for pattern in _ENDS:
        last = deque(pattern.finditer(text, low, high), maxlen=1)
        if last:
            return last[0].end()
    return high
