"""The naive form, in fp64, one row and one instruction at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place

ONE = {
    "copy": lambda x: x,
    "narrow": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "mean": lambda x: x.mean(-1, keepdim=True),
}
TWO = {"mul": torch.mul, "add": torch.add, "sub": torch.sub}


def run(
    instructions: Sequence[Instruction], buffers: Sequence[Buffer], inputs: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Every buffer behind the instructions, `[rows, width]` fp64, of those that are given; rounded where it holds
    fewer bits than fp32."""
    rows = len(next(iter(inputs.values())))
    values = {
        number: inputs[number].double() if number in inputs else torch.zeros(rows, buffer.width, dtype=torch.float64)
        for number, buffer in enumerate(buffers)
        if buffer.constant is None
    }

    def numbers(row: int, place: Place, sizes: Sequence[int]) -> Tensor:
        constant = buffers[place.buffer].constant
        of = values[place.buffer][row] if constant is None else constant.double()
        return of.as_strided(sizes, place.strides, of.storage_offset() + place.offset)

    for row in range(rows):
        for step in instructions:
            if step.weight is not None:
                x = numbers(row, step.a, (1, 1, step.sizes[1])).flatten()
                made = x @ step.weight.double() + (0 if step.bias is None else step.bias.double())
                into = numbers(row, step.out, (1, 1, step.sizes[0]))
                made = made.view(1, 1, -1)
            else:
                a, b = (numbers(row, place, step.sizes) for place in step.places[1:])
                made = ONE[step.operation](a) if step.operation in ONE else TWO[step.operation](a, b)
                into = numbers(row, step.out, made.shape if step.operation == "mean" else step.sizes)
            dtype = buffers[step.out.buffer].dtype
            into.copy_(made if dtype == torch.float32 else made.to(dtype))
    return values
