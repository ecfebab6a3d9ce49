"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., 2024, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from kvshelf.errors import PolicyUnsupported
from kvshelf.store.artifact import Kept
from kvshelf.workers.budgets import Budget, LayerBudget
from kvshelf.workers.policies.base import Policy, keep, parameter
from kvshelf.workers.policies.view import LayerView


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first tokens (attention sinks) and the most recent ones; the middle is gone.

    Positions stay absolute. Departures: the chat template's tokens before the document count as sinks when there are
    more of them than `sink`. The paper streams without end with positions renumbered in the cache; here the document is
    finite.
    """

    name: ClassVar[str] = "streaming_llm"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    sink: int = parameter(4, "first tokens always kept", minimum=0)

    def fitted(self, num_tokens: int, budget: Budget, protected_prefix: int, given: frozenset[str]) -> Self:
        super().fitted(num_tokens, budget, protected_prefix, given)
        if self.sink <= budget.tokens:
            return self
        if "sink" in given:
            raise PolicyUnsupported(
                f"sink is {self.sink}, and the budget holds {budget.tokens} entries per KV head; lower sink to at most "
                f"{budget.tokens} or raise the budget",
                param="policy_params.sink",
            )
        return replace(self, sink=budget.tokens)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        sinks = max(self.sink, layer.protected_prefix)
        counts = torch.tensor(budget.per_head, device=layer.keys.device).unsqueeze(1)  # [kv_heads, 1]
        recent = layer.positions >= layer.num_tokens - (counts - sinks)  # [kv_heads, N]
        first = layer.positions < sinks
        importance = layer.positions.float().masked_fill(first, torch.inf)
        return keep(layer, recent | first, importance.repeat(layer.kv_heads, 1))
