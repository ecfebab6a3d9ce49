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
"""Of a buffer: a third of a millisecond of PCIe 5, beside which starting a copy is nothing. Not measured."""

PINNED_BYTES: Final = 4 * BUFFER_BYTES
"""Of the host, for each card, once something was copied in both directions."""

_ALIGNED: Final = 256


class Staging:
    """Two buffers between the host and a card for one direction, and the stream of its copies. Thread-safe: one call at
    a time. A buffer is used again behind the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        """Where the host pins no memory, each copy is waited for."""
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [_Buffer(host_memory([BUFFER_BYTES], torch.uint8, device)) for _ in range(2)]
        self._used = 0
        self._turn = Lock()

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Tensors of the host, contiguous on the card once the event has happened: see `received`. Waits for the
        buffers, never for what else the card does."""
        with self._using():
            made = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in tensors]
            for there, tensor in zip(made, tensors, strict=True):
                for place, there_part, part in self._places(_octets(there), _octets(tensor)):
                    place.copy_(part)
                    there_part.copy_(place, non_blocking=True)
            return made, self.stream.record_event()

    def fetch(self, tensors: Sequence[Tensor], behind: torch.cuda.Event) -> list[Tensor]:
        """Tensors of the card, as they are behind this event, on the host. Waits for no later work of the card."""
        made = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        with self._using():
            self.stream.wait_event(behind)
            for here, tensor in zip(made, tensors, strict=True):
                for place, here_part, part in self._places(_octets(here), _octets(tensor)):
                    place.copy_(part, non_blocking=True)
                    self._buffers[0].leaving.append((here_part, place))
        return made

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Its turn, in buffers of which nothing is needed any more. At the end, and where it ends with an error, all
        that was to leave has left."""
        with self._turn, torch.cuda.stream(self.stream):
            self._turn_over()
            try:
                yield
            finally:
                if any(buffer.leaving for buffer in self._buffers):
                    self._turn_over()
                    self._turn_over()

    def _places(self, to: Tensor, of: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Places in the buffers for octets `[n]`, and the parts of both tensors that go through each."""
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
        """Go on in the other buffer, once its copies are done and what was to leave by it has left."""
        self._buffers[0].event = self.stream.record_event()
        self._buffers.reverse()
        self._used = 0
        self._buffers[0].emptied()


class _Buffer:
    """memory: `[BUFFER_BYTES]` uint8. event: behind its last copy. leaving: places of the host, and those of
    the buffer that are copied to them once the event has happened."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.event: torch.cuda.Event | None = None
        self.leaving: list[tuple[Tensor, Tensor]] = []

    def emptied(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for here, place in self.leaving:
            here.copy_(place)
        self.leaving.clear()


class OfEachCard(Generic[T]):
    """What there is once for each card, made when a thread first asks for it; others wait for that one."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make = make
        self._made: dict[torch.device, T] = {}
        self._making = Lock()

    def __call__(self, device: torch.device) -> T:
        """Raises what making it raises, and then makes it for the next one who asks."""
        with self._making:
            if device not in self._made:
                self._made[device] = self._make(device)
            return self._made[device]

    def clear(self) -> None:
        """Forget all cards."""
        self._made.clear()


arriving: Final = OfEachCard(Staging)
"""The way to a card."""

leaving: Final = OfEachCard(Staging)
"""The way from a card."""

decoding: Final = OfEachCard(lambda device: torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
"""The stream on which a card decodes layers beside its other work."""


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Have a card compute what is queued inside the block beside its other work, and wait at the end for this alone;
    elsewhere the block runs as it is. What is read behind the block is to be given to the function that this yields:
    its memory is not used again while this thread's stream reads it."""
    if device.type != "cuda":
        yield lambda _: None
        return
    reader, stream = torch.cuda.current_stream(device), decoding(device)
    with torch.cuda.stream(stream):
        yield lambda tensors: _lent(tensors, reader)
        stream.synchronize()


def events_of(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Of each card among these, the event behind all that this thread has given it."""
    cards = {device for device in devices if device.type == "cuda"}
    return {card: torch.cuda.current_stream(card).record_event() for card in cards}


def received(tensors: Sequence[Tensor], event: torch.cuda.Event) -> None:
    """Have all that this thread gives the card from now on wait for the event behind which these tensors are there, of
    which there is one at least."""
    stream = torch.cuda.current_stream(tensors[0].device)
    stream.wait_event(event)
    _lent(tensors, stream)


def _lent(tensors: Iterable[Tensor], reader: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(reader)


def carried(
    tensors: Sequence[Tensor], device: torch.device, events: Mapping[torch.device, torch.cuda.Event]
) -> list[Tensor]:
    """The tensors on this device, to be read on this thread's stream of it. events: of each card, that behind which
    they are there (`events_of`); a copy to the host waits for no later work of the card."""
    moved = list(tensors)
    for source in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == source]
        for place, tensor in zip(places, _carried([tensors[place] for place in places], device, events), strict=True):
            moved[place] = tensor
    return moved


def _carried(
    tensors: Sequence[Tensor], device: torch.device, events: Mapping[torch.device, torch.cuda.Event]
) -> Sequence[Tensor]:
    """Of tensors of one device."""
    source = tensors[0].device
    if source.type == "cuda" and device.type == "cpu":
        return leaving(source).fetch(tensors, events[source])
    if source.type == "cpu" and device.type == "cuda":
        there, event = arriving(device).send(tensors)
        received(there, event)
        return there
    return [tensor.to(device) for tensor in tensors]


def _octets(tensor: Tensor) -> Tensor:
    """The bytes `[n]` of a tensor, in its memory where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)  # a column reshaped is no row of bytes
