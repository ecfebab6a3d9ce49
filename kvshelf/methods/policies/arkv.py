"""ARKV: each entry in many bits, in few, or not at all (Lei and Ilager, 2026, arXiv 2603.08727)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.records import Entries, Kept
from kvshelf.kernels.transfer import download
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import pooling_kernel
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.cake import indicators, variance
from kvshelf.methods.policies.chunked import ChunkedTail
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class ARKV(KeepsScores, ChunkedTail):
    """Keep what the window attends to steadily or in bursts, and give layers whose attention is spread out, shifting
    and peaked more entries in many bits; the others have few.

    A stored cache has both under the codec `mixed:share=policy`, few bits being int2, int3 or int4. The score is that
    of `cake`: mean + `gamma` * variance of a token's weights over the window's rows, averaged over the GQA group and
    pooled. A layer's claim is E^(1/tau1) * V^(1/tau2) * K^(1/tau3), summed over the window's rows in all query heads: E
    is their entropy, V the variance and K the kurtosis of each token's weights over the rows, as in the authors' code.
    A layer's share is its claim as a part of the largest claim. Of its entries that are not always kept, the best have
    many bits, as large a part as its share.

    The authors' code decides the shares when the prompt has been read, keeps the prompt's entries whole, and rounds
    entries to fp8 while the model answers. So does suffix policy `arkv`, by the shares that the cache has with
    `keep_scores`. Here the document's entries get their bits, too, once it has been read; with `prefill` "chunked"
    behind each chunk, whose last tokens are the window, over all that is left. An entry in few bits is read as it was
    until the cache is stored. With a budget of the whole document nothing is dropped.
    """

    name: ClassVar[str] = "arkv"
    source: ClassVar[str] = "ARKV, arXiv 2603.08727"
    advice: ClassVar[str] = "with codec mixed:share=policy, where layers differ in how widely they attend."
    version: ClassVar[int] = 2
    sets_precision: ClassVar[bool] = True
    column_names: ClassVar[tuple[str, ...]] = ("share",)

    window: int = parameter(32, "last tokens that observe; those of the document are kept", minimum=1)
    kernel: int = pooling_kernel(5)
    gamma: float = parameter(200.0, "what the variance over the rows counts beside the mean", minimum=0)
    tau1: float = parameter(7.77, "the larger, the less the entropy tells layers apart", minimum=0.1)
    tau2: float = parameter(5.41, "the larger, the less the variance tells layers apart", minimum=0.1)
    tau3: float = parameter(5.53, "the larger, the less the kurtosis tells layers apart", minimum=0.1)

    def score(self, layer: LayerView) -> Tensor:
        return indicators(layer.window(self.window), layer.kv_heads, self.gamma, self.kernel)

    def noted(self, layer: LayerView) -> tuple[Tensor, int]:
        """The sums that the layer's claim is of, `[3]` fp64, and how many entries of each head are always kept."""
        window = layer.window(self.window)
        sums = torch.stack([_statistics(window.attention(head)) for head in range(layer.kv_heads)])
        return layer.all_heads(sums).sum(dim=0), self.always(layer)

    def finished(
        self,
        records: Mapping[int, Entries],
        notes: Mapping[int, tuple[Tensor, int]],
        budget: Budget,  # noqa: ARG002
    ) -> Mapping[int, Entries]:
        of_layers = download([sums for sums, _ in notes.values()])
        claims = dict(zip(notes, map(self._claim, of_layers), strict=True))
        largest = max(claims.values())
        rated: dict[int, Entries] = {}
        for layer, record in records.items():
            assert isinstance(record, Kept)
            claim, always = claims[layer], notes[layer][1]
            # All claims are 0 where a window of one row has no variance: then all layers are alike.
            part = claim / largest if largest > 0 else 1.0
            counts = tuple(always + round(part * (n - always)) for n in record.lengths)
            share = torch.full_like(record.entry_positions, part, dtype=torch.float32)
            rated[layer] = self.keeping(replace(record, precise=counts), share=share)
        return rated

    def _claim(self, sums: Tensor) -> float:
        powers = zip(sums.tolist(), (self.tau1, self.tau2, self.tau3), strict=True)
        return math.prod(math.pow(x, 1 / tau) for x, tau in powers)


def _statistics(weights: Tensor) -> Tensor:
    """Entropy, and variance and kurtosis over rows, summed over a GQA group: `[3]` fp64, of `[group, R, columns]`."""
    squares = (weights - weights.mean(dim=1, keepdim=True)).square_()
    kurtosis = squares.square().mean(dim=1) / squares.mean(dim=1).clamp_min(1e-8).square()
    entropy = -(weights * (weights + 1e-10).log())
    return torch.stack([numbers.double().sum() for numbers in (entropy, variance(weights), kurtosis)])
