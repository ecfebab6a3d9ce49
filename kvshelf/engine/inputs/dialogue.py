"""A conversation behind a stored cache: its tokens as the template writes them as a whole, and the turns in it.

The cache of a turn has the answer as the template writes earlier answers, as the next question needs it. Whether a
question can be asked of a cache follows from its tokens alone. Where a template rewrites earlier turns, the caches of
these turns no longer match, and the tokens behind the last cache that matches are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvshelf.artifact.identity import Boundary, Identity, Layout, digest
from kvshelf.engine.inputs.prepare import as_bytes
from kvshelf.model.text import Broken, EncodedDocument, Prompt, TemplateOptions, TextFormat

Said = dict[str, Any]
"""A message: its role and content, and of an assistant's perhaps calls of tools and thoughts."""


class TurnEnd(NamedTuple):
    """Where a turn ends: behind so many messages, and behind so many of the conversation's tokens."""

    messages: int
    tokens: int


@dataclass(frozen=True)
class Dialogue:
    """Messages behind their root, a cache that is no turn of theirs. boundary: of that cache. intro: as of
    `TextFormat.prompt`. Its methods raise `InvalidRequest` where the template does not write the messages."""

    form: TextFormat
    boundary: Boundary
    messages: Sequence[Said]
    options: TemplateOptions
    intro: Callable[[Broken], str] | None = None

    @cached_property
    def prompt(self) -> Prompt:
        """The tokens behind the root, up to where the answer to the last message begins."""
        return self._prompt(self.messages, opening=True)

    @property
    def turns(self) -> list[TurnEnd]:
        """The turns before the question, in order."""
        return self._turns(self.messages, self.prompt)

    def answered(self, answer: Said) -> tuple[list[int], list[TurnEnd]]:
        """The tokens behind the root once this answer is an earlier turn, and the turns in them, this one last."""
        messages = [*self.messages, answer]
        prompt = self._prompt(messages, followed=True)
        before = [end for end in self._turns(messages, prompt) if end.messages < len(messages)]
        return prompt.token_ids, [*before, TurnEnd(len(messages), len(prompt.token_ids))]

    def _turns(self, messages: Sequence[Said], prompt: Prompt) -> list[TurnEnd]:
        places = (at for at, message in enumerate(messages) if message["role"] == "assistant")
        return [TurnEnd(at + 1, prompt.ends[at]) for at in places if at in prompt.ends]

    def _prompt(self, messages: Sequence[Said], *, opening: bool = False, followed: bool = False) -> Prompt:
        return self.form.prompt(
            self.boundary, messages, opening=opening, followed=followed, options=self.options, intro=self.intro
        )

    def reads(self, parent: Identity, node: Identity, first: int, end: int) -> bool:
        """Whether a cache behind another one has the tokens of this conversation from `first` to the one before `end`.
        parent, node: the identities of both."""
        added = as_bytes(self.prompt.token_ids[first:end])
        return node.document == digest("kvshelf.appended", parent.document, added)


def whole_turn(layout: Layout, token_ids: Sequence[int]) -> EncodedDocument:
    """Tokens that are appended to a cache and end with an answer."""
    boundary: Boundary = "text" if layout == "plain" else "after_assistant"
    return EncodedDocument(list(token_ids), 0, layout, boundary)
