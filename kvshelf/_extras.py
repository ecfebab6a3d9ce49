"""Optional parts of kvshelf: a missing one is named together with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvshelf.errors import MissingExtra


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Import inside this block what comes with `kvshelf[extra]`.

    Raises `MissingExtra` when a module from outside kvshelf is not installed. A module of kvshelf that is missing is a
    broken installation, which no extra would cure, and passes through.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvshelf":
            raise
        raise MissingExtra(
            f"{purpose} needs {error.name!r}, which is not installed; run: pip install 'kvshelf[{extra}]'"
        ) from error
