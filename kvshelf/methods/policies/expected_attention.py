"""Expected Attention: what questions that are still to come will attend to (Devoto et al., 2025, arXiv 2510.00636)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.kernels.row_norms import row_norms
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, fitted_sink
from kvshelf.methods.policies.view import DocumentView, LayerView
from kvshelf.model.rope import Rope

_ROWS_PER_BLOCK = 512


@dataclass(frozen=True)
class ExpectedAttention(ScoringPolicy):
    """Keep what future queries are expected to attend to, judged by the distribution of the document's own queries.

    Queries before RoPE are taken as Gaussian. Their mean mu and covariance Sigma (divided by the number of tokens) are
    those of the document after the sinks. R, the mean rotation matrix of the positions N .. N + n_future - 1, moves the
    queries there. The expected weight of key j is then softmax_j(s k_j . R mu + s^2/2 k_j^T R Sigma R^T k_j), s being
    the model's attention scale; the score is (its mean over the GQA group + eps) * ||v_j||. This is kvpress's
    ExpectedAttentionPress, but R comes from the model's own RoPE tables, whatever their scaling, and all is fp32,
    because the quadratic term leaves the range of half precision. Departures: scores are logarithms, as most tokens of
    some heads would underflow to equal scores of zero. The chat template's tokens count as sinks if they are more than
    `sink`. Sinks stay, and neither queries nor softmax include them. The published results also use per-head budgets
    and eps 0.01.
    """

    name: ClassVar[str] = "expected_attention"
    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636"
    advice: ClassVar[str] = "to compare with its published results; on kvshelf-tiny it does not retrieve."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.ROPE

    n_future: int = parameter(512, "future positions that are averaged over", minimum=1, maximum=65536)
    sink: int = parameter(4, "first tokens always kept, and left out of the statistics", minimum=0)
    covariance: bool = parameter(True, "use the queries' covariance, not only their mean")
    value_norm: bool = parameter(True, "weigh by the norm of the values")
    eps: float = parameter(0.0, "added to the expected weight before it is weighed by the values", minimum=0)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens - 1, requested="sink" in given)
        return replace(self, sink=sink)

    def score(self, layer: LayerView) -> Tensor:
        first = self._first(layer)
        keys = layer.keys[:, first:].float()  # [kv_heads, n, D]
        mean, covariance = self._future_queries(layer, first)
        heads = zip(keys, layer.grouped(mean), layer.grouped(covariance), strict=True)
        scores = torch.stack([_log_weights(*of_head, layer.scaling) for of_head in heads])
        if self.value_norm:
            least = scores.new_full((), self.eps).log()  # -inf for 0, which adds nothing
            scores = torch.logaddexp(scores, least) + row_norms(layer.values[:, first:]).log_()
        return torch.nn.functional.pad(scores, (first, 0))

    def protected(self, layer: LayerView) -> Tensor:
        return layer.positions < self._first(layer)

    def _first(self, layer: LayerView) -> int:
        return max(self.sink, layer.protected_prefix)

    def _future_queries(self, layer: LayerView, first: int) -> tuple[Tensor, Tensor]:
        """Mean `[q_heads, D]` and covariance `[q_heads, D, D]` of the queries at the future positions, fp32."""
        assert layer.rope is not None, "the policy says that it observes RoPE"
        queries, positions = layer.all_queries[:, first:], layer.rotated_to[first:]
        end = layer.document.end
        future = torch.arange(end, end + self.n_future, device=queries.device)
        rotation = layer.rope.mean_rotation(queries.shape[-1], future)
        mean, covariance = _moments(queries, positions, layer.rope, covariance=self.covariance)
        return mean @ rotation.T, rotation @ covariance @ rotation.T


def _moments(queries: Tensor, positions: Tensor, rope: Rope, *, covariance: bool) -> tuple[Tensor, Tensor]:
    """Mean `[q_heads, D]` and covariance `[q_heads, D, D]` (zeros unless requested) of un-rotated queries, fp32.

    queries: `[q_heads, n, D]`, as rotated to positions `[n]`. One block of rows at a time, so that the un-rotated rows
    stay in the processor's cache. Sums are over differences from the first block's mean: squares of the queries
    themselves could far exceed their spread, which fp32 would lose.
    """
    heads, num_rows, dim = queries.shape
    total = queries.new_zeros(heads, dim, dtype=torch.float32)
    squares = queries.new_zeros(heads, dim, dim, dtype=torch.float32)
    shift: Tensor | None = None
    blocks = zip(torch.split(queries, _ROWS_PER_BLOCK, dim=1), torch.split(positions, _ROWS_PER_BLOCK), strict=True)
    for block, at in blocks:
        rows = rope.unrotate(block, at)
        shift = rows.mean(dim=1, keepdim=True) if shift is None else shift
        rows -= shift
        total += rows.sum(dim=1)
        if covariance:
            squares.baddbmm_(rows.mT, rows)
    assert shift is not None, "a policy keeps fewer tokens than there are rows"
    difference = total / num_rows
    if covariance:
        squares = squares / num_rows - difference.unsqueeze(2) * difference.unsqueeze(1)
    return shift.squeeze(1) + difference, squares


def _log_weights(keys: Tensor, mean: Tensor, covariance: Tensor, scaling: float) -> Tensor:
    """The log of the mean over one GQA group of softmax(s k.m + s^2/2 k^T C k). keys: `[n, D]`, mean: `[group, D]`,
    covariance: `[group, D, D]`. Returns `[n]`."""
    scaled = keys * scaling
    logits = mean @ scaled.T  # [group, n]
    for row, matrix in zip(logits, covariance, strict=True):
        row += ((scaled @ matrix) * scaled).sum(dim=-1) / 2
    return torch.log_softmax(logits, dim=-1).logsumexp(dim=0) - math.log(len(logits))
