"""Measures units on one or several processes, and keeps their outcomes in a file from which a killed run resumes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, StateConflict
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.processes import arriving, processes
from kvshelf_bench.quality.grid import Row, Unit
from kvshelf_bench.quality.outcome import Outcome

_BEGINNING: Final = b'{"bench": "quality", "key": "'
"""Starts every line, to tell a first line that was cut off from the text of a foreign file."""


class ResumeFile:
    """A file of outcomes, one JSON object per line, for one process at a time.

    Lines are looked up by key, so lines of another model or setting stay and are never taken for this run's. A line
    that a kill cut off is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise InvalidRequest(f"--resume {path}: {error.strerror or error}", param="resume") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StateConflict(
                f"{path} is being written by another run; wait for it, or give another --resume file", param="resume"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def load(self) -> dict[str, Outcome]:
        """Every outcome in the file, by key. Raises `InvalidRequest` for a foreign file, which stays as it is."""
        self._file.seek(0)
        whole, newline, torn = self._file.read().rpartition(b"\n")
        outcomes = {}
        for number, line in enumerate(whole.splitlines(), 1):
            outcome = self._outcome(number, line)
            outcomes[outcome.key] = outcome
        if torn:
            if not outcomes and torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                raise self._foreign(1, "it has no end")
            self._file.truncate(len(whole + newline))
        return outcomes

    def append(self, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Write one line; `about` is for people who read the file."""
        line = {"bench": "quality", "key": outcome.key, **about, **asdict(outcome)}  # as `_BEGINNING` has it
        self._file.write(json.dumps(line).encode() + b"\n")
        # Flushed to the operating system, a line survives a kill; surviving a power cut would cost an fsync per line.
        self._file.flush()

    def _outcome(self, number: int, line: bytes) -> Outcome:
        names = Outcome.__dataclass_fields__
        try:
            fields = {name: value for name, value in json.loads(line).items() if name in names}
            lists = {name: tuple(fields[name]) for name in ("exact", "partial", "answers", "first_tokens")}
            return Outcome(**{**fields, **lists})
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise self._foreign(number, error) from error

    def _foreign(self, number: int, reason: object) -> InvalidRequest:
        return InvalidRequest(
            f"line {number} of {self._path} was not written by this bench ({reason}); give another --resume file",
            param="resume",
        )


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
