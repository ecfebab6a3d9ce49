"""The file that keeps outcomes while a run goes on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvshelf.bench.outcome import Outcome
from kvshelf.errors import InvalidRequest, StateConflict


class Journal:
    """A file of outcomes, one JSON object per line, so that a run that was killed goes on where it stopped.

    Lines are looked up by key: what another model or setting wrote is left alone and never taken for this run's. One
    process at a time; a line that was cut off by a kill is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StateConflict(
                f"{self._path} is being written by another run; wait for it, or give another --resume file",
                param="resume",
            ) from None
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def load(self) -> dict[str, Outcome]:
        """Every outcome in the file, by key. Raises `InvalidRequest` for a file that is no such journal."""
        assert self._file is not None
        self._file.seek(0)
        text = self._file.read()
        whole, newline, torn = text.rpartition("\n")
        if torn:
            self._file.truncate(len((whole + newline).encode()))
        found = {}
        for number, line in enumerate(whole.splitlines(), 1):
            outcome = self._outcome(number, line)
            found[outcome.key] = outcome
        return found

    def append(self, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Write one line; `about` is for people who read the file."""
        assert self._file is not None
        self._file.write(json.dumps({**about, **asdict(outcome)}) + "\n")
        # The operating system has it: that outlives a killed process. Surviving a power cut would cost an fsync a line.
        self._file.flush()

    def _outcome(self, number: int, line: str) -> Outcome:
        names = Outcome.__dataclass_fields__
        try:
            fields = {name: value for name, value in json.loads(line).items() if name in names}
            lists = {name: tuple(fields[name]) for name in ("exact", "partial")}
            return Outcome(**{**fields, **lists})
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise InvalidRequest(
                f"line {number} of {self._path} was not written by this bench ({error}); give another --resume file",
                param="resume",
            ) from error
