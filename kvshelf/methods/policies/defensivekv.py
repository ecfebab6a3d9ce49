"""DefensiveKV: guard against the worst case, not the mean (Feng et al., 2025, arXiv 2510.13334)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import Counts, importance_of
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import TailPolicy, pooling_kernel
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.sharing import flat_shares
from kvshelf.methods.policies.view import DocumentView, LayerView

_BLOCK_TOKENS = 1024
"""Tokens whose values are projected at once: all of them would take N x q_heads x hidden numbers."""

_SECURED = 2.0
"""Added to the scores of secured tokens: all others are at most 1."""


@dataclass(frozen=True)
class DefensiveKV(TailPolicy):
    """Keep the tokens that any row at the end of the prompt might miss badly, weighed by what their values add to the
    output; the heads of a layer share one budget.

    A is the window's attention on the judged tokens. Each row of A is pooled over neighbours and rescaled to its mass
    before. A token's risk is its largest weight over rows and GQA group, and at least the mean risk of its head. The
    risk is multiplied by a cost: the group's mean of ||W_o v||_1, divided by its sum over all KV heads at that token.
    First, each head secures tokens in descending order of the plain mean of A, until it loses at most 1 - `mass` of its
    rows' attention. Then the best tokens of all heads of the layer together stay.

    Departures from the authors' code: their correction for the window's own attention measures tokens outside the
    window; kvshelf measures the loss itself. The token that crosses the threshold is secured too, since without it the
    threshold is not reached. Secured tokens, window and template are certain to stay; in the authors' code they get the
    layer's largest score and may lose a tie.
    """

    name: ClassVar[str] = "defensivekv"
    source: ClassVar[str] = "DefensiveKV, arXiv 2510.13334"
    advice: ClassVar[str] = (
        "when the questions are unknown, one prefill is all you can pay, and no more than half has to go."
    )
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.WEIGHTS

    window: int = parameter(32, "last tokens that observe; those of the document are kept", minimum=1)
    kernel: int = pooling_kernel(5)
    mass: float = parameter(0.9, "part of the attention that each head secures first", minimum=0, maximum=1)
    secured: int | None = parameter(
        None, "most tokens a head secures; null: what the budget leaves beside window and template", minimum=0
    )

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        largest = budget.tokens - document.protected_prefix - policy.window
        if policy.secured is None:
            return replace(policy, secured=largest)
        if policy.secured > largest:
            raise PolicyUnsupported(
                f"secured is {policy.secured}, and the budget of {budget.tokens} entries per KV head leaves {largest} "
                f"beside a window of {policy.window} and the chat template; lower secured or raise the budget",
                param="policy_params.secured",
            )
        return policy

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:  # noqa: ARG002
        return flat_shares(importance_of(scores, protected), budget.total)

    def score(self, layer: LayerView) -> Tensor:
        window = layer.window(self.window)
        risks, secured = [], []
        for head in range(layer.kv_heads):
            weights = window.attention(head)  # [group, R, columns]
            secured.append(self._secured(weights.mean(dim=(0, 1))))
            risks.append(self._risk(weights))
        cost = projected_norms(layer)[:, : window.columns]
        cost /= layer.all_heads(cost).sum(dim=0).clamp_min(torch.finfo(cost.dtype).tiny)
        return window.pad(torch.stack(risks) * cost + _SECURED * torch.stack(secured))

    def _risk(self, weights: Tensor) -> Tensor:
        """`[group, R, columns]` to `[columns]`: the worst case over rows and group, at least the mean worst case."""
        # Sums instead of means, since rows are rescaled anyway; `avg_pool1d` takes ten times as long.
        neighbours = F.pad(weights, (self.kernel // 2,) * 2).unfold(-1, self.kernel, 1).sum(dim=-1)
        lost = weights.sum(dim=-1) / neighbours.sum(dim=-1).clamp_min(torch.finfo(weights.dtype).tiny)
        worst = neighbours.mul_(lost.unsqueeze(-1)).amax(dim=(0, 1))
        return worst.clamp_min(worst.mean())

    def _secured(self, mean: Tensor) -> Tensor:
        """`[columns]` bool: the largest weights, until at most 1 - `mass` of the judged attention is missing."""
        ranked = mean.double().sort(descending=True, stable=True)
        before = ranked.values.cumsum(dim=0) - ranked.values
        needed = before < ranked.values.sum() - (1 - self.mass)
        needed[len(needed) if self.secured is None else self.secured :] = False
        return torch.zeros_like(needed).scatter_(0, ranked.indices, needed)


def projected_norms(layer: LayerView) -> Tensor:
    """||W_o v||_1 of each value, the mean over its GQA group: `[kv_heads, N]` fp32. Multiplied in the model's dtype."""
    weights = layer.grouped(layer.output_projection())  # [kv_heads, group, Dv, hidden]
    norms = []
    for values, projection in zip(layer.values, weights, strict=True):
        # One product per group: the norms of its heads add up to the norm of their concatenated outputs.
        wide = projection.transpose(0, 1).flatten(1)  # [Dv, group * hidden]
        blocks = (values[start : start + _BLOCK_TOKENS] for start in range(0, layer.num_tokens, _BLOCK_TOKENS))
        norms.append(torch.cat([(block @ wide).abs_().sum(dim=-1, dtype=torch.float32) for block in blocks]))
    return torch.stack(norms) / weights.shape[1]
