"""What the commands share: options with one meaning everywhere, exit codes, and where output goes.

Results go to stdout, everything else to stderr, so that `ID=$(kvshelf put report.txt)` works.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console

from kvshelf.errors import (
    CacheExpired,
    CallerError,
    ConnectionFailed,
    InvalidRequest,
    KvshelfError,
    LoadError,
    NotFound,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvshelf.client import Client

EXIT_CODES = """
Exit codes: 0 done; 1 failed; 2 refused (bad usage or input); 3 not on the shelf (unknown or expired id);
4 the service cannot be reached; 5 the service is busy, try again. (`kvshelf batch` also has 6: stopped before its end.)
"""

_EXIT_OF: list[tuple[type[KvshelfError], int]] = [
    (NotFound, 3),
    (CacheExpired, 3),
    (ConnectionFailed, 4),
    (LoadError, 5),
    (CallerError, 2),
    (KvshelfError, 1),
]

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="KVSHELF_URL", help="A running service.  [default: http://127.0.0.1:8765]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's objects, one per line, errors too.")]
Store = Annotated[str | None, typer.Option("--store", help="URL of the store, such as disk:///var/lib/kvshelf.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--encryption-key-file",
        envvar="KVSHELF_ENCRYPTION_KEY_FILE",
        help="Keys that the store's caches are sealed with, one per line; the first one seals.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="May be given several times.")]

# Names, labels and messages are shown as they are: square brackets in them are no markup.
notes = Console(stderr=True, highlight=False, markup=False)


def table_console() -> Console:
    """For tables on stdout: as wide as the terminal, or wide enough for every id in a pipe."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def exit_code(error: KvshelfError) -> int:
    return next(code for cls, code in _EXIT_OF if isinstance(error, cls))


def report(error: KvshelfError, *, as_json: bool) -> int:
    """Say what went wrong and return the exit code for it."""
    if as_json:
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        print(json.dumps({"error": fields}))
    else:
        notes.print(f"kvshelf: {error.message}", style="red", soft_wrap=True)
    return exit_code(error)


@contextmanager
def named_errors(*, as_json: bool = False) -> Iterator[None]:
    """Ends the command with the right message and exit code when one of kvshelf's errors is raised inside."""
    try:
        yield
    except KvshelfError as error:
        raise typer.Exit(report(error, as_json=as_json)) from error


@contextmanager
def connected(url: str | None, *, as_json: bool) -> Iterator[Client]:
    """A client of the service at `url`, with `named_errors` around it."""
    from kvshelf.client import Client

    with named_errors(as_json=as_json), Client(url) as client:
        yield client


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well: a reader never sees half of it under that name."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", param="--output") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def print_object(obj: BaseModel) -> None:
    print(obj.model_dump_json(), flush=True)


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """`["a=b"]` -> `{"a": "b"}`. Raises `InvalidRequest` for a text without a name or an equals sign."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidRequest(f"{option} {text!r} is not of the form name=value", param=option)
        found[name] = value
    return found


def parameters(texts: Sequence[str] | None) -> Mapping[str, Any]:
    """`--param window=64 --param pooling=max`: values that read as JSON are taken as JSON, all others as text."""
    return {name: _json_or_text(value) for name, value in pairs(texts, "--param").items()}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 36525 * 86400
"""A hundred years; a date beyond the year 9999 could not be shown."""


def seconds(text: str | None, option: str = "--ttl") -> float | None:
    """`90`, `90s`, `15m`, `2h` or `7d` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise InvalidRequest(f"{option} {text!r} is not a duration; write 90s, 15m, 2h or 7d", param=option)
    found = float(match[1]) * _UNITS_S[match[2]]
    if found > _LONGEST_S:
        raise InvalidRequest(
            f"{option} {text!r} is more than 100 years; leave it out for what has no end", param=option
        )
    return found


def standard_input() -> str:
    """All of it, as text."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start}: {error.reason}); convert it, or give a file instead",
            param="document",
        ) from error


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB"
