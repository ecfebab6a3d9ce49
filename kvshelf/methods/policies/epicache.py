"""EpiCache: what one episode of a conversation attends to (Kim et al., 2025, arXiv 2509.17396)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import encoded
from kvshelf.methods.policies.blocks import BlockPast, BlockPolicy, largest_weights
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.calibrated import calibration_of, required_digest
from kvshelf.methods.policies.centroids import unpacked
from kvshelf.methods.policies.sharing import floored
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

_INSTRUCTION: Final = "\n\nFind what the text above says about the following."
_OWN_END: Final = 64
"""Last tokens of the document that stand for the episode without a tokenizer."""
_FLOOR: Final = 4
"""A layer keeps at least an even share divided by this."""
_SPREAD: Final = 1e-4
"""Smaller differences of similarities are rounding."""


@dataclass(frozen=True)
class EpiCache(BlockPolicy):
    """Keep what the text of one episode attends to: one of several caches of a long conversation, each for its episode.

    Behind the document, or behind each chunk of it with `prefill` "chunked", runs a pass: an instruction, the chat
    template's text before the answer, and `probe`, the episode's text. The score of an entry is the largest weight that
    any row of the pass, of any head of the GQA group, gives it in a softmax over all entries, without the pass itself.
    The best of all heads of a layer stay (`across="layer"`), or of each head. Each chunk scores all entries anew, and
    the KV cache of a layer never has more of them than budget, chunk and pass together.

    With `layers` "sensitivity", layers whose keys change more where a document is read in blocks keep more. `kvshelf
    calibrate` measures once per model the mean cosine s_l between a layer's keys and those of the same tokens when each
    sees the first tokens and its own block alone. The weight of a layer is (1 - t_l) ^ `sharpness`, where t_l is s_l
    with the lowest of all layers at 0 and the highest at 1; a share is proportional to it, and at least a quarter of an
    even one.

    A creation with `episodes` finds the episodes and makes the caches, with `prefill` "chunked"
    (docs/internals/answers.md). A question is sent to the cache with the nearest `centroid`, which changes no entry.

    Departures: s_l is of blocks of 128 tokens behind 4 first ones, as documents of `kvshelf calibrate` are short; the
    paper's have 2,048. The gain of "sensitivity" is not measured here. The first `sink` tokens and the chat template's
    always stay. The authors' code starts the pass one position early, within the chunk's last token; here it starts
    behind the chunk. Their floor of a layer adds to the budget; here the other layers pay for it, and take the entries
    for which a layer has no room, so that the total is exact. By default layers have equal budgets, which need no
    calibration. Words, not a sentence encoder, tell episodes apart. Without `probe` the pass has the instruction alone;
    without a tokenizer it is the document's last 64 tokens.
    """

    name: ClassVar[str] = "epicache"
    source: ClassVar[str] = "EpiCache, arXiv 2509.17396"
    advice: ClassVar[str] = "for long conversations about many things: one cache an episode, and memory for one chunk."

    probe: str | None = parameter(None, "the episode's text; null: the instruction alone")
    centroid: str | None = parameter(None, "what the episode is about, for route=nearest; made by `episodes`")
    layers: str = parameter(
        "equal", "budgets of layers: equal, or by sensitivity", choices=("equal", "sensitivity"), added=True
    )
    sharpness: float = parameter(1.1, "power of a layer's weight", minimum=0, maximum=8, added=True)
    calibration: str | None = parameter(
        None, "for layers=sensitivity: digest of the calibration to use; null: the one that is there", added=True
    )

    @property
    def needs(self) -> Needs:
        return super().needs | (Needs.CALIBRATION if self.layers == "sensitivity" else Needs.NOTHING)

    @property
    def ragged(self) -> bool:
        return super().ragged or self.layers == "sensitivity"

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        if self.centroid is not None:
            unpacked(self.centroid)
        policy = super().fitted(document, budget, given)
        if self.layers == "equal":
            for name in sorted({"calibration", "sharpness"} & given):
                raise PolicyUnsupported(
                    f"{name} says nothing without layers=sensitivity; leave it out", param=f"policy_params.{name}"
                )
            return policy
        measured = calibration_of(document)
        if measured.key_similarities is None:
            raise PolicyUnsupported(
                "the model's calibration is of an earlier version and has no key_similarities, by which "
                "layers=sensitivity shares the budget; make it again with kvshelf calibrate --only heads",
                param="policy_params.layers",
            )
        return replace(policy, calibration=required_digest(self.calibration, measured.keys_digest))

    def tokens_of(self, layer_idx: int, document: DocumentView, mean: int) -> int:
        if self.layers == "equal":
            return mean
        similarities = calibration_of(document).key_similarities
        assert similarities is not None, "the policy was fitted"
        floor = max(mean // _FLOOR, min(mean, self.sinks(document) + 1))
        return _shares(similarities, self.sharpness, mean, floor, document.num_tokens)[layer_idx]

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


@lru_cache(maxsize=64)
def _shares(similarities: tuple[float, ...], sharpness: float, mean: int, floor: int, cap: int) -> tuple[int, ...]:
    """Entries of a head of each layer. Cached for the layers of a chunk, as exact fractions are slow."""
    weights = sensitivities(similarities, sharpness)
    return tuple(floored(weights, mean * len(weights), floor, cap))


def sensitivities(similarities: Sequence[float], sharpness: float) -> list[float]:
    """The layers' weights: 1 for the layer whose keys change most, and for all where all change alike."""
    lowest, highest = min(similarities), max(similarities)
    if highest - lowest < _SPREAD:
        return [1.0] * len(similarities)
    return [((highest - similarity) / (highest - lowest)) ** sharpness for similarity in similarities]
