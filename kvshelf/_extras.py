"""Optional parts of kvshelf: the error for a missing one names the command that installs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

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
            f"{purpose} needs {error.name!r}, which is not installed; run: {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """The command that installs `kvshelf[extra]` from where kvshelf came from: checkout, wheel or index."""
    try:  # PEP 610; what comes from an index has no such file
        origin = json.loads(distribution("kvshelf").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # imported from a folder on the path
        origin = {}
    url = origin.get("url", "")
    source = unquote(urlsplit(url).path) if url.startswith("file:") else "kvshelf"
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"
