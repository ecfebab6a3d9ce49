"""The journal of a batch: a line of JSON for each row that has ended, in a file, in objects in S3 or in a job table."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import pyarrow as pa
import pydantic_core

from kvshelf.corpus.places import Place, exists
from kvshelf.corpus.row import Row
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable

ValueT = TypeVar("ValueT")

_FORMAT: Final = 1
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ReadLines = Callable[[], Iterable[tuple[str, bytes]]]
"""Gives the same lines each time, each with the place where it stands."""


class Lines(Protocol):
    """Where the lines of a journal are.

    Every method may raise `StoreUnavailable` or `StorageFull`; the caller then appends the same lines again.
    """

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
        """Each row's last end, in any order. Call nothing else until it is read.

        of_this_run: leave out rows that only earlier runs recorded. A completed run has met every row of the input, so
        the rows it did not meet are no longer part of the input.
        """
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
    """The journal beside an output. Use it in a `with` block.

    It identifies the batch whose results the output holds, also when that is complete: results of another batch must
    not replace them. about: the batch's input, options, store and models as plain JSON values. output: that the rows
    are for, if any.
    """

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
    """What `parse` makes of JSON of a journal. what: names it in the `InvalidRequest` that other bytes raise."""
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
