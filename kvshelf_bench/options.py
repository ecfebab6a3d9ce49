"""Shared parts of the bench commands: options, the progress bar, and the output."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from kvshelf.errors import InvalidRequest
from kvshelf.terminal import progress_bar

if TYPE_CHECKING:
    from kvshelf_bench.engines import EngineOptions
    from kvshelf_bench.measure import Spread


def writable(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuses a file that cannot be written, before an hour of work and not after it."""
    if path is not None:
        try:
            obstacle = _obstacle(path)
        except OSError as error:
            obstacle = error.strerror
        if obstacle:
            raise InvalidRequest(f"{param.opts[0]} {path} cannot be written: {obstacle}", param=param.name)
    return path


def _obstacle(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    allowed = os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK | os.X_OK)
    return None if allowed else "permission denied"


Model = Annotated[str, typer.Option("--model", help="Bundled name, local folder or hub id.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda:0 ...")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Weights = Annotated[str, typer.Option("--weights", help="plain or int8: rounded to a byte each, on a CPU.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads of torch; 0 leaves its own choice.")]
Output = Annotated[
    Path | None, typer.Option("--output", callback=writable, help="Write the result as JSON to this file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class _Loads:
    def engine_options(self) -> EngineOptions:
        from kvshelf_bench.engines import EngineOptions

        return EngineOptions(**vars(self))


@dataclass(frozen=True)
class Loading(_Loads):
    """The model of a command, and how it is loaded."""

    model: Model = "kvshelf-tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: Threads = 1


@dataclass(frozen=True)
class FreeLoading(Loading):
    """With the threads that torch chooses."""

    threads: Threads = 0


@dataclass(frozen=True)
class WeightedLoading(_Loads):
    """With the form of the weights. Options are listed in the order of fields, so this does not extend `Loading`."""

    model: Model = "kvshelf-tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    weights: Weights = "plain"
    threads: Threads = 1


@dataclass(frozen=True)
class Reporting:
    """Where the result of a command goes: always to the terminal."""

    output: Output = None
    as_json: Json = False


NumberT = TypeVar("NumberT", int, float)

_PIPE_WIDTH = 120


def split(text: str) -> tuple[str, ...]:
    """`int4:group=64,residual=8,none` is two names: a comma before `name=` belongs to the parameters of one."""
    return tuple(part.strip() for part in re.split(r",(?!\s*\w+=)", text) if part.strip())


def choices(text: str, known: tuple[Any, ...], option: str) -> list[Any]:
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}", param_hint=option)
    return chosen


def numbers(text: str, option: str = "--lengths") -> list[int]:
    """Whole numbers from 1 on, separated by commas."""
    values = _parsed(int, text, option)
    if min(values) < 1:
        raise InvalidRequest(f"{option} {text}: each number must be at least 1", param=option.removeprefix("--"))
    return values


def decimals(text: str, option: str, low: float, high: float) -> list[float]:
    """Numbers from `low` to `high`, separated by commas."""
    values = _parsed(float, text, option)
    if not all(low <= number <= high for number in values):
        raise typer.BadParameter(f"{text!r} has a number outside {low:g} to {high:g}", param_hint=option)
    return values


def _parsed(kind: Callable[[str], NumberT], text: str, option: str) -> list[NumberT]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=option) from error


def ratio(spread: Spread) -> str:
    """A median with its range."""
    return f"{spread.median:.2f} ({spread.low:.2f} - {spread.high:.2f})"


def milliseconds(spread: Spread) -> str:
    """A median of seconds."""
    number = spread.median * 1e3
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.2f} ms"


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar, as what is called after each of `total` steps."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def publish(report: dict[str, Any], tables: list[Table], reporting: Reporting, *, notes: str = "") -> None:
    """The report to the terminal as JSON or as tables with `notes` and the machine below, and as JSON to a file.

    `report` holds JSON types and dataclasses. If one of the two cannot be written, the other one still is.
    """
    text = json.dumps(report, indent=2, default=asdict)
    try:
        if reporting.as_json:
            typer.echo(text)
        else:
            _print(tables, notes, report["machine"])
    finally:
        if reporting.output is not None:
            try:
                reporting.output.write_text(text + "\n")
            except OSError as error:
                reason = f"cannot write --output {reporting.output}: {error.strerror}"
                raise InvalidRequest(reason, param="output") from error


def rendered(tables: list[Table], notes: str, where: dict[str, Any]) -> str:
    """What a run prints, as text of 120 columns."""
    file = StringIO()
    _print(tables, notes, where, Console(file=file, width=_PIPE_WIDTH, highlight=False))
    return file.getvalue()


def _print(tables: list[Table], notes: str, where: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    for table in tables:
        console.print(table)
        console.print()
    if notes:
        console.print(notes, style="dim")
    console.print(
        f"{where['processor']}, {where['threads']} of {where['cores']} cores, load {where['load']:.1f}, "
        f"{where['gpu'] or 'no GPU'}, kernels on a CPU: {where['cpu_kernels']}, torch {where['torch']}, "
        f"transformers {where['transformers']}",
        style="dim",
    )
