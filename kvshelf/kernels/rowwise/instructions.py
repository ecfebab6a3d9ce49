"""Lists of instructions over rows, whatever executes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

OPERATIONS: Final = (
    "linear", "mul", "add", "sub", "copy", "silu", "gelu", "gelu_tanh", "tanh", "relu", "rsqrt", "mean",
    "narrow",
)  # fmt: skip
"""In the order of their numbers in C."""


@dataclass(frozen=True)
class Place:
    """Where a value lies in a row of a buffer: its first element, and the strides of three dimensions."""

    buffer: int
    offset: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Instruction:
    """One operation of `OPERATIONS` on every row.

    sizes: of a row of the result, of "mean" of what it is the mean of over the last, of "linear" the panels, the
    inputs, or pairs of them, and 1; for Triton the outputs, the inputs and 1. `b` of an operation on one value is `a`.
    weight, scales, bias: of "linear"; scales where the weight is int8. "narrow" is a copy in the dtype of `out`.
    """

    operation: str
    sizes: tuple[int, int, int]
    out: Place
    a: Place
    b: Place
    weight: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def places(self) -> tuple[Place, Place, Place]:
        return self.out, self.a, self.b


@dataclass(frozen=True, eq=False)
class Buffer:
    """Values of `width` elements a row; a constant, which all rows share, is its elements themselves. dtype: for C
    fp32, or bf16, of whole pairs, of what "narrow" makes."""

    width: int
    constant: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def words(self) -> int:
        """Of four bytes, of a row."""
        return self.width * self.dtype.itemsize // 4


def together(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The same with products of the same values side by side, so that threads divide them in one go. A value is made
    once, so a product may be made as soon as another of its values is."""
    made: list[Instruction] = []
    for each in instructions:
        alike = [
            i for i, other in enumerate(made) if each.operation == other.operation == "linear" and other.a == each.a
        ]
        made.insert(alike[-1] + 1 if alike else len(made), each)
    return made
