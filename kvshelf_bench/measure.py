"""Shared by all benches: the machine and its ceilings, medians of interleaved rounds, and confidence intervals."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from kvshelf.kernels.dispatch import cpu_form
from kvshelf.kernels.rates import Cost, cost

KeyT = TypeVar("KeyT", bound=Hashable)
ResultT = TypeVar("ResultT")


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "cpu_kernels": cpu_form(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


def use_threads(threads: int) -> None:
    """Sets the threads of torch in this process; 0 leaves its own choice."""
    if threads:
        torch.set_num_threads(threads)


def load_warning(where: Mapping[str, Any]) -> str:
    """A warning if the load of a `machine()` exceeds its cores, otherwise "".

    Process time stays usable then, wall time does not. A refusal would make the bench useless on a shared machine.
    """
    if where["load"] <= where["cores"]:
        return ""
    return (
        f"The load average was {where['load']:.1f} on {where['cores']} cores at the start: neighbours disturb what is "
        "measured. Trust ratios of CPU times, not wall times."
    )


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a measurement."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def cuda_peak(run: Callable[[], ResultT], device: torch.device) -> tuple[ResultT, int]:
    """The result of `run`, and the bytes by which it raised the memory of this GPU at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak resident set size back to the present one


def with_peak(device: torch.device, run: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """The result of `run`, and the bytes by which it raised the memory of this process at most, or of its GPU."""
    if device.type == "cuda":
        return cuda_peak(run, device)
    # Garbage that is freed during `run` would hide a part of its peak, and so would pages that the allocator kept.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = status_bytes("VmRSS")
    result = run()
    return result, status_bytes("VmHWM") - before


def allocated_peak(device: torch.device, run: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """The result of `run`, and the most bytes of tensors that it held at once beside those before: by torch's
    allocator, on a CPU too, where pages of the process (`with_peak`) come and go later than tensors do."""
    if device.type == "cuda":
        return cuda_peak(run, device)
    gc.collect()  # what it freed during the run would be taken from what the run holds
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return result, max(sizes, default=0)


def interleaved(variants: Mapping[KeyT, Callable[[], ResultT]], rounds: int) -> dict[KeyT, list[ResultT]]:
    """Run every variant once per round, in order, and collect what each returns.

    In interleaved rounds a neighbour that slows the machine for a while slows all variants alike; ratios are taken
    within a round. One round before the first does not count.
    """
    results: dict[KeyT, list[ResultT]] = {name: [] for name in variants}
    for counted in [False] + [True] * rounds:
        for name, run in variants.items():
            value = run()
            if counted:
                results[name].append(value)
    return results


def timed(run: Callable[[], ResultT], device: torch.device) -> tuple[ResultT, Cost]:
    """The result of one call, and what it cost."""
    results: list[ResultT] = []
    spent = cost(lambda: results.append(run()), device)
    return results[0], spent


def ratios(numerator: list[float], denominator: list[float]) -> Spread:
    """Spread of the ratios within each round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927): right near 0 and 1, where hits +- 2 sigma leaves the range."""
    z, share = 1.96, hits / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def clustered_wilson(clusters: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """95 % interval of a share whose trials come in clusters of (hits, trials), such as the questions of a document.

    Answers from one cache are correlated, so n questions say less than n documents would. Wilson's interval is taken at
    the effective number of trials, n divided by the design effect (Kish, 1965; for Wilson's interval: Dean and Pagano,
    2015): the variance of the share estimated from the spread between clusters, over that of n independent trials. The
    effect is held between 1 and the size of a cluster, beyond which an estimate from few clusters is noise. If all
    answers are right, or all wrong, there is no spread and every trial counts, as in surveys (NCHS, 2017). A bootstrap
    over documents would have no width there, where most cells of a good policy are.
    """
    hits, trials = sum(hit for hit, _ in clusters), sum(size for _, size in clusters)
    share = hits / trials
    if share in (0, 1):
        return wilson(hits, trials)
    count = len(clusters)
    largest = trials / count
    effect = largest
    if count > 1:
        spread = sum((hit - share * size) ** 2 for hit, size in clusters) * count / (count - 1)
        effect = min(max(spread / (trials * share * (1 - share)), 1.0), largest)
    return wilson(hits / effect, trials / effect)


def clustered_mean(clusters: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of values that come in clusters, such as the scores of a document's questions, and half of its 95 %
    interval: the ratio estimator of cluster sampling (Cochran, 1977, 6.3), with Student's t for few clusters. No
    interval can be told from one cluster; it is infinite then."""
    count, size = len(clusters), sum(map(len, clusters))
    mean = sum(map(sum, clusters)) / size
    if count < 2:
        return mean, math.inf
    spread = sum((sum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters) * count / (count - 1)
    return mean, _student(count - 1) * math.sqrt(spread) / size


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, from Cornish and Fisher's expansion; below 3 degrees it is too far off."""
    if freedom < 3:
        return (12.706, 4.303)[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def processor_s(pid: int, *, children: bool = False) -> float:
    """Processor seconds of a process so far, by proc(5): of all its threads, and of its ended children if wanted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def status_bytes(field: str) -> int:
    """Bytes of this process by proc(5): VmRSS is resident now, VmHWM was the most resident at once.

    Not from getrusage, whose peak starts with that of the parent process and cannot be reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def _version(package: str) -> str | None:
    """Not read from the imported module: the bench of the kernels runs without transformers."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
