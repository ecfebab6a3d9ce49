"""Column sums of causal attention with torch's own operations, in one pass.

Without log-sum-exps, one product takes a block of rows and all of its keys, so that no second pass is needed. With
them, each tile of keys and rows is independent: it stays in the cache, and one exponential turns its product into
weights. Only this path multiplies bf16 states in bf16, as torch has no faster bf16 product with fp32 results on a CPU:
logits are rounded to 8 bits, and sums of 8k rows are off by 7e-4 of the largest (measured; 1e-6 in fp32).

Bytes: the keys of a head once per block of rows; logits and weights are written and read in cache, and are the only
large buffers, 2 * 4 MiB at 8k tokens without log-sum-exps, 2 MiB at any length with them. FLOPs: as the public function
says; a tile on the diagonal is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS_PER_PRODUCT = 128
"""Rows of queries, over all heads of a group, that meet the keys at once. Fewer make the product slower, more push the
logits (4 MiB at 8k tokens) out of the cache: 1024 rows take 10 to 20 % longer."""

_TILE = 512
"""Keys, and rows over all heads of a group, of a tile: 1 MiB of fp32 logits. A tile of 2 MiB takes 1.3 times as long
where the second-level cache holds 2 MiB."""


AddRows = Callable[[Tensor, Tensor, Tensor, float, Tensor | None, slice], None]
"""`_add_rows` below, or another form of it."""


def column_sums(
    queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0, every: int = 1, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return sums_by(_add_rows, queries, keys, scale, local_rows, every, lse)


def sums_by(
    add_rows: AddRows, queries: Tensor, keys: Tensor, scale: float, local_rows: int, every: int, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both sums, of the sampled early rows and of the local rows."""
    num_rows, num_keys = queries.shape[1], keys.shape[1]
    early_rows = num_rows - local_rows
    total, local = queries.new_zeros(2, queries.shape[0], num_keys, dtype=torch.float32)
    early = slice((early_rows - 1) % every, early_rows, every)
    add_rows(total[:, : num_keys - local_rows], queries, keys[:, : num_keys - local_rows], scale, lse, early)
    add_rows(local, queries, keys, scale, lse, slice(early_rows, num_rows, 1))
    return total.mul_(every).add_(local), local


def _add_rows(sums: Tensor, queries: Tensor, keys: Tensor, scale: float, lse: Tensor | None, rows: slice) -> None:
    """Add the weights of `rows` to `sums` `[q_heads, N]`, in place. The last of the rows sees all of the keys."""
    group = queries.shape[0] // keys.shape[0]
    for head, head_keys in enumerate(keys):
        heads = slice(head * group, (head + 1) * group)
        if lse is None:
            _add_whole_rows(sums[heads], queries[heads, rows], head_keys, scale, rows.step)
        else:
            _add_tiles(sums[heads], queries[heads, rows], head_keys, scale, rows.step, lse[heads, rows])


def _add_whole_rows(sums: Tensor, queries: Tensor, keys: Tensor, scale: float, every: int) -> None:
    """One KV head: sums `[group, N]`, queries `[group, R, D]`, keys `[N, D]`; the rows are `every` tokens apart."""
    keys_t = keys.float().T
    group, num_rows, dim = queries.shape
    step = max(1, _ROWS_PER_PRODUCT // group)
    for start in range(0, num_rows, step):
        block = queries[:, start : start + step].float() * scale
        visible = keys.shape[0] - (num_rows - start - block.shape[1]) * every  # keys that the block's last row sees
        logits = torch.matmul(block.reshape(-1, dim), keys_t[:, :visible]).view(group, -1, visible)
        future = _future(block.shape[1], every, keys.device)
        logits[:, :, visible - future.shape[1] :].masked_fill_(future, -torch.inf)
        sums[:, :visible] += torch.softmax(logits, dim=-1).sum(dim=1)


def _add_tiles(sums: Tensor, queries: Tensor, keys: Tensor, scale: float, every: int, lse: Tensor) -> None:
    """As `_add_whole_rows`, with the log-sum-exps of the rows: lse `[group, R]`."""
    if queries.dtype == torch.float16:
        queries, keys = queries.float(), keys.float()  # a CPU multiplies fp16 slowly
    group, num_rows, dim = queries.shape
    step = max(1, _TILE // group)
    for start in range(0, num_rows, step):
        block = queries[:, start : start + step]
        visible = keys.shape[0] - (num_rows - start - block.shape[1]) * every
        future = _future(block.shape[1], every, keys.device).T.unsqueeze(1)  # [keys, 1, rows]
        certain = visible - future.shape[0]  # keys that all rows of the block see
        rows, shift = block.reshape(-1, dim).T, -lse[:, start : start + step].reshape(-1)
        for first in range(0, visible, _TILE):
            last = min(first + _TILE, visible)
            # Keys are the left operand: a product reads it in place, but repacks the right operand every time.
            logits = torch.matmul(keys[first:last], rows).float()
            weights = torch.add(shift, logits, alpha=scale, out=logits).exp_().view(last - first, group, -1)
            if last > certain:  # masked after the exponential: exp(-inf) takes ten times as long
                unsure = max(certain, first)
                hidden = future[unsure - certain : last - certain]
                weights[unsure - first :].masked_fill_(hidden, 0)
            sums[:, first:last] += weights.sum(dim=2).T


def _future(num_rows: int, every: int, device: torch.device) -> Tensor:
    """Which keys each row does not see, of those after the first row's own and up to the last row's own: `[rows, keys]`
    bool. Rows are `every` tokens apart."""
    keys = torch.arange((num_rows - 1) * every, device=device)
    return keys >= every * torch.arange(num_rows, device=device).unsqueeze(1)
