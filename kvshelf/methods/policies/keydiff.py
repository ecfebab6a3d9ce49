"""KeyDiff: keep the keys that differ most from the average key (Park et al., 2025, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.kernels.mean_cosines import mean_cosines
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.chunked import ChunkedPolicy
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class KeyDiff(ChunkedPolicy, ScoringPolicy):
    """Keep the keys least like the mean direction of all keys. Sees no query; strong among filler, weak where all is
    fact.

    score_j = -cos(k_j, mean_i k_i / |k_i|) per KV head, on keys after RoPE. With `prefill` "chunked" the document is
    read in blocks, as in the paper: all entries and the block are judged together. Departure: by default the
    whole document is scored at once.
    """

    name: ClassVar[str] = "keydiff"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    advice: ClassVar[str] = (
        "first: it costs next to nothing, and of the cheap ones it holds longest; not where every sentence is a fact."
    )

    def score(self, layer: LayerView) -> Tensor:
        return mean_cosines(layer.keys).neg_()
