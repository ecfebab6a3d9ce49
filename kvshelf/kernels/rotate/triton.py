"""The rotation in one launch: a program takes a block of rows of one head; the partners of its channels are read again
from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Elements of a program: 16 for each thread of 4 warps."""


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    """See `kvshelf.kernels.rotate`."""
    heads, num_rows, dim = states.shape
    out = torch.empty(states.shape, dtype=torch.float32, device=states.device)
    block_dim = min(_TILE, triton.next_power_of_2(dim))
    block = _TILE // block_dim
    grid = (triton.cdiv(num_rows, block), heads, triton.cdiv(dim, block_dim))
    _rotate[grid](
        states, *states.stride()[:2], cos.contiguous(), sin.contiguous(), partners.contiguous(), out, num_rows,
        DIM=dim, BLOCK_DIM=block_dim, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    states, head_stride, stride, cos, sin, partners, out, num_rows,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = (rows < num_rows)[:, None] & (channels < DIM)[None, :]
    others = tl.load(partners + channels, mask=channels < DIM, other=0)
    own = states + head * head_stride + rows[:, None] * stride
    table = rows[:, None] * DIM + channels[None, :]
    x = tl.load(own + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(own + others[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = x * tl.load(cos + table, mask=inside, other=0.0) + y * tl.load(sin + table, mask=inside, other=0.0)
    tl.store(out + head * num_rows * DIM + table, turned, mask=inside)
