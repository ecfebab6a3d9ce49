"""How similar each row is to all rows: its cosine with the mean of their directions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.checks import require_states
from kvshelf.kernels.dispatch import implementation


def mean_cosines(states: Tensor) -> Tensor:
    """cos(x_j, sum_i x_i / |x_i|) of each row x_j of a head.

    states: `[heads, N, D]`, any strides as long as the last dimension is contiguous. Returns `[heads, N]`, computed and
    returned in fp32, which must hold the squares. A row of zeros has no direction: it adds nothing, and its cosine is
    0. A value that is not finite makes its whole head NaN. Raises `InvalidTensor` for other shapes.

    Bytes: states twice, for the mean comes before any cosine; the second time 8k rows of 64 channels are still in the
    L2 cache. FLOPs: 6 per element, so the memory is the limit. Share of the limit on a GPU: not measured.
    """
    require_states("mean_cosines", {"states": 3}, states=states)
    if states.numel() == 0:
        return torch.zeros(states.shape[:2], dtype=torch.float32, device=states.device)
    cosines: Tensor = implementation("mean_cosines", states.device).mean_cosines(states)
    return cosines.float()
