"""What a part of `scripts/gpu.py` measures with: rows that are on disk as soon as they are measured."""

from __future__ import annotations

import gc
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvshelf.kernels.rates import cost
from kvshelf_bench.measure import Spread

ResultT = TypeVar("ResultT")

_PROCESSES = 8
"""Of a part that compiles many kernels: each waits for the compiler most of its time."""


class Profile(NamedTuple):
    """Of one call of many: kernels, and the seconds in which the device computed, None on a CPU. table: of all
    operations, those that take longest first."""

    kernels: float
    device_s: float | None
    table: str


class OutOfTime(Exception):
    """The part's time is over. Raised between two pieces of work, for the rest to be named."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part under way. rows: the file that its rows are appended to, as JSON lines. ends: `time.monotonic()` when
    its process is killed. toy: small sizes, on a CPU. folder: for the texts that a row names."""

    name: str
    device: torch.device
    toy: bool
    rows: Path
    folder: Path
    ends: float

    @property
    def left_s(self) -> float:
        """Seconds until this process is killed."""
        return self.ends - time.monotonic()

    @property
    def dtype(self) -> torch.dtype:
        """Of the models and states: bfloat16, on a CPU float32."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def workers(self) -> Executor:
        """What runs many small checks: several processes with the card; on a CPU this one, whose imports are done."""
        if self.device.type != "cuda":
            return ThreadPoolExecutor(1)
        return ProcessPoolExecutor(_PROCESSES, mp_context=multiprocessing.get_context("spawn"))

    def require_s(self, seconds: float) -> None:
        """Raise `OutOfTime` unless so many seconds are left."""
        if self.left_s < seconds:
            raise OutOfTime(f"{self.left_s:.0f} s are left, and this takes about {seconds:.0f}")

    def row(
        self,
        name: str,
        measured: float | None,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        """One line of the report. measured: None where it could not be; then a goal is missed. Goals are a card's: of
        them a toy run has `at_most` 0 alone, that nothing is wrong."""
        goal = at_least if at_most is None else at_most
        goal = None if self.toy and goal else goal
        share = None if measured is None or not goal else measured / goal
        met = None
        if goal is not None:
            met = measured is not None and (measured >= goal if at_most is None else measured <= goal)
        bound = "" if goal is None else "at least" if at_most is None else "at most"
        self._write(
            {"name": name, "measured": measured, "unit": unit, "bound": bound, "goal": goal, "share": share, "met": met,
             "note": note}
        )  # fmt: skip

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """An error inside the block becomes a row of this name, and the next piece of work goes on. Frees the memory of
        the card behind it."""
        try:
            yield
        except OutOfTime as over:
            self._write({"name": name, "error": f"no time: {over}"})
        except Exception as error:  # whatever goes wrong is told, and hides nothing else
            last = traceback.format_exc().strip().splitlines()[-12:]
            self._write({"name": name, "error": f"{type(error).__name__}: {error}"[:600], "trace": last})
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], rounds: int = 3, warm_up: int = 1) -> Spread:
        """Of calls of `run`, each timed until the device has finished it; `warm_up` calls before do not count."""
        for _ in range(warm_up):
            run()
        return Spread.of([cost(run, self.device).seconds for _ in range(rounds)])

    def peak(self, run: Callable[[], ResultT]) -> tuple[ResultT, int | None]:
        """The result, and the bytes that the device held at most, all that was there before included; None on a CPU."""
        if self.device.type != "cuda":
            return run(), None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = run()
        torch.cuda.synchronize(self.device)
        return result, torch.cuda.max_memory_allocated(self.device)

    def profiled(self, run: Callable[[], object], steps: int) -> Profile:
        """What so many calls of `run` do, by torch's profiler."""
        on_card = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
        with profile(activities=activities) as profiled:
            for _ in range(steps):
                run()
            if on_card:
                torch.cuda.synchronize(self.device)
        averages = profiled.key_averages()
        order = "self_device_time_total" if on_card else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=25, max_name_column_width=70)
        if not on_card:
            return Profile(0, None, table)
        kernels = [kernel for kernel in averages if kernel.device_type == torch.autograd.DeviceType.CUDA]
        count = sum(kernel.count for kernel in kernels) / steps
        return Profile(count, sum(kernel.self_device_time_total for kernel in kernels) / steps / 1e6, table)

    def device_ms(self, run: Callable[[], object]) -> float | None:
        """Milliseconds in which the device computes during a call, launches and waits left out; None on a CPU."""
        if self.device.type != "cuda":
            return None
        seconds = self.profiled(run, steps=3).device_s
        return None if seconds is None else seconds * 1e3

    def text(self, name: str, written: str) -> None:
        """Append a text to the file of this name in the report's folder."""
        with (self.folder / name).open("a") as file:
            file.write(written.rstrip() + "\n\n")

    def _write(self, row: dict[str, Any]) -> None:
        with self.rows.open("a") as file:
            file.write(json.dumps({"part": self.name} | row) + "\n")


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with other tensors: in lists, tuples, and dataclasses, quantized rows among them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {member.name: mapped(getattr(value, member.name), change) for member in fields(value) if member.init}
        return replace(value, **own)
    return value
