"""The cosines in two passes over the rows as they lie: sums of the directions of each block of rows, and, once torch
has added these up, a product with each row. In bf16 torch's operations move 4.5 times the bytes, because they make an
fp32 copy first and read it three times. Blocks are added in one order: no atomics. Share of the limit: not measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import load_rows, rows_of_tile, warps

_BLOCK_ROWS = 256
"""Rows of a block: 256 programs at 8k tokens and 8 heads, whose sums are a 64th of the bytes of bf16 rows."""


def mean_cosines(states: Tensor) -> Tensor:
    heads, num_rows, dim = states.shape
    width = triton.next_power_of_2(dim)
    rows = min(_BLOCK_ROWS, rows_of_tile(width))  # a tile lies within its block
    tile = {"ROWS": rows, "DIM": dim, "BLOCK_DIM": width, "num_warps": warps(rows * width)}
    strides, blocks = (num_rows, *states.stride()[:2]), triton.cdiv(num_rows, _BLOCK_ROWS)
    sums = torch.empty(heads, blocks, dim, dtype=torch.float32, device=states.device)
    _sum_directions[(blocks, heads)](states, sums, *strides, BLOCK=_BLOCK_ROWS, **tile)
    axes = F.normalize(sums.sum(dim=1), dim=-1)
    cosines = torch.empty(heads, num_rows, dtype=torch.float32, device=states.device)
    _cosines[(triton.cdiv(num_rows, rows), heads)](states, axes, cosines, *strides, **tile)
    return cosines


@triton.jit
def _directed(states, stride, index, num_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Rows, and the inverses of their norms. What is not a number stays none."""
    tile = load_rows(states, stride, index, index < num_rows, DIM, BLOCK_DIM, True)
    norms = tl.sqrt_rn(tl.sum(tile * tile, axis=1))
    return tile, 1.0 / tl.where(norms < 1e-12, 1e-12, norms)


@triton.jit
def _sum_directions(
    states, sums, num_rows, head_stride, stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    for start in range(0, BLOCK, ROWS):
        index = block * BLOCK + start + tl.arange(0, ROWS)
        tile, inverses = _directed(states + head * head_stride, stride, index, num_rows, DIM, BLOCK_DIM)
        total += tl.sum(tile * inverses[:, None], axis=0)
    channels = tl.arange(0, BLOCK_DIM)
    tl.store(sums + (head * tl.num_programs(0) + block) * DIM + channels, total, mask=channels < DIM)


@triton.jit
def _cosines(
    states, axes, cosines, num_rows, head_stride, stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile, inverses = _directed(states + head * head_stride, stride, index, num_rows, DIM, BLOCK_DIM)
    channels = tl.arange(0, BLOCK_DIM)
    axis = tl.load(axes + head * DIM + channels, mask=channels < DIM, other=0.0)
    products = tl.sum(tile * axis[None, :], axis=1)
    tl.store(cosines + head * num_rows + index, products * inverses, mask=index < num_rows)
