"""CAKE: slices of the cache by what each layer prefers (Qin et al., 2025, arXiv 2503.12491)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import TailPolicy, pooling_kernel
from kvshelf.methods.policies.sharing import ProportionalSharing
from kvshelf.methods.policies.view import LayerView, ObservationWindow


@dataclass(frozen=True)
class Cake(TailPolicy):
    """Give layers whose attention is spread out and shifting more of the budget, and keep what is attended to
    steadily or in bursts.

    With A the weights of the window's rows on the judged tokens, the preference of a layer is P = H^(1/tau1) *
    V^(1/tau2) (section 4.1): H, the entropy, sums -A log A over query heads, rows and tokens; V is the variance of A
    over the rows (unbiased), summed over query heads and tokens. A layer's share of the budget is proportional to P. A
    token's score is mean + gamma * variance of A over the rows (section 4.3), averaged over the GQA group and pooled.
    The authors tune tau1, tau2: 1.6, 0.4 for Llama 3.1 8B at 1,024 entries, 1.5, 0.6 for Qwen 2.5 7B, else 1, 1.

    The layers are reduced in cascade (section 4.2). Departures: if a share exceeds the document, the other layers take
    the excess in proportion and not evenly, so that no share grows when a layer joins (`ProportionalSharing` has the
    proof). The total is exact. A window of one row has no variance, so all layers get equal shares.
    """

    name: ClassVar[str] = "cake"
    source: ClassVar[str] = "CAKE, arXiv 2503.12491"
    advice: ClassVar[str] = "with small budgets on deep models, where layers differ in how widely they attend."
    sharing: ClassVar[ProportionalSharing] = ProportionalSharing()

    window: int = parameter(32, "last tokens that observe; those of the document are kept", minimum=1)
    kernel: int = pooling_kernel(5)
    gamma: float = parameter(200.0, "what the variance over the rows counts beside the mean", minimum=0)
    tau1: float = parameter(1.0, "the larger, the less the entropy tells layers apart", minimum=0.1)
    tau2: float = parameter(1.0, "the larger, the less the variance tells layers apart", minimum=0.1)

    def score(self, layer: LayerView) -> Tensor:
        return indicators(layer.window(self.window), layer.kv_heads, self.gamma, self.kernel)

    def weight(self, layer: LayerView) -> float:
        window = layer.window(self.window)
        sums = []  # of each KV head: its entropy and its variance
        for head in range(layer.kv_heads):
            weights = window.attention(head)
            sums.append(torch.stack([torch.special.entr(weights).sum(), variance(weights).sum()]))
        entropy, shift = layer.all_heads(torch.stack(sums).double()).sum(dim=0).tolist()
        return math.pow(entropy, 1 / self.tau1) * math.pow(shift, 1 / self.tau2)


def indicators(window: ObservationWindow, kv_heads: int, gamma: float, kernel: int) -> Tensor:
    """Mean + gamma * variance of each token's weights over the rows of the window, averaged over the GQA group and
    pooled: `[kv_heads, N]` fp32, zero for the tail."""
    heads = map(window.attention, range(kv_heads))
    of_heads = [(weights.mean(dim=1) + gamma * variance(weights)).mean(dim=0) for weights in heads]
    return window.pad(pooled(torch.stack(of_heads), kernel))


def variance(weights: Tensor) -> Tensor:
    """The variance over the rows: `[group, R, columns]` to `[group, columns]`. Unbiased; zero for a single row."""
    # `torch.var` takes ten times as long over a dimension that is not the last.
    deviations = weights - weights.mean(dim=1, keepdim=True)
    return deviations.square_().sum(dim=1) / max(1, weights.shape[1] - 1)
