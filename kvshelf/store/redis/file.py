"""A file in Redis, received in pieces straight into the reader's memory."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from kvshelf.errors import BlobError, StoreError
from kvshelf.store.blobs import SeekableFile
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.server import Loan
from kvshelf.store.redis.wire import Command, Reply, Wire

_AHEAD: Final = 4  # pieces requested ahead: the server works while the reader hashes
_SMALL: Final = 256 << 10  # bytes; a smaller read fetches only its own bytes, unless it continues the last read
_HEAD: Final = 12 << 10  # bytes at the beginning that come with the lease: the headers of most blobs
_TAIL: Final = 64  # bytes at the end that come with the lease: the trailer verifies the blob
_FIRST: Final = 1 << 20  # bytes of a stream's first answer
_DRAIN: Final = 64 << 10  # bytes; fewer than these are read and thrown away, to keep a connection


@dataclass(frozen=True)
class ChunkPiece:
    """A value in Redis that is part of a file, and the bytes it must have."""

    key: str
    nbytes: int


class RedisFile(SeekableFile):
    """A file in pieces. Raises `BlobError` (reason "missing") for a piece that is gone or has another length, and
    `StoreUnavailable`. The file holds a lease on the server for `lease_s`; `renew` prolongs it during reads, and the
    command `release` ends it. `ends`: the server's answers to `ends_of(pieces)`. once: the lease may end with the last
    piece, so that later reads have no lease."""

    def __init__(
        self,
        link: RedisLink,
        pieces: Sequence[ChunkPiece],
        ends: Sequence[Reply],
        *,
        lease_s: float,
        renew: Callable[[], Any],
        release: Command,
        once: bool,
    ) -> None:
        super().__init__()
        self._link = link
        self._pieces = pieces
        self._ends = list(accumulate(piece.nbytes for piece in pieces))
        self._renew = renew
        self._release: Command | None = release
        self._once = once
        self._lease_s = lease_s
        self._renew_at = time.monotonic() + lease_s / 3
        self.nbytes = self._ends[-1]
        self._last_end = 0  # where the last read ended; a read at the beginning counts as a continuation
        # An end of the wrong length counts as empty: the next read of its span reports it.
        self._head, self._tail = (
            data if isinstance(data, bytes) and len(data) == span.nbytes else b""
            for span, data in zip(ends_of(pieces), ends, strict=True)
        )
        self._stream: _RedisStream | None = None

    def close(self) -> None:
        if not self.closed:
            self._end_stream()
            if self._release is not None:
                with suppress(StoreError):  # the lease ends by itself
                    self._link.call(*self._release)
        super().close()

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]], /) -> None:
        """See `StoredFile`: one round trip, in which exactly these bytes come."""
        self._keep_lease()
        spans: list[tuple[ChunkSpan, memoryview]] = []
        for start, buffer in ranges:
            end = start + len(buffer)
            if end > self.nbytes:
                raise BlobError(f"the file ended {end - self.nbytes} bytes early while it was read", reason="truncated")
            if end <= len(self._head):
                _copy(self._head, start, buffer)
            elif start >= self.nbytes - len(self._tail):
                _copy(self._tail, start - (self.nbytes - len(self._tail)), buffer)
            else:
                spans += self._spans_of(start, buffer)
        answers = self._link.pipeline([span.command for span, _ in spans]) if spans else []
        for (span, buffer), data in zip(spans, answers, strict=True):
            if not isinstance(data, bytes) or len(data) != span.nbytes:
                raise missing(span.piece)
            buffer[:] = data

    def _spans_of(self, start: int, buffer: memoryview) -> Iterator[tuple[ChunkSpan, memoryview]]:
        """The parts of pieces that fill a buffer from byte `start` of the file on."""
        while buffer:
            index = bisect_right(self._ends, start)
            count = min(len(buffer), self._ends[index] - start)
            first = self._offset(index, start)
            yield ChunkSpan(self._pieces[index], first, first + count), buffer[:count]
            start, buffer = start + count, buffer[count:]

    def _keep_lease(self) -> None:
        released = self._release is None or (self._stream is not None and self._stream.has_said_last)
        if not released and time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._lease_s / 3
            self._renew()

    def _read_some(self, view: memoryview) -> int:
        """Read up to the end of a piece at most."""
        self._keep_lease()
        index = bisect_right(self._ends, self._position)
        view = view[: self._ends[index] - self._position]
        if self._position < len(self._head):
            if self._stream is None and len(self._head) < self.nbytes:  # a reader of the head usually reads on
                self._begin_stream(len(self._head))
            view = _copy(self._head, self._position, view)
        elif self._position >= self.nbytes - len(self._tail):
            view = _copy(self._tail, self._position - (self.nbytes - len(self._tail)), view)
        elif len(view) < _SMALL and self._position != self._last_end:
            start = self._offset(index, self._position)
            data = self._link.call("GETRANGE", self._pieces[index].key, start, start + len(view) - 1)
            if not isinstance(data, bytes) or len(data) != len(view):
                raise missing(self._pieces[index])
            view[:] = data
        else:
            view = view[: self._stream_into(view, self._position)]
        self._last_end = self._position + len(view)
        return len(view)

    def _offset(self, index: int, position: int) -> int:
        """The offset within a piece of a position in the file."""
        return position - self._ends[index] + self._pieces[index].nbytes

    def _stream_into(self, view: memoryview, position: int) -> int:
        """Read from the stream, or from a new one if it is not at `position`. Returns how many bytes came."""
        if self._stream is None or self._stream.position != position:
            self._end_stream()
            self._begin_stream(position)
        assert self._stream is not None
        try:
            return self._stream.read(view)
        except BaseException:
            self._end_stream()
            raise

    def _begin_stream(self, position: int) -> None:
        index = bisect_right(self._ends, position)
        last = self._release if self._once else None
        self._stream = _RedisStream(self._link, self._pieces[index:], self._offset(index, position), position, last)

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            if stream.has_said_last:
                self._release = None


class _RedisStream:
    """Pieces that come one after the other on one connection."""

    def __init__(
        self, link: RedisLink, pieces: Sequence[ChunkPiece], skip: int, position: int, last: Command | None
    ) -> None:
        """skip: unwanted bytes of the first piece. position: where in the file the stream begins. last: a command sent
        with the last span; its answer is a number, and no thread waits for it."""
        self.position = position
        self.has_said_last = False
        self._last = last
        self._link = link
        self._spans = deque(_spans(pieces, skip))  # not requested yet
        self._requested: deque[ChunkSpan] = deque()  # requested, not received
        self._left = 0  # bytes to come of the first requested span; 0: it has not begun
        self._loan: Loan = link.borrow(pieces[0].key)
        with link.talking(self._loan) as wire:
            self._ask(wire, 2)

    def read(self, view: memoryview) -> int:
        """Fill the buffer, at most to the end of the piece. Returns how many bytes came."""
        with self._link.talking(self._loan) as wire:
            if not self._left:
                self._begin(wire)
            view = view[: self._left]
            wire.fill(view)
            self._left -= len(view)
            self.position += len(view)
            if not self._left:
                wire.end_bulk()
                self._requested.popleft()
        return len(view)

    def close(self) -> None:
        """Give the connection back if little is left to come on it, else close it."""
        to_come = self._left or sum(span.nbytes for span in self._requested)
        if len(self._requested) > 1 or to_come > _DRAIN:
            self._loan.drop()
        elif self._loan.is_whole:
            with suppress(BlobError, StoreError):  # the loan is dropped then
                if to_come:
                    self.read(memoryview(bytearray(to_come)))
                if self.has_said_last:
                    with self._link.talking(self._loan) as wire:
                        wire.receive()
                self._loan.give_back()

    def _begin(self, wire: Wire) -> None:
        """Begin to receive the next span, and request the spans after it before reading its bytes. Several are
        requested at once: sending a command takes as long as receiving 400 kB."""
        span = self._requested[0]
        if wire.bulk() != span.nbytes:
            raise missing(span.piece)
        self._left = span.nbytes
        if len(self._requested) <= _AHEAD // 2:
            self._ask(wire, _AHEAD)
        if len(self._requested) == 1 and self._last is not None:
            wire.send(self._last)
            self.has_said_last = True

    def _ask(self, wire: Wire, count: int) -> None:
        """Request spans until `count` are outstanding."""
        commands: list[Command] = []
        while self._spans and len(self._requested) < count:
            self._requested.append(self._spans.popleft())
            commands.append(self._requested[-1].command)
        if commands:
            wire.send(*commands)


@dataclass(frozen=True)
class ChunkSpan:
    piece: ChunkPiece
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def command(self) -> Command:
        if self.nbytes == self.piece.nbytes:
            return ("GET", self.piece.key)
        end = -1 if self.stop == self.piece.nbytes else self.stop - 1
        return ("GETRANGE", self.piece.key, self.start, end)

    @property
    def bounded_command(self) -> Command:
        """As `command`, but the answer has at most one byte too many, however long the piece is."""
        end = self.stop if self.stop == self.piece.nbytes else self.stop - 1
        return ("GETRANGE", self.piece.key, self.start, end)


def ends_of(pieces: Sequence[ChunkPiece]) -> tuple[ChunkSpan, ChunkSpan]:
    """The beginning and the end of a file, which most readers look at first."""
    first, last = pieces[0], pieces[-1]
    return ChunkSpan(first, 0, min(_HEAD, first.nbytes)), ChunkSpan(last, max(0, last.nbytes - _TAIL), last.nbytes)


def _spans(pieces: Sequence[ChunkPiece], skip: int) -> Iterator[ChunkSpan]:
    """Spans from byte `skip` of the first piece on; the first is short, so that the server soon prepares the next."""
    first, *others = pieces
    cut = min(skip + _FIRST, first.nbytes)
    yield ChunkSpan(first, skip, cut)
    if cut < first.nbytes:
        yield ChunkSpan(first, cut, first.nbytes)
    yield from (ChunkSpan(piece, 0, piece.nbytes) for piece in others)


def _copy(data: bytes, offset: int, view: memoryview) -> memoryview:
    """Copy the data from `offset` on into the view, and return the filled part of the view."""
    piece = memoryview(data)[offset : offset + len(view)]
    view[: len(piece)] = piece
    return view[: len(piece)]


def missing(piece: ChunkPiece) -> BlobError:
    return BlobError(f"{piece.key} is not in Redis any more, or not whole", reason="missing")
