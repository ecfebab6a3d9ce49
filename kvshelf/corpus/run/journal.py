"""The journal of a batch that the command line runs: a file beside its output."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import pydantic_core

from kvshelf.corpus.output.results import Journal, Result
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable

_FORMAT: Final = 1
_FIRST: Final = 2
"""The line of the first result."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileJournal(Journal):
    """JSON lines: the first one says which batch it is, each other one is a result. For one process at a time.

    `about` names the input and the options of the batch, where its caches go and which models make them, as plain JSON
    values; a journal of another batch is refused. A last line that a kill cut off is dropped.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = {"journal": _FORMAT, **about}
        self._file: BinaryIO | None = None
        self._end = 0
        self._first = _FIRST  # line of this run

    def __enter__(self) -> Self:
        """Open or begin it. Raises `StateConflict` if it is another batch's or in use, `InvalidRequest` if it is no
        journal."""
        with self._named_errors():
            file = open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        self._file = file
        try:
            self._take(file)
        except BaseException:
            file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open().close()

    def append(self, results: Sequence[Result]) -> None:
        self._write(b"".join(_line(result.to_dict()) for result in results))

    def finished(self, *, of_this_run: bool = False) -> Iterator[Result]:
        """`of_this_run`: without what earlier runs alone have. A run that came to its end has come by every row; those
        that it has not come by are no rows any more."""
        since = self._first if of_this_run else _FIRST
        last: dict[bytes, int] = {}
        for number, result in self._results(since):
            last[_digest(result)] = number
        for number, result in self._results(since):
            if last[_digest(result)] == number:
                yield result

    def delete(self) -> None:
        """Remove it: all that is in it is in the output."""
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
            if first != header and header.startswith(first):  # new, or begun and not got far
                self._write(header)
                return
            if self._parsed(1, first) != self._about:
                raise StateConflict(
                    f"{self._path} belongs to a batch with another input, model or store, or other options; finish "
                    "that one, delete the file, or give another --output"
                )
            self._end = file.tell()
            for line in self._lines(self._end):
                self._end += len(line)
                self._first += 1

    def _write(self, data: bytes) -> None:
        """Behind the last whole line: what failed before may have left part of one."""
        file = self._open()
        with self._named_errors():
            file.seek(self._end)
            file.truncate()
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        self._end += len(data)

    def _results(self, since: int) -> Iterator[tuple[int, Result]]:
        with self._named_errors():
            for number, line in enumerate(self._lines(0), 1):
                if number >= since:
                    yield number, self._result(number, line)

    def _result(self, number: int, line: bytes) -> Result:
        try:
            return Result.from_dict(self._parsed(number, line))
        except (TypeError, KeyError) as error:
            raise self._foreign(number) from error

    def _lines(self, start: int) -> Iterator[bytes]:
        """The whole lines from a place on."""
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _parsed(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> InvalidRequest:
        return InvalidRequest(
            f"line {number} of {self._path} was not written by a batch; give another --output", param="--output"
        )

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


def _digest(result: Result) -> bytes:
    """Stands for `Result.key`: of a million rows the names of their files would take more memory."""
    return blake2b(f"{result.line} {result.source}".encode(), digest_size=16).digest()
