"""Where a home keeps runs of bytes: by name, written once, read any number of times, removed.

This layer knows no caches, tenants or encryption. The index (`kvshelf.store.index`) decides which names count: bytes
under any other name are the leftovers of a dead writer.
"""

from __future__ import annotations

import abc
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from kvshelf.artifact.memory import fill

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Step = Callable[[str], None]
"""Called with the name of each completed step of a write: for tracing, and for tests that stop there."""

Name = tuple[str, int]
"""A name in `Blobs`, and the size with which it was written."""

WRITE_LEASE_S: Final = 60.0
"""How long a writer may be silent before its write counts as abandoned."""

MARGIN_S: Final = 86400.0 + 600.0
"""How long a server keeps bytes after their end: a sweep removes them before, and a server without one loses nothing
when its clock jumps by less than a day. The manifest goes 10 minutes earlier, so that a reader can finish."""

_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}")


def new_name(cache_id: str) -> str:
    """A fresh name for bytes of a cache. The random part separates two writers of one cache."""
    return f"{cache_id.removeprefix('kvs_')}-{secrets.token_hex(8)}"


def cache_of(name: str) -> str:
    """The cache whose bytes were written under a name."""
    return f"kvs_{name[:40]}"


def is_name(name: str) -> bool:
    """Whether a name has the form that `new_name` gives."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Health:
    """The problems of a home that answers, one sentence each. faults: the home must not be used, because it may lose
    parts of a cache. full: it answers, and takes no more caches. warnings: for the operator."""

    faults: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Blobs(Protocol):
    """A place for bytes. Several threads and several processes may use it at once. `nbytes` is always the size with
    which a name was written. Methods raise `StoreUnavailable` and `StorageFull` when the place does not work, and
    `StoreUnavailable` for a malformed name."""

    home: str
    """The name of this place in a receipt: "disk", "redis" or "objects"."""

    walk_every_s: ClassVar[float | None]
    """Seconds between the sweeps that may call `walk`; 0: each may. None: nothing stays there that nobody knows."""

    read_ahead: ClassVar[bool]
    """Whether it pays to read an opened file on a second thread while the first hashes. If another process sends the
    bytes, it already works in parallel, and two threads that pass segments to each other lose more than they gain: 59
    instead of 50 ms of processor time for 64 MB from Redis."""

    def write(self, name: str, buffers: Iterable[memoryview], nbytes: int, *, on_step: Step) -> None:
        """Create the name and make its bytes durable. A write longer than the write lease needs `renew` meanwhile.
        `on_step` is called with "created", "written", "synced". After an error, bytes written so far may stay: the
        caller removes them, or a sweep does."""

    def renew(self, name: str, nbytes: int) -> None:
        """Make a server keep the bytes written so far for at least another write lease. A disk does nothing here.
        Called by another thread while the writer writes. Never shortens a lifetime that `keep_until` has set."""

    def open(self, name: str, nbytes: int, *, once: bool = False) -> StoredFile | None:
        """A seekable file at byte 0, or None if the name does not exist.

        The file holds a lease until it is closed: its bytes can be read to the end although the name is removed
        meanwhile. once: the caller reads it from front to end once, so the lease may end with the last bytes. Reading
        raises `BlobError` (reason "missing") if a part is gone.
        """

    def beginning(self, name: str, nbytes: int, count: int) -> bytes | None:
        """The first `count` bytes, or all if there are fewer; None if the name does not exist. Reads nothing else."""

    def holds(self, name: str, nbytes: int) -> bool:
        """Whether the name exists with this size. The bytes are not read."""

    def hold_each(self, names: Sequence[tuple[str, int]]) -> list[bool]:
        """`holds` for many names with their sizes at once."""
        return [self.holds(name, nbytes) for name, nbytes in names]

    def keep_until(self, name: str, nbytes: int, expires_at: float | None) -> None:
        """Let the server drop the bytes `MARGIN_S` after a time (Unix seconds), or never. A disk does nothing here.

        Never shortens the lifetime that an earlier call set: when two callers change the expiry of a cache at once,
        the last call here need not be the one whose manifest counts. A sweep frees bytes that expire earlier. Raises
        `BlobError` (reason "missing") if bytes are gone.
        """

    def remove(self, name: str, nbytes: int) -> bool:
        """Remove the bytes, quarantined or not; open readers keep them. Does nothing if there are none. False: they are
        still there for a reader, and have no new ones. The caller tries again later."""

    def set_aside(self, name: str, nbytes: int) -> None:
        """Keep the bytes of a corrupt cache for inspection, hidden from `open` where hiding them costs no copy. Does
        nothing if there are none."""

    def is_read(self, name: str) -> bool:
        """Whether a reader has the bytes open now."""

    def walk(self) -> Iterator[tuple[str, float]]:
        """Every name, with the seconds since its last change. Slow: it walks the whole place."""

    def problems(self) -> list[str]:
        """Problems of the place, one sentence each: strange files, a server that may drop bytes."""

    def health(self) -> Health:
        """See `Health`. Called every few seconds, so it must be quick and not walk the place."""
        return Health()

    def close(self) -> None:
        """Let go of files and connections."""


class StoredFile(RawIOBase):
    """A seekable file of a store, for one thread at a time."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]], /) -> None:
        """Fill each buffer from its byte of the file on. The ranges ascend and do not overlap; they are fetched
        together where fetching takes a round trip, so ask for several at once. Raises as reading does, and `BlobError`
        if the file ends first."""
        for start, buffer in ranges:
            self.seek(start)
            fill(self, buffer)


class SeekableFile(StoredFile):
    """A read-only file of `nbytes` bytes for one thread at a time. `readinto` fills the buffer or reaches the end."""

    nbytes: int
    _position = 0

    @abc.abstractmethod
    def _read_some(self, view: memoryview) -> int:
        """Read at least one byte from `_position` on, which is before the end; returns how many. `view` is not empty
        and not longer than what is left."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence]
        if position < 0:
            raise ValueError(f"a file has no byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self.closed:
            raise ValueError("the file is closed")
        view = memoryview(buffer).cast("B")[: max(0, self.nbytes - self._position)]
        done = 0
        while done < len(view):
            count = self._read_some(view[done:])
            self._position += count
            done += count
        return done


class RangesFile(SeekableFile):
    """A file that is read in ranges alone: no home takes a read for the beginning of all that follows. Closing it
    leaves the file below open."""

    def __init__(self, file: StoredFile) -> None:
        super().__init__()
        self._file = file
        self.nbytes = file.seek(0, os.SEEK_END)

    def _read_some(self, view: memoryview) -> int:
        self._file.read_ranges([(self._position, view)])
        return len(view)


def neighbours(ranges: Sequence[tuple[int, memoryview]], gap: int) -> Iterator[Sequence[tuple[int, memoryview]]]:
    """Ranges in groups: within one, at most `gap` bytes lie between a range and the next."""
    start = 0
    for index in range(1, len(ranges) + 1):
        before, buffer = ranges[index - 1]
        if index == len(ranges) or ranges[index][0] - before - len(buffer) > gap:
            yield ranges[start:index]
            start = index


READ_LEASE_S: Final = 60.0
"""How long a removed name stays readable for a reader that has gone silent."""

TAKEN_S: Final = 3600.0
"""How long a taken name takes no readers: its bytes are removed long before."""

TAKEN: Final = "taken"
"""The token of a name that is taken, in place of a reader's."""


class Leases(Protocol):
    """Which names in `Blobs` are being read, in all processes of a home. Every method is one atomic step. A lease ends
    by itself after `READ_LEASE_S`, so a reader that dies blocks nothing for long. Methods raise `StoreUnavailable` when
    the home does not work."""

    def hold(self, name: str, token: str) -> bool:
        """Begin or renew the lease of a reader. False: the name is taken, and its bytes are going."""

    def release(self, name: str, token: str) -> None:
        """End a lease. Ignores an unknown one."""

    def has_readers(self, name: str) -> bool:
        """Whether any reader has a lease."""

    def take(self, name: str) -> bool:
        """Take a name in order to remove its bytes: it gets no new readers. False: a reader has a lease still, and
        nothing was done."""
