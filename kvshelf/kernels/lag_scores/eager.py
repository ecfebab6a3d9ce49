"""LagKV's score, equations 7 to 10. Bytes: both inputs once; FLOPs: a few per element, so the memory is the limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_SPREAD = 1e-6
"""Denominator for a channel that is constant over a partition. The paper leaves 0/0 open; a NaN would poison the
softmax."""


def lag_scores(states: Tensor, scale: Tensor) -> Tensor:
    """softmax over each partition of the channel-wise standard deviation of its states, in the scale of `scale`.

    states, scale: `[heads, partitions, lag, D]`, keys or values. Each partition of `states` is normalised by the
    minimum and maximum of its partner in `scale` (eq. 7, 8, 9): for LagKV the partition that follows it, for LocalKV
    itself (eq. 14, 15). The standard deviation is the unbiased one. Returns `[heads, partitions, lag]` fp32.
    """
    # Minimum and maximum apart, standard deviation as a norm: torch.aminmax and torch.std take ten times as long.
    low = scale.amin(dim=2, keepdim=True).float()  # [heads, partitions, 1, D]
    spread = scale.amax(dim=2, keepdim=True).float() - low
    normalized = (states.float() - low).div_(spread.masked_fill_(spread == 0, MIN_SPREAD))
    normalized -= normalized.mean(dim=-1, keepdim=True)
    deviation = torch.linalg.vector_norm(normalized, dim=-1) / math.sqrt(states.shape[-1] - 1)
    return torch.softmax(deviation, dim=-1)
