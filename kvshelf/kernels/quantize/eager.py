"""Quantization by torch's own operations, some rows at a time: see `kvshelf.kernels.quantize`.

Each pass over a block reads the output of the pass before, which is still in the L2 cache. Over all rows at once, every
pass would go to memory and every temporary would be pages that the system has to clear first, which would take most of
the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvshelf.kernels.groups import Axis, scales_shape
from kvshelf.kernels.quantize import Coded

_BLOCK_ELEMENTS = 1 << 18
"""Elements computed at a time: 1 MiB in fp32, half of a common L2 cache. A quarter of it takes up to twice as long,
because of the calls; twice or half of it take the same."""


def quantize(x: Tensor, bits: int, group: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = empty(x, bits, group, axis)
    dim, rows_of_group = _along(axis, group)
    for start, stop in _blocks(0, len(x), x.shape[1], rows_of_group):
        block = x[start:stop].float()
        if missing := -block.shape[dim] % group:  # repeating the last row or column changes no minimum or maximum
            block = torch.cat([block, block.narrow(dim, -1, 1).repeat_interleave(missing, dim)], dim)
        by_group = torch.unflatten(block, dim, (-1, group))
        groups = slice(start // rows_of_group, -(-stop // rows_of_group))
        numbers, scales[groups], zeros[groups] = _quantize(by_group, dim + 1, bits)
        codes[start:stop] = _pack(numbers.flatten(dim, dim + 1)[: stop - start, : x.shape[1]], bits)
    return codes, scales, zeros


def dequantize(rows: Coded, start: int, stop: int) -> Tensor:
    out = rows.codes.new_empty(stop - start, rows.num_channels, dtype=rows.dtype)
    dim, rows_of_group = _along(rows.axis, rows.group)
    for first, last in _blocks(start, stop, rows.num_channels, rows_of_group):
        groups = slice(first // rows_of_group, -(-last // rows_of_group))
        scale, zero = (table[groups].float().unsqueeze(dim + 1) for table in (rows.scales, rows.zeros))
        # Whole groups, so that a scale is broadcast over them instead of copied to each element; the parts of groups
        # outside of the block are never written nor read.
        shape = list(scale.shape)
        shape[dim + 1] = rows.group
        by_group = scale.new_empty(shape)
        block = by_group.flatten(dim, dim + 1)[first % rows_of_group :][: last - first, : rows.num_channels]
        block.copy_(_unpack(rows.codes[first:last], rows.bits)[:, : rows.num_channels])
        by_group.mul_(scale).add_(zero)
        out[first - start : last - start] = block
    return out


def empty(x: Tensor, bits: int, group: int, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros to be filled in."""
    shape = scales_shape(axis, group, x.shape[:1], x.shape[1])
    codes = x.new_empty(x.shape[0], -(-x.shape[1] * bits // 8), dtype=torch.uint8)
    scales, zeros = (x.new_empty(shape, dtype=torch.bfloat16) for _ in range(2))
    return codes, scales, zeros


def _along(axis: Axis, group: int) -> tuple[int, int]:
    """The dimension that groups run along, and the rows of a group."""
    return (0, group) if axis == "tokens" else (1, 1)


def _blocks(start: int, stop: int, num_channels: int, group: int) -> Iterator[tuple[int, int]]:
    """Cut rows start..stop into blocks that fit into the cache, on the edges of groups."""
    rows = max(1, _BLOCK_ELEMENTS // (num_channels * group)) * group
    for begin in range(start - start % group, stop, rows):
        yield max(begin, start), min(begin + rows, stop)


def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group along `dim` of `[A, B, C]` fp32 per index of the other two dimensions. Codes uint8 in the shape of x,
    scales and zeros without `dim`."""
    levels = (1 << bits) - 1
    # Minimum and maximum separately: torch.aminmax takes four times as long as the two calls.
    zeros = _round_to_bf16(x.amin(dim, keepdim=True), up=False)
    low = zeros.float()
    scales = _round_to_bf16((x.amax(dim, keepdim=True) - low) / levels, up=True)
    divisor = scales.float().masked_fill_(scales == 0, 1.0)  # 0 / 0 is NaN, and a NaN's integer is undefined
    codes = (x - low).div_(divisor).round_().clamp_(0, levels)
    # By way of a signed type: torch converts floats to uint8 four times as slowly.
    narrow = codes.to(torch.int8 if bits < 8 else torch.int16).to(torch.uint8)
    return narrow, scales.squeeze(dim), zeros.squeeze(dim)


def _round_to_bf16(x: Tensor, up: bool) -> Tensor:
    """Round fp32 up or down to bf16: keep the upper half of the bits, and step one further from 0 if the rounding goes
    that way and the lower half is not 0. (`torch.nextafter` takes twenty times as long.)"""
    bits = x.view(torch.int32)
    outwards = (~bits if up else bits) >> 31  # -1 or 0
    return ((bits + (outwards & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[R, C]` uint8, one per byte, to `[R, ceil(C * bits / 8)]`."""
    if bits == 3:  # eight codes to three bytes
        eights = torch.unflatten(functional.pad(codes, (0, -codes.shape[1] % 8)), 1, (-1, 8)).int()
        words = (eights << _shifts(3, 8, codes.device)).sum(dim=2, keepdim=True, dtype=torch.int32)
        packed = (words >> _shifts(8, 3, codes.device)).to(torch.uint8).flatten(1)
        return packed[:, : -(-codes.shape[1] * bits // 8)]
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    if unused := -codes.shape[1] % per_byte:
        codes = functional.pad(codes, (0, unused))
    # The codes of a byte are read as one little-endian integer and shifted together: strided slices of bytes take ten
    # times as long.
    # Flat, because a single row may have any stride and still count as contiguous.
    words = codes.flatten().view({2: torch.int16, 4: torch.int32}[per_byte])
    packed = words
    for i in range(1, per_byte):
        packed = packed | (words >> (i * (8 - bits)))
    return packed.to(torch.uint8).view(codes.shape[0], -1 if codes.shape[0] else 0)  # the lowest byte of each


def _shifts(bits: int, count: int, device: torch.device) -> Tensor:
    """Where each of `count` codes of `bits` bits begins in a word, `[count]` int32."""
    return torch.arange(0, bits * count, bits, dtype=torch.int32, device=device)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Bytes `[R, B]` to codes `[R, B * 8 / bits]` uint8, or a few more behind them, one per byte: the codes of a byte
    are spread over one little-endian integer. (A table of 256 such integers takes half as long again.)"""
    if bits == 8:
        return packed
    if bits == 3:
        threes = torch.unflatten(functional.pad(packed, (0, -packed.shape[1] % 3)), 1, (-1, 3)).int()
        words = (threes << _shifts(8, 3, packed.device)).sum(dim=2, keepdim=True, dtype=torch.int32)
        return ((words >> _shifts(3, 8, packed.device)) & 7).to(torch.uint8).flatten(1)
    words = packed.to(torch.int16 if bits == 4 else torch.int32)
    if bits == 2:
        words = words.bitwise_or_(words << 12).bitwise_and_(0x000F000F)
        return words.bitwise_or_(words << 6).bitwise_and_(0x03030303).view(torch.uint8)
    return words.bitwise_or_(words << 4).bitwise_and_(0x0F0F).view(torch.uint8)
