"""LagKV's score, equations 7 to 10. Bytes: the states once; FLOPs: a few per element, so the memory is the limit."""

from __future__ import annotations

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
    low, high = torch.aminmax(states[:, 1:], dim=2, keepdim=True)  # [heads, partitions - 1, 1, D]
    low, spread = low.float(), (high.float() - low.float())
    spread.masked_fill_(spread == 0, MIN_SPREAD)
    # The standard deviation does not change under a shift, but (x - low) is small where x is: fewer bits are lost.
    normalized = states[:, :-1].float().sub_(low) if states.dtype != torch.float32 else states[:, :-1] - low
    return torch.softmax(normalized.div_(spread).std(dim=-1, correction=1), dim=-1)
