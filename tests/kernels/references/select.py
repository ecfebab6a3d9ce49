"""The naive form: Python's sort on (score, position), and one copied row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """See `kvshelf.kernels.select.select`."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    for row, (row_scores, count) in enumerate(zip(scores.tolist(), counts, strict=True)):
        ranks = [-score if math.isfinite(score) else -math.inf for score in row_scores]
        ranked = sorted((not p, rank, j) for j, (rank, p) in enumerate(zip(ranks, protected.tolist(), strict=True)))
        for _, _, j in ranked[:count]:
            mask[row, j] = True
    return mask


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """See `kvshelf.kernels.select.pack`."""
    kept = [(head, j) for head, row in enumerate(mask.tolist()) for j, is_kept in enumerate(row) if is_kept]
    packed_keys, packed_values = (states.new_zeros(sum(counts), states.shape[2]) for states in (keys, values))
    for entry, (head, j) in enumerate(kept):
        packed_keys[entry], packed_values[entry] = keys[head, j], values[head, j]
    return packed_keys, packed_values, torch.tensor([j for _, j in kept], dtype=torch.int32, device=keys.device)
