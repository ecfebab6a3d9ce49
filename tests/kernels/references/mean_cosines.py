"""The naive form, in fp64, with every direction in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_cosines(states: Tensor) -> Tensor:
    """See `kvshelf.kernels.mean_cosines`."""
    rows = states.double()
    cosines = torch.zeros(states.shape[:2], dtype=torch.float64, device=states.device)
    for head, own in enumerate(rows):
        directions = torch.stack([row / row.norm().clamp_min(1e-12) for row in own])
        mean = directions.sum(dim=0)
        for place, direction in enumerate(directions):
            cosines[head, place] = direction.dot(mean) / mean.norm().clamp_min(1e-12)
    return cosines
