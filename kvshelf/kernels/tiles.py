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
def image_of(score):
    """int32 images of fp32 scores, which sort as the scores do: 2^31 - 1 for a score that is not finite. Both zeros
    give 0."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    image = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude >= 0x7F800000, 0x7FFFFFFF, image)


@triton.jit
def least_kept(load, scores, others, count, stride, other_stride, target, BLOCK: tl.constexpr):
    """The greatest image such that the elements from it on weigh at least `target` together. It grows by two bits at a
    time: by the most steps, 0 to 3, that keep this. load: `load(scores, others, elements, count, stride, other_stride)`
    gives images and int32 weights of a block of elements."""
    lanes = tl.arange(0, BLOCK)
    least = tl.full((), -0x7FFFFFFF - 1, tl.int32)
    for digit in range(16):
        step = tl.full((), 1, tl.int32) << (30 - 2 * digit)
        one = tl.zeros((BLOCK,), tl.int32)
        two = tl.zeros((BLOCK,), tl.int32)
        three = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, count, BLOCK):
            image, weight = load(scores, others, start + lanes, count, stride, other_stride)
            one += tl.where(image >= least + step, weight, 0)
            two += tl.where(image >= least + step + step, weight, 0)
            three += tl.where(image >= least + step + step + step, weight, 0)
        steps = (tl.sum(one, axis=0) >= target).to(tl.int32)
        steps += (tl.sum(two, axis=0) >= target).to(tl.int32)
        steps += (tl.sum(three, axis=0) >= target).to(tl.int32)
        least += steps * step
    return least


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
