"""A conversation behind a stored cache: its tokens as the template writes them, and the caches of its turns.

The cache of a turn has the answer as the template writes earlier answers. Where a template rewrites earlier turns,
their caches no longer match, and the tokens behind the last cache that matches are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Boundary, Identity, Layout, digest
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.decode.turns import Turn
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.inputs.encode import Document, Encoder, Prompt
from kvshelf.engine.inputs.prepare import as_bytes
from kvshelf.engine.options import CompressOptions
from kvshelf.engine.prefill.appending import continued
from kvshelf.errors import InvalidRequest, StateConflict
from kvshelf.methods.policies.registry import everything
from kvshelf.model.text import Broken, EncodedDocument, TemplateOptions, TextFormat
from kvshelf.model.text import Prompt as WrittenPrompt

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
    def prompt(self) -> WrittenPrompt:
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

    def _turns(self, messages: Sequence[Said], prompt: WrittenPrompt) -> list[TurnEnd]:
        places = (at for at, message in enumerate(messages) if message["role"] == "assistant")
        return [TurnEnd(at + 1, prompt.ends[at]) for at in places if at in prompt.ends]

    def _prompt(self, messages: Sequence[Said], *, opening: bool = False, followed: bool = False) -> WrittenPrompt:
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


class Turns:
    """Makes caches of turns that ran in a batch. Thread-safe, but for `caches`."""

    def __init__(self, facts: ModelFacts, encoder: Encoder, compressor: Compressor) -> None:
        self._facts = facts
        self._encoder = encoder
        self._compressor = compressor

    def require(self) -> None:
        """Raises `PolicyUnsupported` for a model whose turns cannot be kept."""
        require_possible(Combination(facts=self._facts, verb="store"))

    def ids(self, document: Attachment, prompt: Prompt, text: str, token_ids: Sequence[int]) -> list[int]:
        """The tokens that a turn appends to a cache, of a prompt and an answer. A conversation has the answer's text,
        encoded as in a client's next request; a plain document has its ids, without those that end an answer. Raises
        `InvalidRequest` for a turn without an answer, and for a turn that is too long."""
        identity = document.identity
        if identity.boundary == "text":
            turn_ids = [*self._encoder.behind(identity, prompt), *self.without_end(token_ids)]
        elif text:
            question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            turn: Any = [*question, {"role": "assistant", "content": text}]
            turn_ids = self._encoder.appended(identity, turn).token_ids
        else:
            raise InvalidRequest("the answer is empty, and a turn of a conversation needs some text", param="store")
        return self.bounded(document, turn_ids)

    def bounded(self, document: Attachment, token_ids: list[int]) -> list[int]:
        """These tokens of a turn behind a cache. Raises `InvalidRequest` where they are too many."""
        if document.next_position + len(token_ids) > self._facts.longest(document.num_tokens):
            raise InvalidRequest("the turn ends beyond the longest sequence of the model", param="store")
        return token_ids

    def without_end(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens of an answer without those that end it."""
        ends = self._facts.end_ids()
        return [token for token in token_ids if token not in ends]

    def caches(
        self, cache: CompressedCache, turns: Sequence[Document | EncodedDocument], states: Turn
    ) -> list[CompressedCache]:
        """Caches of a document after each of some turns, whose keys and values a batch has computed: no pass of the
        model.

        turns: have the tokens of `states` together; each is appended to the cache before it, under policy full. Raises
        as `Engine.prepare_append`, and `StateConflict` where the turns are other tokens than those that ran.
        """
        caches, at = [], 0
        for turn in turns:
            job = self._compressor.prepare_append(cache, turn, CompressOptions(policy="full"))
            part = states.part(at, at + job.num_tokens)
            if list(part.token_ids) != list(job.document.token_ids):
                raise StateConflict("the turn is written otherwise when the next one follows; it was not kept")
            assert job.parent is not None
            layers = part.records(self._facts.kinds, cache.layers, cache.num_tokens)
            ends = job.document.stored_sentence_ends
            alone = CompressedCache(layers, job.num_tokens, job.num_tokens, job.identity, sentence_ends=ends)
            cache = continued(job.parent, alone, self._compressor.level(job).identity, job.num_tokens)
            caches.append(cache)
            at += job.num_tokens
        return caches

    def identity(self, parent: Identity, codec: str, kept_tokens: int, turn: Document | EncodedDocument) -> Identity:
        """The identity of a cache after a turn, as of `caches`, from that of the cache before. Raises `InvalidRequest`
        for a turn that cannot follow."""
        encoded, policy = self._encoder.appended(parent, turn), everything()
        alone = replace(
            parent,
            num_tokens=len(encoded.token_ids),
            boundary=encoded.boundary,
            policy=policy.name,
            policy_version=policy.revision,
            policy_params=policy.parameters(),
            budget_tokens=len(encoded.token_ids),
            compression_ratio=0.0,
            probe="",
            expected_questions=(),
            protect=(),
        )
        return alone.behind(parent, codec, kept_tokens, as_bytes(encoded.token_ids))
