"""Lists of instructions over rows, for every device."""

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
    """The place of a value in a row of a buffer: its first element, and the strides of three dimensions."""

    buffer: int
    offset: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Instruction:
    """One operation of `OPERATIONS` on every row.

    sizes: of a row of the result. Those of "mean" are its operand's, whose last dimension it reduces. Those of "linear"
    are the panels, the inputs or pairs of inputs, and 1; for Triton the outputs, the inputs and 1. `b` of an operation
    on one value is `a`. weight, scales, bias: of "linear"; scales where the weight is int8. "narrow" is a copy in the
    dtype of `out`.
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
    """Values of `width` elements a row, or a constant that all rows share. dtype: for C fp32, or bf16 in whole pairs
    for the results of "narrow"."""

    width: int
    constant: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def words(self) -> int:
        """Words of four bytes of a row."""
        return self.width * self.dtype.itemsize // 4


def together(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions with products of the same values side by side, so that threads divide them in one go. Each value
    is written once, so a product may run as soon as another product of its values does."""
    ordered: list[Instruction] = []
    for step in instructions:
        alike = [
            i for i, other in enumerate(ordered) if step.operation == other.operation == "linear" and other.a == step.a
        ]
        ordered.insert(alike[-1] + 1 if alike else len(ordered), step)
    return ordered
