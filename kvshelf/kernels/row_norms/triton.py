"""Norms in one launch: a program takes a block of rows of one head, `_TILE` elements at a time.

A row of up to `_TILE` channels is one tile's; of longer ones the squares are added up part by part. 16 elements a
thread of 8 warps have 8 KiB of bf16 a program in flight, and several programs share a multiprocessor, so the memory
should be the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Elements of a tile."""


def row_norms(states: Tensor) -> Tensor:
    """See `kvshelf.kernels.row_norms`."""
    heads, num_rows, dim = states.shape
    norms = torch.empty(states.shape[:2], dtype=torch.float32, device=states.device)
    block_dim = min(_TILE, triton.next_power_of_2(dim))
    block = _TILE // block_dim
    _row_norms[(triton.cdiv(num_rows, block), heads)](
        states, *states.stride()[:2], norms, num_rows, DIM=dim, BLOCK_DIM=block_dim, BLOCK=block, num_warps=8
    )
    return norms


@triton.jit
def _row_norms(
    states, head_stride, stride, norms, num_rows,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    states += head * head_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, DIM, BLOCK_DIM):
        channels = first + tl.arange(0, BLOCK_DIM)
        inside = (rows < num_rows)[:, None] & (channels < DIM)[None, :]
        part = tl.load(states + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(part * part, axis=1)
    tl.store(norms + head * num_rows + rows, tl.sqrt(squares), mask=rows < num_rows)
