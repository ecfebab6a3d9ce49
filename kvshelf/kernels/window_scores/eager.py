"""Observation windows with torch's own operations: the keys meet 128 rows of a KV head's whole group at once.

Bytes: the keys of one head once per 128 rows; `128 * (N + T)` fp32 logits and as many weights, 8 MiB at 8k tokens, are
the only large buffers of `window_scores`. All rows at once take 1.5 to 2 times as long: they leave the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_ROWS_PER_PRODUCT = 128


def window_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    own_keys: Tensor | None = None,
    reduce: str = "mean",
    kernel: int = 1,
    pooling: str = "avg",
) -> Tensor:
    """See `kvshelf.kernels.window_scores.window_scores`."""
    grouped = queries.reshape(keys.shape[0], -1, *queries.shape[1:])
    scores = [
        _reduced(grouped[head], head_keys, scale, None if own_keys is None else own_keys[head], reduce)
        for head, head_keys in enumerate(keys)
    ]
    return pooled(torch.stack(scores), kernel, pooling)


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    """See `kvshelf.kernels.window_scores.window_attention`."""
    group, num_rows, dim = queries.shape
    weights = _weights(queries.reshape(-1, dim), keys, scale, own_keys, _future(group, num_rows, keys.device))
    return weights.view(group, num_rows, -1)[..., : keys.shape[0]]


def pooled(scores: Tensor, kernel: int, how: str = "avg") -> Tensor:
    """Each score together with its neighbours, along the last dimension. The mean counts zeros beyond the edges, as
    torch does by default and the papers' code with it."""
    if kernel == 1 or scores.numel() == 0:
        return scores
    pool = F.max_pool1d if how == "max" else F.avg_pool1d
    return pool(scores, kernel, stride=1, padding=kernel // 2)


def _reduced(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None, reduce: str) -> Tensor:
    """Mean or largest weight over all rows of one KV head, `[N]` fp32."""
    group, num_rows, dim = queries.shape
    rows, future = queries.reshape(-1, dim), _future(group, num_rows, keys.device)
    scores = torch.zeros(keys.shape[0], device=keys.device)
    for start in range(0, len(rows), _ROWS_PER_PRODUCT):
        block = slice(start, start + _ROWS_PER_PRODUCT)
        weights = _weights(rows[block], keys, scale, own_keys, future[block])[:, : keys.shape[0]]
        scores = torch.maximum(scores, weights.amax(dim=0)) if reduce == "max" else scores.add_(weights.sum(dim=0))
    return scores if reduce == "max" else scores.div_(len(rows))


def _weights(rows: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None, future: Tensor) -> Tensor:
    """Softmax over keys and own keys, `[rows, N + T]` fp32; `future` `[rows, R]` marks the last ones a row cannot
    see."""
    rows = rows * scale
    logits = torch.matmul(rows, keys.T)
    if own_keys is not None:
        logits = torch.cat([logits, torch.matmul(rows, own_keys.T)], dim=1)
    logits = logits.float()
    logits[:, logits.shape[1] - future.shape[1] :].masked_fill_(future, -torch.inf)
    return torch.softmax(logits, dim=-1)


def _future(group: int, num_rows: int, device: torch.device) -> Tensor:
    """What each row does not see of the last `num_rows` tokens, `[group * num_rows, num_rows]` bool."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu(1).repeat(group, 1)
