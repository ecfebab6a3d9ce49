"""PyramidKV: SnapKV with more for the lower layers (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Score as SnapKV does, and let the budget fall in equal steps from the first layer to the last.

    B is the mean budget, w the window. The last layer gets B / beta and the first 2B - B / beta. If the first would get
    more than N - w, it gets N - w and the last 2B - (N - w). `form` "kvpress" counts the window in and rounds the
    steps, so that the total can miss B * layers by half an entry per layer and head. "authors" gives every layer its
    window, applies the formula to B - w, and rounds beta's part and the step down, so that a layer of n can get up to n
    / 2 entries more than B on average. Departures: B is the integer budget, and a model of one layer gets B.

    Where the last layer has no room for its window and the chat template (and in the authors' form where 2 (B - w) >
    N), a default `beta` becomes 1, so that all layers get B, as in SnapKV; a request's `beta` is refused.
    """

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    advice: ClassVar[str] = "as a baseline: lower layers get more, whatever the document."
    version: ClassVar[int] = 1
    exact: ClassVar[bool] = False

    prefill: str = field(default="whole", init=False)  # a chunk is judged where all layers have equally many entries
    chunk: int = field(default=2048, init=False)
    beta: int = parameter(20, "how steep: the last layer gets about 1 / beta of the mean budget", minimum=1)
    form: str = parameter(
        "kvpress", "whether the window is part of what the formula shares out", choices=("kvpress", "authors")
    )

    @property
    def ragged(self) -> bool:
        return self.beta > 1

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        high, low = policy._ends(budget.tokens, document.num_tokens)
        shortest = min((len(probe.token_ids) for probe in policy.probe_passes(document)), default=0)
        always = document.protected_prefix + max(0, policy.window - shortest)
        flat = policy.form == "authors" and document.num_tokens < 2 * (budget.tokens - policy.window)
        if high >= low >= max(policy.window, always) and not flat:
            return policy
        if "beta" in given and policy.beta > 1:
            raise PolicyUnsupported(
                f"with beta {policy.beta} the last layer would get {low:g} of a mean budget of {budget.tokens} entries "
                f"per KV head, and the first {high:g} of {document.num_tokens} tokens: no pyramid, as every layer "
                f"keeps {max(policy.window, always)} always; give another beta, window or budget, or policy snapkv",
                param="policy_params.beta",
            )
        return replace(policy, beta=1)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        mean = budget.total // len(budget.per_head)
        if layer.num_layers == 1 or self.beta == 1:
            return budget.per_head
        high, low = self._ends(mean, layer.num_tokens)
        step = (high - low) / (layer.num_layers - 1)
        if self.form == "authors":
            step = math.floor(step)
        return (round(high - layer.place * step),) * len(budget.per_head)

    def _ends(self, mean: int, num_tokens: int) -> tuple[float, float]:
        """Budgets of the first layer and of the last: their mean is `mean` apart from rounding."""
        beside = self.window if self.form == "authors" else 0  # entries that the formula does not share out
        shared = mean - beside
        low = shared // self.beta if beside else shared / self.beta
        high = min(2 * shared - low, num_tokens - self.window)
        return high + beside, 2 * shared - high + beside
