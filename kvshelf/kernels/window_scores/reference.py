"""The naive form: the whole causal attention matrix of the last rows, head by head, with the keys repeated."""

from __future__ import annotations

import torch
from torch import Tensor


def window_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """See `kvshelf.kernels.window_scores.eager.window_scores`; computed in fp64."""
    q_heads, window, _ = queries.shape
    kv_heads, num_tokens, _ = keys.shape
    group = q_heads // kv_heads
    scores = torch.zeros(kv_heads, num_tokens - window, dtype=torch.float64)
    for h in range(q_heads):
        logits = scale * queries[h].double() @ keys[h // group].double().T
        for row in range(window):
            last_visible = num_tokens - window + row
            weights = torch.softmax(logits[row, : last_visible + 1], dim=0)
            scores[h // group] += weights[: num_tokens - window] / (window * group)
    return scores
