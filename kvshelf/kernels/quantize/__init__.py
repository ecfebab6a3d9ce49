"""Asymmetric round-to-nearest quantization of `[R, C]` rows to 2, 3, 4 or 8 bits, packed into bytes (KIVI,
arXiv:2402.02750).

For the elements x of a group, all in fp32:

    zero = min x, rounded down to bf16
    step = (max x - zero) / (2^bits - 1), rounded up to bf16
    code = round((x - zero) / step), half to even, from 0 to 2^bits - 1;  0 if step is 0
    dequantized = zero + code * step

The directions of the roundings make the codes reach both ends of the group, so that |dequantized - x| <= step / 2 to
fp32 rounding although scales are kept in bf16; rounding them to nearest would cut off up to 2^-9 of the range. A
constant group has an error below its bf16 rounding step. x must be finite, and below 1.6e38 in magnitude, so that its
range is too. Every form on every device gives the same codes, scales and zeros, bit by bit.

A code takes `bits` bits of a row's bytes, the first channel in the lowest ones: with 3 bits some lie in two bytes. The
unused bits of a row's last byte are 0.
"tokens": a group is `group` consecutive rows of one channel, as for keys, whose outliers sit in fixed channels.
"channels": a group is `group` consecutive channels of one row, as for values. The last group may be short.
Bytes per element: bits / 8 + 4 / group stored, besides those of x or of the dequantized rows. FLOPs: about 8 per
element to quantize, 2 to dequantize: memory is the limit. Share of the limit on a GPU: not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.kernels.checks import FLOATING, require
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.groups import Axis, scales_shape


@dataclass(frozen=True, eq=False)
class Coded:
    """Codes `[R, ceil(num_channels * bits / 8)]` uint8, with the bf16 scales and zeros that turn them back into rows
    `[R, num_channels]` of `dtype`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    axis: Axis
    num_channels: int
    dtype: torch.dtype

    @property
    def finite(self) -> Tensor:
        """Whether every code stands for a finite number of `dtype`: bool, without dimensions, on the codes' device.

        If a group's range ends near the largest number of the dtype, rounding the step up can lead past that number.
        """
        bottom = self.zeros.float()
        top = bottom + self.scales.float() * (2**self.bits - 1)
        return torch.isfinite(bottom.to(self.dtype)).all() & torch.isfinite(top.to(self.dtype)).all()


def quantize(x: Tensor, bits: int, group: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, C]` of any strides in groups of `group` elements along `axis`.

    bits: 2, 3, 4 or 8. Returns codes `[R, ceil(C * bits / 8)]` uint8, scales and zeros bf16: `[ceil(R / group), C]`
    along "tokens", `[R, ceil(C / group)]` along "channels". Raises `InvalidTensor` for anything else.
    """
    require(
        x.dim() == 2 and x.shape[1] > 0 and x.dtype in FLOATING and bits in (2, 3, 4, 8) and group > 0,
        "quantize",
        f"x must be [R, C] float32, bfloat16 or float16, C and group from 1, bits 2, 3, 4 or 8 (given {bits} bits in "
        f"groups of {group} {axis})",
        x=x,
    )
    quantized: tuple[Tensor, Tensor, Tensor] = implementation("quantize", x.device).quantize(x, bits, group, axis)
    return quantized


def dequantize(rows: Coded, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows start..stop of the input of `quantize`, as `[stop - start, num_channels]` in their dtype, contiguous.

    start and stop need not fall on a group's edge; stop None is the last row. Each value is rounded once, from fp32.
    Raises `InvalidTensor` for tensors unlike those that `quantize` returns.
    """
    codes, scales, zeros = rows.codes, rows.scales, rows.zeros
    row_bytes = -(-rows.num_channels * rows.bits // 8)
    shape = scales_shape(rows.axis, max(rows.group, 1), codes.shape[:1], rows.num_channels)
    require(
        rows.bits in (2, 3, 4, 8)
        and rows.group > 0
        and rows.dtype in FLOATING
        and codes.dtype == torch.uint8
        and scales.dtype == zeros.dtype == torch.bfloat16
        and codes.device == scales.device == zeros.device
        and codes.dim() == 2
        and codes.shape[1] == row_bytes
        and scales.shape == zeros.shape == shape
        and all(tensor.stride(1) == 1 or tensor.shape[1] <= 1 for tensor in (codes, scales, zeros)),
        "dequantize",
        f"for {rows.num_channels} channels of {rows.bits} bits in groups of {rows.group} {rows.axis}, into "
        f"{rows.dtype}, codes must be [R, {row_bytes}] uint8, scales and zeros {list(shape)} bfloat16, all on one "
        "device and with a contiguous last dimension",
        codes=codes,
        scales=scales,
        zeros=zeros,
    )
    start, stop, _ = slice(start, stop).indices(codes.shape[0])
    plain: Tensor = implementation("quantize", codes.device).dequantize(rows, start, max(start, stop))
    return plain
