"""The streams and events of a card that is not there: which of its work is behind which, and what the host waited for.

Each operation is the next tick of the stream that it is given to. A stream has seen its own ticks, those of the events
that it was told to wait for, and those that the host had waited for when it was given something.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class _Tick(NamedTuple):
    stream: Stream
    number: int


class _Copy(NamedTuple):
    """A copy that is queued. memory: of the host that it reads, or is to write. arriving: what it will have written."""

    tick: _Tick
    memory: Tensor
    arriving: Tensor | None


class Stream:
    """As torch's, as far as the package uses it."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._order = order
        self.device = device
        self.seen: dict[Stream, int] = {}

    def next_tick(self) -> _Tick:
        """Of an operation that this stream is given."""
        self._see(self._order.host)
        self.seen[self] = self.seen.get(self, 0) + 1
        return _Tick(self, self.seen[self])

    def record_event(self) -> Event:
        return Event(self._order, dict(self.seen))

    def wait_event(self, event: Event) -> None:
        self._see(event.seen)

    def wait_stream(self, stream: Stream) -> None:
        self._see(stream.seen)

    def synchronize(self) -> None:
        self._order.wait("synchronize", self.seen)

    def _see(self, seen: dict[Stream, int]) -> None:
        _join(self.seen, seen)


class Event:
    """As torch's, recorded."""

    def __init__(self, order: Order, seen: dict[Stream, int]) -> None:
        self._order = order
        self.seen = seen

    def synchronize(self) -> None:
        """A wait, unless the host has waited for all of this before."""
        if any(self._order.host.get(stream, 0) < number for stream, number in self.seen.items()):
            self._order.wait("synchronize", self.seen)


class Order:
    """What happens in which order. Raises `RuntimeError` for work that is not behind what it needs.

    noted: is told the name of each wait of the host.
    """

    def __init__(self, noted: Callable[[str], None]) -> None:
        self.host: dict[Stream, int] = {}
        self._noted = noted
        self._local = threading.local()
        self._defaults: dict[torch.device, Stream] = {}
        self._written: dict[int, _Tick] = {}
        self._queued: list[_Copy] = []
        self._turn = threading.RLock()

    def current(self, device: torch.device) -> Stream:
        """The stream of a card that this thread gives work to."""
        with self._turn:
            default = self._defaults.setdefault(device, Stream(self, device))
        return self._streams.get(device, default)

    @property
    def _streams(self) -> dict[torch.device, Stream]:
        """Those of this thread that are not the cards' own."""
        own: dict[torch.device, Stream] = vars(self._local).setdefault("streams", {})
        return own

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Work of this thread is given to a stream."""
        before = self.current(stream.device)
        self._streams[stream.device] = stream
        try:
            yield
        finally:
            self._streams[stream.device] = before

    def wait(self, name: str, seen: dict[Stream, int]) -> None:
        """The host waits for these ticks: what was queued has arrived."""
        with self._turn:
            _join(self.host, seen)
            for copy in [copy for copy in self._queued if self._has(copy.tick, self.host)]:
                self._queued.remove(copy)
                if copy.arriving is not None:
                    copy.memory.copy_(copy.arriving)
        self._noted(name)

    def done(self, device: torch.device, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """An operation of a card's current stream on its memory."""
        with self._turn:
            tick = self.current(device).next_tick()
            for tensor in read:
                self.require_behind(device, tensor)
            self._written |= {_memory_of(tensor): tick for tensor in written if tensor.nbytes}

    def meet(self, device: torch.device, other: torch.device) -> None:
        """The current streams of two cards are behind each other: what torch does around a copy between them."""
        with self._turn:
            self.current(device).wait_stream(self.current(other))
            self.current(other).wait_stream(self.current(device))

    def require_behind(self, device: torch.device, tensor: Tensor) -> None:
        """A card's current stream reads this memory: what wrote it has to be seen."""
        tick = self._written.get(_memory_of(tensor))
        if tick is not None and not self._has(tick, self.current(device).seen):
            raise RuntimeError("a stream reads memory of the card before the event behind which it was written")

    def copies(self, device: torch.device, memory: Tensor, arriving: Tensor | None = None) -> None:
        """A card's current stream was given a copy from this memory of the host, or one of `arriving` to it."""
        with self._turn:
            self._queued.append(_Copy(self.current(device).next_tick(), memory, arriving))

    def require_free(self, memory: Tensor) -> None:
        """The host, or a copy to it, writes to this memory of the host: no copy that is queued may need it."""
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for copy in list(self._queued):
            if begin < copy.memory.data_ptr() + copy.memory.nbytes and copy.memory.data_ptr() < end:
                raise RuntimeError("memory of the host is written to before a copy that needs it was waited for")

    @staticmethod
    def _has(tick: _Tick, seen: dict[Stream, int]) -> bool:
        return seen.get(tick.stream, 0) >= tick.number


def _join(seen: dict[Stream, int], others: dict[Stream, int]) -> None:
    for stream, number in list(others.items()):
        seen[stream] = max(seen.get(stream, 0), number)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
