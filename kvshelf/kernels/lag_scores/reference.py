"""The naive form of LagKV's equations 7 to 10, one partition and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def lag_scores(states: Tensor) -> Tensor:
    """See `kvshelf.kernels.lag_scores.eager.lag_scores`; computed in fp64."""
    heads, partitions, lag, dim = states.shape
    scores = torch.zeros(heads, partitions - 1, lag, dtype=torch.float64)
    for h in range(heads):
        for p in range(partitions - 1):
            following = states[h, p + 1].double()
            low, high = following.amin(dim=0), following.amax(dim=0)
            spread = torch.where(high > low, high - low, torch.full((dim,), 1e-6, dtype=torch.float64))
            normalized = (states[h, p].double() - low) / spread
            scores[h, p] = torch.softmax(normalized.std(dim=-1, correction=1), dim=0)
    return scores
