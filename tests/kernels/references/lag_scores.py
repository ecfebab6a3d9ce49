"""The naive form of LagKV's equations 7 to 11, one partition and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def lag_scores(keys: Tensor, values: Tensor, lag: int, own_scale: bool, value_weight: float) -> Tensor:
    """See `kvshelf.kernels.lag_scores`; computed in fp64."""
    heads, tokens, _ = keys.shape
    scores = torch.zeros(heads, tokens // lag - 1, lag, dtype=torch.float64)
    for h in range(heads):
        for p in range(scores.shape[1]):
            for states, weight in ((keys[h].double(), 1.0), (values[h].double(), value_weight)):
                own, following = states[p * lag :][:lag], states[(p + 1) * lag :][:lag]
                scores[h, p] += weight * _unusual(own, own if own_scale else following)
    return scores


def _unusual(states: Tensor, scale: Tensor) -> Tensor:
    """Equations 7 to 10 of one partition `[lag, D]` in the scale of another."""
    low, high = scale.amin(dim=0), scale.amax(dim=0)
    spread = torch.where(high > low, high - low, torch.full_like(low, 1e-6))
    return torch.softmax(((states - low) / spread).std(dim=-1, correction=1), dim=0)
