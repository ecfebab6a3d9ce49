"""How sparse and how redundant the heads of a model are: by what EMS (arXiv 2412.08521) weighs evicting and merging.

These are the statistics of its equations 3 and 4 in words; the symbols were not at hand, and the constants are ours. A
head is sparse if few tokens receive its attention, and redundant if many tokens have another one much like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.engine import Engine
from kvshelf.kernels.column_sums import column_sums

MASS: Final = 0.95
"""Of a head's attention: what the fewest tokens receive whose count `sparsity` is about."""

TAU: Final = 0.6
"""Similarity from which EMS merges."""

_ROWS: Final = 512  # of a similarity matrix at once


@dataclass(frozen=True)
class Head:
    """One KV head, means over documents. sparsity: share of the tokens outside the smallest set that receives `MASS` of
    the attention of all rows (s_glo of eq. 2, the mean over the group's query heads). redundancy: mean over tokens of
    the greatest similarity to another token, cos(k_i, k_j) * cos(v_i, v_j) as in eq. 5. mergeable: share of the tokens
    for which that is at least `TAU`."""

    layer: int
    kv_head: int
    sparsity: float
    redundancy: float
    mergeable: float


def heads(engine: Engine, documents: Sequence[Sequence[int]]) -> list[Head]:
    """All heads of the layers that see a whole document, by documents given as token ids, of at least two tokens."""
    seen: list[dict[int, Tensor]] = []
    for ids in documents:
        found = _Statistics()
        inputs = {"input_ids": torch.tensor([list(ids)]), "position_ids": torch.arange(len(ids)).unsqueeze(0)}
        engine.passes.causal({name: each.to(engine.passes.devices.inputs) for name, each in inputs.items()}, found)
        seen.append(found.of_layers)
    return [
        Head(layer, head, *(fmean(float(one[layer][number, head]) for one in seen) for number in range(3)))
        for layer in sorted(seen[0])
        for head in range(seen[0][layer].shape[1])
    ]


class _Statistics(ForwardContext):
    """Of one document: sparsity, redundancy and mergeable, `[3, kv_heads]` for each layer."""

    def __init__(self) -> None:
        self.of_layers: dict[int, Tensor] = {}

    def after_attention(self, layer: Attended) -> None:
        if layer.window is not None or layer.chunk is not None:
            return  # policies reduce no such layer
        queries, keys, values = layer.queries[0], layer.keys[0], layer.values[0]
        lse = None if layer.lse is None else layer.lse[0]
        sums, _ = column_sums(queries, keys, layer.scaling, 0, lse=lse)
        nearest = nearest_similarity(keys, values)
        redundancy, mergeable = nearest.mean(dim=1), (nearest >= TAU).float().mean(dim=1)
        received = sums.view(len(keys), -1, keys.shape[1]).mean(dim=1)
        self.of_layers[layer.layer_idx] = torch.stack([sparsity(received), redundancy, mergeable]).cpu()


def sparsity(received: Tensor) -> Tensor:
    """`[kv_heads]`: share of the tokens outside the smallest set with `MASS` of what is `received`, `[kv_heads, N]`."""
    ranked = received.sort(dim=1, descending=True).values.cumsum(dim=1)
    needed = 1 + (ranked < MASS * ranked[:, -1:]).sum(dim=1)
    return 1 - needed / received.shape[1]


def nearest_similarity(keys: Tensor, values: Tensor) -> Tensor:
    """`[kv_heads, N]`: of each token the similarity of the most similar other one. keys: `[kv_heads, N, D]`, values:
    `[kv_heads, N, Dv]`. Keys that point apart are not similar, whatever their values."""
    k, v = (F.normalize(rows.float(), dim=2) for rows in (keys, values))
    found = []
    for start in range(0, k.shape[1], _ROWS):
        rows = slice(start, start + _ROWS)
        alike = (k[:, rows] @ k.mT).clamp_min(0) * (v[:, rows] @ v.mT)  # [kv_heads, rows, N]
        alike.diagonal(start, 1, 2).fill_(-torch.inf)
        found.append(alike.amax(dim=2))
    return torch.cat(found, dim=1)
