"""What a long search has found so far, so that one that was interrupted goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class SearchJournal:
    """The findings of a search, a line of JSON for each of its steps.

    Steps come in the same order each time. The first line says which search it is: the file of another one is replaced.
    """

    def __init__(self, path: Path | None, of: str) -> None:
        """path: None keeps nothing. of: a digest of all that the findings follow from."""
        self._path = path
        self._found: list[Any] = []
        if path is None:
            return
        first, *found = _lines(path) or [None]
        if first == {"of": of}:
            self._found = found
        text = "".join(json.dumps(line) + "\n" for line in ({"of": of}, *self._found))  # without a torn last line
        path.write_text(text, "utf-8")

    def step(self, make: Callable[[], Any]) -> Any:
        """What the next step has found, as JSON types: from the file, or made now and written to it."""
        if self._found:
            return self._found.pop(0)
        made = make()
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return made

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _lines(path: Path) -> list[Any]:
    """The lines up to the first that is not JSON, which a crash has torn; none where there is no file."""
    found: list[Any] = []
    try:
        for line in path.read_text("utf-8").splitlines():
            found.append(json.loads(line))
    except (FileNotFoundError, ValueError):
        pass
    return found
