"""Quantization and its undoing in one launch each: see `kvshelf.kernels.quantize`.

To quantize, a program holds whole groups in registers, so that x is read once: `_quantize_tokens` the rows of one group
in some channels, `_quantize_channels` some rows' groups, each a row of its tile. To dequantize, a program makes a tile
of rows from their bytes; it reads a byte once, and a scale again for every element, from the L1 cache. All three should
be bound by memory: there are fewer than 12 operations an element, and one IEEE-rounded division, without which the
codes would differ from the CPU's. Tiles are `_TILE` elements, 16 a thread: a group of 32 rows in 64 channels, read in
whole lines of bf16. Twice as many a thread spill. Where groups are long, a tile has fewer channels. Share of the limit:
not measured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.groups import Axis
from kvshelf.kernels.quantize import Coded, eager
from kvshelf.kernels.tiles import warps

_TILE = 2048
_FEWEST_CHANNELS = 16
"""Channels of a tile: a sector of 32 bytes in bf16."""


def quantize(x: Tensor, bits: int, group: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    if bits == 3 or (axis == "channels" and group * bits % 8):  # a code or a byte would be of two programs
        return eager.quantize(x, bits, group, axis)
    num_rows, num_channels = x.shape
    codes, scales, zeros = eager.empty(x, bits, group, axis)
    tile = triton.next_power_of_2(group)
    if num_rows and axis == "tokens":
        channels = min(triton.next_power_of_2(num_channels), max(_FEWEST_CHANNELS, _TILE // tile))
        channels = max(channels, 8 // bits)
        _quantize_tokens[scales.shape[0], triton.cdiv(num_channels, channels)](
            x, codes, scales, zeros, num_rows, num_channels, *x.stride(), codes.shape[1], group,
            BITS=bits, ROWS=tile, CHANNELS=channels, num_warps=warps(tile * channels),
        )  # fmt: skip
    elif num_rows:
        groups = max(1, _TILE // tile)
        _quantize_channels[(triton.cdiv(scales.numel(), groups),)](
            x, codes, scales, zeros, scales.numel(), scales.shape[1], num_channels, *x.stride(), codes.shape[1],
            group, BITS=bits, GROUPS=groups, CHANNELS=tile, num_warps=warps(groups * tile),
        )  # fmt: skip
    return codes, scales, zeros


def dequantize(rows: Coded, start: int, stop: int) -> Tensor:
    if rows.bits == 3:
        return eager.dequantize(rows, start, stop)
    codes, scales, zeros = rows.codes, rows.scales, rows.zeros
    out = codes.new_empty(stop - start, rows.num_channels, dtype=rows.dtype)
    if out.numel():
        row_bytes = triton.next_power_of_2(codes.shape[1])
        at_once = max(1, _TILE * rows.bits // (8 * row_bytes))
        by_group = (rows.group, 1) if rows.axis == "tokens" else (1, rows.group)
        _dequantize[(triton.cdiv(stop - start, at_once),)](
            codes, scales, zeros, out, start, stop, rows.num_channels,
            codes.stride(0), scales.stride(0), zeros.stride(0), *by_group,
            BITS=rows.bits, ROWS=at_once, BYTES=row_bytes, num_warps=warps(at_once * row_bytes * 8 // rows.bits),
        )  # fmt: skip
    return out


@triton.jit
def _rounded_to_bf16(x, up: tl.constexpr):
    """fp32 rounded up or down to bf16, and the same number in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    outwards = bits >= 0 if up else bits < 0
    upper = (bits + tl.where(outwards, 0xFFFF, 0)) >> 16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True), (upper << 16).to(tl.float32, bitcast=True)


@triton.jit
def _coded(x, low, high, BITS: tl.constexpr):
    """Codes int32 of x between `low` and `high`, which broadcast; scales and zeros bf16."""
    levels: tl.constexpr = (1 << BITS) - 1
    zeros, zero = _rounded_to_bf16(low, False)
    scales, step = _rounded_to_bf16(tl.div_rn(high - zero, tl.full(high.shape, levels, tl.float32)), True)
    step = tl.where(step == 0, 1.0, step)
    quotient = tl.div_rn(x - zero, tl.broadcast_to(step, x.shape))
    # Adding 1.5 * 2^23 leaves the nearest integer, of two the even one, in the lowest bits.
    codes = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.minimum(tl.maximum(codes, 0), levels), scales, zeros


@triton.jit
def _bytes_of(codes, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Codes `[ROWS, CHANNELS]` of neighbouring channels to bytes `[ROWS, CHANNELS * BITS / 8]`."""
    per_byte: tl.constexpr = 8 // BITS
    shifts = BITS * tl.arange(0, per_byte)[None, None, :]
    return tl.sum(codes.reshape(ROWS, CHANNELS // per_byte, per_byte) << shifts, axis=2).to(tl.uint8)


@triton.jit
def _quantize_tokens(
    x, codes, scales, zeros, num_rows, num_channels, row_stride, stride, row_bytes, group,
    BITS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROWS)
    row = index * group + place
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows_inside, channels_inside = (place < group) & (row < num_rows), channel < num_channels
    # Places past the end of a group read its first row, which changes no minimum or maximum.
    read = tl.where(rows_inside, row, index * group)
    at = x + read[:, None] * row_stride + channel.to(tl.int64)[None, :] * stride
    states = tl.load(at, mask=channels_inside[None, :], other=0.0).to(tl.float32)
    low, high = tl.min(states, axis=0), tl.max(states, axis=0)
    code, scale, zero = _coded(states, low[None, :], high[None, :], BITS)
    at = index * num_channels + channel[None, :]
    tl.store(scales + at, scale, mask=channels_inside[None, :])
    tl.store(zeros + at, zero, mask=channels_inside[None, :])
    code = tl.where(channels_inside[None, :], code, 0)
    width: tl.constexpr = CHANNELS * BITS // 8
    byte = tl.program_id(1) * width + tl.arange(0, width)
    at = codes + row[:, None] * row_bytes + byte[None, :]
    tl.store(at, _bytes_of(code, ROWS, CHANNELS, BITS), mask=rows_inside[:, None] & (byte < row_bytes)[None, :])


@triton.jit
def _quantize_channels(
    x, codes, scales, zeros, total, num_groups, num_channels, row_stride, stride, row_bytes, group,
    BITS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)  # number of a group, counted over all rows
    inside = index < total
    row, first = index // num_groups, index % num_groups * group
    place = tl.arange(0, CHANNELS)
    channel = first[:, None] + place[None, :]
    channels_inside = (place < group)[None, :] & (channel < num_channels)
    # Places past the end of a group read its first channel, which changes no minimum or maximum.
    read = tl.where(channels_inside, channel, first[:, None])
    states = tl.load(x + row[:, None] * row_stride + read * stride, mask=inside[:, None], other=0.0).to(tl.float32)
    low, high = tl.min(states, axis=1), tl.max(states, axis=1)
    code, scale, zero = _coded(states, low[:, None], high[:, None], BITS)
    tl.store(scales + index[:, None], scale, mask=inside[:, None])
    tl.store(zeros + index[:, None], zero, mask=inside[:, None])
    code = tl.where(channels_inside, code, 0)
    width: tl.constexpr = CHANNELS * BITS // 8
    byte = tl.arange(0, width)
    at = first[:, None] * BITS // 8 + byte[None, :]
    bytes_inside = inside[:, None] & (byte < group * BITS // 8)[None, :] & (at < row_bytes)
    tl.store(codes + row[:, None] * row_bytes + at, _bytes_of(code, GROUPS, CHANNELS, BITS), mask=bytes_inside)


@triton.jit
def _dequantize(
    codes, scales, zeros, out, start, stop, num_channels, codes_stride, scales_stride, zeros_stride,
    group_rows, group_channels, BITS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    per_byte: tl.constexpr = 8 // BITS
    row = start + tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    byte = tl.arange(0, BYTES)
    inside = (row < stop)[:, None] & (byte < tl.cdiv(num_channels, per_byte))[None, :]
    packed = tl.load(codes + row[:, None] * codes_stride + byte[None, :], mask=inside, other=0).to(tl.int32)
    shifts = BITS * tl.arange(0, per_byte)[None, None, :]
    code = ((packed[:, :, None] >> shifts) & ((1 << BITS) - 1)).reshape(ROWS, BYTES * per_byte)
    channel = tl.arange(0, BYTES * per_byte)
    inside = (row < stop)[:, None] & (channel < num_channels)[None, :]
    group_row, group_channel = (row // group_rows)[:, None], (channel // group_channels)[None, :]
    scale = tl.load(scales + group_row * scales_stride + group_channel, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros + group_row * zeros_stride + group_channel, mask=inside, other=0.0).to(tl.float32)
    at = out + (row - start)[:, None] * num_channels + channel[None, :]
    tl.store(at, (zero + code.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)
