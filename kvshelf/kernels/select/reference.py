"""The naive form: Python's sort on (score, position), and one copied row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """See `kvshelf.kernels.select.eager.select`."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for row, (row_scores, count) in enumerate(zip(scores.tolist(), counts, strict=True)):
        ranked = sorted((not p, -s, j) for j, (s, p) in enumerate(zip(row_scores, protected.tolist(), strict=True)))
        for _, _, j in ranked[:count]:
            mask[row, j] = True
    return mask


def gather(states: Tensor, mask: Tensor) -> Tensor:
    """See `kvshelf.kernels.select.eager.gather`."""
    heads, num_tokens, _ = states.shape
    return torch.stack([states[h, j] for h in range(heads) for j in range(num_tokens) if mask[h, j]])
