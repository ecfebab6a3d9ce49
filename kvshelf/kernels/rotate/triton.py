"""The rotation in one launch: a number is read as it lies, its partner's from the L1 cache, and each is written once.
Programs of the same rows follow each other, so that heads share the tables in the L2 cache. Torch's operations move 5
times the bytes in bf16, 3.2 times in fp32. Share of the limit: not measured."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import load_rows, rows_of_tile, warps


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    heads, num_rows, dim = states.shape
    out = torch.empty(states.shape, dtype=torch.float32, device=states.device)
    width = triton.next_power_of_2(dim)
    rows = rows_of_tile(width)
    _rotate[(heads, triton.cdiv(num_rows, rows))](
        states, cos, sin, partners, out, num_rows, *states.stride()[:2], *cos.stride(), *sin.stride(),
        partners.stride(0), ROWS=rows, DIM=dim, BLOCK_DIM=width, num_warps=warps(rows * width),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    states, cos, sin, partners, out, num_rows,
    head_stride, stride, cos_row, cos_stride, sin_row, sin_stride, partner_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    states += head * head_stride
    tile = load_rows(states, stride, index, index < num_rows, DIM, BLOCK_DIM, True)
    channels = tl.arange(0, BLOCK_DIM)
    inside = (index < num_rows)[:, None] & (channels < DIM)[None, :]
    rows = index.to(tl.int64)[:, None]
    partner = tl.load(partners + channels * partner_stride, mask=channels < DIM, other=0)
    exists = inside & ((partner >= 0) & (partner < DIM))[None, :]  # nothing beyond the states is read
    other = tl.load(states + rows * stride + partner[None, :], mask=exists, other=0.0).to(tl.float32)
    cosines = tl.load(cos + rows * cos_row + channels[None, :] * cos_stride, mask=inside, other=0.0)
    sines = tl.load(sin + rows * sin_row + channels[None, :] * sin_stride, mask=inside, other=0.0)
    place = (head * num_rows + rows) * DIM + channels[None, :]
    tl.store(out + place, tile * cosines + other * sines, mask=inside)
