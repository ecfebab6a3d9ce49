"""Window scores in two launches, whatever the number of heads and rows.

`_split_lse` takes the log-sum-exp of each row over one split of the keys, and of the own keys as one more split.
`_score_keys` owns a block of keys of one KV head: it combines the splits' log-sum-exps, computes the logits again for
all rows of the group, a block of rows at a time, reduces the weights over the rows and pools them. Blocks overlap by
the neighbours that pooling needs.

Keys are read twice, the second time mostly from the L2 cache (16 MiB a layer at 8k tokens, 8 heads of 128 channels in
bf16; at 32k most of it comes from memory again), and the products are made twice. Keeping the exponentials of one pass
and correcting them afterwards would move `q_heads * R * N` of them twice: at 64 rows and group 4, in bf16, 4 times the
bytes of the keys. A single row is bound by the bytes of the keys; 64 rows of group 4 by products and exponentials,
which take a pass about as long as reading the keys once. Share of the limit: not measured.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import INTERPRETED, load_rows
from kvshelf.kernels.window_scores.eager import pass_scores, pooled, window_attention

__all__ = ["pass_scores", "window_attention", "window_scores"]  # the first two are torch's operations on CUDA too

_LOG2_E = math.log2(math.e)

_MOST_SPLITS = 16
"""With 8 KV heads and two blocks of rows, 16 splits make 256 programs. Each program of the second launch combines the
splits again, which is an eighth of its exponentials."""

_LEAST_SPLIT = 512
"""Keys of a split; with fewer, a program would mostly load query rows."""

_WIDEST_POOLING = 15
"""Neighbours that pooling inside a block of keys may have. Wider ones would waste half of the smallest block."""


def window_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    own_keys: Tensor | None = None,
    reduce: str = "mean",
    kernel: int = 1,
    pooling: str = "avg",
) -> Tensor:
    if kernel > _WIDEST_POOLING:
        return pooled(window_scores(queries, keys, scale, own_keys, reduce), kernel, pooling)
    (q_heads, num_rows, dim), (kv_heads, num_keys, _) = queries.shape, keys.shape
    scores = keys.new_empty(kv_heads, num_keys, dtype=torch.float32)
    if num_keys == 0:
        return scores
    num_own = 0 if own_keys is None else own_keys.shape[1]
    own = keys if own_keys is None else own_keys
    group_rows = q_heads // kv_heads * num_rows
    tile = tiles(dim, group_rows, queries.dtype)
    splits = min(_MOST_SPLITS, triton.cdiv(num_keys, _LEAST_SPLIT))
    split_keys = triton.cdiv(triton.cdiv(num_keys, splits), tile["BLOCK_KEYS"]) * tile["BLOCK_KEYS"]
    splits = triton.cdiv(num_keys, split_keys)
    lse = keys.new_empty(kv_heads, splits + (num_own > 0), group_rows, dtype=torch.float32)
    sizes = (num_rows, group_rows, num_keys, num_own)
    strides = (*queries.stride()[:2], *keys.stride()[:2], *own.stride()[:2])
    _split_lse[triton.cdiv(group_rows, tile["BLOCK_ROWS"]), lse.shape[1], kv_heads](
        queries, keys, own, lse, scale * _LOG2_E, *sizes, split_keys, *strides, DIM=dim, **tile
    )
    _score_keys[triton.cdiv(num_keys, tile["BLOCK_KEYS"] - kernel + 1), kv_heads](
        queries, keys, lse, scores, scale * _LOG2_E, *sizes, lse.shape[1], *strides[:4],
        SPLITS=triton.next_power_of_2(lse.shape[1]), MAXIMUM=reduce == "max",
        KERNEL=kernel, POOL_MAXIMUM=pooling == "max", DIM=dim, **tile,
    )  # fmt: skip
    return scores


def tiles(dim: int, group_rows: int, dtype: torch.dtype) -> dict[str, int | bool]:
    """Sizes of the tiles, and warps and stages, for a head size, the rows of a KV head, and a dtype."""
    width = max(16, triton.next_power_of_2(dim))
    if dtype == torch.float32:
        most, block_keys = 32, 32  # no tensor cores for exact fp32: a tile's products are unrolled into registers
    else:
        most, block_keys = 64, 128
    return {
        "BLOCK_ROWS": min(most, max(16, triton.next_power_of_2(group_rows))),
        "BLOCK_KEYS": block_keys,
        "BLOCK_DIM": width,
        "UPCAST": INTERPRETED and dtype == torch.bfloat16,
        "num_warps": 8 if width * dtype.itemsize >= 256 else 4,
        "num_stages": 2,
    }


@triton.jit
def _load_rows(
    queries, q_head, q_row, kv_head, start, num_rows, group_rows,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A block of a group's rows, head after head; which of them exist, and the number of each in its head."""
    slots = start + tl.arange(0, BLOCK_ROWS)
    valid = slots < group_rows
    head = kv_head * (group_rows // num_rows) + slots // num_rows
    rows = slots % num_rows
    channels = tl.arange(0, BLOCK_DIM)
    tile = tl.load(
        queries + (head.to(tl.int64) * q_head + rows.to(tl.int64) * q_row)[:, None] + channels[None, :],
        mask=valid[:, None] & (channels[None, :] < DIM),
        other=0.0,
    )
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile, valid, rows


@triton.jit
def _split_lse(
    queries, keys, own, lse, scale, num_rows, group_rows, num_keys, num_own, split_keys,
    q_head, q_row, k_head, k_row, o_head, o_row,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """lse of each row over a split, to the base 2; -inf where the row sees no key of the split. The last split is the
    own keys, if there are any."""
    start = tl.program_id(0) * BLOCK_ROWS
    split = tl.program_id(1)
    kv_head = tl.program_id(2).to(tl.int64)
    tile, valid, rows = _load_rows(
        queries, q_head, q_row, kv_head, start, num_rows, group_rows, DIM, BLOCK_ROWS, BLOCK_DIM, UPCAST
    )  # fmt: skip
    is_own = (num_own > 0) & (split == tl.num_programs(1) - 1)
    states = tl.where(is_own, own + kv_head * o_head, keys + kv_head * k_head)
    stride = tl.where(is_own, o_row, k_row)
    begin = tl.where(is_own, 0, split * split_keys)
    end = tl.where(is_own, num_own, tl.minimum(begin + split_keys, num_keys))
    # A row sees the document's keys, or own keys, up to its own; a row after the document sees all of the document.
    last = tl.where(is_own, num_own, num_keys)
    seen = tl.where((num_own == 0) | is_own, last - num_rows + rows + 1, last)
    best = tl.full([BLOCK_ROWS], -1e30, tl.float32)  # finite, for a row that sees nothing of the split
    mass = tl.zeros([BLOCK_ROWS], tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        index = first + tl.arange(0, BLOCK_KEYS)
        block = load_rows(states, stride, index, index < end, DIM, BLOCK_DIM, UPCAST)
        logits = scale * tl.dot(tile, tl.trans(block), input_precision="ieee")
        logits = tl.where((index < end)[None, :] & (index[None, :] < seen[:, None]), logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, axis=1))
        mass = mass * tl.exp2(best - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
        best = higher
    place = (kv_head * tl.num_programs(1) + split) * group_rows + start + tl.arange(0, BLOCK_ROWS)
    tl.store(lse + place, best + tl.log2(mass), mask=valid)


@triton.jit
def _combined(lse, kv_head, start, group_rows, num_splits, BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """lse of a block of rows over all splits; +inf for rows that do not exist, so that their weights are zero."""
    slots = start + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, SPLITS)
    place = (kv_head * num_splits + splits[:, None]) * group_rows + slots[None, :]
    exists = (splits < num_splits)[:, None] & (slots < group_rows)[None, :]
    parts = tl.load(lse + place, mask=exists, other=float("-inf"))
    best = tl.maximum(tl.max(parts, axis=0), -1e30)
    whole = best + tl.log2(tl.sum(tl.exp2(parts - best[None, :]), axis=0))
    return tl.where(slots < group_rows, whole, float("inf"))


@triton.jit
def _score_keys(
    queries, keys, lse, scores, scale, num_rows, group_rows, num_keys, num_own, num_splits,
    q_head, q_row, k_head, k_row,
    SPLITS: tl.constexpr, MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, POOL_MAXIMUM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of a block of keys without its margins, which only take part in pooling."""
    kv_head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * (BLOCK_KEYS - KERNEL + 1) - KERNEL // 2 + tl.arange(0, BLOCK_KEYS)
    inside = (index >= 0) & (index < num_keys)
    block = load_rows(keys + kv_head * k_head, k_row, index, inside, DIM, BLOCK_DIM, UPCAST)
    sums = tl.zeros([BLOCK_KEYS], tl.float32)
    largest = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(0, group_rows, BLOCK_ROWS):
        tile, _, rows = _load_rows(
            queries, q_head, q_row, kv_head, start, num_rows, group_rows, DIM, BLOCK_ROWS, BLOCK_DIM, UPCAST
        )  # fmt: skip
        shift = _combined(lse, kv_head, start, group_rows, num_splits, BLOCK_ROWS, SPLITS)
        exponents = scale * tl.dot(block, tl.trans(tile), input_precision="ieee") - shift[None, :]
        hidden = (num_own == 0) & (index[:, None] > (num_keys - num_rows + rows)[None, :])
        weights = tl.where(hidden, 0.0, tl.exp2(exponents))
        sums += tl.sum(weights, axis=1)
        if MAXIMUM:
            largest = tl.maximum(largest, tl.max(weights, axis=1))
    # On a GPU a maximum ignores NaN, and a sum does not.
    if MAXIMUM:  # noqa: SIM108  (Triton takes no conditional expression over blocks)
        reduced = tl.where(sums == sums, largest, sums)
    else:
        reduced = sums / group_rows
    pooled = reduced
    if KERNEL > 1:
        # Every key against every other: 16k comparisons, where the block has as many weights per 128 rows.
        here = tl.arange(0, BLOCK_KEYS)
        distance = here[:, None] - here[None, :]
        near = (distance <= KERNEL // 2) & (distance >= -(KERNEL // 2)) & inside[None, :]
        pooled = tl.sum(tl.where(near, reduced[None, :], 0.0), axis=1) / KERNEL
        if POOL_MAXIMUM:
            largest = tl.max(tl.where(near, reduced[None, :], float("-inf")), axis=1)
            pooled = tl.where(pooled == pooled, largest, pooled)
    place = tl.arange(0, BLOCK_KEYS)
    mine = (place >= KERNEL // 2) & (place < BLOCK_KEYS - KERNEL // 2) & inside
    tl.store(scores + kv_head * num_keys + index, pooled, mask=mine)
