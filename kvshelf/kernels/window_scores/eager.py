"""Observation windows with torch's own operations: one product takes 128 rows of a KV head's whole group.

Bytes: the keys of one head once per 128 rows; `128 * (N + T)` fp32 logits and as many weights, 8 MiB at 8k tokens, are
the only large buffers of `window_scores`. All 256 rows of SnapKV at once take 1.2 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_ROWS_PER_PRODUCT = 128


Multiply = Callable[[Tensor, Tensor, Tensor], None]
AddWeights = Callable[[Tensor, Tensor, Tensor, str], None]
"""`multiply` and `add_weights` below, or other forms of them."""


def scores_by(
    multiply: Multiply,
    add_weights: AddWeights,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    own_keys: Tensor | None,
    reduce: str,
    kernel: int,
    pooling: str,
) -> Tensor:
    (kv_heads, num_keys, dim), (_, num_rows, _) = keys.shape, queries.shape
    future = _future(queries.shape[0] // kv_heads, num_rows, keys.device)
    width = num_keys + (0 if own_keys is None else own_keys.shape[1])
    # Made once: memory that is new in every block has to be mapped, which takes as long as the softmax.
    buffers = keys.new_empty(2, min(len(future), _ROWS_PER_PRODUCT), width, dtype=torch.float32)
    scores = keys.new_zeros(kv_heads, num_keys, dtype=torch.float32)
    for head, rows in enumerate((queries * scale).reshape(kv_heads, -1, dim)):
        for start in range(0, len(rows), _ROWS_PER_PRODUCT):
            block = slice(start, start + _ROWS_PER_PRODUCT)
            logits, spare = buffers[:, : len(rows[block])]
            own = None if own_keys is None else own_keys[head]
            _fill_logits(multiply, logits, rows[block], keys[head], own, future[block])
            add_weights(scores[head], logits, spare, reduce)
    return pooled(scores if reduce == "max" else scores.div_(len(future)), kernel, pooling)


def pass_scores_by(
    multiply: Multiply, add_weights: AddWeights, queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor
) -> Tensor:
    (passes, q_heads, num_rows, dim), (kv_heads, num_keys, _), length = queries.shape, keys.shape, own_keys.shape[2]
    future = torch.ones(num_rows, length, dtype=torch.bool, device=keys.device).triu(length - num_rows + 1)
    grouped = (queries * scale).view(passes, kv_heads, q_heads // kv_heads, num_rows, dim)
    rows_of_pass = q_heads // kv_heads * num_rows
    at_once = max(1, _ROWS_PER_PRODUCT // rows_of_pass)
    # Made once, as in `scores_by`.
    buffers = keys.new_empty(2, min(at_once, passes) * rows_of_pass, num_keys + length, dtype=torch.float32)
    scores = keys.new_zeros(kv_heads, num_keys, dtype=torch.float32)
    for head in range(kv_heads):
        for start in range(0, passes, at_once):
            some, own = grouped[start : start + at_once, head], own_keys[start : start + at_once, head]
            logits, spare = buffers[:, : len(some) * rows_of_pass]
            multiply(some.reshape(-1, dim), keys[head], logits[:, :num_keys])
            own_logits = (some @ own.mT[:, None]).float().masked_fill_(future, -torch.inf)  # [passes, group, R, T]
            logits[:, num_keys:] = own_logits.flatten(0, 2)
            add_weights(scores[head], logits, spare, "max")
    return scores


def add_weights(scores: Tensor, logits: Tensor, spare: Tensor, reduce: str) -> None:
    """Add the softmax weights of logits `[rows, N + T]` on the first N keys to `scores` `[N]`, in place, or raise the
    scores to the largest weights. May overwrite logits and `spare`, which is as large."""
    weights = torch.softmax(logits, dim=-1, out=spare)[:, : len(scores)]
    if reduce == "max":
        torch.maximum(scores, weights.amax(dim=0), out=scores)
    else:
        scores += weights.sum(dim=0)


def window_attention(queries: Tensor, keys: Tensor, scale: float, own_keys: Tensor | None = None) -> Tensor:
    (group, num_rows, dim), num_keys = queries.shape, keys.shape[0]
    width = num_keys + (0 if own_keys is None else own_keys.shape[0])
    logits = keys.new_empty(group * num_rows, width, dtype=torch.float32)
    future = _future(group, num_rows, keys.device)
    _fill_logits(multiply, logits, (queries * scale).reshape(-1, dim), keys, own_keys, future)
    return torch.softmax(logits, dim=-1).view(group, num_rows, width)[..., :num_keys]


def pooled(scores: Tensor, kernel: int, how: str = "avg") -> Tensor:
    """Each score together with its neighbours, along the last dimension. The mean counts zeros beyond the edges, as
    torch does by default and the papers' code with it."""
    if kernel == 1 or scores.numel() == 0:
        return scores
    pool = F.max_pool1d if how == "max" else F.avg_pool1d
    return pool(scores, kernel, stride=1, padding=kernel // 2)


def multiply(rows: Tensor, keys: Tensor, out: Tensor) -> None:
    """The products of rows `[R, D]` with keys `[N, D]` of their dtype, into `out` `[R, N]` fp32."""
    if rows.dtype == out.dtype:
        torch.mm(rows, keys.T, out=out)
    else:
        out.copy_(torch.mm(rows, keys.T))


window_scores = partial(scores_by, multiply, add_weights)
pass_scores = partial(pass_scores_by, multiply, add_weights)


def _fill_logits(
    multiply_into: Multiply, logits: Tensor, rows: Tensor, keys: Tensor, own_keys: Tensor | None, future: Tensor
) -> None:
    """The logits of scaled rows over keys and own keys, `[rows, N + T]` fp32; `future` `[rows, R]` marks which of the
    last R keys a row does not see."""
    num_keys = keys.shape[0]
    multiply_into(rows, keys, logits[:, :num_keys])
    if own_keys is not None:
        multiply_into(rows, own_keys, logits[:, num_keys:])
    logits[:, logits.shape[1] - future.shape[1] :].masked_fill_(future, -torch.inf)


def _future(group: int, num_rows: int, device: torch.device) -> Tensor:
    """Which of the last `num_rows` tokens each row does not see, `[group * num_rows, num_rows]` bool."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu(1).repeat(group, 1)
