"""Products with the weights of real models: kvshelf's own beside torch's and oneDNN's, and this machine's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kvshelf.bench.kernels.kernels import Ceilings
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.rowwise import available, linear, pack_weight, plain_linear
from kvshelf.workers.model.int8 import as_int8

SHAPES: Final = {
    "smollm2-135m": ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)),
    "qwen2.5-0.5b": ((896, 896), (128, 896), (4864, 896), (896, 4864), (151936, 896)),
    "llama-3.1-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
}
"""Outputs and inputs of the weights of models. The last one of the first two is the head, tied to the embedding."""

ROWS: Final = (1, 2, 4, 8, 16, 32, 128, 512, 2048)

_SAMPLE_S: Final = 1e-3
_MOST_FLOPS: Final = 4e10


@dataclass(frozen=True)
class ProductTime:
    """Seconds of one product by each way, the smallest of several; `ours` in panels, `int8` in panels of bytes, `plain`
    of the weight as it lies. read_s: of reading the weight once. of_limit: the least time that this machine needs, over
    that of `ours`."""

    outputs: int
    inputs: int
    rows: int
    ours: float
    int8: float
    plain: float
    onednn: float
    torch: float
    read_s: float
    of_limit: float


def product_times(model: str, rounds: int, limits: Ceilings) -> Iterator[ProductTime]:
    """Every weight of a model of `SHAPES` with every number of `ROWS`, in fp32, under torch's threads. Products that
    take half a second and more are left out."""
    if model not in SHAPES:
        raise InvalidRequest(f"unknown model {model!r}; one of {', '.join(SHAPES)}, none", param="products")
    if not available():
        return
    for outputs, inputs in SHAPES[model]:
        weight = torch.randn(outputs, inputs).div_(inputs**0.5)
        ways = _ways(weight)
        for rows in ROWS:
            flops = 2.0 * rows * weight.numel()
            if flops <= _MOST_FLOPS:
                ours, int8, plain, onednn, torchs, read_s = _smallest(ways, torch.randn(rows, inputs), rounds)
                least_s = max(read_s, flops / limits.matmul_flops)
                yield ProductTime(outputs, inputs, rows, ours, int8, plain, onednn, torchs, read_s, least_s / ours)


_Way = Callable[[Tensor], object]


def _ways(weight: Tensor) -> list[_Way]:
    """In the order of the fields of `ProductTime`, each a function of the rows."""
    packed, flat = pack_weight(weight), weight.flatten()
    numbers, scales = as_int8(weight)
    byte_panels = pack_weight(numbers)
    ordered = torch.ops.mkldnn._reorder_linear_weight.default(weight, 32)
    return [
        lambda x: linear(x, packed, None),
        lambda x: linear(x, byte_panels, None, scales),
        lambda x: plain_linear(x, weight),
        lambda x: torch.ops.mkldnn._linear_pointwise.default(x, ordered, None, "none", [], ""),
        lambda x: functional.linear(x, weight),
        lambda _: torch.dot(flat, flat),
    ]


def _smallest(ways: list[_Way], x: Tensor, rounds: int) -> list[float]:
    """Seconds of processor time of a call of each, the smallest of rounds that take turns: neighbours only make a call
    longer. Small calls are measured together."""
    repeats = []
    for way in ways:
        way(x)  # lays out what depends on the number of rows
        repeats.append(max(1, round(_SAMPLE_S / _seconds(way, x, 1))))
    samples = [[_seconds(way, x, times) for way, times in zip(ways, repeats, strict=True)] for _ in range(rounds)]
    return [min(own) for own in zip(*samples, strict=True)]


def _seconds(run: _Way, x: Tensor, times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        run(x)
    return max(time.process_time() - started, 1e-9) / times
