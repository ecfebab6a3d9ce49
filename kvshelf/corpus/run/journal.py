"""The journal of a batch that the command line runs: a file next to its output, or objects in S3."""

from __future__ import annotations

import abc
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

from kvshelf.corpus.places import Place
from kvshelf.corpus.row import Journal, Row, last_ends
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable

ValueT = TypeVar("ValueT")

_FORMAT: Final = 1
_FIRST: Final = 2
"""The number of the first line that holds a row."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputJournal(Journal):
    """The journal beside an output. Use it in a `with` block.

    It identifies the batch whose results the output holds, also when that is complete: results of another batch must
    not replace them.
    """

    @abc.abstractmethod
    def __enter__(self) -> Self:
        """Open or create it. Raises `StateConflict` if the output is another batch's."""

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abc.abstractmethod
    def finished(self, *, of_this_run: bool = False) -> Iterator[Row]:
        """of_this_run: leave out rows that only earlier runs recorded. A completed run has met every row of the input,
        so the rows it did not meet are no longer part of the input."""

    @abc.abstractmethod
    def complete(self) -> None:
        """Remove the rows: the output holds everything. The identity stays."""


def identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a journal records of its batch."""
    return {"journal": _FORMAT, **about}


def another(output: Place, journal: Place, known: Mapping[str, Any], about: Mapping[str, Any]) -> StateConflict:
    """The refusal of a batch whose output is that of another one. known, about: what both are; see `identity`."""
    before, now = _options(known), _options(about)
    names = [name for name in now | before if before.get(name) != now.get(name)]
    changes = [f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}" for name in names]
    return StateConflict(
        f"{output} belongs to another batch: {'; '.join(changes)}. Give another --output; or give the earlier options, "
        f"to continue that batch; or delete {output} and {journal}, to give up its results"
    )


def parsed(data: bytes, made: Callable[[Any], ValueT], what: str) -> ValueT:
    """What `made` reads from JSON of a journal. what: names it in the `InvalidRequest` that other bytes raise."""
    try:
        return made(json.loads(data))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{what} was not written by a batch; give another --output", param="--output") from error


def no_batch_s(output: Place) -> StateConflict:
    """The refusal of an output that no batch has written, as far as one can tell."""
    return StateConflict(
        f"{output} is there already, and no journal beside it says which batch wrote it; give another --output, or "
        "move the file away"
    )


def _options(about: Mapping[str, Any]) -> dict[str, Any]:
    found = {**about, **about.get("fields", {})}
    found.pop("fields", None)
    return found | {"model": ", ".join(found.pop("models"))} if "models" in found else found


def _shown(value: Any) -> str:
    return "not given" if value is None else f"{json.dumps(value, ensure_ascii=False):.80}"


class FileJournal(OutputJournal):
    """JSON lines: the first line identifies the batch, each further line is an ended row. For one process at a time.

    about: the batch's input, options, store and models as plain JSON values. output: the file that the rows are for, if
    any. An incomplete last line, which a killed process left, is dropped.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, output: Path | None = None) -> None:
        self._path = path
        self._about = identity(about)
        self._output = output
        self._file: BinaryIO | None = None
        self._end = 0
        self._first = _FIRST  # number of the first line that this run appends

    def __enter__(self) -> Self:
        """As the base class. Raises `StateConflict` if it is in use, too, and `InvalidRequest` if it is no journal."""
        if self._output is not None and self._output.exists() and not self._path.exists():
            raise no_batch_s(self._output)
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
        since = self._first if of_this_run else _FIRST
        return last_ends(lambda: self._rows(since))

    def complete(self) -> None:
        self._end, self._first = len(_line(self._about)), _FIRST
        self._write(b"")

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
            known = parsed(first, dict, f"line 1 of {self._path}")
            if known != self._about:
                if "journal" not in known:
                    raise InvalidRequest(f"{self._path} is no journal of a batch; give another --output")
                output = self._output or self._path
                if output.exists() or next(self._lines(file.tell()), None) is not None:
                    raise another(output, self._path, known, self._about)
                file.truncate(0)  # nothing is left of that batch
                self._write(header)
                return
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
                yield parsed(line, Row.from_dict, f"line {number} of {self._path}")

    def _lines(self, start: int) -> Iterator[bytes]:
        """The whole lines from an offset on."""
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file:
                if line.endswith(b"\n"):
                    yield line

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
