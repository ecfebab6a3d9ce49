"""The ceilings of this device, measured: rates that the figures of the benches are a share of."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from kvshelf.bench.measure import cost

_BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
"""Larger than every processor cache, of which some have hundreds of megabytes."""

_MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory once, with torch's threads: a dot product of a vector with itself."""
    values = torch.ones(_BUFFER_BYTES[device.type] // 4, device=device)
    return values.nbytes / _median_s(lambda: torch.dot(values, values), device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying memory, read and written bytes both counted."""
    source = torch.ones(_BUFFER_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large square matrix product; 2 n^3 are counted."""
    size = _MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _median_s(lambda: torch.matmul(left, right), device)


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    run()  # the first call touches fresh memory
    return median(cost(run, device).seconds for _ in range(_REPEATS))
