"""Exit codes and output that the commands share.

Results go to stdout, everything else to stderr, so that `ID=$(kvshelf put report.txt)` works.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from kvshelf import atomic, errors
from kvshelf.cli.output import HarmlessConsole, harmless, say_json
from kvshelf.terminal import json_or_text

if TYPE_CHECKING:
    from kvshelf.client import Client

EXIT_CODES = """\b
Exit codes of all commands:
  0    done
  1    failed: the service, a worker, the store or a check of `kvshelf doctor`
  2    refused: bad usage or bad input
  3    not on the shelf: an unknown or expired id, or an unknown name
  4    the service cannot be reached
  5    the service is busy, try again
  6    `kvshelf batch` was stopped before its end; the same command resumes it
  130  interrupted with Ctrl-C

KVSHELF_URL is the address of the service, KVSHELF_API_KEY your key if it asks for one.
"""

INTERRUPTED = 130
"""What shells return for SIGINT. Typer exits with it where a command does not end by itself after Ctrl-C."""

_EXIT_OF: list[tuple[type[errors.KvshelfError], int]] = [
    (errors.NotFound, 3),
    (errors.CacheExpired, 3),
    (errors.ConnectionFailed, 4),
    (errors.LoadError, 5),
    (errors.CallerError, 2),
    (errors.KvshelfError, 1),
]

# Names, labels and messages may contain square brackets, which must not be read as markup.
notes = HarmlessConsole(stderr=True, highlight=False, markup=False)


def table_console() -> Console:
    """A console for tables on stdout: as wide as the terminal or COLUMNS; in a pipe wide enough for every id."""
    return HarmlessConsole(highlight=False, markup=False, width=None if _has_width() else 200)


def _has_width() -> bool:
    return (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[int] = ()) -> Table:
    """A table without lines; the columns `numbers` are aligned right. Cells are never wrapped: a name with a line break
    would look like a row."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place in numbers else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(harmless(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row))
    return grid


def heading(text: str) -> None:
    """A line on stdout that says what the lines below it are about, whole, however narrow the terminal is."""
    table_console().print(text, style="bold", soft_wrap=True)


def details(rows: Mapping[str, str]) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, harmless(value))
    return grid


def print_table(grid: Table, *, cut: str | None = None) -> None:
    """Print a `table` on stdout. In a terminal that is too narrow, only the column with the heading `cut` is cut."""
    console = table_console()
    for column in grid.columns:
        column.width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    for column in grid.columns:
        room = console.width - _width(grid, without=column)
        if column.header == cut and _has_width() and room >= _LEAST:  # below that the lines are too long anyway
            column.width = min(column.width or 0, room)
    console.width = _width(grid)
    console.print(grid)


_LEAST = 8
"""Characters that are left of a cell that is cut."""


def _width(grid: Table, *, without: Column | None = None) -> int:
    """The columns and the gaps between them."""
    return sum(column.width or 0 for column in grid.columns if column is not without) + 2 * (len(grid.columns) - 1)


def print_objects(objects: Iterable[Any], table: Callable[[], Table], *, as_json: bool) -> None:
    """Print objects of the API, one JSON object per line, or the table that shows them."""
    if not as_json:
        print_table(table())
        return
    for value in objects:
        say_json(value)


def report(error: errors.KvshelfError, *, as_json: bool) -> int:
    if as_json:
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        say_json({"error": fields | ({"details": error.details} if error.details else {})})
    else:
        notes.print(f"kvshelf: {error.message}", style="red", soft_wrap=True)
    return next(code for cls, code in _EXIT_OF if isinstance(error, cls))


@contextmanager
def named_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turns a kvshelf error raised inside into its message and exit code, and ends the command."""
    try:
        yield
    except errors.KvshelfError as error:
        raise typer.Exit(report(error, as_json=as_json)) from error


class Failures:
    """Reports the errors of single items while the others go on. `exit_code` is that of the first, 0 without any."""

    def __init__(self, *, as_json: bool) -> None:
        self.exit_code = 0
        self._as_json = as_json

    @contextmanager
    def reported(self, of: str = "") -> Iterator[None]:
        """of: the item, which the message of an error then names."""
        try:
            yield
        except errors.KvshelfError as error:
            if of not in error.message:
                error.message = f"{of}: {error.message}"
            code = report(error, as_json=self._as_json)
            self.exit_code = self.exit_code or code


@contextmanager
def connected(url: str | None) -> Iterator[Client]:
    from kvshelf.client import Client

    with Client(url) as client:
        yield client


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """As `atomic.written`, and `InvalidRequest` where the file cannot be written."""
    try:
        with atomic.written(path) as file:
            yield file
    except OSError as error:
        raise errors.InvalidRequest(f"cannot write {path}: {error.strerror}", param="--output") from error


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """`["a=b"]` -> `{"a": "b"}`. Raises `InvalidRequest` if the name or the equals sign is missing."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise errors.InvalidRequest(f"{option} {text!r} is not of the form name=value", param=option)
        values[name] = value
    return values


def parameters(texts: Sequence[str] | None, option: str = "--param") -> Mapping[str, Any]:
    """`--param window=64 --param pooling=max`: a value that parses as JSON is JSON, any other value is text."""
    return {name: json_or_text(value) for name, value in pairs(texts, option).items()}


_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 36525 * 86400
"""A hundred years. A date beyond the year 9999 could not be displayed."""


def seconds(text: str | None, option: str = "--ttl") -> float | None:
    """`90`, `90s`, `15m`, `2h` or `7d` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise errors.InvalidRequest(f"{option} {text!r} is not a duration; write 90s, 15m, 2h or 7d", param=option)
    length_s = float(match[1]) * _UNITS_S[match[2]]
    if length_s > _LONGEST_S:
        raise errors.InvalidRequest(
            f"{option} {text!r} is more than 100 years; leave the option out for no limit", param=option
        )
    return length_s


def standard_input() -> str:
    """All of standard input, as the text of a file is read."""
    from kvshelf.corpus.input.extract import plain_text

    return plain_text(sys.stdin.buffer.read(), "standard input", "document")


def duration(time_s: float) -> str:
    """The largest unit that fits, as `seconds` reads it: 45s, 12m, 3h, 5d."""
    unit = next(unit for unit in ("d", "h", "m", "s") if time_s >= _UNITS_S[unit] or unit == "s")
    return f"{max(0, time_s) // _UNITS_S[unit]:.0f}{unit}"


def local_time(time_s: float | None, timespec: str) -> str:
    """Unix seconds as local time, to the second or minute; None is never."""
    if time_s is None:
        return "never"
    return datetime.datetime.fromtimestamp(time_s).astimezone().isoformat(sep=" ", timespec=timespec)


def megabytes(size_bytes: int) -> str:
    """In MB, with at least two digits, as on the page."""
    number = size_bytes / 1e6
    return f"{number:.2g} MB" if number < 0.1 else f"{number:.2f} MB"
