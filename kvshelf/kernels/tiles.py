"""Shared parts of Triton kernels. Only they may import it, because it needs Triton."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run under Triton's interpreter. Its `tl.dot` is wrong for bf16, so kernels upcast bf16 to fp32."""


def warps(tile: int) -> int:
    """Warps for a tile of `tile` elements: 16 elements a thread, and at most 16 warps."""
    return min(16, max(1, tile // 512))


def rows_of_tile(width: int) -> int:
    """Rows of `width` elements that a program takes at a time where it does little with each: 4,096 elements."""
    return max(1, 4096 // width)


@triton.jit
def load_rows(states, stride, index, valid, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Rows `index` of states, zero where they are not valid and in the padding of the channels."""
    channels = tl.arange(0, BLOCK_DIM)
    tile = tl.load(
        states + index.to(tl.int64)[:, None] * stride + channels[None, :],
        mask=valid[:, None] & (channels[None, :] < DIM),
        other=0.0,
    )
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile
