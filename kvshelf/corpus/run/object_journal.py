"""The journal of a batch whose output is an object in S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.fs as pafs
import pydantic_core

from kvshelf.corpus.objects import opened, put
from kvshelf.corpus.places import Place, beside, exists
from kvshelf.corpus.row import Row, last_ends
from kvshelf.corpus.run.journal import FileJournal, OutputJournal, another, identity, no_batch_s, parsed
from kvshelf.errors import StateConflict, StoreUnavailable

PART_BYTES: Final = 1 << 20
"""A part of about this size is complete, and the next rows go to another one."""

_IDENTITY: Final = "batch.json"


def journal_of(output: Place, about: Mapping[str, Any]) -> OutputJournal:
    """The journal of a batch with this output, beside it. about: as for `FileJournal`."""
    where = beside(output, ".journal")
    if isinstance(where, Path):
        return FileJournal(where, about, output=Path(output))
    return ObjectJournal(where, about, output=str(output))


class ObjectJournal(OutputJournal):
    """Objects below one prefix: `batch.json` identifies the batch, and parts hold the ended rows as JSON lines.

    An object cannot grow, so each append writes the run's last part again, with more rows. A run has parts of its own,
    named by its number, so that runs on several machines overwrite nothing. There is no lock: the first run that
    completes removes all parts, and another one that is under way finds its parts gone and writes no output.
    """

    def __init__(self, where: str, about: Mapping[str, Any], *, output: str) -> None:
        self._where = where
        self._about = identity(about)
        self._output = output
        self._system, self._folder = opened(where, param="--output")
        self._run = ""
        self._part = bytearray()
        self._parts: list[str] = []

    def __enter__(self) -> Self:
        with self._named_errors():
            known = self._identity()
            found = self._found()
            if known != self._about:
                there = exists(self._output)
                if known is None and there:
                    raise no_batch_s(self._output)
                if known is not None and (there or found):
                    raise another(self._output, self._where, known, self._about)
                put(self._system, f"{self._folder}/{_IDENTITY}", pydantic_core.to_json(self._about))
        last = max((int(name.partition("-")[0]) for name in found), default=0)
        self._run = f"{last + 1:06}-{secrets.token_hex(4)}"
        return self

    def __exit__(self, *_: object) -> None:
        pass  # each append has written all that it was given

    def append(self, rows: Sequence[Row]) -> None:
        if not self._parts or len(self._part) >= PART_BYTES:
            self._parts.append(f"{self._run}-{len(self._parts) + 1:06}.jsonl")
            self._part = bytearray()
        data = self._part + b"".join(pydantic_core.to_json(row.to_dict()) + b"\n" for row in rows)
        with self._named_errors():
            put(self._system, f"{self._folder}/{self._parts[-1]}", data)
        self._part = data

    def finished(self, *, of_this_run: bool = False) -> Iterator[Row]:
        found = self._found()
        if not set(self._parts) <= set(found):
            raise StateConflict(
                f"another run of this batch has completed meanwhile; {self._output} holds its results, and the caches "
                "of this run are on the shelf, too"
            )
        names = [name for name in found if not of_this_run or name.startswith(self._run)]
        return last_ends(lambda: self._rows(names))

    def complete(self) -> None:
        with self._named_errors():
            for name in self._found():
                self._system.delete_file(f"{self._folder}/{name}")
        self._part, self._parts = bytearray(), []

    def _identity(self) -> dict[str, Any] | None:
        try:
            return parsed(self._read(_IDENTITY), dict, f"{_IDENTITY} in {self._where}")
        except FileNotFoundError:
            return None

    def _found(self) -> list[str]:
        """The names of all parts, in the order in which they were begun."""
        with self._named_errors():
            infos = self._system.get_file_info(pafs.FileSelector(self._folder, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.base_name.endswith(".jsonl"))

    def _rows(self, names: Sequence[str]) -> Iterator[Row]:
        for name in names:
            with self._named_errors():
                lines = self._read(name).splitlines()
            yield from (parsed(line, Row.from_dict, f"{name} in {self._where}") for line in lines)

    def _read(self, name: str) -> bytes:
        with self._system.open_input_stream(f"{self._folder}/{name}", compression=None) as stream:
            data: bytes = stream.read()
        return data

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StoreUnavailable(f"the results cannot be kept in {self._where}: {error!s:.200}") from error
