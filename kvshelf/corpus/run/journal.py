"""The journal of a batch: a line of JSON for each row that has ended, in a file, in objects in S3 or in a job table."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, Self, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
import pydantic_core

from kvshelf.corpus.places import Place, beside, exists, opened, put
from kvshelf.corpus.row import Row
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable

ValueT = TypeVar("ValueT")

PART_BYTES: Final = 1 << 20
"""A part of about this size is complete, and the next lines go to another one."""

_IDENTITY: Final = "batch.json"
_FORMAT: Final = 1
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ReadLines = Callable[[], Iterable[tuple[str, bytes]]]
"""Gives the same lines each time, each with the place where it stands."""


class Lines(Protocol):
    """Where the lines of a journal are. Every method may raise `StoreUnavailable` or `StorageFull`; the caller then
    appends the same lines again."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines, which have no line ends; they are durable when it returns."""

    def reader(self, *, of_this_run: bool) -> ReadLines:
        """Reads the lines that are there now. of_this_run: without those that only earlier runs appended."""


class Journal:
    """The rows of one batch that have ended. If a row ends again later, the last end counts. Raises as `Lines` does."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def append(self, rows: Sequence[Row]) -> None:
        """Record these rows; durable when it returns. A row of the same `key` as an earlier one replaces it."""
        self._lines.append([pydantic_core.to_json(row.to_dict()) for row in rows])

    def finished(self, *, of_this_run: bool = False) -> Iterator[Row]:
        """Each row's last end, in any order. Call nothing else until it is read. of_this_run: leave out rows that only
        earlier runs recorded. A completed run has met every row of the input, so the rows it did not meet are no longer
        part of the input."""
        read = self._lines.reader(of_this_run=of_this_run)
        return last_ends(lambda: (self._row(line, place) for place, line in read()))

    def _row(self, line: bytes, place: str) -> Row:  # noqa: ARG002
        return Row.from_dict(pydantic_core.from_json(line))


class OutputLines(Lines, Protocol):
    """The lines of a journal beside an output, and the identity of their batch. where: for messages."""

    where: Place

    def is_new(self) -> bool:
        """Whether no identity is recorded. Creates nothing."""

    def open(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open or create them; returns the identity that is recorded now. identity: to record where there is none."""

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Remove all lines, and record this identity if it is another one."""

    def close(self) -> None:
        """End the use of them. Each `append` has written all that it was given."""
        return


class OutputJournal(Journal):
    """The journal beside an output. Use it in a `with` block. It identifies the batch whose results the output holds,
    also when that is complete: results of another batch must not replace them. about: the batch's input, options, store
    and models as plain JSON values. output: that the rows are for, if any."""

    _lines: OutputLines

    def __init__(self, lines: OutputLines, about: Mapping[str, Any], *, output: Place | None = None) -> None:
        super().__init__(lines)
        self._identity = {"journal": _FORMAT, **about}
        self._output = output

    def __enter__(self) -> Self:
        """Open or create it. Raises `StateConflict` if the output is another batch's, or the journal is in use, and
        `InvalidRequest` if it is no journal."""
        with named_errors(self._lines.where):
            if self._lines.is_new() and self._has_output():
                raise StateConflict(
                    f"{self._output} is there already, and no journal beside it says which batch wrote it; give "
                    "another --output, or move the file away"
                )
            recorded = self._lines.open(self._identity)
            try:
                if recorded != self._identity:
                    if self._has_output() or any(self._lines.reader(of_this_run=False)()):
                        raise self._another(recorded)
                    self._lines.begin(self._identity)
            except BaseException:
                self._lines.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def complete(self) -> None:
        """Remove the rows: the output holds everything. The identity stays."""
        with named_errors(self._lines.where):
            self._lines.begin(self._identity)

    def _has_output(self) -> bool:
        return self._output is not None and exists(self._output)

    def _another(self, recorded: Mapping[str, Any]) -> StateConflict:
        """The refusal of a batch whose output is that of another one."""
        before, now, where = _options(recorded), _options(self._identity), self._lines.where
        names = [name for name in now | before if before.get(name) != now.get(name)]
        changes = [f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}" for name in names]
        output = self._output or where
        return StateConflict(
            f"{output} belongs to another batch: {'; '.join(changes)}. Give another --output; or give the earlier "
            f"options, to continue that batch; or delete {output} and {where}, to give up its results"
        )

    def _row(self, line: bytes, place: str) -> Row:
        return parsed(line, Row.from_dict, place)


def parsed(data: bytes, parse: Callable[[Any], ValueT], what: str) -> ValueT:
    """The result of `parse` for JSON of a journal. what: names the JSON in the `InvalidRequest` that other bytes
    raise."""
    try:
        return parse(json.loads(data))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{what} was not written by a batch; give another --output", param="--output") from error


@contextmanager
def named_errors(where: Place) -> Iterator[None]:
    """Turns errors of a file or of S3 into those that `Lines` raises."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = f"{error!s:.200}" if isinstance(where, str) else error.strerror or error
        if isinstance(where, Path) and error.errno in _FULL:
            raise StorageFull(
                f"no room for the results in {where}: {reason}; the batch goes on when there is"
            ) from error
        raise StoreUnavailable(f"the results cannot be kept in {where}: {reason}") from error


def last_ends(read: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Each row's last end, in the order of the journal. `read` is called twice, so that memory never holds all rows."""
    last = {_digest(row): number for number, row in enumerate(read())}
    for number, row in enumerate(read()):
        if last[_digest(row)] == number:
            yield row


def _digest(row: Row) -> bytes:
    """A digest of `Row.key`: the file names of a million rows would take more memory."""
    return blake2b(f"{row.line} {row.source}".encode(), digest_size=16).digest()


def _options(identity: Mapping[str, Any]) -> dict[str, Any]:
    options = {**identity, **identity.get("fields", {})}
    options.pop("fields", None)
    return options | {"model": ", ".join(options.pop("models"))} if "models" in options else options


def _shown(value: Any) -> str:
    return "not given" if value is None else f"{json.dumps(value, ensure_ascii=False):.80}"


def journal_of(output: Place, about: Mapping[str, Any]) -> OutputJournal:
    """The journal of a batch with this output, beside it. about: as for `OutputJournal`."""
    where = beside(output, ".journal")
    lines = FileLines(where) if isinstance(where, Path) else ObjectLines(where, output=str(output))
    return OutputJournal(lines, about, output=output)


class FileLines(OutputLines):
    """Line 1 is the identity. For one process at a time. An incomplete last line, which a killed process left, is
    dropped."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._path = where
        self._file: BinaryIO | None = None
        self._header = b""
        self._end = 0
        self._earlier = 0  # lines of earlier runs

    def is_new(self) -> bool:
        return not self._path.exists()

    def open(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        """As the base class. Raises `StateConflict` if it is in use, too, and `InvalidRequest` if it is no journal."""
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        self._file = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._recorded(file, identity)
        except BlockingIOError:
            file.close()
            raise StateConflict(
                f"{self._path} is being written by another run of this batch; wait for it, or cancel it"
            ) from None
        except BaseException:
            file.close()
            raise

    def _recorded(self, file: BinaryIO, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        first, header = file.readline(), _line(identity)
        if first != header and header.startswith(first):  # new, or killed while the header was written
            self.begin(identity)
            return identity
        recorded = parsed(first, dict, f"line 1 of {self._path}")
        if first != header and "journal" not in recorded:
            raise InvalidRequest(f"{self._path} is no journal of a batch; give another --output")
        self._header, self._end = first, len(first)
        for line in self._lines():
            self._end += len(line)
            self._earlier += 1
        return recorded

    def begin(self, identity: Mapping[str, Any]) -> None:
        header, self._earlier = _line(identity), 0
        if self._header == header:  # never written anew: a kill in its middle would leave no identity
            self._end = len(header)
            self._write(b"")
            return
        self._end = 0
        self._write(header)
        self._header = header

    def close(self) -> None:
        self._opened().close()

    def append(self, lines: Sequence[bytes]) -> None:
        self._write(b"".join(line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        """Write after the last whole line: a failed write may have left part of a line."""
        file = self._opened()
        with named_errors(self._path):
            file.seek(self._end)
            file.truncate()
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        self._end += len(data)

    def reader(self, *, of_this_run: bool) -> ReadLines:
        skipped = self._earlier if of_this_run else 0

        def read() -> Iterator[tuple[str, bytes]]:
            with named_errors(self._path):
                for number, line in islice(enumerate(self._lines(), 2), skipped, None):
                    yield f"line {number} of {self._path}", line

        return read

    def _lines(self) -> Iterator[bytes]:
        """The whole lines behind the header."""
        with self._path.open("rb") as file:
            file.seek(len(self._header))
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the journal is not open; use it in a `with` block")
        return self._file


def _line(identity: Mapping[str, Any]) -> bytes:
    return pydantic_core.to_json(dict(identity)) + b"\n"


class ObjectLines(OutputLines):
    """Objects below one prefix: `batch.json` is the identity, and parts hold the lines.

    An object cannot grow, so each append writes the run's last part again, with more lines. A run has parts of its own,
    named by its number, so that runs on several machines overwrite nothing. There is no lock: the first run that
    completes removes all parts, and another one that is under way finds its parts gone and writes no output.
    """

    def __init__(self, where: str, *, output: str) -> None:
        self.where = where
        self._output = output
        self._system, self._folder = opened(where, param="--output")
        self._recorded: Mapping[str, Any] | None = None
        self._run = ""
        self._part = bytearray()
        self._parts: list[str] = []

    def is_new(self) -> bool:
        try:
            self._recorded = parsed(self._read(_IDENTITY), dict, f"{_IDENTITY} in {self.where}")
        except FileNotFoundError:
            return True
        return False

    def open(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        last = max((int(name.partition("-")[0]) for name in self._stored_parts()), default=0)
        self._run = f"{last + 1:06}-{secrets.token_hex(4)}"
        if self._recorded is None:
            self._record(identity)
        return self._recorded or identity

    def begin(self, identity: Mapping[str, Any]) -> None:
        for name in self._stored_parts():
            self._system.delete_file(f"{self._folder}/{name}")
        self._part, self._parts = bytearray(), []
        if self._recorded != identity:
            self._record(identity)

    def _record(self, identity: Mapping[str, Any]) -> None:
        put(self._system, f"{self._folder}/{_IDENTITY}", pydantic_core.to_json(dict(identity)))
        self._recorded = identity

    def append(self, lines: Sequence[bytes]) -> None:
        if not self._parts or len(self._part) >= PART_BYTES:
            self._parts.append(f"{self._run}-{len(self._parts) + 1:06}.jsonl")
            self._part = bytearray()
        data = self._part + b"".join(line + b"\n" for line in lines)
        with named_errors(self.where):
            put(self._system, f"{self._folder}/{self._parts[-1]}", data)
        self._part = data

    def reader(self, *, of_this_run: bool) -> ReadLines:
        stored = self._stored_parts()
        if not set(self._parts) <= set(stored):
            raise StateConflict(
                f"another run of this batch has completed meanwhile; {self._output} holds its results, and the caches "
                "of this run are on the shelf, too"
            )
        names = [name for name in stored if not of_this_run or name.startswith(self._run)]

        def read() -> Iterator[tuple[str, bytes]]:
            for name in names:
                with named_errors(self.where):
                    lines = self._read(name).splitlines()
                yield from ((f"{name} in {self.where}", line) for line in lines)

        return read

    def _stored_parts(self) -> list[str]:
        """The names of all parts, in the order in which they were begun."""
        with named_errors(self.where):
            infos = self._system.get_file_info(pafs.FileSelector(self._folder, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.base_name.endswith(".jsonl"))

    def _read(self, name: str) -> bytes:
        with self._system.open_input_stream(f"{self._folder}/{name}", compression=None) as stream:
            data: bytes = stream.read()
        return data
