"""Who gets how much of a budget, across heads and layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.workers.budgets import Budget


@dataclass(frozen=True, eq=False)
class LayerStats:
    """What a plan knows of one layer: the importance of the candidates of each KV head (fp32, infinite where an entry
    must stay; in ascending position), and the weight of the layer as a whole."""

    importance: Sequence[Tensor]
    weight: float = 1.0


class CachePlan(ABC):
    """How the layers and heads of a cache share one budget, decided while the layers arrive.

    What a head gets may only shrink when a later layer joins, because what was let go is gone. Each plan says why that
    holds for it; a plan that cannot say so would need every layer in full until the end.
    """

    @abstractmethod
    def counts(self, layers: Sequence[LayerStats], budget: Budget, num_layers: int) -> list[tuple[int, ...]]:
        """Entries for each KV head of the layers seen so far, of `num_layers` in all. Once all are seen they add up to
        `budget.tokens` times layers times heads."""


def flat_counts(heads: Sequence[Tensor], total: int, floors: Sequence[int]) -> list[int]:
    """Give each head its floor and the rest of `total` to the best entries of all heads together.

    heads: importance of each head's entries, fp32. Returns how many entries each head keeps; they are its best ones,
    equal ones in ascending position. Ties between heads go to the earlier head. Where `total` exceeds what there is,
    every head keeps all it has.
    """
    forced = [min(floor, len(head)) for floor, head in zip(floors, heads, strict=True)]
    rest = [head.sort(descending=True, stable=True).values[taken:] for head, taken in zip(heads, forced, strict=True)]
    owners = torch.cat([torch.full(tail.shape, i, device=tail.device) for i, tail in enumerate(rest)])
    best = torch.cat(rest).sort(descending=True, stable=True).indices[: max(0, total - sum(forced))]
    won = torch.bincount(owners[best], minlength=len(heads)).tolist()
    return [taken + more for taken, more in zip(forced, won, strict=True)]


@dataclass(frozen=True)
class GlobalPlan(CachePlan):
    """One budget for all layers and heads: the best entries of the whole cache, and `floor` of an even share for each
    head whatever its scores.

    Early layers can be cut before later ones are known: an entry outside the best `total` of the layers seen so far is
    outside the best `total` of all, because more layers only add competitors. Reducing in cascade therefore gives the
    entries that waiting for every layer would give.
    """

    floor: float = 0.0

    def counts(self, layers: Sequence[LayerStats], budget: Budget, num_layers: int) -> list[tuple[int, ...]]:
        kv_heads = len(layers[0].importance)
        protected = int(torch.isposinf(layers[0].importance[0]).sum())
        floor = max(protected, int(self.floor * budget.tokens))
        reserved = floor * kv_heads * (num_layers - len(layers))
        heads = [head for layer in layers for head in layer.importance]
        counts = flat_counts(heads, budget.tokens * kv_heads * num_layers - reserved, [floor] * len(heads))
        return [tuple(counts[i : i + kv_heads]) for i in range(0, len(counts), kv_heads)]
