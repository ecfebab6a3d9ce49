"""The naive form: one softmax per row over every key the row may see."""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums(queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.column_sums.eager.column_sums`; computed in fp64."""
    q_heads, num_rows, _ = queries.shape
    kv_heads, num_keys, _ = keys.shape
    total = torch.zeros(q_heads, num_keys, dtype=torch.float64)
    local = torch.zeros_like(total)
    for head in range(q_heads):
        for row in range(num_rows):
            visible = num_keys - num_rows + row + 1
            logits = scale * keys[head // (q_heads // kv_heads), :visible].double() @ queries[head, row].double()
            weights = torch.softmax(logits, dim=0)
            total[head, :visible] += weights
            if row >= num_rows - local_rows:
                local[head, :visible] += weights
    return total, local
