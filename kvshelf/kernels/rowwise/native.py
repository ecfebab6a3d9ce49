"""Lists of instructions over rows, as C executes them (`native.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kvshelf.kernels.native import Part, compiled, pointer, run_parts
from kvshelf.kernels.rowwise.instructions import OPERATIONS, Buffer, Instruction, together

PANEL: Final = 32
"""Outputs of a panel of a packed weight."""

LINES: Final = 4
"""A divisor of the outputs of a weight that is not packed."""

WEIGHT_DTYPES: Final = (torch.float32, torch.int16, torch.int8, torch.bfloat16)
"""Dtypes of packed weights, in the order of their numbers in C: int16 holds the bits of bf16, for rows of fp32, and
bfloat16 pairs of inputs, for rows of bf16."""

BLOCK_ROWS: Final = 96
"""Rows that a thread takes through all instructions at a time: a multiple of how many registers hold sums of, and few
enough for what lies between to stay in a second-level cache of a megabyte."""


class _Rows(ctypes.Structure):
    """See `native.c`."""

    _fields_ = (
        ("instructions", ctypes.c_void_p), ("buffers", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("rows", ctypes.c_int64), ("block_rows", ctypes.c_int64), ("scratch", ctypes.c_void_p),
        ("scratch_row", ctypes.c_int64),
    )  # fmt: skip


class RowProgram:
    """Instructions in order. `outside`: the buffers that the caller passes, by their place in `buffers`; the others
    exist only while a block of rows passes. Not thread-safe."""

    def __init__(self, instructions: Sequence[Instruction], buffers: Sequence[Buffer], outside: Sequence[int]) -> None:
        instructions = together(instructions)
        used = sorted({place.buffer for step in instructions for place in step.places})
        self._at = {buffer: index for index, buffer in enumerate(used)}
        self._references = [buffers[buffer].constant for buffer in used], list(instructions)  # C has their addresses
        self._outside = [(buffer, 3 * self._at[buffer]) for buffer in outside if buffer in self._at]
        inside = [buffer for buffer in used if buffer not in outside and buffers[buffer].constant is None]
        begins, scratch_row = _packed(instructions, {buffer: buffers[buffer].words for buffer in inside})
        self._table = (ctypes.c_int64 * (3 * len(used)))()
        for buffer, index in self._at.items():
            constant = buffers[buffer].constant
            row = (0, buffers[buffer].words, begins.get(buffer, 0)) if constant is None else (constant.data_ptr(), 0, 0)
            self._table[3 * index : 3 * index + 3] = list(row)
        words = [word for step in instructions for word in self._words(step)]
        self._words_of_c = (ctypes.c_int64 * len(words))(*words)
        self._scratch = torch.empty(0)
        self._call = _Rows(
            instructions=ctypes.addressof(self._words_of_c), buffers=ctypes.addressof(self._table),
            count=len(instructions), scratch_row=scratch_row,
        )  # fmt: skip

    def run(self, values: Mapping[int, Tensor], rows: int) -> None:
        """Execute over `rows` rows. values: each outside buffer, `[rows, width]` contiguous, in its dtype."""
        run_parts([self.part(values, rows)])

    def part(self, values: Mapping[int, Tensor], rows: int) -> Part:
        """As `run`, to be run with other parts. There is one at a time: the next one replaces it."""
        threads = torch.get_num_threads()
        self._call.rows = rows
        self._call.block_rows = block = _block_rows(rows, threads)
        for buffer, place in self._outside:
            self._table[place] = values[buffer].data_ptr()
        needed = self._call.scratch_row * block * (threads if rows > block else 1)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed)
        self._call.scratch = self._scratch.data_ptr()
        return Part(ctypes.addressof(self._call), 0, self)

    def _words(self, step: Instruction) -> list[int]:
        places = [word for p in step.places for word in (self._at[p.buffer], p.offset, *p.strides)]
        tensors = (step.weight, step.scales, step.bias)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        kind = 0 if step.weight is None else WEIGHT_DTYPES.index(step.weight.dtype)
        return [OPERATIONS.index(step.operation), *step.sizes, *places, *addresses, kind]


def multiply(x: Tensor, packed: Tensor, scales: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """x `[..., inputs]` times a packed weight into `out` `[..., outputs]` fp32, both contiguous. scales: `[outputs]`,
    of a weight in int8."""
    (panels, inputs), threads = packed.shape[:2], torch.get_num_threads()
    rows = out.numel() // (panels * PANEL)
    sizes = (ctypes.c_int64 * 5)(rows, panels, inputs, _block_rows(rows, threads), WEIGHT_DTYPES.index(packed.dtype))
    optional = (None if tensor is None else pointer(tensor) for tensor in (scales, bias))
    compiled().kvshelf_multiply(pointer(x), pointer(packed), *optional, pointer(out), sizes, threads)


def multiply_lines(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x `[..., inputs]` times a weight `[outputs, inputs]` into `out` `[..., outputs]`, all contiguous."""
    outputs, inputs = weight.shape
    sizes = (ctypes.c_int64 * 3)(out.numel() // outputs, outputs, inputs)
    compiled().kvshelf_multiply_lines(pointer(x), pointer(weight), pointer(out), sizes, torch.get_num_threads())


def _block_rows(rows: int, threads: int) -> int:
    """Rows of a block: all of them where there are few, so that threads divide the outputs of products."""
    return rows if rows <= BLOCK_ROWS * (1 if threads == 1 else 2) else BLOCK_ROWS


def _packed(instructions: Sequence[Instruction], widths: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Where each inside buffer begins, and the elements of a row of all: a buffer whose last reader has run makes room
    for the next of its width."""
    last = {place.buffer: i for i, step in enumerate(instructions) for place in step.places}
    begins: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    end = 0
    for i, step in enumerate(instructions):
        for buffer in dict.fromkeys(place.buffer for place in step.places):
            if buffer in widths and buffer not in begins:
                room = free.get(widths[buffer])
                begins[buffer] = room.pop() if room else end
                end = max(end, begins[buffer] + widths[buffer])
        for buffer in dict.fromkeys(place.buffer for place in step.places):
            if buffer in widths and last[buffer] == i:
                free.setdefault(widths[buffer], []).append(begins[buffer])
    return begins, end
