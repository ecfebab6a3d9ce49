"""The pieces of one answer as they come: thoughts are told apart from its text, and what may be a call is held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from kvshelf.api.answers import Piece
from kvshelf.api.shapes import Logprob
from kvshelf.engine.decode.detokenizer import may_begin
from kvshelf.model.templates.thoughts import Thoughts


class HeldPieces:
    """The pieces of an answer, held back while they may belong to a call. settled: as `ToolFormat.settled`."""

    def __init__(self, settled: Callable[[str], int]) -> None:
        self._settled = settled
        self._text = ""
        self._waiting: deque[Piece] = deque()
        self._released = 0
        """Characters of the text that have gone out."""

    def push(self, piece: Piece) -> Iterator[Piece]:
        """Add a piece. Gives those that are text whatever follows."""
        self._text += piece
        self._waiting.append(piece)
        return self._until(self._settled(self._text))

    def among(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """These pieces, those of text as `push` gives them; thoughts are never held back."""
        for piece in pieces:
            yield from [piece] if piece.is_thought else self.push(piece)

    def rest(self, text: str) -> Iterator[Piece]:
        """What is left of the answer's text, once that is known."""
        yield from self._until(len(text))
        if self._released < len(text):
            yield Piece(text[self._released :])

    def _until(self, end: int) -> Iterator[Piece]:
        while self._waiting and self._released + len(self._waiting[0]) <= end:
            self._released += len(self._waiting[0])
            yield self._waiting.popleft()


class ThoughtStream:
    """The pieces of one answer, thoughts told apart. opened: whether the prompt has opened them."""

    def __init__(self, thoughts: Thoughts | None, *, opened: bool) -> None:
        self._thoughts = thoughts
        self._state = "text" if thoughts is None else "thought" if opened else "start"
        self._text = ""
        self._begun = False
        self._bytes = 0
        self._logprobs: list[Logprob] | None = None
        """Of the tokens so far, as long as none is text."""

    def push(self, piece: Piece) -> Iterator[Piece]:
        """Add a piece. Gives pieces of thoughts and of text."""
        if self._state == "text":
            yield piece
            return
        self._text += piece
        self._bytes += len(piece.encode())
        if piece.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *piece.logprobs]
        yield from self._split(ended=False)

    def rest(self) -> Iterator[Piece]:
        """What was held back, once the answer has ended."""
        yield from self._split(ended=True)

    def _split(self, *, ended: bool) -> Iterator[Piece]:
        marks = self._thoughts
        if marks is None:  # then nothing is held back
            return
        if self._state == "start":
            self._begin(marks, ended=ended)
        if self._state == "thought":
            yield from self._think(marks, ended=ended)
        if self._state == "between":
            text = self._text.lstrip()
            header = next((header for header in marks.headers if text.startswith(header)), "")
            if header or ended or (text and not _may_become(text, marks.headers)):
                self._state, self._text = "text", text[len(header) :]
        if self._state == "text" and self._text:
            rest, self._text = self._text, ""
            skipped = self._bytes - len(rest.encode())
            yield Piece(rest, None if self._logprobs is None else behind(self._logprobs, skipped))

    def _begin(self, marks: Thoughts, *, ended: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(marks.opening):
            self._state, self._text = "thought", text[len(marks.opening) :]
        elif any(text.startswith(header) for header in marks.headers):
            self._state = "between"
        elif ended or not _may_become(text, (marks.opening, *marks.headers)):
            self._state = "text"

    def _think(self, marks: Thoughts, *, ended: bool) -> Iterator[Piece]:
        if not self._begun:
            self._text = self._text.lstrip()
            if self._text.startswith(marks.opening):  # written again, although the prompt has it
                self._text = self._text[len(marks.opening) :].lstrip()
            elif not ended and marks.opening.startswith(self._text):
                return
        thought, closing, rest = self._text.partition(marks.closing)
        if closing or ended:
            thoughts, self._state, self._text = thought.rstrip(), "between", rest
        else:
            open_ = len(thought) - may_begin(thought, (marks.closing,))
            thoughts = thought[:open_].rstrip()
            self._text = thought[len(thoughts) :]
        if thoughts:
            self._begun = True
            yield Piece(thoughts, is_thought=True)


def behind(tokens: Sequence[Logprob], skipped: int) -> list[Logprob]:
    """The tokens of a text that begin behind its first so many bytes."""
    begins = accumulate((len(token.bytes or ()) for token in tokens), initial=0)
    return [token for token, at in zip(tokens, begins, strict=False) if at >= skipped]


def _may_become(text: str, marks: Sequence[str]) -> bool:
    return any(mark.startswith(text) for mark in marks)


def told_apart(thoughts: Thoughts | None, text: str, *, opened: bool) -> tuple[str | None, str]:
    """The thoughts of a whole answer, None without any, and its text."""
    stream = ThoughtStream(thoughts, opened=opened)
    pieces = [*stream.push(Piece(text)), *stream.rest()]
    thought = "".join(piece for piece in pieces if piece.is_thought)
    return thought or None, "".join(piece for piece in pieces if not piece.is_thought)
