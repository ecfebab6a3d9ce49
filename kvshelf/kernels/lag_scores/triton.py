"""Equations 7 to 11 in one launch: a program per head and partition, keys and then values.

Most partitions are read twice: by their own program, and as the scale by the program of the partition before. The two
are neighbours in the grid and so run at the same time: the second read comes from the L2 cache. The alternative, a
program that walks along a head and keeps the next partition, reads each byte once, but 8 heads give only 8 programs for
a card's 132 multiprocessors.

A tile holds all tokens of a partition and some of its channels, because minimum and maximum run over the tokens, and
the deviation over channels can be put together from parts (Chan, Golub and LeVeque, 1979): no second pass for long
partitions, and the softmax is over what is in registers. A tile of 4096 elements is 16 a thread of 8 warps, 64 to 80
registers in all, and both partitions' tiles are 16 KiB of bf16: three programs a multiprocessor keep several times as
many bytes in flight as the memory's latency requires. So bandwidth should be the limit. Twice the tile takes 168
registers for 4 warps and gains nothing. From 1000 tokens a partition registers may spill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import warps

_TILE = 4096
"""Elements of a tile."""

_FEWEST_CHANNELS = 8
"""16 bytes of bf16 a token. With fewer channels a tile, long partitions would read each 32-byte sector many times."""


def lag_scores(keys: Tensor, values: Tensor, lag: int, own_scale: bool, value_weight: float) -> Tensor:
    heads, tokens, _ = keys.shape
    scores = keys.new_empty(heads, tokens // lag - 1, lag, dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    block_lag = triton.next_power_of_2(lag)
    channels = max(_FEWEST_CHANNELS, _TILE // block_lag)
    _lag_scores[scores.shape[1], heads](
        keys, *keys.stride()[:2], values, *values.stride()[:2], value_weight, scores,
        LAG=lag, BLOCK_LAG=block_lag, OWN_SCALE=own_scale,
        DIM=keys.shape[2], BLOCK_DIM=min(channels, triton.next_power_of_2(keys.shape[2])),
        VALUE_DIM=values.shape[2], BLOCK_VALUE_DIM=min(channels, triton.next_power_of_2(values.shape[2])),
        num_warps=warps(block_lag * channels),
    )  # fmt: skip
    return scores


@triton.jit
def _lag_scores(
    keys, key_head_stride, key_stride,
    values, value_head_stride, value_stride, value_weight,
    scores,
    LAG: tl.constexpr, BLOCK_LAG: tl.constexpr, OWN_SCALE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
):  # fmt: skip
    partition = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    key_at = keys + head * key_head_stride + partition * LAG * key_stride
    value_at = values + head * value_head_stride + partition * LAG * value_stride
    score = _unusual(key_at, key_stride, LAG, BLOCK_LAG, OWN_SCALE, DIM, BLOCK_DIM)
    score += value_weight * _unusual(value_at, value_stride, LAG, BLOCK_LAG, OWN_SCALE, VALUE_DIM, BLOCK_VALUE_DIM)
    tokens = tl.arange(0, BLOCK_LAG)
    first = (head * tl.num_programs(0) + partition) * LAG
    tl.store(scores + first + tokens, score, mask=tokens < LAG)


@triton.jit
def _unusual(
    states, stride,
    LAG: tl.constexpr, BLOCK_LAG: tl.constexpr, OWN_SCALE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Equations 7 to 10 of the partition that starts at `states`, `[BLOCK_LAG]` fp32."""
    tokens = tl.arange(0, BLOCK_LAG)
    mean = tl.zeros([BLOCK_LAG], tl.float32)
    squares = tl.zeros([BLOCK_LAG], tl.float32)  # of the differences from the mean
    for first in range(0, DIM, BLOCK_DIM):
        channels = first + tl.arange(0, BLOCK_DIM)
        inside = (tokens < LAG)[:, None] & (channels < DIM)[None, :]
        rows = tokens[:, None].to(tl.int64)
        tile = tl.load(states + rows * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        if OWN_SCALE:
            scale = tile
        else:
            scale = tl.load(states + (rows + LAG) * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        normalized = tl.where(inside, _normalized(tile, scale, inside), 0.0)
        count = tl.minimum(BLOCK_DIM, DIM - first)
        part_mean = tl.sum(normalized, axis=1) / count
        centered = tl.where(inside, normalized - part_mean[:, None], 0.0)
        difference = part_mean - mean
        share = count / (first + count)
        mean += difference * share
        squares += tl.sum(centered * centered, axis=1) + difference * difference * (first * share)
    deviation = tl.where(tokens < LAG, tl.sqrt(squares / (DIM - 1)), float("-inf"))
    weight = tl.exp(deviation - tl.max(deviation, axis=0))
    return weight / tl.sum(weight, axis=0)


@triton.jit
def _normalized(tile, scale, inside):
    """Equations 7 to 9. Minima and maxima ignore NaN, so a channel with a NaN is marked separately."""
    number = scale == scale
    low = tl.min(tl.where(inside & number, scale, float("inf")), axis=0)
    high = tl.max(tl.where(inside & number, scale, float("-inf")), axis=0)
    spread = tl.where(high > low, high - low, 1e-6)
    spread = tl.where(tl.min(number.to(tl.int32), axis=0) == 1, spread, float("nan"))
    return (tile - low[None, :]) / spread[None, :]
