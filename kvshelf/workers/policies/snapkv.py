"""SnapKV: what the last tokens of the document attend to (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.window_scores import window_scores
from kvshelf.workers.budgets import Budget
from kvshelf.workers.policies.base import LayerView, Observes, ScoringPolicy, parameter


@dataclass(frozen=True)
class SnapKV(ScoringPolicy):
    """Keep what the last `window` tokens attend to most, pooled over neighbours, and the window itself.

    Listing 1 of the paper, with two departures that kvpress also makes: the mean over the window's rows instead of the
    sum (the same order), and the mean over a GQA group, taken before pooling, so that KV heads are not repeated. The
    paper scores with the question at the end of the prompt; here the window is the document's own tail, because
    questions come later.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    observes: ClassVar[Observes] = Observes.WINDOW_QUERIES

    window: int = parameter(64, "last tokens that observe, and are kept", minimum=1)
    kernel: int = parameter(5, "width of the pooling over neighbouring tokens", minimum=1, odd=True)
    pooling: str = parameter("avg", "how neighbours are pooled", choices=("avg", "max"))

    def fitted(self, num_tokens: int, budget: Budget, protected_prefix: int, given: frozenset[str]) -> Self:
        super().fitted(num_tokens, budget, protected_prefix, given)
        largest = budget.tokens - protected_prefix
        if "window" not in given:
            return replace(self, window=min(self.window, max(1, budget.tokens // 2), largest))
        if self.window > largest:
            raise PolicyUnsupported(
                f"window is {self.window}, and the budget of {budget.tokens} entries per KV head has room for "
                f"{largest}; "
                "lower window or raise the budget",
                param="policy_params.window",
            )
        return self

    def score(self, layer: LayerView) -> Tensor:
        scores = window_scores(layer.window_queries(self.window), layer.keys, layer.scaling)  # [kv_heads, N - w]
        if self.pooling == "max":
            pooled = F.max_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        else:
            pooled = F.avg_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        return F.pad(pooled, (0, self.window))  # the window's own columns are protected; their score is never read

    def protected(self, layer: LayerView) -> Tensor:
        return super().protected(layer) | (layer.positions >= layer.num_tokens - self.window)
