"""A pool of processes that measure units: each has an engine of its own on its own threads."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from kvshelf.bench.engines import EngineOptions
from kvshelf.bench.processes import arriving, processes
from kvshelf.bench.quality.grid import Unit
from kvshelf.bench.quality.outcome import Outcome, Protocol, measure_unit

Done = tuple[int, list[Outcome]]
"""The place of a unit in the given list, and an outcome per row of the unit."""


def default_processes(device: str) -> int:
    """One per core this process may use; one for a GPU, as several would wait for it in turn."""
    return len(os.sched_getaffinity(0)) if device == "cpu" else 1


def measured(units: Sequence[Unit], protocol: Protocol, options: EngineOptions, count: int) -> Iterator[Done]:
    """Measure every unit on `count` processes, in any order. Raises `WorkerCrashed` when a process dies.

    Each process gets one unit at a time, as their costs differ by an order of magnitude.
    """
    waiting = deque(enumerate(units))
    with processes(_work, [(options, protocol)] * min(count, len(units))) as pool:
        busy = dict(pool)
        for idle in pool:
            idle.send(waiting.popleft())
        for connection, done in arriving(busy, "; results are kept, start again to go on"):
            if waiting:
                connection.send(waiting.popleft())
                busy[connection] = pool[connection]
            yield done


def _work(connection: Connection, options: EngineOptions, protocol: Protocol) -> None:
    """Measures units until the pipe ends, also because the process at the other end was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process at the other end
    engine = options.load()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            place, unit = connection.recv()
            connection.send((place, measure_unit(engine, unit, protocol)))
