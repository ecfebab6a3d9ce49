"""An object, read in ranges: several requests are on their way while the reader hashes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvshelf.errors import BlobError, StoreError
from kvshelf.store.blobs import READ_LEASE_S, SeekableFile, neighbours

HEAD: Final = 256 << 10
"""Bytes at the beginning that come when a file is opened: the headers of all but very long documents."""

TAIL: Final = 64
"""Bytes at the end that come with them: the trailer verifies the header."""

_SMALL: Final = 1 << 20  # bytes; a smaller read fetches only its own bytes, unless it continues the last read
_FIRST: Final = 1 << 20  # bytes of a stream's first range; each later one has twice as many, up to `_LARGEST`
_LARGEST: Final = 8 << 20
_GAP: Final = 256 << 10  # bytes between two ranges that one request brings: they take less time than a request
_AHEAD: Final = 4  # ranges at once: a connection to S3 brings 50 to 100 MB/s, a network card ten times that


@dataclass(frozen=True)
class Ends:
    """The object's size, and the bytes that came with its opening: the first and the last ones."""

    nbytes: int
    head: memoryview
    tail: memoryview


@dataclass(frozen=True)
class Lease:
    """`hold` renews it and says whether it was still held; `release` ends it."""

    hold: Callable[[], bool]
    release: Callable[[], None]


class ObjectFile(SeekableFile):
    """See `Blobs.open`. Raises `BlobError` (reason "missing") if the object is gone, and as `fetch` does."""

    def __init__(
        self, fetch: Callable[[int, int], Future[memoryview]], ends: Ends, lease: Lease, *, once: bool
    ) -> None:
        """fetch: begins to read the bytes from a start up to a stop. once: begin with the bytes behind the head now."""
        super().__init__()
        self._fetch = fetch
        self._ends = ends
        self.lease = lease
        self._renew_at = time.monotonic() + READ_LEASE_S / 3
        self.nbytes = ends.nbytes
        self._last_end = 0  # where the last read ended; a read at the beginning counts as a continuation
        self._stream = _ObjectStream(fetch, len(ends.head), self._stop) if once else None

    @property
    def _stop(self) -> int:
        """Where the tail begins."""
        return self.nbytes - len(self._ends.tail)

    def close(self) -> None:
        if not self.closed:
            self._end_stream()
            with suppress(StoreError):  # the lease ends by itself
                self.lease.release()
        super().close()

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]], /) -> None:
        """See `StoredFile`: all requests are on their way at once, each for ranges that lie close together."""
        self._keep_lease()
        requests: list[tuple[Future[memoryview], Sequence[tuple[int, memoryview]]]] = []
        for group in neighbours(ranges, _GAP):
            start, stop = group[0][0], group[-1][0] + len(group[-1][1])
            if stop > self.nbytes:
                raise BlobError(f"the object has {self.nbytes} bytes, not {stop}", reason="truncated")
            requests.append((self._whole(start, stop), group))
        for data, group in requests:
            for start, buffer in group:
                buffer[:] = _arrived(data)[start - group[0][0] :][: len(buffer)]

    def _whole(self, start: int, stop: int) -> Future[memoryview]:
        """A range, requested unless it came with the opening."""
        data: Future[memoryview] = Future()
        if stop <= len(self._ends.head):
            data.set_result(self._ends.head[start:stop])
        elif start >= self._stop:
            data.set_result(self._ends.tail[start - self._stop : stop - self._stop])
        else:
            data = self._fetch(start, stop)
        return data

    def _keep_lease(self) -> None:
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + READ_LEASE_S / 3
            if not self.lease.hold():
                raise missing()

    def _read_some(self, view: memoryview) -> int:
        self._keep_lease()
        position = self._position
        if position < len(self._ends.head):
            data = self._ends.head[position:]
        elif position >= self._stop:
            data = self._ends.tail[position - self._stop :]
        elif len(view) < _SMALL and position != self._last_end:
            data = _arrived(self._fetch(position, min(position + len(view), self._stop)))
        else:
            data = self._streamed(position)
        count = min(len(data), len(view))
        view[:count] = data[:count]
        self._last_end = position + count
        return count

    def _streamed(self, position: int) -> memoryview:
        """Bytes from a position on, out of the stream, or of a new one if it is not there."""
        if self._stream is None or not self._stream.has(position):
            self._end_stream()
            self._stream = _ObjectStream(self._fetch, position, self._stop)
        try:
            return self._stream.read(position)
        except BaseException:
            self._end_stream()  # the next read asks anew: the outage may be over
            raise

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    data: Future[memoryview]


class _ObjectStream:
    """Ranges that follow each other, `_AHEAD` of them requested."""

    def __init__(self, fetch: Callable[[int, int], Future[memoryview]], start: int, stop: int) -> None:
        self._fetch = fetch
        self._next = start
        self._stop = stop
        self._size = _FIRST
        self._ranges: deque[_Range] = deque()
        self._request()

    def has(self, position: int) -> bool:
        """Whether the position is in a range that is requested; those before it are dropped."""
        while self._ranges and self._ranges[0].stop <= position:
            self._ranges.popleft().data.cancel()
            self._request()
        return bool(self._ranges) and self._ranges[0].start <= position

    def read(self, position: int) -> memoryview:
        """The bytes of the first range from a position in it on."""
        first = self._ranges[0]
        return _arrived(first.data)[position - first.start :]

    def close(self) -> None:
        for piece in self._ranges:
            piece.data.cancel()

    def _request(self) -> None:
        while len(self._ranges) < _AHEAD and self._next < self._stop:
            stop = min(self._next + self._size, self._stop)
            self._ranges.append(_Range(self._next, stop, self._fetch(self._next, stop)))
            self._next, self._size = stop, min(2 * self._size, _LARGEST)


def _arrived(data: Future[memoryview]) -> memoryview:
    try:
        return data.result()
    except FileNotFoundError as error:
        raise missing() from error


def missing() -> BlobError:
    return BlobError("its object is gone", reason="missing")
