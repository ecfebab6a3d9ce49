"""Where a home keeps runs of bytes: by name, written once, read any number of times, removed.

It knows nothing of caches, tenants or encryption. What counts is decided by the index (`kvshelf.store.index`): bytes
whose name the index does not know are nothing but rubbish that a dead writer left.
"""

from __future__ import annotations

import abc
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import ClassVar, Final

Step = Callable[[str], None]
"""Called with the name of each step of a write as it is completed: for tracing, and for tests that stop there."""

WRITE_LEASE_S: Final = 60.0
"""How long a writer may be silent before what it writes is taken for abandoned."""

MARGIN_S: Final = 600.0
"""How much longer a server keeps bytes than the manifest that names them: a reader that began in time can end."""

_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}")


def new_name(cache_id: str) -> str:
    """A fresh name for bytes of a cache. The random part keeps two writers of one cache out of each other's way."""
    return f"{cache_id.removeprefix('kvs_')}-{secrets.token_hex(8)}"


def is_name(name: str) -> bool:
    """Whether `new_name` can have made this name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Health:
    """What is amiss with a place that answers, one sentence each.

    faults: why it must not be used, for it may lose parts of a cache. warnings: what an operator should know of.
    """

    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Blobs(abc.ABC):
    """A place for bytes. Serves several threads and several processes at once.

    `nbytes` is always the size with which a name was written. Methods raise `StoreUnavailable` and `StorageFull` when
    the place itself does not work, and for a name that is none.
    """

    home: str
    """What a receipt calls this place: "disk" or "redis"."""

    cheap_to_walk: ClassVar[bool]
    """Whether every sweep may call `found`."""

    read_ahead: ClassVar[bool]
    """Whether it pays to read an opened file on a thread of its own while what it gave is digested. Where the bytes
    come from another process, that one works meanwhile, and two threads that pass segments to each other lose more than
    they gain: 59 instead of 50 ms of processor time for 64 MB from Redis."""

    @abc.abstractmethod
    def write(self, name: str, buffers: Iterable[memoryview], nbytes: int, *, on_step: Step) -> None:
        """Create and make durable. What takes longer than the write lease needs `renew` beside it.

        `on_step` hears "created", "written", "synced". On an error the bytes written so far may stay: the caller
        removes them, or they are found as rubbish later.
        """

    @abc.abstractmethod
    def renew(self, name: str, nbytes: int) -> None:
        """Let a server keep what is there of the bytes for another write lease at least. A disk does nothing here.

        For a thread beside the one that writes, reads back and calls `keep_until`: nothing is ever kept shorter by it.
        """

    @abc.abstractmethod
    def open(self, name: str, nbytes: int, *, once: bool = False) -> RawIOBase | None:
        """A seekable file at byte 0, or None when there is nothing of this name.

        It holds a lease until it is closed: the bytes can be read to the end although the name is removed meanwhile.
        once: it is read from front to end once and then closed, so the lease may end when the last bytes come.
        Reading raises `BlobError` (reason "missing") where a part is gone.
        """

    @abc.abstractmethod
    def beginning(self, name: str, nbytes: int, count: int) -> bytes | None:
        """The first `count` bytes, or all where there are fewer; None when there is nothing of this name.

        No more than these are read: `open` is for who reads on.
        """

    @abc.abstractmethod
    def holds(self, name: str, nbytes: int) -> bool:
        """Whether all the bytes seem to be there, by their number; they are not read."""

    def hold_each(self, names: Sequence[tuple[str, int]]) -> list[bool]:
        """`holds` for many names with their sizes at once."""
        return [self.holds(name, nbytes) for name, nbytes in names]

    @abc.abstractmethod
    def keep_until(self, name: str, nbytes: int, expires_at: float | None) -> None:
        """Let the server drop the bytes `MARGIN_S` after a time (Unix seconds), or never. A disk does nothing here.

        Nothing is kept shorter than an earlier call said: of two who change the expiry of a cache at once, the one
        whose manifest counts need not be the one who comes here last. A sweep frees what ends earlier. Raises
        `BlobError` (reason "missing") when not all are there.
        """

    @abc.abstractmethod
    def remove(self, name: str, nbytes: int) -> bool:
        """Remove the bytes, set aside or not; readers that have them open keep them. False if there were none."""

    @abc.abstractmethod
    def set_aside(self, name: str, nbytes: int) -> None:
        """Keep the bytes for inspection, where `open` does not find them; nothing happens if there are none."""

    @abc.abstractmethod
    def is_read(self, name: str) -> bool:
        """Whether a reader has the bytes open now."""

    @abc.abstractmethod
    def found(self) -> Iterator[tuple[str, float]]:
        """Every name there is, with the seconds since its last change. Slow: it walks the whole place."""

    @abc.abstractmethod
    def problems(self) -> list[str]:
        """What is amiss with the place itself, one sentence each: strange files, a server that may drop bytes."""

    def health(self) -> Health:
        """See `Health`. Quick: it is asked every few seconds, and walks nothing."""
        return Health()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""
