"""Lists of instructions on a card: torch multiplies with weights, and one kernel carries out all instructions between
two products, a row a program, or a part of a row where no number needs another's.

The kernel is compiled for its instructions, so the result of one stays in registers for the next; values that change
places (a rotation's other halves) go through memory that the program itself has written, behind a barrier. It computes
in fp32 and rounds where it stores. Bytes: the caller's buffers once. A single row has few programs: its time is that of
a launch. Share of the limit on a GPU: not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.rowwise.fusing import WORDS, Fusion, Product, fused
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction
from kvshelf.kernels.tiles import warps


class FusedProgram:
    """Instructions in order, with weights `[inputs, outputs]` as torch has them. `outside`: the buffers that the caller
    passes, by their place in `buffers`."""

    def __init__(self, instructions: Sequence[Instruction], buffers: Sequence[Buffer], outside: Sequence[int]) -> None:
        self._buffers = buffers
        self._launches = list(fused(instructions, buffers, outside))

    def run(self, values: dict[int, Tensor], rows: int) -> None:
        """Execute over `rows` rows. values: each outside buffer, `[rows, width]` with rows of any stride, in its
        dtype; the results of products replace theirs."""
        if not rows:
            return
        memory = values.copy()
        for launch in self._launches:
            if isinstance(launch, Product):
                _multiply(launch, memory)
            else:
                self._carry_out(launch, memory, rows)
        values.update((buffer, memory[buffer]) for buffer in values)

    def _carry_out(self, fusion: Fusion, memory: dict[int, Tensor], rows: int) -> None:
        device = next(iter(memory.values())).device
        for number in fusion.results:
            if number not in memory:
                buffer = self._buffers[number]
                memory[number] = torch.empty(rows, buffer.width, dtype=buffer.dtype, device=device)
        constants = [self._buffers[number].constant for number in fusion.buffers]
        pairs = list(zip(fusion.buffers, constants, strict=True))
        tensors = [memory[number] if constant is None else constant for number, constant in pairs]
        strides = [memory[number].stride(0) if constant is None else 0 for number, constant in pairs]
        if fusion.scratch:
            tensors.append(torch.empty(rows, fusion.scratch, device=device))
            strides.append(fusion.scratch)
        # `dispatch` has the class made, and does not run it.
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            carry_out[(rows, fusion.parts)](
                tuple(tensors), STRIDES=tuple(strides), LIST=fusion.words, WORDS=WORDS, num_warps=warps(fusion.tile)
            )


def _multiply(product: Product, memory: dict[int, Tensor]) -> None:
    begin = product.a.offset
    x = memory[product.a.buffer][:, begin : begin + product.inputs]
    out = torch.mm(x, product.weight) if product.bias is None else torch.addmm(product.bias, x, product.weight)
    parts = torch.split(out, [count for _, count in product.outs], dim=1)
    memory.update((buffer, part) for (buffer, _), part in zip(product.outs, parts, strict=True))


@triton.jit
def carry_out(tensors, STRIDES: tl.constexpr, LIST: tl.constexpr, WORDS: tl.constexpr):
    """One row of all instructions: see `Fusion`."""
    values = ()
    for i in tl.static_range(len(LIST) // WORDS):
        values = values + (_carry_out(tensors, values, STRIDES, LIST, i * WORDS),)  # type: ignore[assignment]  # noqa: RUF005


@triton.jit
def _carry_out(tensors, values, STRIDES: tl.constexpr, LIST: tl.constexpr, AT: tl.constexpr):
    OPERATION: tl.constexpr = LIST[AT]
    OUTER: tl.constexpr = LIST[AT + 1] * LIST[AT + 2]
    LINES: tl.constexpr = LIST[AT + 2]
    INNER: tl.constexpr = LIST[AT + 3]
    OUT: tl.constexpr = LIST[AT + 19]
    if LIST[AT + 6]:
        tl.debug_barrier()
    line = tl.arange(0, LIST[AT + 4])[:, None]
    inner = tl.program_id(1) * LIST[AT + 5] + tl.arange(0, LIST[AT + 5])[None, :]
    inside = (line < OUTER) & (inner < INNER)
    index = (line // LINES, line % LINES, inner)
    a = _numbers(tensors, values, index, inside, STRIDES, LIST, AT + 7)
    if OPERATION == "mul":
        number = a * _numbers(tensors, values, index, inside, STRIDES, LIST, AT + 13)
    elif OPERATION == "add":
        number = a + _numbers(tensors, values, index, inside, STRIDES, LIST, AT + 13)
    elif OPERATION == "sub":
        number = a - _numbers(tensors, values, index, inside, STRIDES, LIST, AT + 13)
    elif OPERATION == "silu":
        number = a * tl.sigmoid(a)
    elif OPERATION == "gelu":
        number = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    elif OPERATION == "gelu_tanh":
        number = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif OPERATION == "tanh":
        number = 2 * tl.sigmoid(2 * a) - 1
    elif OPERATION == "relu":
        number = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "rsqrt":
        number = tl.rsqrt(a)
    elif OPERATION == "mean":
        number = tl.sum(tl.where(inside, a, 0.0), axis=1, keep_dims=True) / INNER
        inside = (line < OUTER) & (inner < 1)
    else:
        number = a
    if OUT >= 0:
        place = _place(index, STRIDES[OUT], LIST, AT + 20)
        tl.store(tensors[OUT] + place, number.to(tensors[OUT].dtype.element_ty), mask=inside)
    return number


@triton.jit
def _numbers(
    tensors, values, index, inside, STRIDES: tl.constexpr, LIST: tl.constexpr, AT: tl.constexpr
):  # fmt: skip
    FROM: tl.constexpr = LIST[AT]
    WHICH: tl.constexpr = LIST[AT + 1]
    if FROM == "value":
        numbers = values[WHICH]
    elif FROM == "number":
        numbers = tl.full((1, 1), WHICH, tl.float32)
    else:
        place = _place(index, STRIDES[WHICH], LIST, AT + 2)
        numbers = tl.load(tensors[WHICH] + place, mask=inside, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def _place(index, STRIDE: tl.constexpr, LIST: tl.constexpr, AT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * STRIDE + LIST[AT]
    return row + index[0] * LIST[AT + 1] + index[1] * LIST[AT + 2] + index[2] * LIST[AT + 3]
