"""A file whose bytes come in pieces from Redis, straight into the reader's memory."""

from __future__ import annotations

import io
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from kvshelf.errors import BlobError, StoreError
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.server import Loan
from kvshelf.store.redis.wire import Command, Wire

_AHEAD: Final = 4  # pieces that are asked for before they are read: the server works while the reader hashes
_SMALL: Final = 256 << 10  # bytes; a read of less fetches just that, unless it is the beginning or goes on from there
_DRAIN: Final = 64 << 10  # bytes; fewer than these are read and thrown away, to keep a connection


@dataclass(frozen=True)
class Piece:
    """A value in Redis that is part of a file, and the bytes it must have."""

    key: str
    nbytes: int


class RedisFile(io.RawIOBase):
    """Seekable and read-only; `readinto` fills the whole buffer or reaches the end. For one thread at a time.

    Raises `BlobError` (reason "missing") for a piece that is gone or has another length, `StoreUnavailable`. It holds a
    lease on the server for `lease_s`, which `renew` prolongs while it is read and `release` ends.
    """

    def __init__(
        self,
        link: RedisLink,
        pieces: Sequence[Piece],
        *,
        lease_s: float,
        renew: Callable[[], Any],
        release: Callable[[], Any],
    ) -> None:
        super().__init__()
        self._link = link
        self._pieces = pieces
        self._ends = list(accumulate(piece.nbytes for piece in pieces))
        self._renew = renew
        self._release = release
        self._lease_s = lease_s
        self._renew_at = time.monotonic() + lease_s / 3
        self._position = 0
        self._last_end = 0  # where the last read ended; who reads the beginning will read on
        self._stream: _Stream | None = None

    @property
    def nbytes(self) -> int:
        return self._ends[-1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}, before the file begins")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.nbytes - self._position)]
        done = 0
        while done < len(view):
            done += self._read_some(view[done:])
        return done

    def close(self) -> None:
        if not self.closed:
            self._end_stream()
            with suppress(StoreError):  # it ends by itself
                self._release()
        super().close()

    def _read_some(self, view: memoryview) -> int:
        """Read up to the end of a piece."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._lease_s / 3
            self._renew()
        index = bisect_right(self._ends, self._position)
        view = view[: self._ends[index] - self._position]
        if len(view) < _SMALL and self._position != self._last_end:
            self._fetch(index, view)
        else:
            try:
                self._streaming(index).read(view)
            except BaseException:
                self._end_stream()
                raise
        self._position += len(view)
        self._last_end = self._position
        return len(view)

    def _offset(self, index: int) -> int:
        """Of the position within a piece."""
        return self._position - self._ends[index] + self._pieces[index].nbytes

    def _fetch(self, index: int, view: memoryview) -> None:
        start = self._offset(index)
        data = self._link.call("GETRANGE", self._pieces[index].key, start, start + len(view) - 1)
        if not isinstance(data, bytes) or len(data) != len(view):
            raise missing(self._pieces[index])
        view[:] = data

    def _streaming(self, index: int) -> _Stream:
        """The stream at the position, a new one if it stands elsewhere."""
        if self._stream is None or self._stream.position != self._position:
            self._end_stream()
            self._stream = _Stream(self._link, self._pieces[index:], self._offset(index), self._position)
        return self._stream

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """Pieces that come one after the other on one connection."""

    def __init__(self, link: RedisLink, pieces: Sequence[Piece], skip: int, position: int) -> None:
        """skip: bytes of the first piece that are not wanted. position: where in the file that is."""
        self.position = position
        self._link = link
        self._pieces = deque(pieces)  # not asked for yet
        self._asked: deque[tuple[Piece, int]] = deque()  # and the bytes that are to come of it
        self._left = 0  # bytes to come of the first of them; 0: it has not begun
        self._loan: Loan = link.borrow(pieces[0].key)
        with link.talking(self._loan) as wire:
            self._ask(wire, 1, skip)  # alone: a server answers nothing before it has done all that it has read

    def read(self, view: memoryview) -> None:
        """Fill the buffer, which does not reach beyond the piece."""
        with self._link.talking(self._loan) as wire:
            if not self._left:
                piece, nbytes = self._asked[0]
                if wire.bulk() != nbytes:
                    raise missing(piece)
                self._left = nbytes
                # For several at once: to send a command takes as long as to receive 400 kB.
                if len(self._asked) <= _AHEAD // 2:
                    self._ask(wire, _AHEAD)
            wire.fill(view)
            self._left -= len(view)
            self.position += len(view)
            if not self._left:
                wire.end_bulk()
                self._asked.popleft()

    def close(self) -> None:
        """The connection goes back if little is left to come on it, else it is closed."""
        to_come = self._left or sum(nbytes for _, nbytes in self._asked)
        if len(self._asked) > 1 or to_come > _DRAIN:
            self._loan.drop()
        elif self._loan.is_whole:
            with suppress(BlobError, StoreError):  # the loan is dropped then
                if to_come:
                    self.read(memoryview(bytearray(to_come)))
                self._loan.give_back()

    def _ask(self, wire: Wire, count: int, skip: int = 0) -> None:
        """Ask for what comes next, until so many pieces are to come."""
        commands: list[Command] = []
        while self._pieces and len(self._asked) < count:
            piece = self._pieces.popleft()
            commands.append(("GETRANGE", piece.key, skip, -1) if skip else ("GET", piece.key))
            self._asked.append((piece, piece.nbytes - skip))
            skip = 0
        if commands:
            wire.send(*commands)


def missing(piece: Piece) -> BlobError:
    return BlobError(f"{piece.key} is not in Redis any more, or not whole", reason="missing")
