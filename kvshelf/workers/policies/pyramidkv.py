"""PyramidKV: SnapKV with more for the lower layers (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.workers.policies.base import parameter
from kvshelf.workers.policies.budgets import LayerBudget
from kvshelf.workers.policies.snapkv import SnapKV
from kvshelf.workers.policies.view import LayerView


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Score as SnapKV does, and let the budget fall in equal steps from the first layer to the last.

    B is the mean budget, w the window. The last layer gets B / beta and the first 2B - B / beta. If the first would get
    more than N - w, it gets N - w and the last 2B - (N - w). This is kvpress's form of the formula: the window is
    included and steps are rounded, so that the total can miss B * layers by half an entry per layer and head. If the
    last layer could not hold its window and the chat template, all layers get B. Departures: B is the integer budget,
    and a model of one layer gets B.
    """

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    advice: ClassVar[str] = "as a baseline: lower layers get more, whatever the document."
    version: ClassVar[int] = 1

    beta: int = parameter(20, "how steep: the last layer gets about 1 / beta of the mean budget", minimum=1)

    @property
    def exact(self) -> bool:
        return False

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        mean = budget.total // len(budget.per_head)
        low, high = self._ends(mean, layer.num_tokens)
        if layer.num_layers == 1 or not high >= low >= max(self.window, int(protected.sum())):
            return budget.per_head
        step = (high - low) / (layer.num_layers - 1)
        return (round(high - layer.place * step),) * len(budget.per_head)

    def _ends(self, mean: int, num_tokens: int) -> tuple[float, float]:
        """Budget of the last layer and of the first, `mean` apart from rounding."""
        low = mean / self.beta
        high = 2 * mean - low
        if high >= num_tokens - self.window:
            high = num_tokens - self.window
            low = 2 * mean - high
        return low, high
