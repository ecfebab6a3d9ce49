"""The naive form: one softmax per row over every key the row may see."""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums(
    queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0, every: int = 1, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.column_sums.column_sums`; computed in fp64, including the log-sum-exps."""
    del lse  # computed here anew, so that tests can judge the given ones
    q_heads, num_rows, _ = queries.shape
    kv_heads, num_keys, _ = keys.shape
    total = torch.zeros(q_heads, num_keys, dtype=torch.float64, device=keys.device)
    local = torch.zeros_like(total)
    for head in range(q_heads):
        for row in range(num_rows):
            is_local = row >= num_rows - local_rows
            if not is_local and (num_rows - local_rows - 1 - row) % every:
                continue
            visible = num_keys - num_rows + row + 1
            logits = scale * keys[head // (q_heads // kv_heads), :visible].double() @ queries[head, row].double()
            weights = torch.softmax(logits, dim=0)
            total[head, :visible] += weights if is_local else every * weights
            if is_local:
                local[head, :visible] += weights
    return total, local
