"""What a part of `scripts/gpu.py` measures with: rows that are on disk as soon as they are measured."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvshelf.bench.measure import Spread, cost

ResultT = TypeVar("ResultT")


class OutOfTime(Exception):
    """The part's time is over. Raised between two pieces of work, for the rest to be named."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part under way. rows: the file that its rows are appended to, as JSON lines. ends: `time.monotonic()` when its
    process is killed. toy: small sizes, on a CPU. folder: for the texts that a row names."""

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
        """One line of the report. measured: None where it could not be; then a goal is missed."""
        goal = at_least if at_most is None else at_most
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

    def text(self, name: str, written: str) -> None:
        """Append a text to the file of this name in the report's folder."""
        with (self.folder / name).open("a") as file:
            file.write(written.rstrip() + "\n\n")

    def _write(self, row: dict[str, Any]) -> None:
        with self.rows.open("a") as file:
            file.write(json.dumps({"part": self.name} | row) + "\n")
