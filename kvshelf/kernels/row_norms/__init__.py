"""The lengths of keys or of values, by which some policies score."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.checks import require_states
from kvshelf.kernels.dispatch import implementation


def row_norms(states: Tensor) -> Tensor:
    """The Euclidean norm of each row, sqrt(sum_d x_d^2).

    states: `[heads, N, D]`, any strides as long as the last dimension is contiguous. Returns `[heads, N]`, computed and
    returned in fp32, which must hold the squares: rows beyond 1e19 give inf, and those below 1e-18 lose digits. A NaN
    makes its row's norm NaN. Raises `InvalidTensor` for other shapes.

    Bytes: states once, 4 a row written. FLOPs: 2 per element, so the memory is the limit. Share of the limit on a GPU:
    not measured.
    """
    require_states("row_norms", {"states": 3}, states=states)
    if states.numel() == 0:
        return torch.zeros(states.shape[:2], dtype=torch.float32, device=states.device)
    norms: Tensor = implementation("row_norms", states.device).row_norms(states)
    return norms.float()
