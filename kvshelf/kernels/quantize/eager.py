"""Asymmetric round-to-nearest quantization of `[R, C]` rows, packed into bytes (KIVI, arXiv:2402.02750).

For the elements x of a group, all in fp32:

    zero = min x, rounded down to bf16
    step = (max x - zero) / (2^bits - 1), rounded up to bf16
    code = round((x - zero) / step), from 0 to 2^bits - 1;  0 if step is 0
    dequantized = zero + code * step

The directions of the roundings make the codes reach both ends of the group, so that |dequantized - x| <= step / 2 to
fp32 rounding although scales are kept in bf16; rounding them to nearest would cut off up to 2^-9 of the range. A
constant group has an error below its bf16 rounding step. x must be finite, and below 1.6e38 in
magnitude, so that its range is too.

A code takes `bits` bits of a byte, the first channel in the lowest ones; the unused bits of a row's last byte are 0.
"tokens": a group is `group` consecutive rows of one channel, as for keys, whose outliers sit in fixed channels.
"channels": a group is `group` consecutive channels of one row, as for values. The last group may be short.
Bytes per element: bits / 8 + 4 / group. FLOPs: about 6 per element to quantize, 2 to dequantize: memory is the limit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def quantize_tokens(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, C]` per channel, in groups of `group` consecutive rows.

    bits: 2, 4 or 8. Returns codes `[R, ceil(C * bits / 8)]` uint8, scales and zeros `[ceil(R / group), C]` bf16.
    """
    num_rows, num_channels = x.shape
    # Repeating the last row completes the last group without changing its minimum or maximum.
    padded = torch.cat([x, x[-1:].expand(-num_rows % group, -1)])
    codes, scales, zeros = _quantize(padded.view(-1, group, num_channels), 1, bits)
    return _pack(codes.view(-1, num_channels)[:num_rows], bits), scales, zeros


def quantize_channels(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, C]` per row, in groups of `group` consecutive channels.

    bits: 2, 4 or 8. Returns codes `[R, ceil(C * bits / 8)]` uint8, scales and zeros `[R, ceil(C / group)]` bf16.
    """
    num_rows, num_channels = x.shape
    num_groups = -(-num_channels // group)
    padded = torch.cat([x, x[:, -1:].expand(-1, -num_channels % group)], dim=1)
    codes, scales, zeros = _quantize(padded.view(num_rows, num_groups, group), 2, bits)
    return _pack(codes.view(num_rows, num_groups * group)[:, :num_channels], bits), scales, zeros


def dequantize_tokens(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    num_channels: int,
    dtype: torch.dtype,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows start..stop of what `quantize_tokens` took, `[stop - start, num_channels]` in `dtype`.

    start and stop need not fall on a group's edge; stop None is the last row. Rounded once, from the fp32 value.
    """
    rows = torch.arange(codes.shape[0], device=codes.device)[start:stop] // group
    return _affine(
        _unpack(codes[start:stop], bits, num_channels),
        scales.index_select(0, rows),
        zeros.index_select(0, rows),
        dtype,
    )


def dequantize_channels(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    num_channels: int,
    dtype: torch.dtype,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Rows start..stop of what `quantize_channels` took, `[stop - start, num_channels]` in `dtype`.

    stop None is the last row. Rounded once, from the fp32 value.
    """
    # Repeated to full width: a broadcast over the short innermost dimension takes five times as long.
    return _affine(
        _unpack(codes[start:stop], bits, num_channels),
        scales[start:stop].repeat_interleave(group, dim=1)[:, :num_channels],
        zeros[start:stop].repeat_interleave(group, dim=1)[:, :num_channels],
        dtype,
    )


def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group along `dim` of `[A, B, C]` per index of the others. Codes in the shape of x, scales and zeros without
    `dim`."""
    levels = (1 << bits) - 1
    x = x.float()
    # Minimum and maximum apart: torch.aminmax takes ten times as long.
    zeros = _round_to_bf16(x.amin(dim, keepdim=True), -torch.inf)
    scales = _round_to_bf16((x.amax(dim, keepdim=True) - zeros) / levels, torch.inf)
    divisor = scales.float().masked_fill_(scales == 0, 1.0)  # 0 / 0 is NaN, and a NaN's uint8 is undefined
    codes = (x - zeros).div_(divisor).round_().clamp_(0, levels).to(torch.uint8)
    return codes, scales.squeeze(dim), zeros.squeeze(dim)


def _round_to_bf16(x: Tensor, direction: float) -> Tensor:
    """fp32 to bf16, towards `direction`: -inf or inf."""
    nearest = x.to(torch.bfloat16)
    wrong = nearest.float() > x if direction < 0 else nearest.float() < x
    return torch.where(wrong, torch.nextafter(nearest, torch.full_like(nearest, direction)), nearest)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[R, C]` uint8, one per byte, to `[R, ceil(C * bits / 8)]`."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
    # The codes of a byte are read as one little-endian integer and shifted together: strided slices of bytes take ten
    # times as long.
    words = padded.flatten().view({2: torch.int16, 4: torch.int32}[per_byte])
    packed = words
    for i in range(1, per_byte):
        packed = packed | (words >> (i * (8 - bits)))
    return packed.to(torch.uint8).view(padded.shape[0], padded.shape[1] // per_byte)  # the lowest byte of each


def _unpack(packed: Tensor, bits: int, num_channels: int) -> Tensor:
    """Codes `[R, num_channels]` in bf16, which holds every integer up to 256."""
    if bits == 8:
        return packed.to(torch.bfloat16)
    # A byte looks up all its codes as one word: two to four times as fast as shifts and masks.
    words = _codes_of_bytes(bits, packed.device).index_select(0, packed.flatten().int())
    return words.view(torch.bfloat16).view(packed.shape[0], packed.shape[1] * (8 // bits))[:, :num_channels]


@functools.cache
def _codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """For each byte, the bf16 codes in it, read as one integer: `[256]`."""
    shifts = torch.arange(0, 8, bits, device=device)
    codes = (torch.arange(256, device=device).unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.bfloat16).view({2: torch.int64, 4: torch.int32}[bits]).squeeze(1)


def _affine(codes: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """zeros + codes * scales, all `[R, C]` bf16, in fp32, rounded to `dtype`."""
    if dtype == torch.bfloat16:
        return torch.addcmul(zeros, codes, scales)  # computes in fp32 and rounds once
    return torch.addcmul(zeros.float(), codes.float(), scales.float()).to(dtype)
