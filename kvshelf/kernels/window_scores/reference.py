"""The naive form: one softmax per row over every key the row may see."""

from __future__ import annotations

import torch
from torch import Tensor


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    """See `kvshelf.kernels.window_scores.eager.window_attention`; computed in fp64."""
    group, num_rows, _ = queries.shape
    num_tokens = keys.shape[0]
    every = keys if own_keys is None else torch.cat([keys, own_keys])
    weights = torch.zeros(group, num_rows, every.shape[0], dtype=torch.float64)
    for head in range(group):
        for row in range(num_rows):
            visible = every[: every.shape[0] - num_rows + row + 1].double()
            logits = scale * visible @ queries[head, row].double()
            weights[head, row, : visible.shape[0]] = torch.softmax(logits, dim=0)
    return weights[:, :, :num_tokens]
