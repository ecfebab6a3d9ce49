"""The lines of a journal beside an output: in a file, or in objects in S3."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow.fs as pafs
import pydantic_core

from kvshelf.corpus.places import Place, beside, opened, put
from kvshelf.corpus.run.journal import OutputJournal, OutputLines, ReadLines, named_errors, parsed
from kvshelf.errors import InvalidRequest, StateConflict

PART_BYTES: Final = 1 << 20
"""A part of about this size is complete, and the next lines go to another one."""

_IDENTITY: Final = "batch.json"


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
