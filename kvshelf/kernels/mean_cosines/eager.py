"""The cosines with torch's own operations: two products with the rows as they are, weighted by inverse norms.

Making unit rows would take two more tensors of the same size. States that are not fp32 are copied once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def mean_cosines(states: Tensor) -> Tensor:
    rows = states.float()  # [heads, N, D]
    inverse_norms = torch.linalg.vector_norm(rows, dim=-1).clamp_min_(1e-12).reciprocal_()  # [heads, N]
    axis = F.normalize(torch.bmm(inverse_norms.unsqueeze(1), rows), dim=-1)  # [heads, 1, D]
    return torch.bmm(rows, axis.transpose(1, 2)).squeeze(2).mul_(inverse_norms)
