"""The rotation with torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    rows = states.float()
    return torch.addcmul(rows * cos, rows.index_select(-1, partners), sin)
