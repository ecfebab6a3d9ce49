"""The naive form of LagKV's equations 7 to 10, one partition and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def lag_scores(states: Tensor, scale: Tensor) -> Tensor:
    """See `kvshelf.kernels.lag_scores.eager.lag_scores`; computed in fp64."""
    heads, partitions, lag, dim = states.shape
    scores = torch.zeros(heads, partitions, lag, dtype=torch.float64)
    for h in range(heads):
        for p in range(partitions):
            partner = scale[h, p].double()
            low, high = partner.amin(dim=0), partner.amax(dim=0)
            spread = torch.where(high > low, high - low, torch.full((dim,), 1e-6, dtype=torch.float64))
            normalized = (states[h, p].double() - low) / spread
            scores[h, p] = torch.softmax(normalized.std(dim=-1, correction=1), dim=0)
    return scores
