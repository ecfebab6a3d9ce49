"""The journal of a batch that the command line runs: a file next to its output."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeVar

import pydantic_core

from kvshelf.corpus.row import Journal, Row, last_ends
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable

ValueT = TypeVar("ValueT")

_FORMAT: Final = 1
_FIRST: Final = 2
"""The number of the first line that holds a row."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileJournal(Journal):
    """JSON lines: the first line identifies the batch, each further line is an ended row. For one process at a time.

    about: the batch's input, options, store and models as plain JSON values; the journal of another batch is refused.
    An incomplete last line, which a killed process left, is dropped.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = {"journal": _FORMAT, **about}
        self._file: BinaryIO | None = None
        self._end = 0
        self._first = _FIRST  # number of the first line that this run appends

    def __enter__(self) -> Self:
        """Open or create it. Raises `StateConflict` if it is in use or another batch's, `InvalidRequest` if the file is
        no journal."""
        with self._named_errors():
            file = open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        self._file = file
        try:
            self._take(file)
        except BaseException:
            file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open().close()

    def append(self, rows: Sequence[Row]) -> None:
        self._write(b"".join(_line(row.to_dict()) for row in rows))

    def finished(self, *, of_this_run: bool = False) -> Iterator[Row]:
        """of_this_run: leave out rows that only earlier runs recorded. A completed run has met every row of the input,
        so the rows it did not meet are no longer part of the input."""
        since = self._first if of_this_run else _FIRST
        return last_ends(lambda: self._rows(since))

    def delete(self) -> None:
        """Remove it: the output holds everything."""
        self._path.unlink(missing_ok=True)

    def _take(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateConflict(
                f"{self._path} is being written by another run of this batch; wait for it, or cancel it"
            ) from None
        with self._named_errors():
            first = file.readline()
            header = _line(self._about)
            if first != header and header.startswith(first):  # new, or killed while the header was written
                self._write(header)
                return
            if self._parsed(1, first, dict) != self._about:
                raise StateConflict(
                    f"{self._path} belongs to a batch with another input, model or store, or other options; finish "
                    "that one, delete the file, or give another --output"
                )
            self._end = file.tell()
            for line in self._lines(self._end):
                self._end += len(line)
                self._first += 1

    def _write(self, data: bytes) -> None:
        """Write after the last whole line: a failed write may have left part of a line."""
        file = self._open()
        with self._named_errors():
            file.seek(self._end)
            file.truncate()
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        self._end += len(data)

    def _rows(self, since: int) -> Iterator[Row]:
        with self._named_errors():
            for number, line in islice(enumerate(self._lines(0), 1), since - 1, None):
                yield self._parsed(number, line, Row.from_dict)

    def _lines(self, start: int) -> Iterator[bytes]:
        """The whole lines from an offset on."""
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _parsed(self, number: int, line: bytes, made: Callable[[Any], ValueT]) -> ValueT:
        try:
            return made(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"line {number} of {self._path} was not written by a batch; give another --output", param="--output"
            ) from error

    def _open(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the journal is not open; use it in a `with` block")
        return self._file

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = f"{self._path}: {error.strerror or error}"
            if error.errno in _FULL:
                raise StorageFull(f"no room for the results in {said}; the batch goes on when there is") from error
            raise StoreUnavailable(f"the results cannot be kept in {said}") from error


def _line(values: Mapping[str, Any]) -> bytes:
    return pydantic_core.to_json(dict(values)) + b"\n"
