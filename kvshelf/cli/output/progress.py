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
        lines, state = _Lines(_LINE_EVERY_S), ""

        def show(progress: Progress) -> None:
            nonlocal state
            lines.print(_headline(progress), now=progress.state != state)
            state = progress.state

        yield show


class _Lines:
    """Lines of a log: no more than one in `every_s` seconds, but for those that are not to wait. The first one comes
    after `wait_s`."""

    def __init__(self, every_s: float, wait_s: float = 0.0) -> None:
        self._every_s, self._next = every_s, time.monotonic() + wait_s

    def print(self, line: str, *, now: bool = False) -> None:
        if now or time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            common.notes.print(line, soft_wrap=True)


@contextmanager
def searching(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how many steps of a search are done, and of how many. The time is shown, too."""
    started = time.monotonic()
    if common.notes.is_terminal:
        with progress_bar() as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        lines = _Lines(_PUT_LINE_EVERY_S)
        yield lambda done, total: lines.print(f"{title}: {done} of {total}, {time.monotonic() - started:.0f} s")
    common.notes.print(f"{title}: done in {time.monotonic() - started:.0f} s", soft_wrap=True)


@contextmanager
def put_shown(name: str) -> Iterator[Callable[[CreationProgress], None]]:
    """Gives a function to call with each event of the creation of `name`. All output goes to standard error."""
    if common.notes.is_terminal:
        with common.notes.status(f"{name}: waiting for the model") as status:
            yield lambda event: status.update(_step(name, event))
    else:
        lines = _Lines(_PUT_LINE_EVERY_S, wait_s=_PUT_LINE_EVERY_S)
        last: tuple[str, str | None] | None = None

        def show(event: CreationProgress) -> None:
            """One line when a phase ends, and one for the many short ones of auto."""
            nonlocal last
            phase = (event.phase, event.part)
            ended = event.done == event.total and phase != last
            lines.print(_step(name, event), now=ended)
            last = phase if ended else last

        yield show


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
