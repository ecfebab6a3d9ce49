"""How near the kernels come to the ceilings of this device: its copy for bytes, its matrix product for FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.rates import copy_bandwidth, cost, matmul_rate
from kvshelf_bench.kernels import baselines
from kvshelf_bench.kernels.cases import LLAMA_8B, PREFILL, Case, Layer, LayerSize, cases
from kvshelf_bench.measure import Spread, cuda_peak

_WARM_UP = 3
_MOST_COPIES = 32


@dataclass(frozen=True)
class Ceilings:
    """Of this device: bytes per second of a copy, reads plus writes; FLOP per second of a matrix product."""

    copy_bytes_per_s: float
    matmul_flops: float

    def limit(self, case: Case) -> tuple[str, float]:
        """Which of the two a case meets, and the seconds that it takes at least."""
        bytes_s, flops_s = case.nbytes / self.copy_bytes_per_s, case.flops / self.matmul_flops
        return ("bytes", bytes_s) if bytes_s >= flops_s else ("FLOPs", flops_s)


@dataclass(frozen=True)
class KernelTime:
    """One operation on one layer. seconds: of one call, launches included. limit: whether bytes or FLOPs are the limit;
    share: of that ceiling. of_prefill: seconds over those of the layer's prefill. slower: for a way around the kernels,
    its seconds over those of the case `beside`. extra_bytes: memory beyond arguments at its peak, results included;
    None where it cannot be told (CPU)."""

    name: str
    tokens: int
    seconds: Spread
    nbytes: float
    flops: float
    limit: str
    share: float
    of_prefill: float
    beside: str
    slower: float | None
    extra_bytes: int | None


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    return Ceilings(copy_bandwidth(device), matmul_rate(device, dtype))


def kernel_times(
    device: torch.device, dtype: torch.dtype, tokens: int, rounds: int, limits: Ceilings, shape: LayerSize | None = None
) -> Iterator[KernelTime]:
    """Every case at one length, one after the other; the shape is `LLAMA_8B` unless given."""
    medians: dict[str, float] = {}
    for case in cases(Layer(shape or LLAMA_8B, tokens, dtype, device)):
        spread, extra = case_time(case, device, rounds)
        medians[case.name] = seconds = spread.median
        slower = seconds / medians[case.beside] if case.beside else None
        limit, least_s = limits.limit(case)
        shares = least_s / seconds, seconds / medians[PREFILL]
        yield KernelTime(case.name, tokens, spread, case.nbytes, case.flops, limit, *shares, case.beside, slower, extra)


def case_time(case: Case, device: torch.device, rounds: int) -> tuple[Spread, int | None]:
    """Seconds of one call, and the bytes beyond its arguments at their peak; None on a CPU."""
    torch.manual_seed(0)
    if device.type != "cuda":
        arguments = case.make()
        case.run(*arguments)  # the first call touches fresh memory
        return Spread.of([cost(lambda: case.run(*arguments), device).seconds for _ in range(rounds)]), None
    rotated = _rotated(case, device)
    for i in range(max(_WARM_UP, len(rotated))):  # compiles, and makes the plans, which a decoder makes once
        case.run(*rotated[i % len(rotated)])
    _, extra = cuda_peak(lambda: case.run(*rotated[0]), device)
    return Spread.of(_event_times(case, rotated, rounds)), extra


def _rotated(case: Case, device: torch.device) -> list[tuple[Any, ...]]:
    """Enough sets of arguments that when one is used again, the L2 cache has been filled twice by others."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    arguments = [case.make()]
    size = max(torch.cuda.memory_allocated(device) - before, 1)
    copies = math.ceil(2 * torch.cuda.get_device_properties(device).L2_cache_size / size) + 1
    return arguments + [case.make() for _ in range(min(copies, _MOST_COPIES) - 1)]


def _event_times(case: Case, rotated: Sequence[tuple[Any, ...]], rounds: int) -> list[float]:
    """Seconds of each call, between two events on its stream. All calls are queued before it waits for any."""
    event = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(rounds)]
    for i, (start, end) in enumerate(events):
        start.record()
        case.run(*rotated[i % len(rotated)])
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def column_sum_times(tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of CPU time of one layer of 8 query and 2 KV heads of 128 channels, medians, under torch's threads.

    attention: plain causal attention. column_sums: the operation in use. naive: the sums from all N x N weights of one
    query head at a time, 12 bytes * tokens^2 of memory. second_attention: the sums by a second call of torch's
    attention, without the first call, whose log-sum-exps it needs.
    """
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(heads, tokens, 128, generator=generator).to(dtype) for heads in (8, 2, 2))
    scale = 128**-0.5
    _, lse = baselines.flash(queries, baselines.repeated(keys, 8), baselines.repeated(values, 8), scale)
    ways: dict[str, Callable[[], object]] = {
        "attention": lambda: baselines.causal_attention(queries, keys, values),
        "column_sums": lambda: column_sums(queries, keys, scale),
        "naive": lambda: baselines.column_sums_of_whole_weights(queries, keys, scale),
        "second_attention": lambda: baselines.column_sums_by_attention(queries, keys, scale, lse),
    }
    return {name: median(cost(run).seconds for _ in range(rounds)) for name, run in ways.items()}
