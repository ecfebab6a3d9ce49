"""The cosines in two launches: the sum of a block's directions by each program, and then the cosines of the block.

What the blocks found is added up between them, so that the result does not depend on the order of programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.mean_cosines import eager

_TILE = 4096
"""Elements of a program: 16 for each thread of 8 warps."""


def mean_cosines(states: Tensor) -> Tensor:
    """See `kvshelf.kernels.mean_cosines`."""
    heads, num_rows, dim = states.shape
    block_dim = triton.next_power_of_2(dim)
    if block_dim > _TILE:
        return eager.mean_cosines(states)
    block = _TILE // block_dim
    blocks = triton.cdiv(num_rows, block)
    inverses = torch.empty(heads, num_rows, dtype=torch.float32, device=states.device)
    cosines = torch.empty_like(inverses)
    sums = torch.empty(heads, blocks, dim, dtype=torch.float32, device=states.device)
    rows = (states, *states.stride()[:2], num_rows)
    sizes = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK": block, "num_warps": 8}
    _add_directions[(blocks, heads)](*rows, inverses, sums, **sizes)
    axes = F.normalize(sums.sum(dim=1), dim=-1)
    _cosines[(blocks, heads)](*rows, inverses, axes, cosines, **sizes)
    return cosines


@triton.jit
def _tile(states, head_stride, stride, num_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """A program's rows in fp32, and which they are."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, BLOCK_DIM)
    inside = (rows < num_rows)[:, None] & (channels < DIM)[None, :]
    states += tl.program_id(1).to(tl.int64) * head_stride
    tile = tl.load(states + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    return tile, rows, channels


@triton.jit
def _add_directions(
    states, head_stride, stride, num_rows, inverses, sums,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, rows, channels = _tile(states, head_stride, stride, num_rows, DIM, BLOCK_DIM, BLOCK)
    norms = tl.sqrt(tl.sum(tile * tile, axis=1))
    inverse = 1 / tl.where(norms < 1e-12, 1e-12, norms)  # not maximum, which need not keep NaN
    head = tl.program_id(1).to(tl.int64)
    tl.store(inverses + head * num_rows + rows, inverse, mask=rows < num_rows)
    place = (head * tl.num_programs(0) + tl.program_id(0)) * DIM
    tl.store(sums + place + channels, tl.sum(tile * inverse[:, None], axis=0), mask=channels < DIM)


@triton.jit
def _cosines(
    states, head_stride, stride, num_rows, inverses, axes, cosines,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, rows, channels = _tile(states, head_stride, stride, num_rows, DIM, BLOCK_DIM, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    axis = tl.load(axes + head * DIM + channels, mask=channels < DIM, other=0.0)
    inverse = tl.load(inverses + head * num_rows + rows, mask=rows < num_rows, other=0.0)
    tl.store(cosines + head * num_rows + rows, tl.sum(tile * axis[None, :], axis=1) * inverse, mask=rows < num_rows)
