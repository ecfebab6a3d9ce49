"""EpiCache: what one episode of a conversation attends to (Kim et al., 2025, arXiv 2509.17396)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import encoded
from kvshelf.methods.policies.blocks import BlockPast, BlockPolicy, largest_weights
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.centroids import unpacked
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

_INSTRUCTION: Final = "\n\nFind what the text above says about the following."
_OWN_END: Final = 64
"""Tokens at the end of the document that stand for the episode where nothing else does."""


@dataclass(frozen=True)
class EpiCache(BlockPolicy):
    """In part, as layers have equal budgets: keep what the text of one episode attends to: one of several caches of a
    long conversation, each for its episode.

    Behind the document, or behind each chunk of it with `prefill` "chunked", runs a pass: an instruction, the chat
    template's text before the answer, and `probe`, the episode's text. The score of an entry is the largest weight that
    any row of the pass, of any head of the GQA group, gives it in a softmax over the document, or what is left of it,
    without the pass itself. The best of all heads of a layer stay (`across="layer"`), or of each head. With chunks all
    that is left is scored anew at each, and the KV cache of a layer never has more entries than budget, chunk and pass
    together.

    A creation with `episodes` finds the episodes and makes the caches, with `prefill` "chunked"
    (docs/internals/answers.md). Their `centroid` says what each is about: a question is sent to the nearest. It changes
    nothing of what stays.

    Departures: the first `sink` tokens and the chat template's always stay. The authors' code starts the pass one
    position early, within the chunk's last token, and weighs the layers' budgets by how much their keys change under a
    blocked prefill, measured beforehand; here the pass starts behind the chunk, and layers have equal budgets. Without
    `probe` the instruction is the pass; without a tokenizer, the document's last 64 tokens.
    """

    name: ClassVar[str] = "epicache"
    source: ClassVar[str] = "EpiCache, arXiv 2509.17396"
    advice: ClassVar[str] = "for long conversations about many things: one cache an episode, and memory for one chunk."

    probe: str | None = parameter(None, "the episode's text; null: the instruction alone")
    centroid: str | None = parameter(None, "what the episode is about, for route=nearest; made by `episodes`")

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        if self.centroid is not None:
            unpacked(self.centroid)
        return super().fitted(document, budget, given)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        ids = self._pass(document)
        if self.prefill == "whole":
            return [ProbePass(ids, document.end)]
        return [ProbePass(ids, document.behind(end)) for _, end in self.blocks(document)]

    def probe_text(self, document: DocumentView) -> str:
        return "" if document.text is None else document.text.decode(self._pass(document))

    def score(self, layer: LayerView) -> Tensor:
        (probed,) = layer.probes
        heads = zip(layer.grouped(probed.queries), layer.keys, strict=True)
        return torch.stack([largest_weights(queries, keys, None, layer.scaling) for queries, keys in heads])

    def judged(self, past: BlockPast) -> Tensor:
        return largest_weights(past.queries, past.keys, None, past.scaling)

    def _pass(self, document: DocumentView) -> tuple[int, ...]:
        episode = encoded(self.probe or "", document)
        if document.text is None:
            return tuple(document.token_ids[-_OWN_END:])
        return (*document.text.encode(_INSTRUCTION), *document.suffix, *episode)
