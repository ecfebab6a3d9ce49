"""Knorm: keep the keys of smallest norm (Devoto et al., 2024, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.kernels.row_norms import row_norms
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class Knorm(ScoringPolicy):
    """Keep the keys of smallest norm: they tend to be attended to most. Sees no query.

    score_j = -|k_j|_2 per KV head; a rotation changes no norm, so RoPE plays no part. In models that normalise their
    keys (Qwen3), norms hardly tell tokens apart. Departure, as in kvpress: the first two layers do not stay whole.
    """

    name: ClassVar[str] = "knorm"
    source: ClassVar[str] = "L2 norm, arXiv 2406.11430"
    advice: ClassVar[str] = "as the cheapest baseline; not for retrieval."

    def score(self, layer: LayerView) -> Tensor:
        return row_norms(layer.keys).neg_()
