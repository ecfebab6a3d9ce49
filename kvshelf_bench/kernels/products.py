"""Products with the weights of real models: kvshelf's own beside torch's and oneDNN's, and this machine's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kvshelf.errors import InvalidRequest
from kvshelf.kernels import rowwise
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place
from kvshelf.kernels.rowwise.native import PANEL, RowProgram
from kvshelf.model.weights.int8 import as_int8
from kvshelf_bench.kernels.kernels import Ceilings

SHAPES: Final = {
    "smollm2-135m": ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)),
    "qwen2.5-0.5b": ((896, 896), (128, 896), (4864, 896), (896, 4864), (151936, 896)),
    "llama-3.1-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
}
"""Outputs and inputs of the weights of models. The last one of the first two is the head, tied to the embedding."""

ROWS: Final = (1, 2, 4, 8, 16, 32, 128, 512, 2048)

_SAMPLE_S: Final = 1e-3
_MOST_FLOPS: Final = 4e10
_FLOPS_OF_A_CALL: Final = 2e7
_MOST_OF_A_CALL: Final = 16


@dataclass(frozen=True)
class ProductTime:
    """Seconds of one product by each way, the smallest of several; `ours` in panels, `bf16` and `int8` in panels of
    these, all as a recorded pass runs them; `plain` of the weight as it lies, `onednn` and `torch` with their call from
    Python. read_s: of reading the weight once. of_limit: the least time that this machine needs, over that of `ours`.
    """

    outputs: int
    inputs: int
    rows: int
    ours: float
    bf16: float
    int8: float
    plain: float
    onednn: float
    torch: float
    read_s: float
    of_limit: float


def product_times(model: str, rounds: int, limits: Ceilings) -> Iterator[ProductTime]:
    """Every weight of a model of `SHAPES` times `ROWS` rows, in fp32, but for products of half a second and more."""
    if model not in SHAPES:
        raise InvalidRequest(f"unknown model {model!r}; one of {', '.join(SHAPES)}, none", param="products")
    if not rowwise.available():
        return
    for outputs, inputs in SHAPES[model]:
        weight = torch.randn(outputs, inputs).div_(inputs**0.5)
        packed, (numbers, scales), others = rowwise.pack_weight(weight), as_int8(weight), _others(weight)
        halves, byte_panels = rowwise.pack_weight(weight.bfloat16().view(torch.int16)), rowwise.pack_weight(numbers)
        for rows in ROWS:
            flops = 2.0 * rows * weight.numel()
            if flops <= _MOST_FLOPS:
                of_a_call = max(1, min(_MOST_OF_A_CALL, int(_FLOPS_OF_A_CALL / flops)))
                forms = [(packed, None), (halves, None), (byte_panels, scales)]
                ways = [_recorded(panels, beside, of_a_call) for panels, beside in forms]
                times = _smallest([*ways, *others], torch.randn(rows, inputs), rounds)
                ours, bf16, int8, plain, onednn, torchs, read_s = times
                least_s = max(read_s, flops / limits.matmul_flops)
                yield ProductTime(
                    outputs, inputs, rows, ours, bf16, int8, plain, onednn, torchs, read_s, least_s / ours
                )  # fmt: skip


@dataclass(frozen=True)
class _Way:
    """A function of the rows that multiplies them `products` times."""

    run: Callable[[Tensor], object]
    products: int = 1


def _recorded(packed: Tensor, scales: Tensor | None, products: int) -> _Way:
    """The product as a recorded pass has it, one of several in a call of C: this call takes 5 us, as long as the
    smallest products of one row, and a pass makes it once for all of its layers."""
    panels, inputs, _ = packed.shape
    x, y = Place(0, 0, (0, 0, 1)), Place(1, 0, (0, 0, 1))
    product = Instruction("linear", (panels, inputs, 1), y, x, x, packed, scales)
    program = RowProgram([product] * products, [Buffer(inputs), Buffer(panels * PANEL)], [0, 1])

    def run(rows: Tensor) -> None:
        program.run({0: rows, 1: rows.new_empty(len(rows), panels * PANEL)}, len(rows))

    return _Way(run, products)


def _others(weight: Tensor) -> list[_Way]:
    """From `plain` on, in the order of the fields of `ProductTime`."""
    flat, ordered = weight.flatten(), torch.ops.mkldnn._reorder_linear_weight.default(weight, 32)
    return [
        _Way(lambda x: rowwise.plain_linear(x, weight)),
        _Way(lambda x: torch.ops.mkldnn._linear_pointwise.default(x, ordered, None, "none", [], "")),
        _Way(lambda x: functional.linear(x, weight)),
        _Way(lambda _: torch.dot(flat, flat)),
    ]


def _smallest(ways: list[_Way], x: Tensor, rounds: int) -> list[float]:
    """Seconds of processor time of a product by each, the smallest of rounds that take turns: neighbours only make a
    call longer. Small calls are measured together."""
    repeats = []
    for way in ways:
        way.run(x)  # lays out what depends on the number of rows
        repeats.append(max(1, round(_SAMPLE_S / (way.products * _seconds(way, x, 1)))))
    samples = [[_seconds(way, x, times) for way, times in zip(ways, repeats, strict=True)] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*samples, strict=True)]


def _seconds(way: _Way, x: Tensor, times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        way.run(x)
    return max(time.process_time() - started, 1e-9) / (times * way.products)
