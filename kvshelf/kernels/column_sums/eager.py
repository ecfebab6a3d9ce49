"""Column sums of causal attention in one pass over blocks of rows: a block sees its whole rows, so that no second pass
with saved log-sum-exps is needed.

    total_j = sum over rows i >= j of softmax_j(scale * q_i . k_0..i)

Bytes: the keys of a head once per block of rows, `128 * N` fp32 logits and as many weights written and read in cache;
memory O(128 * N). FLOPs: q_heads * R * N * D on average over a causal square (half a causal attention) + about 5 per
logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_PER_PRODUCT = 128
"""Rows of queries, over all heads of a group, that meet the keys at once. Fewer make the product slower, more push the
logits (4 MiB at 8k tokens) out of the cache: 1024 rows take 10 to 20 % longer."""


def column_sums(queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Softmax weights that each key receives, summed over all rows and over the last `local_rows` of them.

    queries: `[q_heads, R, D]`, the last R rows of a causal sequence; keys: `[kv_heads, N, D]`, R <= N. Row r sees the
    first N - R + r + 1 keys. Query head h reads KV head h // (q_heads // kv_heads). Returns both sums, `[q_heads, N]`
    fp32; the second is 0 if local_rows is 0 and equals the first if it is R or more. Logits, weights and sums are fp32
    (a bf16 sum stops growing at 256 times its addend). The sums of a sequence given in chunks, each with the keys up to
    its end, add up to those of the whole.
    """
    num_rows, num_keys = queries.shape[1], keys.shape[1]
    local_rows = min(local_rows, num_rows)
    early_rows, early_keys = num_rows - local_rows, num_keys - local_rows
    total = queries.new_zeros(queries.shape[0], num_keys, dtype=torch.float32)
    local = torch.zeros_like(total)
    _add_rows(total[:, :early_keys], queries[:, :early_rows], keys[:, :early_keys], scale)
    _add_rows(local, queries[:, early_rows:], keys, scale)
    return total.add_(local), local


def _add_rows(sums: Tensor, queries: Tensor, keys: Tensor, scale: float) -> None:
    """Add the weights of all rows to `sums` `[q_heads, N]`, in place."""
    group = queries.shape[0] // keys.shape[0]
    for head, head_keys in enumerate(keys):
        heads = slice(head * group, (head + 1) * group)
        _add_rows_of_group(sums[heads], queries[heads], head_keys, scale)


def _add_rows_of_group(sums: Tensor, queries: Tensor, keys: Tensor, scale: float) -> None:
    """The same for one KV head: sums `[group, N]`, queries `[group, R, D]`, keys `[N, D]`."""
    keys_t = keys.float().T
    group, num_rows, dim = queries.shape
    step = max(1, _ROWS_PER_PRODUCT // group)
    for start in range(0, num_rows, step):
        block = queries[:, start : start + step].float() * scale
        visible = keys.shape[0] - num_rows + start + block.shape[1]
        logits = torch.matmul(block.reshape(-1, dim), keys_t[:, :visible]).view(group, -1, visible)
        future = torch.ones(block.shape[1], block.shape[1], dtype=torch.bool, device=keys.device).triu_(1)
        logits[:, :, visible - block.shape[1] :].masked_fill_(future, -torch.inf)
        sums[:, :visible] += torch.softmax(logits, dim=-1).sum(dim=1)
