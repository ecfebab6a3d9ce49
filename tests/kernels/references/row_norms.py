"""The naive form, one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def row_norms(states: Tensor) -> Tensor:
    """See `kvshelf.kernels.row_norms`; computed in fp64."""
    norms = torch.zeros(states.shape[:2], dtype=torch.float64, device=states.device)
    for head in range(states.shape[0]):
        for row in range(states.shape[1]):
            norms[head, row] = math.sqrt(sum(x * x for x in states[head, row].tolist()))
    return norms
