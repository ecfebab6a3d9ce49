"""The turns of conversations that one model has answered, appended to a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity
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
from kvshelf.model.text import EncodedDocument


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
