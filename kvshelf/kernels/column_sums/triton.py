"""Column sums of causal attention in two launches, or one where log-sum-exps are given: see the package's docstring.

`_row_lse` computes the rows' log-sum-exps; a program takes a block of rows and all keys before them. A program of
`_sum_columns` owns a block of keys of one query head and walks the rows that see them, so that only it writes their
sums: no atomics, one order of addition, and no buffer but the log-sum-exps. It takes one query head and not the whole
group: it loads its keys once and streams the queries, which differ from head to head.

The limit: at D = 128 a weight takes 256 FLOPs and one exponential, about equally long on a GPU that multiplies bf16 at
800 TFLOP/s and has 16 exponentials a clock and multiprocessor; at D = 64 the exponentials are the limit. Each 128 x 128
tile reads its streamed side from the L2 cache at 128 FLOPs a byte, as attention kernels do. Tiles are the largest that
leave room to load the next tile while one is multiplied. Keys are the left operand, since sums over rows then stay
within a warp. Heavy programs (late rows, early keys) start first. Share of the limit: not measured.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import INTERPRETED, load_rows

_LOG2_E = math.log2(math.e)


def column_sums(
    queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0, every: int = 1, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (q_heads, num_rows, dim), (kv_heads, num_keys, _) = queries.shape, keys.shape
    total, local = queries.new_empty(2, q_heads, num_keys, dtype=torch.float32)
    if 0 in (q_heads, num_rows):
        return total.zero_(), local.zero_()
    early_rows = num_rows - local_rows
    sampled = triton.cdiv(early_rows, every)
    rows = (num_rows, sampled, (early_rows - 1) % every, early_rows, local_rows, every)
    heads = (q_heads, q_heads // kv_heads, num_keys)
    tile = tiles(dim, queries.dtype)
    lses = queries.new_empty(q_heads, num_rows, dtype=torch.float32) if lse is None else lse
    strides = (*queries.stride()[:2], *keys.stride()[:2], *lses.stride())
    if lse is None:
        grid = (triton.cdiv(sampled + local_rows, tile["BLOCK_ROWS"]) * q_heads,)
        _row_lse[grid](queries, keys, lses, scale * _LOG2_E, *heads, *rows, *strides, DIM=dim, **tile)
    grid = (triton.cdiv(num_keys, tile["BLOCK_KEYS"]) * q_heads,)
    _sum_columns[grid](queries, keys, lses, total, local, scale * _LOG2_E, *heads, *rows, *strides, DIM=dim, **tile)
    return total, local


def tiles(dim: int, dtype: torch.dtype) -> dict[str, int | bool]:
    """Sizes of the tiles, and warps and stages, for a head size and dtype."""
    width = max(16, triton.next_power_of_2(dim))
    if dtype == torch.float32:
        side, warps = 32, 4  # no tensor cores for exact fp32: a tile's products are unrolled into registers
    elif width > 128:
        side, warps = 64, 4
    else:
        side, warps = 128, 8
    return {
        "BLOCK_ROWS": side,
        "BLOCK_KEYS": side,
        "BLOCK_DIM": width,
        "UPCAST": INTERPRETED and dtype == torch.bfloat16,
        "num_warps": warps,
        "num_stages": 2,
    }


@triton.jit
def _add_keys(
    tile, best, mass, keys, k_row, start, seen, most_seen, scale,
    DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take a block of keys into the running maximum and mass of each row's softmax, to the base 2."""
    index = start + tl.arange(0, BLOCK_KEYS)
    block = load_rows(keys, k_row, index, index < most_seen, DIM, BLOCK_DIM, UPCAST)
    logits = scale * tl.dot(tile, tl.trans(block), input_precision="ieee")
    logits = tl.where(index[None, :] < seen[:, None], logits, float("-inf"))
    higher = tl.maximum(best, tl.max(logits, axis=1))
    mass = mass * tl.exp2(best - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
    return higher, mass


@triton.jit
def _row_lse(
    queries, keys, lse, scale, q_heads, group, num_keys,
    num_rows, num_sampled, first_sampled, first_local, num_local, every,
    q_head, q_row, k_head, k_row, lse_head, lse_row,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """lse of the sampled rows and then of the local rows, numbered consecutively as slots."""
    head = (tl.program_id(0) % q_heads).to(tl.int64)
    block = tl.num_programs(0) // q_heads - 1 - tl.program_id(0) // q_heads  # the last rows see most
    num_slots = num_sampled + num_local
    slots = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = slots < num_slots
    slots = tl.minimum(slots, num_slots - 1)
    rows = tl.where(slots < num_sampled, first_sampled + slots * every, first_local + slots - num_sampled)
    seen = num_keys - num_rows + rows + 1
    keys += head // group * k_head
    tile = load_rows(queries + head * q_head, q_row, rows, valid, DIM, BLOCK_DIM, UPCAST)
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_ROWS], tl.float32)
    most_seen = tl.max(seen)
    for start in range(0, most_seen, BLOCK_KEYS):
        best, mass = _add_keys(
            tile, best, mass, keys, k_row, start, seen, most_seen, scale, DIM, BLOCK_KEYS, BLOCK_DIM, UPCAST
        )  # fmt: skip
    tl.store(lse + head * lse_head + rows * lse_row, (best + tl.log2(mass)) * 0.6931471805599453, mask=valid)


@triton.jit
def _add_rows(
    sums, tile, index, queries, q_row, lse, lse_row, begin, end, first_row, every, hidden_rows, scale,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what rows `first_row + every * slot` give to a block of keys, for slots from `begin` to `end`. Row r sees key
    j if r + hidden_rows >= j; unless MASKED, every row sees every key."""
    for start in range(begin, end, BLOCK_ROWS):
        slots = start + tl.arange(0, BLOCK_ROWS)
        rows = first_row + slots * every
        block = load_rows(queries, q_row, rows, slots < end, DIM, BLOCK_DIM, UPCAST)
        shift = tl.load(lse + rows.to(tl.int64) * lse_row, mask=slots < end, other=float("inf")) * 1.4426950408889634
        exponents = scale * tl.dot(tile, tl.trans(block), input_precision="ieee") - shift[None, :]
        if MASKED:
            exponents = tl.where(rows[None, :] + hidden_rows >= index[:, None], exponents, float("-inf"))
        sums += tl.sum(tl.exp2(exponents), axis=1)
    return sums


@triton.jit
def _sum_columns(
    queries, keys, lse, total, local, scale, q_heads, group, num_keys,
    num_rows, num_sampled, first_sampled, first_local, num_local, every,
    q_head, q_row, k_head, k_row, lse_head, lse_row,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """total and local of a block of keys in one query head."""
    head = (tl.program_id(0) % q_heads).to(tl.int64)
    first_key = tl.program_id(0) // q_heads * BLOCK_KEYS  # the first keys are seen by most
    index = first_key + tl.arange(0, BLOCK_KEYS)
    tile = load_rows(keys + head // group * k_head, k_row, index, index < num_keys, DIM, BLOCK_DIM, UPCAST)
    queries += head * q_head
    lse += head * lse_head
    hidden_rows = num_keys - num_rows
    # Sampled rows: from `begin` on they see the block's first key, from `whole` on all of its keys.
    distance = first_key - hidden_rows - first_sampled
    begin = tl.minimum(tl.maximum(distance + every - 1, 0) // every, num_sampled)
    whole = tl.minimum(tl.maximum(distance + BLOCK_KEYS + every - 2, 0) // every, num_sampled)
    sums = tl.zeros([BLOCK_KEYS], tl.float32)
    sums = _add_rows(
        sums, tile, index, queries, q_row, lse, lse_row, begin, whole, first_sampled, every, hidden_rows, scale,
        DIM, BLOCK_ROWS, BLOCK_DIM, UPCAST, True,
    )  # fmt: skip
    sums = _add_rows(
        sums, tile, index, queries, q_row, lse, lse_row, whole, num_sampled, first_sampled, every, hidden_rows, scale,
        DIM, BLOCK_ROWS, BLOCK_DIM, UPCAST, False,
    )  # fmt: skip
    begin = tl.minimum(tl.maximum(first_key - hidden_rows - first_local, 0), num_local)
    local_sums = tl.zeros([BLOCK_KEYS], tl.float32)
    local_sums = _add_rows(
        local_sums, tile, index, queries, q_row, lse, lse_row, begin, num_local, first_local, 1, hidden_rows, scale,
        DIM, BLOCK_ROWS, BLOCK_DIM, UPCAST, True,
    )  # fmt: skip
    place = head * num_keys + index
    tl.store(total + place, sums * every + local_sums, mask=index < num_keys)
    tl.store(local + place, local_sums, mask=index < num_keys)
