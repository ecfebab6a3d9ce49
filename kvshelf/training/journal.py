"""A file from which an interrupted search goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class SearchJournal:
    """The results of a search, a line of JSON for each of its steps, which come in the same order each time. The first
    line names the search: the file of another one is replaced."""

    def __init__(self, path: Path | None, of: str) -> None:
        """path: None for no file. of: a digest of all that the results follow from."""
        self._path = path
        self._results: list[Any] = []
        if path is None:
            return
        first, *results = _lines(path) or [None]
        if first == {"of": of}:
            self._results = results
        text = "".join(json.dumps(line) + "\n" for line in ({"of": of}, *self._results))  # without a torn last line
        path.write_text(text, "utf-8")

    def step(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the next step, of JSON types: from the file, or made now and written to it."""
        if self._results:
            return self._results.pop(0)
        result = make(*arguments)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return result

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _lines(path: Path) -> list[Any]:
    """The lines before the first that is not JSON, which a crash has torn; none without a file."""
    lines: list[Any] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text("utf-8").splitlines():
            lines.append(json.loads(line))
    return lines
