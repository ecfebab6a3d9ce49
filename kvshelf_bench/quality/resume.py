"""The file from which a killed run of the quality bench resumes."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from kvshelf.errors import InvalidRequest, StateConflict
from kvshelf_bench.quality.outcome import Outcome

_BEGINNING: Final = b'{"bench": "quality", "key": "'
"""Starts every line, to tell a first line that was cut off from the text of a foreign file."""


class ResumeFile:
    """A file of outcomes, one JSON object per line, for one process at a time.

    Lines are looked up by key, so lines of another model or setting stay and are never taken for this run's. A line
    that a kill cut off is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise InvalidRequest(f"--resume {path}: {error.strerror or error}", param="resume") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StateConflict(
                f"{path} is being written by another run; wait for it, or give another --resume file", param="resume"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def load(self) -> dict[str, Outcome]:
        """Every outcome in the file, by key. Raises `InvalidRequest` for a foreign file, which stays as it is."""
        self._file.seek(0)
        whole, newline, torn = self._file.read().rpartition(b"\n")
        found = {}
        for number, line in enumerate(whole.splitlines(), 1):
            outcome = self._outcome(number, line)
            found[outcome.key] = outcome
        if torn:
            if not found and torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                raise self._foreign(1, "it has no end")
            self._file.truncate(len(whole + newline))
        return found

    def append(self, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Write one line; `about` is for people who read the file."""
        line = {"bench": "quality", "key": outcome.key, **about, **asdict(outcome)}  # as `_BEGINNING` has it
        self._file.write(json.dumps(line).encode() + b"\n")
        # Flushed to the operating system, a line survives a kill; surviving a power cut would cost an fsync per line.
        self._file.flush()

    def _outcome(self, number: int, line: bytes) -> Outcome:
        names = Outcome.__dataclass_fields__
        try:
            fields = {name: value for name, value in json.loads(line).items() if name in names}
            lists = {name: tuple(fields[name]) for name in ("exact", "partial")}
            later = {name: tuple(fields.get(name, ())) for name in ("answers", "first_tokens")}
            return Outcome(**{**fields, **lists, **later})
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise self._foreign(number, error) from error

    def _foreign(self, number: int, reason: object) -> InvalidRequest:
        return InvalidRequest(
            f"line {number} of {self._path} was not written by this bench ({reason}); give another --resume file",
            param="resume",
        )
