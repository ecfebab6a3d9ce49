"""KeyDiff: keep the keys that differ most from the average key (Park et al., 2025, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.kernels.row_norms import row_norms
from kvshelf.workers.policies.base import ScoringPolicy
from kvshelf.workers.policies.view import LayerView


@dataclass(frozen=True)
class KeyDiff(ScoringPolicy):
    """Keep the keys least like the mean direction of all keys. Sees no query; strong among filler, weak where all is
    fact.

    score_j = -cos(k_j, mean_i k_i / |k_i|) per KV head, on keys after RoPE. Departure: the whole document at once,
    where the paper goes block by block.
    """

    name: ClassVar[str] = "keydiff"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    advice: ClassVar[str] = (
        "first: it costs next to nothing, and of the cheap ones it holds longest; not where every sentence is a fact."
    )

    def score(self, layer: LayerView) -> Tensor:
        inverse_norms = row_norms(layer.keys).clamp_min_(1e-12).reciprocal_()  # [kv_heads, N]
        keys = layer.keys.float()  # [kv_heads, N, D]
        # Lengths weigh two products with the keys as they are: unit keys would be two more tensors of their size.
        anchor = F.normalize(torch.bmm(inverse_norms.unsqueeze(1), keys), dim=-1)  # [kv_heads, 1, D]
        return torch.bmm(keys, anchor.transpose(1, 2)).squeeze(2).mul_(inverse_norms).neg_()
