"""Measures units on one or several processes, and keeps their outcomes in a file from which a killed run resumes."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvshelf.engine.engine import Engine
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.processes import arriving, processes
from kvshelf_bench.quality.grid import Row, Unit
from kvshelf_bench.quality.outcome import Outcome
from kvshelf_bench.quality.resume import ResumeFile

UnitT = TypeVar("UnitT", bound=Unit)
MeasuredT = TypeVar("MeasuredT", bound=Unit, contravariant=True)

Progress = Callable[[UnitT, Sequence[Outcome], bool], None]
"""Called with each finished unit, the outcomes of its rows, and whether they were in the resume file already."""


class Measuring(Protocol[MeasuredT]):
    """How units of a kind are measured, with the settings that they share. Goes to other processes."""

    @property
    def device(self) -> str: ...

    def key(self, unit: MeasuredT, row: Row) -> str: ...

    def measure(self, engine: Engine, unit: MeasuredT) -> list[Outcome]: ...


def require_resumable(resume: Path) -> None:
    """Raises `InvalidRequest` for a file that the bench did not write: before a model is loaded."""
    if resume.exists():  # only then: a run that is refused leaves no file
        with ResumeFile(resume) as file:
            file.load()


def outcomes(
    units: Sequence[UnitT],
    protocol: Measuring[UnitT],
    engine: Engine,
    options: EngineOptions,
    resume: Path,
    *,
    processes: int,
    progress: Progress[UnitT],
) -> dict[str, Outcome]:
    """The outcomes of all rows of all units, by key. What the file `resume` lacks is measured and appended there.

    processes: 0 means one per core. The result depends neither on their number nor on the order of the units: each unit
    is a function of its settings alone, and each process runs on `options.threads` threads.
    """
    with ResumeFile(resume) as file:
        known = file.load()
        missing = []
        for unit in units:
            if rest := tuple(row for row in unit.rows if protocol.key(unit, row) not in known):
                missing.append(replace(unit, rows=rest))
            else:
                progress(unit, [known[protocol.key(unit, row)] for row in unit.rows], True)
        for unit, measured in _measured(missing, protocol, options, engine, processes):
            for row, outcome in zip(unit.rows, measured, strict=True):
                kept = {"policy": row.variant.label, "removed": row.removed, "budget": row.budget}
                file.append(outcome, {**unit.about, **kept, "codec": row.codec, "exported": row.exported})
                known[outcome.key] = outcome
            progress(unit, measured, False)
    return known


def _measured(
    units: list[UnitT], protocol: Measuring[UnitT], options: EngineOptions, engine: Engine, count: int
) -> Iterator[tuple[UnitT, list[Outcome]]]:
    """In this process if one is enough, so that errors keep their tracebacks; otherwise on `count` processes, in any
    order, each with its own engine and threads. Raises `WorkerCrashed` when a process dies."""
    # One per core this process may use; one for a GPU, as several would wait for it in turn.
    count = count or (len(os.sched_getaffinity(0)) if protocol.device == "cpu" else 1)
    if count == 1 or len(units) < 2 * count:
        for unit in units:
            yield unit, protocol.measure(engine, unit)
        return
    waiting = deque(enumerate(units))
    with processes(_work, [(options, protocol)] * count) as pool:
        busy = dict(pool)
        for idle in pool:
            idle.send(waiting.popleft())
        for connection, (place, outcomes) in arriving(busy, "; results are kept, start again to go on"):
            if waiting:  # one unit at a time, as their costs differ by an order of magnitude
                connection.send(waiting.popleft())
                busy[connection] = pool[connection]
            yield units[place], outcomes


def _work(connection: Connection, options: EngineOptions, protocol: Measuring[Any]) -> None:
    """Measures units until the pipe closes, even if the process at the other end was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process at the other end
    engine = options.load()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            place, unit = connection.recv()
            connection.send((place, protocol.measure(engine, unit)))
