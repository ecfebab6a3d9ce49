"""The naive form, in fp64, one channel at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    """See `kvshelf.kernels.rotate`."""
    rows, turned = states.double(), torch.zeros(states.shape, dtype=torch.float64, device=states.device)
    for channel, partner in enumerate(partners.tolist()):
        turned[..., channel] = rows[..., channel] * cos[:, channel] + rows[..., partner] * sin[:, channel]
    return turned
