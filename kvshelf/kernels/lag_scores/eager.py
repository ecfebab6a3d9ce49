"""LagKV's score, equations 7 to 10. Bytes: the states once; FLOPs: a few per element, so the memory is the limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_SPREAD = 1e-6
"""Denominator for a channel that is constant over a partition. The paper leaves 0/0 open; a NaN would poison the
softmax."""


def lag_scores(states: Tensor) -> Tensor:
    """softmax over each partition of the channel-wise standard deviation of its lag-relative states.

    states: `[heads, partitions, lag, D]`, keys or values. Partition p is normalised by the minimum and maximum of
    partition p + 1 (eq. 7, 8, 9), and the standard deviation is the unbiased one. Returns `[heads, partitions - 1,
    lag]` fp32: the last partition has no successor and no score.
    """
    # Minimum and maximum apart, standard deviation as a norm: torch.aminmax and torch.std take ten times as long.
    following = states[:, 1:]
    low = following.amin(dim=2, keepdim=True).float()  # [heads, partitions - 1, 1, D]
    spread = following.amax(dim=2, keepdim=True).float() - low
    normalized = (states[:, :-1].float() - low).div_(spread.masked_fill_(spread == 0, MIN_SPREAD))
    normalized -= normalized.mean(dim=-1, keepdim=True)
    deviation = torch.linalg.vector_norm(normalized, dim=-1) / math.sqrt(states.shape[-1] - 1)
    return torch.softmax(deviation, dim=-1)
