"""The layers of a document on their way to a card, each behind an event of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import ref

import torch

from kvshelf.artifact.heads import cut
from kvshelf.artifact.records import LayerRecord, devices_of, entries_of, tensors_of, with_entries, with_tensors
from kvshelf.kernels.rates import CPU
from kvshelf.kernels.staging import arriving, received


class Sending:
    """Sends the layers of one document to cards as they arrive, on a thread of its own. What was not sent yet when
    nobody has this object any more is not sent.

    sent: of each layer, done once its copy is queued, with the error where it cannot be. Then `received` gives it.
    """

    def __init__(
        self,
        records: Sequence[Future[LayerRecord]],
        devices: Sequence[torch.device],
        heads: tuple[int, int] | None,
    ) -> None:
        """devices: of each layer. heads: as of `reading`."""
        self._devices = devices
        self._heads = heads
        self._thread = ThreadPoolExecutor(1, "kvshelf-send")
        self._queued: dict[int, tuple[LayerRecord, torch.cuda.Event | None]] = {}
        self.sent: tuple[Future[None], ...] = tuple(Future() for _ in records)
        for index, record in enumerate(records):
            record.add_done_callback(partial(_begin, ref(self), index))

    def received(self, layer: int) -> LayerRecord:
        """A layer that was sent: what this thread gives its card from now on waits for the copy. Ask until it is
        released. Raises the error of a layer that could not be sent."""
        self.sent[layer].result()
        record, event = self._queued[layer]
        if event is not None:
            received(tensors_of([record]), event)
        return record

    def release(self, layer: int) -> None:
        """Let go of a layer that was received: who reads it has what it needs."""
        del self._queued[layer]

    def begin(self, layer: int, record: Future[LayerRecord]) -> None:
        """Send a layer that has arrived, or failed."""
        self._thread.submit(_sent_by, ref(self), layer, record)

    def send(self, layer: int, record: Future[LayerRecord]) -> None:
        """The same, on the caller's thread."""
        try:
            self._queued[layer] = self._on_its_way(record.result(), self._devices[layer])
            self.sent[layer].set_result(None)
        except Exception as error:  # any error: threads wait for the layer
            self.sent[layer].set_exception(error)
        if all(other.done() for other in self.sent):
            self._thread.shutdown(wait=False)

    def _on_its_way(self, record: LayerRecord, device: torch.device) -> tuple[LayerRecord, torch.cuda.Event | None]:
        """The layer on the device, and the event before which nobody may read it there."""
        record = reading(record, self._heads)
        if device.type != "cuda" or devices_of(record) != {CPU}:
            return record.to(device), None
        tensors, event = arriving(device).send(tensors_of([record]))
        return with_tensors([record], tensors)[0], event


def reading(layer: LayerRecord, heads: tuple[int, int] | None) -> LayerRecord:
    """What attention reads of a layer here: its KV heads from the first of these to the one before the second; None:
    all."""
    entries = entries_of(layer)
    return layer if heads is None or entries is None else with_entries(layer, cut(entries, *heads))


def _begin(sending: ref[Sending], layer: int, record: Future[LayerRecord]) -> None:
    if (there := sending()) is not None:
        there.begin(layer, record)


def _sent_by(sending: ref[Sending], layer: int, record: Future[LayerRecord]) -> None:
    if (there := sending()) is not None:
        there.send(layer, record)
