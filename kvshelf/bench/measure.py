"""What every bench needs: the machine it ran on, medians of interleaved rounds, and an honest interval."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a measurement."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every variant once per round, in order, and collect what each returns.

    Interleaved, because a neighbour that slows the machine for a while then slows all variants alike; ratios are taken
    within a round. One round before the first is thrown away.
    """
    results: dict[str, list[float]] = {name: [] for name in variants}
    for counted in [False] + [True] * rounds:
        for name, run in variants.items():
            value = run()
            if counted:
                results[name].append(value)
    return results


def ratios(numerator: list[float], denominator: list[float]) -> Spread:
    """Spread of the ratios within each round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call; waits for a GPU to finish."""
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927): right near 0 and 1, where hits +- 2 sigma leaves the range."""
    z, share = 1.96, hits / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
