"""Splits a text that is longer than a model takes into parts that fit, at the ends of paragraphs where it has some."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, overload

from kvshelf.errors import InvalidRequest

MOST_PARTS: Final = 10_000
"""Most parts of one text. Each part is a prefill and a cache of its own."""

_ENDS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n[^\S\n]*\n\s*",  # a paragraph
        r"\n",  # a line
        r"[.?!][\"')\]’”]*\s+|[。？！]",  # noqa: RUF001  a sentence; the full-width ones are meant
        r"\s+",  # a word
    )
)
"""Patterns of the ends of parts, the best first."""

_CHARACTERS_PER_TOKEN: Final = 4
"""A guess for the first part, because only encoding gives the tokens; later parts take the last one's length."""


class TextSpan(NamedTuple):
    """The characters of one part, from `start` to before `end`."""

    start: int
    end: int


class TextParts(Sequence[str]):
    """The parts of a text, each cut out at its use: together they take more memory than the text."""

    def __init__(self, text: str, spans: Sequence[TextSpan]) -> None:
        self._text, self._spans = text, spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> TextParts: ...

    def __getitem__(self, index: int | slice) -> str | TextParts:
        if isinstance(index, slice):
            return TextParts(self._text, self._spans[index])
        return self._text[slice(*self._spans[index])]


TokenStarts = Callable[[str], list[int]]
"""The place of the first character of each token of a text."""


def spans(
    text: str, token_starts: TokenStarts, *, size: int, overlap: int, checkpoint: Callable[[], None] = lambda: None
) -> list[TextSpan]:
    """The parts of a text, in order: each of at most `size` tokens, and together all of it.

    A part ends with the last paragraph that ends in its second half; without one, with the last line, sentence or word.
    The next part begins at least `overlap` tokens before that end, at most twice as many where a paragraph, a line, a
    sentence or a word begins there. `overlap` is at most a quarter of `size`. Each part begins and ends after the part
    before it begins and ends, although many tokens may share a character.

    `checkpoint` is called before each part and may raise. Raises `InvalidRequest` for more than `MOST_PARTS` parts, and
    for a character of more than `size` tokens.
    """
    assert 0 <= overlap <= size // 4, "each part must go beyond the overlap"
    parts: list[TextSpan] = []
    start, length = 0, size * _CHARACTERS_PER_TOKEN  # length: characters that are encoded to find the part
    while True:
        checkpoint()
        while True:
            starts = [start + at for at in token_starts(text[start : start + length])]
            if len(starts) > size or start + length >= len(text):
                break
            length *= 2
        if len(starts) <= size:
            return [*parts, TextSpan(start, len(text))]
        if len(parts) + 1 >= MOST_PARTS:
            raise too_many_parts(size)
        end = _end(text, start, starts, token_starts, size)
        if parts and end <= parts[-1].end:  # it would only repeat the part before
            start = parts[-1].end
            continue
        parts.append(TextSpan(start, end))
        start, length = _overlapping(text, parts[-1], starts, overlap), (end - start) * 5 // 4


def too_many_parts(size: int) -> InvalidRequest:
    """The error for a text that has more than `MOST_PARTS` parts of `size` tokens."""
    return InvalidRequest(
        f"split: the text has more than {MOST_PARTS} parts of {size} tokens; give a larger max_tokens, or send less",
        param="split",
    )


def _end(text: str, start: int, starts: list[int], token_starts: TokenStarts, size: int) -> int:
    """The end of the part that begins at `start`. Its tokens are counted, because a cut changes the tokens beside
    it."""
    room = size
    while room:
        end = _break(text, starts[room // 2], max(start + 1, starts[room]))
        excess = len(token_starts(text[start:end])) - size
        if excess <= 0:
            return end
        room = max(room - excess, room // 2)
    if len(token_starts(text[start : start + 1])) > size:
        raise InvalidRequest(
            f"split: the character {text[start]!r} takes more than the {size} tokens of a part; give a larger "
            "max_tokens",
            param="split",
        )
    return start + 1


def _overlapping(text: str, part: TextSpan, starts: list[int], overlap: int) -> int:
    """The start of the next part: after the start of `part`, and not after its end."""
    if not overlap:
        return part.end
    tokens = bisect_left(starts, part.end)
    following = _break(text, starts[max(1, tokens - 2 * overlap)], starts[max(1, tokens - overlap)])
    return min(part.end, max(part.start + 1, following))


def _break(text: str, low: int, high: int) -> int:
    """The best place to cut a text after `low` and up to `high`: the last end of the best kind, else `high`."""
    for pattern in _ENDS:
        last = deque(pattern.finditer(text, low, high), maxlen=1)
        if last:
            return last[0].end()
    return high
