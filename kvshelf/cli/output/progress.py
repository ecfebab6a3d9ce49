"""Shows the progress of a batch or a put: a live display in a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvshelf.cli.output import common
from kvshelf.terminal import progress_bar

if TYPE_CHECKING:
    from kvshelf.api import CreationProgress
    from kvshelf.corpus.run.progress import Progress

_LINE_EVERY_S: Final = 60.0
_PUT_LINE_EVERY_S: Final = 5.0
_MOST_WORKERS: Final = 16
_PHASES: Final = {
    "prefill": ("prefill and policy", "layers"),
    "quality": ("quality", "measured"),
    "store": ("store", "stored"),
}


@contextmanager
def shown(*, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Gives a function to call with each snapshot. All output goes to standard error."""
    if quiet:
        yield lambda _: None
    elif common.notes.is_terminal:
        with Live(console=common.notes, refresh_per_second=4, transient=True) as live:
            yield lambda progress: live.update(_display(progress))
    else:
        yield _Lines().show


class _Lines:
    def __init__(self) -> None:
        self._next = 0.0
        self._state = ""

    def show(self, progress: Progress) -> None:
        """Print a line when the state changes, otherwise once a minute."""
        if progress.state == self._state and time.monotonic() < self._next:
            return
        self._state, self._next = progress.state, time.monotonic() + _LINE_EVERY_S
        common.notes.print(_headline(progress), soft_wrap=True)


@contextmanager
def searching(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how many steps of a search are done, and of how many. The time is shown, too."""
    started = time.monotonic()
    if common.notes.is_terminal:
        with progress_bar() as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        yield _SearchLines(title, started).show
    common.notes.print(f"{title}: done in {time.monotonic() - started:.0f} s", soft_wrap=True)


class _SearchLines:
    def __init__(self, title: str, started: float) -> None:
        self._title, self._started, self._next = title, started, started

    def show(self, done: int, total: int) -> None:
        """Print a line, but not more than one in `_PUT_LINE_EVERY_S`."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _PUT_LINE_EVERY_S
            common.notes.print(f"{self._title}: {done} of {total}, {now - self._started:.0f} s", soft_wrap=True)


@contextmanager
def put_shown(name: str) -> Iterator[Callable[[CreationProgress], None]]:
    """Gives a function to call with each event of the creation of `name`. All output goes to standard error."""
    if common.notes.is_terminal:
        with common.notes.status(f"{name}: waiting for the model") as status:
            yield lambda event: status.update(_step(name, event))
    else:
        yield _PutLines(name).show


class _PutLines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._printed_at = time.monotonic()
        self._phase: tuple[str, str | None] | None = None

    def show(self, event: CreationProgress) -> None:
        """Print a line when a phase ends, and at least every few seconds; one line for the many short ones of auto."""
        phase = (event.phase, event.part)
        ended = event.done == event.total and phase != self._phase
        if not ended and time.monotonic() < self._printed_at + _PUT_LINE_EVERY_S:
            return
        self._printed_at = time.monotonic()
        self._phase = phase if ended else self._phase
        common.notes.print(_step(self._name, event), soft_wrap=True)


def _step(name: str, event: CreationProgress) -> str:
    part = "" if event.part is None else f" part {event.part}"
    phase, counted = _PHASES[event.phase]
    return f"{name}{part}: {phase}, {event.done} of {event.total} {counted}, {event.seconds:.2f} s"


class Spent:
    """The seconds of each phase of a creation, as its progress told them: what is said at the end is their sum."""

    def __init__(self) -> None:
        self._runs: list[CreationProgress] = []  # the last event of each time that a phase ran

    def add(self, event: CreationProgress) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.phase, last.part) == (event.phase, event.part) and event.done:
            self._runs.pop()
        self._runs.append(event)

    def describe(self, part: str | None) -> str:
        """Of one part, or of a document that is not split."""
        of = [run for run in self._runs if run.part == part]
        ran = {run.phase for run in of}
        sums = {phase: sum(run.seconds for run in of if run.phase == phase) for phase in _PHASES if phase in ran}
        return ", ".join(f"{_PHASES[phase][0]} {seconds:.2f} s" for phase, seconds in sums.items())


def _display(progress: Progress) -> Group:
    bar = ProgressBar(total=1.0, completed=progress.fraction, width=60)
    workers = _workers(progress) if len(progress.workers) > 1 else ""
    return Group(Text(_headline(progress)), bar, Text(describe_numbers(progress), style="dim"), workers)


def _headline(progress: Progress) -> str:
    of = "" if progress.total is None else f" of {progress.total:,}"
    reason = f" ({progress.reason})" if progress.reason else ""
    left = "" if progress.eta_s is None else f", {duration(progress.eta_s)} left"
    return f"{progress.state}{reason}: {progress.done + progress.failed:,}{of} documents, {progress.fraction:.0%}{left}"


def describe_numbers(progress: Progress) -> str:
    return (
        f"{progress.reused:,} reused, {progress.failed:,} failed, {progress.tokens_per_s:,.0f} tokens/s, "
        f"{common.megabytes(progress.bytes_stored)} stored ({progress.bytes.share:.1%} of 16 bits), "
        f"{progress.gpu_hours:.2f} GPU hours"
    )


def _workers(progress: Progress) -> Table:
    rows = []
    for name, worker in sorted(progress.workers.items())[:_MOST_WORKERS]:
        rate = worker.tokens / worker.seconds if worker.seconds else 0.0
        rows.append((name, f"{worker.done:,}", f"{rate:,.0f}"))
    table = common.table(("WORKER", "DOCUMENTS", "TOKENS/S"), rows, numbers=(1, 2))
    table.style = table.header_style = "dim"
    return table


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
