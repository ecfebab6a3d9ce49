"""Observation-window attention with the keys read once per KV head, never repeated per query head.

Bytes: the keys of one head once. FLOPs: 2 * group * R * N * D. The weights of a GQA group, `[group, R, N]` fp32, are
the only large buffer: 8 MiB at 64 rows, group 4 and 8k tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    """Softmax weights of the rows of one GQA group on the tokens of a document.

    queries: `[group, R, D]`, keys: `[N, D]`. Without `own_keys` the rows are the document's last R tokens, and each
    sees the keys up to its own. With `own_keys` `[T, D]`, T >= R, they are the last R of T tokens after the document:
    each sees all of the document and those of the T up to its own, which take part in the denominator and are not
    returned. Returns `[group, R, N]` fp32; rows sum to at most 1.
    """
    rows = queries.reshape(-1, queries.shape[-1]) * scale  # [group * R, D]
    logits = torch.matmul(rows, keys.T).float()  # [group * R, N]
    if own_keys is None:
        _hide_future(logits, *queries.shape[:2])
        return torch.softmax(logits, dim=-1).view(*queries.shape[:2], -1)
    own = torch.matmul(rows, own_keys.T).float()
    _hide_future(own, *queries.shape[:2])
    lse = torch.logaddexp(logits.logsumexp(dim=-1), own.logsumexp(dim=-1))
    return logits.sub_(lse.unsqueeze(1)).exp_().view(*queries.shape[:2], -1)


def _hide_future(logits: Tensor, group: int, num_rows: int) -> None:
    """Row r of the last `num_rows` tokens sees nothing after itself. logits: `[group * R, keys]`, changed in place."""
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=logits.device).triu(1)
    logits[:, -num_rows:].masked_fill_(future.repeat(group, 1), -torch.inf)
