"""Processes that measure units: each has an engine of its own on its own threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import transformers

from kvshelf.bench.quality.outcome import Outcome, Protocol, measure_unit
from kvshelf.bench.quality.plan import Unit
from kvshelf.errors import WorkerCrashed
from kvshelf.workers.engine.engine import Engine

Done = tuple[int, list[Outcome]]
"""The place of a unit in the list that was given, and an outcome per row of it."""


@dataclass(frozen=True)
class Source:
    """How to load an engine: the arguments of `Engine.load`, and the threads of torch (0: its own choice)."""

    model: str = "kvshelf-tiny"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1

    def load(self) -> Engine:
        """An engine in this process; sets the threads of this process."""
        if self.threads:
            torch.set_num_threads(self.threads)
        transformers.utils.logging.disable_progress_bar()  # the bench has a bar of its own
        return Engine.load(self.model, device=self.device, dtype=self.dtype)


def default_processes(device: str) -> int:
    """One per core this process may use, or one for a GPU, which processes would only wait for in turn."""
    return len(os.sched_getaffinity(0)) if device == "cpu" else 1


def measured(units: Sequence[Unit], protocol: Protocol, source: Source, processes: int) -> Iterator[Done]:
    """Measure every unit, in whatever order they are done. Raises `WorkerCrashed` when a process dies.

    Units are handed out one at a time, as their costs differ by an order of magnitude.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    waiting = deque(range(len(units)))
    at_work: dict[Connection, BaseProcess] = {}
    with ExitStack() as stack:
        for _ in range(min(processes, len(units))):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, source, protocol), daemon=True)
            worker.start()
            theirs.close()
            stack.callback(worker.join)
            stack.callback(ours.close)  # runs first: a worker whose pipe is closed ends by itself
            ours.send((waiting[0], units[waiting.popleft()]))
            at_work[ours] = worker
        while at_work:
            for connection in wait(list(at_work)):
                assert isinstance(connection, Connection)
                yield _received(connection, at_work[connection])
                if waiting:
                    connection.send((waiting[0], units[waiting.popleft()]))
                else:
                    del at_work[connection]


def _received(connection: Connection, worker: BaseProcess) -> Done:
    try:
        done: Done = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        worker.join()
        raise WorkerCrashed(
            f"a process of the bench ended with exit code {worker.exitcode} (its own message stands above); what was "
            "measured is kept, start again to go on"
        ) from error
    return done


def _work(connection: Connection, source: Source, protocol: Protocol) -> None:
    """The life of one process: until its pipe is closed, also because the process at the other end was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process at the other end
    engine = source.load()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            place, unit = connection.recv()
            connection.send((place, measure_unit(engine, unit, protocol)))
