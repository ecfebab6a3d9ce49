"""The pieces of one answer as they come: thoughts are told apart from its text, and what may be a call is held back.

Thoughts begin and end by the marks of the chat template. Earlier ones stand in a conversation where the template writes
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvshelf.api.answers import Piece
from kvshelf.engine.decode.detokenizer import may_begin
from kvshelf.model.templates.thoughts import Thoughts


class HeldPieces:
    """The pieces of an answer, held back while they may belong to a call. settled: as `ToolFormat.settled`."""

    def __init__(self, settled: Callable[[str], int]) -> None:
        self._settled = settled
        self._text = ""
        self._held: deque[Piece] = deque()
        self._told = 0

    def push(self, piece: Piece) -> Iterator[Piece]:
        """Add a piece. Gives those that are text whatever follows."""
        self._text += piece
        self._held.append(piece)
        return self._until(self._settled(self._text))

    def among(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """These pieces, those of text as `push` gives them; thoughts are never held back."""
        for piece in pieces:
            yield from [piece] if piece.is_thought else self.push(piece)

    def rest(self, text: str) -> Iterator[Piece]:
        """What is left of the answer's text, once that is known."""
        yield from self._until(len(text))
        if self._told < len(text):
            yield Piece(text[self._told :])

    def _until(self, end: int) -> Iterator[Piece]:
        while self._held and self._told + len(self._held[0]) <= end:
            self._told += len(self._held[0])
            yield self._held.popleft()


class ThoughtStream:
    """The pieces of one answer, thoughts told apart. opened: whether the prompt has opened them."""

    def __init__(self, thoughts: Thoughts | None, *, opened: bool) -> None:
        self._thoughts = thoughts
        self._state = "text" if thoughts is None else "thought" if opened else "start"
        self._held = ""
        self._begun = False

    def push(self, piece: Piece) -> Iterator[Piece]:
        """Add a piece. Gives pieces of thoughts and of text."""
        if self._state == "text":
            yield piece
            return
        self._held += piece
        yield from self._told(ended=False)

    def rest(self) -> Iterator[Piece]:
        """What was held back, once the answer has ended."""
        yield from self._told(ended=True)

    def _told(self, *, ended: bool) -> Iterator[Piece]:
        assert self._thoughts is not None or not self._held
        marks = self._thoughts
        if marks is None:
            return
        if self._state == "start":
            self._begin(marks, ended=ended)
        if self._state == "thought":
            yield from self._think(marks, ended=ended)
        if self._state == "between":
            self._cross(marks, ended=ended)
        if self._state == "text" and self._held:
            held, self._held = self._held, ""
            yield Piece(held)

    def _begin(self, marks: Thoughts, *, ended: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(marks.opening):
            self._state, self._held = "thought", text[len(marks.opening) :]
        elif any(text.startswith(header) for header in marks.headers):
            self._state = "between"
        elif ended or not _may_become(text, (marks.opening, *marks.headers)):
            self._state = "text"

    def _think(self, marks: Thoughts, *, ended: bool) -> Iterator[Piece]:
        if not self._begun:
            self._held = self._held.lstrip()
            if self._held.startswith(marks.opening):  # written again, although the prompt has it
                self._held = self._held[len(marks.opening) :].lstrip()
            elif not ended and marks.opening.startswith(self._held):
                return
        thought, closing, rest = self._held.partition(marks.closing)
        if closing or ended:
            thoughts, self._state, self._held = thought.rstrip(), "between", rest
        else:
            open_ = len(thought) - may_begin(thought, (marks.closing,))
            thoughts = thought[:open_].rstrip()
            self._held = thought[len(thoughts) :]
        if thoughts:
            self._begun = True
            yield Piece(thoughts, is_thought=True)

    def _cross(self, marks: Thoughts, *, ended: bool) -> None:
        text = self._held.lstrip()
        header = next((header for header in marks.headers if text.startswith(header)), None)
        if header is not None:
            self._state, self._held = "text", text[len(header) :]
        elif ended or (text and not _may_become(text, marks.headers)):
            self._state, self._held = "text", text


def _may_become(text: str, wanted: Sequence[str]) -> bool:
    return any(each.startswith(text) for each in wanted)


def told_apart(thoughts: Thoughts | None, text: str, *, opened: bool) -> tuple[str | None, str]:
    """The thoughts of a whole answer, None without any, and its text."""
    stream = ThoughtStream(thoughts, opened=opened)
    pieces = [*stream.push(Piece(text)), *stream.rest()]
    thought = "".join(piece for piece in pieces if piece.is_thought)
    return thought or None, "".join(piece for piece in pieces if not piece.is_thought)
