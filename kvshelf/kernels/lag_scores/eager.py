"""Equations 7 to 11 with torch's own operations, a few partitions at a time, so that every pass but the first reads
them from the cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_SPREAD = 1e-6
"""Denominator for a channel that is constant over a partition."""

_BLOCK = 1 << 17
"""Elements normalised at once: 512 KiB of fp32 and as much again for the input. Twice as many are not faster, half as
many pay more for the calls."""


def lag_scores(keys: Tensor, values: Tensor, lag: int, own_scale: bool, value_weight: float) -> Tensor:
    scores = keys.new_zeros(keys.shape[0], keys.shape[1] // lag - 1, lag, dtype=torch.float32)
    for states, weight in ((keys, 1.0), (values, value_weight)):
        _add_scores(scores, states.reshape(states.shape[0], -1, lag, states.shape[2]), own_scale, weight)
    return scores


def _add_scores(scores: Tensor, partitions: Tensor, own_scale: bool, weight: float) -> None:
    """Add `weight` times the scores of all partitions but the last of `[heads, partitions, lag, D]`, in place."""
    step = max(1, _BLOCK // partitions[:, 0].numel())
    for start in range(0, scores.shape[1], step):
        block = partitions[:, start : start + step + 1].float()
        judged = block[:, :-1]
        scale = judged if own_scale else block[:, 1:]
        # Separate minimum and maximum, deviation as a norm: torch.aminmax and torch.std take ten times as long.
        low = scale.amin(dim=2, keepdim=True)  # [heads, block, 1, D]
        spread = scale.amax(dim=2, keepdim=True) - low
        normalized = (judged - low).div_(spread.masked_fill_(spread == 0, MIN_SPREAD))
        normalized -= normalized.mean(dim=-1, keepdim=True)
        deviation = torch.linalg.vector_norm(normalized, dim=-1) / math.sqrt(partitions.shape[-1] - 1)
        scores[:, start : start + step].add_(torch.softmax(deviation, dim=-1), alpha=weight)
