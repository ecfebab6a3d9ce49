"""Pinned memory through which tensors reach a card or leave it, on streams of their own.

A card copies from and to pinned memory alone while it computes. Two buffers for each direction are all that is pinned:
the processor fills or empties one while the card copies the other, whatever the size of what is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from kvshelf.kernels.transfer import host_memory

T = TypeVar("T")

BUFFER_BYTES: Final = 16 << 20
"""Bytes of a buffer: a third of a millisecond of PCIe 5, against which the start of a copy is nothing. Not measured."""

PINNED_BYTES: Final = 4 * BUFFER_BYTES
"""Pinned memory of the host for each card that has copied in both directions."""

_ALIGNED: Final = 256


class Staging:
    """Two buffers between the host and a card for one direction, and the stream of its copies. Thread-safe: one call at
    a time. A buffer is used again after the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        """Where the host pins no memory, each copy is waited for."""
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [_Buffer(host_memory([BUFFER_BYTES], torch.uint8, device)) for _ in range(2)]
        self._used = 0
        self._turn = Lock()

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copies of the host's tensors, contiguous on the card once the event has happened: see `received`. Waits for
        the buffers, never for other work of the card."""
        with self._using():
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                for place, target, part in self._places(_octets(copy), _octets(tensor)):
                    place.copy_(part)
                    target.copy_(place, non_blocking=True)
            return copies, self.stream.record_event()

    def fetch(self, tensors: Sequence[Tensor], event: torch.cuda.Event) -> list[Tensor]:
        """Copies on the host of the card's tensors as they are after this event. Waits for no later work of the
        card."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        with self._using():
            self.stream.wait_event(event)
            for copy, tensor in zip(copies, tensors, strict=True):
                for place, target, part in self._places(_octets(copy), _octets(tensor)):
                    place.copy_(part, non_blocking=True)
                    self._buffers[0].leaving.append((target, place))
        return copies

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Takes the turn of one call, with a buffer whose copies are done. At the end, and after an error, all copies
        to the host are done."""
        with self._turn, torch.cuda.stream(self.stream):
            self._turn_over()
            try:
                yield
            finally:
                if any(buffer.leaving for buffer in self._buffers):
                    self._turn_over()
                    self._turn_over()

    def _places(self, to: Tensor, of: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Places in the buffers for octets `[n]`, and the parts of both tensors that pass through each place."""
        done = 0
        while done < len(of):
            if self._used >= BUFFER_BYTES:
                self._turn_over()
            end = min(len(of), done + BUFFER_BYTES - self._used)
            place = self._buffers[0].memory[self._used : self._used + end - done]
            self._used += -(-(end - done) // _ALIGNED) * _ALIGNED
            yield place, to[done:end], of[done:end]
            done = end

    def _turn_over(self) -> None:
        """Go on in the other buffer, once its copies are done and its parts for the host are there."""
        self._buffers[0].event = self.stream.record_event()
        self._buffers.reverse()
        self._used = 0
        self._buffers[0].empty()


class _Buffer:
    """memory: `[BUFFER_BYTES]` uint8. event: after its last copy. leaving: tensors of the host, and the places of the
    buffer that are copied to them once the event has happened."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.event: torch.cuda.Event | None = None
        self.leaving: list[tuple[Tensor, Tensor]] = []

    def empty(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for target, place in self.leaving:
            target.copy_(place)
        self.leaving.clear()


class OfEachCard(Generic[T]):
    """One object for each card, made at the first call for it, while other threads wait."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make = make
        self._objects: dict[torch.device, T] = {}
        self._lock = Lock()

    def __call__(self, device: torch.device) -> T:
        """Raises as `make` does; the next call then tries again."""
        with self._lock:
            if device not in self._objects:
                self._objects[device] = self._make(device)
            return self._objects[device]

    def clear(self) -> None:
        """Forget all cards."""
        self._objects.clear()


arriving: Final = OfEachCard(Staging)
"""The way to a card."""

leaving: Final = OfEachCard(Staging)
"""The way from a card."""

decoding: Final = OfEachCard(lambda device: torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
"""The stream on which a card decodes layers beside its other work."""


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Have a card run the work of the block beside its other work, and wait at the end for this work alone; on another
    device the block runs as it is. Pass the tensors that are read after the block to the function that this yields:
    their memory is not used again while this thread's stream reads it."""
    if device.type != "cuda":
        yield lambda _: None
        return
    reader, stream = torch.cuda.current_stream(device), decoding(device)
    with torch.cuda.stream(stream):
        yield lambda tensors: _lend(tensors, reader)
        stream.synchronize()


def events_of(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """An event of each card among the devices, after all work that this thread has queued there."""
    cards = {device for device in devices if device.type == "cuda"}
    return {card: torch.cuda.current_stream(card).record_event() for card in cards}


def received(tensors: Sequence[Tensor], event: torch.cuda.Event) -> None:
    """Have all later work of this thread on the card wait for the event after which these tensors are there. There is
    at least one."""
    stream = torch.cuda.current_stream(tensors[0].device)
    stream.wait_event(event)
    _lend(tensors, stream)


def _lend(tensors: Iterable[Tensor], reader: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(reader)


def carried(
    tensors: Sequence[Tensor], device: torch.device, events: Mapping[torch.device, torch.cuda.Event]
) -> list[Tensor]:
    """The tensors on this device, to be read on this thread's stream of it. events: of each card, the event after which
    its tensors are there (`events_of`); a copy to the host waits for no later work of the card."""
    moved = list(tensors)
    for source in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == source]
        of_source = [tensors[place] for place in places]
        if source.type == "cuda" and device.type == "cpu":
            copies = leaving(source).fetch(of_source, events[source])
        elif source.type == "cpu" and device.type == "cuda":
            copies, event = arriving(device).send(of_source)
            received(copies, event)
        else:
            copies = [tensor.to(device) for tensor in of_source]
        for place, copy in zip(places, copies, strict=True):
            moved[place] = copy
    return moved


def _octets(tensor: Tensor) -> Tensor:
    """The bytes `[n]` of a tensor, in its memory where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)  # a column reshaped is no row of bytes
