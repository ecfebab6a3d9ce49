"""Observation-window attention with the keys read once per KV head, never repeated per query head.

Bytes: the keys once. FLOPs: 2 * q_heads * window * N * D. The logits of a GQA group, `[group * window, N]` fp32, are
the only large buffer: 8 MiB per KV head at window 64, group 4 and 8k tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def window_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Mean attention weight of the window's rows on each token before the window (SnapKV, section 3, "voting").

    queries: `[q_heads, w, D]`, the last w rows of the document. keys: `[kv_heads, N, D]`. The softmax runs over all
    tokens a row may see, window included (its columns take part in the denominator), and is reduced by the mean over
    rows and over the GQA group. Returns `[kv_heads, N - w]` fp32.
    """
    q_heads, window, dim = queries.shape
    kv_heads, num_tokens, _ = keys.shape
    rows = queries.reshape(kv_heads, -1, dim) * scale  # [kv_heads, group * w, D]
    logits = torch.matmul(rows, keys.transpose(1, 2)).float()  # [kv_heads, group * w, N]
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., -window:].masked_fill_(future.repeat(q_heads // kv_heads, 1), -torch.inf)
    return torch.softmax(logits, dim=-1)[..., : num_tokens - window].mean(dim=1)
