"""Rows as codes, as `kvshelf.kernels.quantize` makes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.kernels.groups import Axis


@dataclass(frozen=True, eq=False)
class Coded:
    """Codes `[R, ceil(num_channels * bits / 8)]` uint8, with the bf16 scales and zeros that turn them back into rows
    `[R, num_channels]` of `dtype`: see `kvshelf.kernels.quantize`."""

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
