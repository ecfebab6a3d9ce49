"""Thoughts in an answer: where they begin and end, by the marks of the model's chat template.

Thoughts are told apart from the answer's text. Earlier ones stand in a conversation where the template writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True)
class Thoughts:
    """The marks of one template. headers: what may stand before an answer's text, which is no part of it."""

    opening: str
    closing: str
    headers: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Those of a chat template; None for one that knows no thoughts."""
        for opening, closing, *headers in _KNOWN:
            # The last names itself: some templates only look for its end, in answers that are sent back.
            if closing in template and (opening in template or closing == "</think>"):
                return cls(opening, closing, tuple(headers))
        return None

    @property
    def texts(self) -> str:
        """All marks."""
        return "".join((self.opening, self.closing, *self.headers))


_KNOWN: Final = (
    (
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
        "<|start|>assistant<|channel|>commentary<|message|>",
        "<|channel|>commentary<|message|>",
    ),  # gpt-oss, which may tell what it is about to do in its channel of calls
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),  # Command A
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron, SmolLM3
)


class Thought(str):
    """A piece of thoughts."""

    __slots__ = ()


class ThoughtStream:
    """The pieces of one answer, thoughts told apart. opened: whether the prompt has opened them."""

    def __init__(self, thoughts: Thoughts | None, *, opened: bool) -> None:
        self._thoughts = thoughts
        self._state = "text" if thoughts is None else "thought" if opened else "start"
        self._held = ""
        self._begun = False

    def push(self, piece: str) -> Iterator[str]:
        """Add a piece. Gives pieces of thoughts, as `Thought`, and of text."""
        if self._state == "text":
            yield piece
            return
        self._held += piece
        yield from self._told(ended=False)

    def rest(self) -> Iterator[str]:
        """What was held back, once the answer has ended."""
        yield from self._told(ended=True)

    def _told(self, *, ended: bool) -> Iterator[str]:
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
            yield held

    def _begin(self, marks: Thoughts, *, ended: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(marks.opening):
            self._state, self._held = "thought", text[len(marks.opening) :]
        elif any(text.startswith(header) for header in marks.headers):
            self._state = "between"
        elif ended or not _may_become(text, (marks.opening, *marks.headers)):
            self._state = "text"

    def _think(self, marks: Thoughts, *, ended: bool) -> Iterator[str]:
        if not self._begun:
            self._held = self._held.lstrip()
            if self._held.startswith(marks.opening):  # written again, although the prompt has it
                self._held = self._held[len(marks.opening) :].lstrip()
            elif not ended and marks.opening.startswith(self._held):
                return
        thought, closing, rest = self._held.partition(marks.closing)
        if closing or ended:
            told, self._state, self._held = thought.rstrip(), "between", rest
        else:
            open_ = len(thought) - _may_end(thought, marks.closing)
            told = thought[:open_].rstrip()
            self._held = thought[len(told) :]
        if told:
            self._begun = True
            yield Thought(told)

    def _cross(self, marks: Thoughts, *, ended: bool) -> None:
        text = self._held.lstrip()
        header = next((header for header in marks.headers if text.startswith(header)), None)
        if header is not None:
            self._state, self._held = "text", text[len(header) :]
        elif ended or (text and not _may_become(text, marks.headers)):
            self._state, self._held = "text", text


def _may_become(text: str, wanted: Sequence[str]) -> bool:
    return any(each.startswith(text) for each in wanted)


def _may_end(text: str, mark: str) -> int:
    """How much of a text's end is the beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def told_apart(thoughts: Thoughts | None, text: str, *, opened: bool) -> tuple[str | None, str]:
    """The thoughts of a whole answer, None without any, and its text."""
    stream = ThoughtStream(thoughts, opened=opened)
    pieces = [*stream.push(text), *stream.rest()]
    thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
    return thought or None, "".join(piece for piece in pieces if not isinstance(piece, Thought))
