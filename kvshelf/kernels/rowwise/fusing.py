"""Lists of instructions as few launches: one for products of the same values, and one for all instructions between
products."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final

import torch
from torch import Tensor

from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place, together

WORDS: Final = 24
"""Words of an instruction in `Fusion.words`."""

_COLUMNS: Final = 1024
"""Elements of a row that a program takes, where several programs share a row."""

_NOWHERE: Final = (-1, 0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Product:
    """The product of `inputs` elements of a row at `a` with a weight `[inputs, outputs]` of their dtype, plus the bias
    `[outputs]`. outs: the buffers that get the outputs, and how many each gets."""

    a: Place
    inputs: int
    weight: Tensor
    bias: Tensor | None
    outs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Fusion:
    """Instructions that one launch carries out, `WORDS` words each: the operation; three sizes, and those of the tile,
    `[outer, inner]`; 1 where it reads memory that the program has written; the sources of `a` and `b` ("value": the
    result of the instruction of a number, "number": a number itself, "memory": a tensor's number, offset and three
    strides); and the place of the result, as number of a tensor (-1: it is not stored), offset and three strides.

    buffers: those of the tensors, behind which stands one of `scratch` elements a row, fp32, if there are any. results:
    the buffers that the launch writes for others. parts: programs of a row. tile: elements of the largest tile.
    """

    words: tuple[str | int | float, ...]
    buffers: tuple[int, ...]
    results: tuple[int, ...]
    scratch: int
    parts: int
    tile: int


def fused(
    instructions: Sequence[Instruction], buffers: Sequence[Buffer], outside: Collection[int]
) -> Iterator[Product | Fusion]:
    """The instructions as launches, in order. outside: the buffers that something else reads, too."""

    def kind(step: Instruction) -> Place | None:
        return step.a if step.operation == "linear" else None

    runs = [list(same) for _, same in groupby(together(instructions), kind)]
    for index, run in enumerate(runs):
        if run[0].operation == "linear":
            yield from _products(run)
        else:
            later = {place.buffer for other in runs[index + 1 :] for step in other for place in step.places[1:]}
            yield _Fusing(run, buffers, later | set(outside)).fusion()


def _products(run: Sequence[Instruction]) -> Iterator[Product]:
    """Products of the same values, as one where their weights are adjacent in memory: see `adjacent`."""
    joined: list[Instruction] = []
    for step in run:
        assert step.weight is not None
        if joined and not adjacent(joined[-1].weight, step.weight):
            yield _product(joined)
            joined = []
        joined.append(step)
    yield _product(joined)


def adjacent(one: Tensor | None, other: Tensor) -> bool:
    """Whether a weight `[inputs, outputs]`, output by output in memory, lies right after another of as many inputs."""
    if one is None or len(one) != len(other) or not (one.T.is_contiguous() and other.T.is_contiguous()):
        return False
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and other.storage_offset() == one.storage_offset() + one.numel()


def products_of_one(instructions: Sequence[Instruction]) -> list[list[int]]:
    """The addresses of the weights by which the same values are multiplied, in the order of their products."""
    addresses: dict[tuple[Place, int], list[int]] = {}
    for step in instructions:
        if step.weight is not None and step.weight.T.is_contiguous():
            addresses.setdefault((step.a, len(step.weight)), []).append(step.weight.data_ptr())
    return list(addresses.values())


def _product(joined: Sequence[Instruction]) -> Product:
    weight, bias = joined[0].weight, joined[0].bias
    assert weight is not None
    inputs = weight.shape[0]
    outs = tuple((step.out.buffer, step.sizes[0]) for step in joined)
    if len(joined) > 1:
        outputs = sum(count for _, count in outs)
        weight = weight.as_strided((inputs, outputs), (1, inputs))
        if any(step.bias is not None for step in joined):
            biases = [weight.new_zeros(step.sizes[0]) if step.bias is None else step.bias for step in joined]
            bias = torch.cat(biases)
    return Product(joined[0].a, inputs, weight, None if bias is None else bias.to(weight.dtype), outs)


class _Fusing:
    """A run of instructions on its way to a `Fusion`. kept: the buffers that are read after this run."""

    def __init__(self, run: Sequence[Instruction], buffers: Sequence[Buffer], kept: Collection[int]) -> None:
        self._run = run = list(_upright(_tiled(run)))
        self._buffers = buffers
        self._sources = [
            [_source(run[:i], place, step.sizes) for place in step.places[1:]] for i, step in enumerate(run)
        ]
        self._written = {step.out.buffer for step in run}
        read = {
            place.buffer
            for step, sources in zip(run, self._sources, strict=True)
            for place, source in zip(step.places[1:], sources, strict=True)
            if source is None
        }
        self._results = self._written & set(kept)
        self._begins: dict[int, int] = {}
        self._scratch = 0
        for buffer in sorted((self._written & read) - self._results):
            self._begins[buffer] = self._scratch
            self._scratch += buffers[buffer].width
        alike = {step.sizes for step in run} == {(1, 1, run[0].sizes[2])} and "mean" not in {e.operation for e in run}
        self._whole = not alike or bool(self._written & read)
        single = {b for b in read if (constant := buffers[b].constant) is not None and constant.numel() == 1}
        tensors = sorted((read | self._results).difference(single, self._begins))
        self._numbers = {buffer: number for number, buffer in enumerate(tensors)}

    def fusion(self) -> Fusion:
        words: list[str | int | float] = []
        unseen: set[int] = set()
        tiles = []
        for step in self._run:
            inner = _power(step.sizes[2])
            tiles.append((_power(step.sizes[0] * step.sizes[1]), inner if self._whole else min(_COLUMNS, inner)))
        for step, sources, tile in zip(self._run, self._sources, tiles, strict=True):
            read = {place.buffer for place, source in zip(step.places[1:], sources, strict=True) if source is None}
            waits = bool(read & unseen)
            if waits:
                unseen.clear()
            a, b = (self._source(place, source) for place, source in zip(step.places[1:], sources, strict=True))
            stored = step.out.buffer in self._results or step.out.buffer in self._begins
            if stored:
                unseen.add(step.out.buffer)
            out = self._place(step.out) if stored else _NOWHERE
            words += [step.operation, *step.sizes, *tile, int(waits), *a, *b, *out]
        return Fusion(
            words=tuple(words),
            buffers=tuple(self._numbers),
            results=tuple(sorted(self._results)),
            scratch=self._scratch,
            parts=1 if self._whole else -(-self._run[0].sizes[2] // _COLUMNS),
            tile=max(map(prod, tiles)),
        )

    def _source(self, place: Place, source: int | None) -> tuple[str | int | float, ...]:
        constant = self._buffers[place.buffer].constant
        if constant is not None and constant.numel() == 1:
            return "number", constant.item(), 0, 0, 0, 0
        return ("memory", *self._place(place)) if source is None else ("value", source, 0, 0, 0, 0)

    def _place(self, place: Place) -> tuple[int, int, int, int, int]:
        begin = self._begins.get(place.buffer)
        if begin is None:
            return self._numbers[place.buffer], place.offset, *place.strides
        return len(self._numbers), begin + place.offset, *place.strides


def _tiled(run: Sequence[Instruction]) -> list[Instruction]:
    """The same instructions, each in the lines of a neighbour that has the same numbers: then they need no memory
    between the two."""
    run, changed = list(run), True
    while changed:
        changed = False
        for i, step in enumerate(run):
            sizes = next((other.sizes for other in run if _in_lines(step, other)), None)
            if sizes is not None:
                out, a, b = (replace(p, strides=(0, sizes[2] * p.strides[2], p.strides[2])) for p in step.places)
                run[i] = replace(step, sizes=sizes, out=out, a=a, b=b)
                changed = True
    return run


def _in_lines(step: Instruction, other: Instruction) -> bool:
    """Whether an instruction on a whole row shares numbers with another that takes them in lines."""
    outer, lines, width = other.sizes
    if step.operation == "mean" or step.sizes != (1, 1, lines * width) or outer != 1 or lines == 1 or width == 1:
        return False
    begins = {(place.buffer, place.offset) for place in step.places if place.strides[2] == 1}
    return any((p.buffer, p.offset) in begins and p.strides[1:] == (width, 1) for p in other.places)


def _upright(run: Sequence[Instruction]) -> Iterator[Instruction]:
    """The same instructions, with numbers that each belong to a line of a tile, as means do, along the tile's other
    side."""
    columns = set()
    for step in run:
        outer, lines, inner = step.sizes
        if step.operation == "mean":
            columns.add(step.out.buffer)
        elif outer == lines == 1 < inner and columns & {place.buffer for place in step.places[1:]}:
            columns.add(step.out.buffer)
            out, a, b = (replace(place, strides=(0, place.strides[2], 0)) for place in step.places)
            step = replace(step, sizes=(1, inner, 1), out=out, a=a, b=b)
        yield step


def _source(before: Sequence[Instruction], place: Place, sizes: tuple[int, int, int]) -> int | None:
    """The number of the instruction before that has just these numbers, or one for each line, in its registers."""
    writers = [i for i, step in enumerate(before) if step.out.buffer == place.buffer]
    if len(writers) != 1 or before[writers[0]].operation == "narrow" or before[writers[0]].out.offset != place.offset:
        return None
    writer = before[writers[0]]
    written = (*writer.sizes[:2], 1) if writer.operation == "mean" else writer.sizes
    for count, size, stride, other in zip(written, sizes, writer.out.strides, place.strides, strict=True):
        if not ((count == size and (size == 1 or stride == other)) or (count == 1 and other == 0)):
            return None
    return writers[0] if written[:2] == sizes[:2] or written[:2] == (1, 1) else None


def _power(size: int) -> int:
    """The next power of 2, as tiles have."""
    return 1 << max(0, size - 1).bit_length()
