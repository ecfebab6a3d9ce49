"""Rows of keys or values that stay quantized in memory, and are dequantized where they are used.

Asymmetric round to nearest in groups, after KIVI (arXiv 2402.02750): keys per channel in groups of consecutive entries,
because a few channels of the keys are large at every token; values per token in groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvshelf.kernels.groups import Axis, scales_shape
from kvshelf.kernels.quantize import Coded, dequantize, quantize

Move = Callable[[Tensor], Tensor]
"""Copies a tensor to another place."""


class HeadRows(Coded):
    """The rows of one KV head, `[length, num_channels]` once dequantized. Indexed like a tensor, by its rows only."""

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """A contiguous range of rows, or the rows `[n]` an int64 tensor names, dequantized: `[n, num_channels]`."""
        if isinstance(rows, Tensor):
            # Each row gets a copy of its group's scales: it becomes its own group.
            groups, group = (rows // self.group, 1) if self.axis == "tokens" else (rows, self.group)
            scales, zeros = self.scales[groups], self.zeros[groups]
            return dequantize(replace(self, codes=self.codes[rows], scales=scales, zeros=zeros, group=group))
        start, stop, step = rows.indices(len(self))
        assert step == 1
        return dequantize(self, start, max(start, stop))

    def coded(self, start: int, stop: int) -> HeadRows:
        """A contiguous range of rows, still coded, as views. `start` is a multiple of the group."""
        rows = slice(start, stop)
        scales = slice(start // self.group, -(-stop // self.group)) if self.axis == "tokens" else rows
        return replace(self, codes=self.codes[rows], scales=self.scales[scales], zeros=self.zeros[scales])


@dataclass(frozen=True, eq=False)
class QuantizedRows(Coded):
    """Rows `[entries, num_channels]` of all heads of a record, as codes of `bits` bits. Every row is quantized.

    codes: `[entries, ceil(num_channels * bits / 8)]` uint8, little end first within a byte. scales and zeros, bfloat16:
    `[groups, num_channels]` with axis "tokens", where a head of n rows has ceil(n / group) groups, so that no group
    crosses a head; `[entries, ceil(num_channels / group)]` with axis "channels". The last group of a head or row may be
    short. lengths: rows of each head. A row is `codes * scales + zeros`, computed in fp32 and given in `dtype`.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        entries = sum(self.lengths)
        # Internal invariants; bytes from outside are checked by the blob reader, with named errors.
        assert self.codes.shape == (entries, -(-self.num_channels * self.bits // 8))
        expected = scales_shape(self.axis, self.group, self.lengths, self.num_channels)
        assert self.scales.shape == self.zeros.shape == expected

    @classmethod
    def quantize(cls, rows: Tensor, lengths: Sequence[int], *, bits: int, group: int, axis: Axis) -> QuantizedRows:
        """Quantize rows `[entries, C]`, packed by head. They must be finite; see `finite` for a dtype's extremes."""
        if axis == "channels":
            codes, scales, zeros = quantize(rows, bits, group, axis)
        else:
            heads = [quantize(head, bits, group, axis) for head in torch.split(rows, list(lengths))]
            codes, scales, zeros = (torch.cat(parts) for parts in zip(*heads, strict=True))
        return cls(codes, scales, zeros, bits, group, axis, rows.shape[1], rows.dtype, tuple(lengths))

    @property
    def shape(self) -> torch.Size:
        """`[entries, num_channels]`: the shape of the dequantized rows."""
        return torch.Size((self.codes.shape[0], self.num_channels))

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zeros))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def moved(self, move: Move) -> QuantizedRows:
        """The same rows with each tensor moved."""
        return replace(self, codes=move(self.codes), scales=move(self.scales), zeros=move(self.zeros))

    def heads(self) -> list[HeadRows]:
        """The rows of every KV head, as views."""
        lengths = list(self.lengths)
        groups = [-(-length // self.group) for length in lengths] if self.axis == "tokens" else lengths
        packed = (self.codes, lengths), (self.scales, groups), (self.zeros, groups)
        parts = zip(*(torch.split(tensor, sizes) for tensor, sizes in packed), strict=True)
        coding = (self.bits, self.group, self.axis, self.num_channels, self.dtype)
        return [HeadRows(codes, scales, zeros, *coding) for codes, scales, zeros in parts]

    def dequantize(self) -> Tensor:
        """All rows, `[entries, num_channels]` in `dtype`."""
        return torch.cat([head[:] for head in self.heads()])


Rows = Tensor | QuantizedRows
"""Keys or values of a record: `[entries, C]`, packed by head."""


def by_head(rows: Rows, lengths: Sequence[int]) -> Sequence[Tensor | HeadRows]:
    """The rows of each head, as views. Both kinds take a slice or an int64 tensor of rows as their index."""
    return torch.split(rows, list(lengths)) if isinstance(rows, Tensor) else rows.heads()


def plain(rows: Rows) -> Tensor:
    """The rows as a tensor `[entries, C]`, dequantized if they are not one already."""
    return rows if isinstance(rows, Tensor) else rows.dequantize()
