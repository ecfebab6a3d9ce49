"""The norms with one of torch's own operations; states that are not fp32 are copied to fp32 first."""

from __future__ import annotations

import torch
from torch import Tensor


def row_norms(states: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(states.float(), dim=-1)
    return norms
