"""Optional parts of kvshelf: the error for a missing one names the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvshelf.errors import MissingExtra


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Wrap the imports of packages that come with `kvshelf[extra]`.

    Raises `MissingExtra` if a foreign module is not installed. A missing module of kvshelf itself is a broken
    installation that no extra would fix, so its error passes through.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvshelf":
            raise
        raise MissingExtra(
            f"{purpose} needs {error.name!r}, which is not installed; run: pip install 'kvshelf[{extra}]'"
        ) from error
