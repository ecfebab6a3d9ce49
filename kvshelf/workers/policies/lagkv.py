"""LagKV: each partition judged in the scale of the next one (Liang et al., 2025, arXiv 2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.kernels.select import select
from kvshelf.store.artifact import Kept
from kvshelf.workers.budgets import Budget, LayerBudget
from kvshelf.workers.policies.base import Policy, keep, parameter
from kvshelf.workers.policies.view import LayerView


@dataclass(frozen=True)
class LagKV(Policy):
    """Keep, in every partition of `lag` tokens, those that stand out in the scale of the next partition. Sees no query.

    After `sink` tokens the document is cut into partitions; all but the last full one are reduced (eq. 7 to 11: the
    score is the sum of that of keys and that of values), the last full one and the remainder stay whole (eq. 12). Where
    the budget does not divide by the partitions, the earliest ones keep one entry more. Departures: the budget is given
    and the share per partition follows from it; a channel that is constant over a partition gets a small spread instead
    of 0/0.
    """

    name: ClassVar[str] = "lagkv"
    source: ClassVar[str] = "LagKV, arXiv 2504.04704"

    sink: int = parameter(4, "first tokens always kept", minimum=0)
    lag: int = parameter(128, "tokens per partition", minimum=2)

    def fitted(self, num_tokens: int, budget: Budget, protected_prefix: int, given: frozenset[str]) -> Self:
        super().fitted(num_tokens, budget, protected_prefix, given)
        policy = self
        if "sink" not in given:
            policy = replace(policy, sink=min(self.sink, budget.tokens // 2))
        if "lag" not in given:
            # Halving keeps partitions aligned with those of the default; any smaller lag that fits would do.
            while policy.lag > 2 and not policy._fits(num_tokens, budget.tokens, protected_prefix):
                policy = replace(policy, lag=policy.lag // 2)
        if not policy._fits(num_tokens, budget.tokens, protected_prefix):
            sink, tail = policy._ends(num_tokens, protected_prefix)
            raise PolicyUnsupported(
                f"sink and the last partitions stay whole and take {sink} + {tail} entries at lag {policy.lag}, more "
                "than "
                f"the {budget.tokens} per KV head of the budget; lower lag or sink, or raise the budget",
                param="policy_params.lag",
            )
        return policy

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        sink, tail = self._ends(layer.num_tokens, layer.protected_prefix)
        partitions = (layer.num_tokens - sink - tail) // self.lag
        scored = slice(sink, sink + (partitions + 1) * self.lag)
        scores = self._scores(layer.keys[:, scored]) + self._scores(layer.values[:, scored])
        shares = [share for count in budget.per_head for share in split_evenly(count - sink - tail, partitions)]
        nothing = layer.positions.new_zeros(self.lag, dtype=torch.bool)
        chosen = select(scores.flatten(0, 1), nothing, shares).view(layer.kv_heads, -1)
        mask = chosen.new_ones(layer.kv_heads, layer.num_tokens)
        mask[:, sink : sink + chosen.shape[1]] = chosen
        importance = torch.full(mask.shape, torch.inf, device=mask.device)
        importance[:, sink : sink + chosen.shape[1]] = scores.flatten(1)
        return keep(layer, mask, importance)

    def _scores(self, states: Tensor) -> Tensor:
        heads, length, dim = states.shape
        return lag_scores(states.reshape(heads, length // self.lag, self.lag, dim))  # [kv_heads, partitions, lag]

    def _ends(self, num_tokens: int, protected_prefix: int) -> tuple[int, int]:
        """Tokens kept whole at the start and at the end (one full partition and the remainder)."""
        sink = max(self.sink, protected_prefix)
        after = num_tokens - sink
        return sink, min(after, self.lag + after % self.lag)

    def _fits(self, num_tokens: int, budget_tokens: int, protected_prefix: int) -> bool:
        return sum(self._ends(num_tokens, protected_prefix)) <= budget_tokens


def split_evenly(total: int, parts: int) -> list[int]:
    """Integers that add up to `total`, the larger ones first."""
    return [total // parts + (1 if part < total % parts else 0) for part in range(parts)]
