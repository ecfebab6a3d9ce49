"""How well a model answers from the cache of each policy and codec, at how many bytes.

Documents are compressed without their questions. Every policy gets the same documents; all codecs of a policy and ratio
encode one and the same compressed cache.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from kvshelf.bench.engines import EngineOptions
from kvshelf.bench.processes import arriving, processes
from kvshelf.bench.quality.grid import Grid, Unit
from kvshelf.bench.quality.outcome import Outcome, Protocol, measure_unit
from kvshelf.bench.quality.resume import ResumeFile
from kvshelf.bench.quality.retrieval import counter
from kvshelf.bench.quality.suite import make_case
from kvshelf.bench.quality.summary import Summary
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.replica.create.sizes import Shape

Progress = Callable[[Unit, bool], None]
"""Called with each finished unit, and whether its outcomes were in the resume file already."""


def run(
    grid: Grid, options: EngineOptions, resume: Path, *, processes: int = 0, progress: Progress = lambda *_: None
) -> Summary:
    """Measure the units of `grid` that the file `resume` lacks, append them there, and summarize all units.

    processes: 0 means one per core. The result depends neither on their number nor on the order of the units: each unit
    is a function of its settings alone, and each process runs on `options.threads` threads. A policy that refuses a
    document refuses its cell. Raises `InvalidRequest` before any work for a length that cannot hold a task, and for a
    file that the bench did not write.
    """
    if resume.exists():  # only then: a run that is refused for its lengths leaves no file
        with ResumeFile(resume) as file:
            file.load()
    engine = options.load()
    protocol = Protocol.of(engine, grid.questions, grid.seed)
    for cell in grid.cells():
        make_case(cell.task, cell.haystack, cell.tokens, 0, counter(engine), questions=grid.questions)
    units = grid.units()
    with ResumeFile(resume) as file:
        known = file.load()
        missing = []
        for unit in units:
            if rest := tuple(row for row in unit.rows if protocol.key(unit, row) not in known):
                missing.append(replace(unit, rows=rest))
            else:
                progress(unit, True)
        for unit, outcomes in _measured(missing, protocol, options, engine, processes):
            for row, outcome in zip(unit.rows, outcomes, strict=True):
                about = {"cell": unit.cell.label, "document": unit.document, "policy": unit.variant.label}
                file.append(outcome, about | {"removed": unit.removed, "codec": row.codec, "exported": row.exported})
                known[outcome.key] = outcome
            progress(unit, False)
    found = ((row, unit.cell, known[protocol.key(unit, row)]) for unit in units for row in unit.rows)
    return Summary.of(grid.cells(), grid.rows(), found, Shape.of(engine.model).full_16bit_bytes(1))


def _measured(
    units: list[Unit], protocol: Protocol, options: EngineOptions, engine: Engine, count: int
) -> Iterator[tuple[Unit, list[Outcome]]]:
    """In this process if one is enough, so that errors keep their tracebacks; otherwise on `count` processes, in any
    order, each with its own engine and threads. Raises `WorkerCrashed` when a process dies."""
    # One per core this process may use; one for a GPU, as several would wait for it in turn.
    count = count or (len(os.sched_getaffinity(0)) if protocol.device == "cpu" else 1)
    if count == 1 or len(units) < 2 * count:
        for unit in units:
            yield unit, measure_unit(engine, unit, protocol)
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


def _work(connection: Connection, options: EngineOptions, protocol: Protocol) -> None:
    """Measures units until the pipe closes, even if the process at the other end was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process at the other end
    engine = options.load()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            place, unit = connection.recv()
            connection.send((place, measure_unit(engine, unit, protocol)))
