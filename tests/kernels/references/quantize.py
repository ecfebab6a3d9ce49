"""The naive form: one group at a time, in fp64, codes packed one by one."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from kvshelf.kernels.groups import Axis


def quantize(x: Tensor, bits: int, group: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """See `kvshelf.kernels.quantize.quantize`."""
    if axis == "channels":
        codes, scales, zeros = _quantize(x, bits, group)
        return pack(codes, bits), scales, zeros
    codes, scales, zeros = _quantize(x.T, bits, group)
    return pack(codes.T, bits), scales.T.contiguous(), zeros.T.contiguous()


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    axis: Axis,
    num_channels: int,
    dtype: torch.dtype = torch.float64,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """See `kvshelf.kernels.quantize.dequantize`; fp64 unless another `dtype` is asked for."""
    rows = torch.zeros(codes.shape[0], num_channels, dtype=torch.float64)
    for r in range(codes.shape[0]):
        for c in range(num_channels):
            at = (r // group, c) if axis == "tokens" else (r, c // group)
            rows[r, c] = float(zeros[at]) + unpacked(codes, bits, r, c) * float(scales[at])
    return rows[start:stop] if dtype == torch.float64 else rows[start:stop].float().to(dtype)


def _quantize(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups along the last dimension of `[R, C]`; codes one per element."""
    levels = 2**bits - 1
    num_rows, length = x.shape
    codes = torch.zeros(num_rows, length, dtype=torch.int64)
    scales = torch.zeros(num_rows, math.ceil(length / group), dtype=torch.bfloat16)
    zeros = torch.zeros_like(scales)
    for r in range(num_rows):
        for g in range(scales.shape[1]):
            elements = x[r, g * group : (g + 1) * group].double()
            zero = floor_to_bf16(float(elements.min()))
            step = -floor_to_bf16(-(float(elements.max()) - zero) / levels)
            if step > 0:
                codes[r, g * group : (g + 1) * group] = ((elements - zero) / step).round().clamp(0, levels).long()
            scales[r, g], zeros[r, g] = step, zero
    return codes, scales, zeros


def floor_to_bf16(x: float) -> float:
    """The largest bf16 that is not above x: the upper half of x's fp32 bits, one further from 0 if that is above x."""
    (word,) = struct.unpack("<I", struct.pack("<f", x))
    (cut,) = struct.unpack("<f", struct.pack("<I", word & 0xFFFF0000))
    if cut <= x:
        return float(cut)
    (below,) = struct.unpack("<f", struct.pack("<I", (word & 0xFFFF0000) + 0x10000))
    return float(below)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[R, C]`, code c of a row in the bits from c * bits upwards of the row read as one little-endian number."""
    num_rows, length = codes.shape
    row_bytes = math.ceil(length * bits / 8)
    packed = torch.zeros(num_rows, row_bytes, dtype=torch.uint8)
    for r in range(num_rows):
        number = sum(int(code) << (c * bits) for c, code in enumerate(codes[r]))
        packed[r] = torch.tensor(list(number.to_bytes(row_bytes, "little")), dtype=torch.uint8)
    return packed


def unpacked(packed: Tensor, bits: int, row: int, channel: int) -> int:
    """One code of a packed row."""
    number = int.from_bytes(bytes(packed[row].tolist()), "little")
    return int((number >> (channel * bits)) & (2**bits - 1))
