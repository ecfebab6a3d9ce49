"""The rates at which a device reads, copies and multiplies, which no operation on it can exceed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Cost:
    """The time of one run. Benches compare `seconds`: process time on a CPU, wall time on a GPU."""

    seconds: float
    wall_s: float


def cost(run: Callable[[], object], device: torch.device = CPU) -> Cost:
    """Time one call on a device. Its result is freed outside the time, as a caller would keep it.

    On a CPU by the processor time of all threads of this process, which neighbours hardly disturb. On a GPU by the wall
    clock, read once the GPU has finished all queued work, as the process itself only waits for the GPU.
    """

    def now() -> float:
        if device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    started_wall, started = time.perf_counter(), now()
    result = run()
    elapsed = Cost(now() - started, time.perf_counter() - started_wall)
    del result
    return elapsed


BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
"""Larger than every processor cache; some caches have hundreds of megabytes."""

MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}

_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory once, with torch's threads: a dot product of a vector with itself."""
    values = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    return values.nbytes / _median_s(lambda: torch.dot(values, values), device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying memory, read and written bytes both counted."""
    source = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large square matrix product; 2 n^3 are counted."""
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _median_s(lambda: torch.matmul(left, right), device)


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    run()  # the first call touches fresh memory
    return median(cost(run, device).seconds for _ in range(_REPEATS))
