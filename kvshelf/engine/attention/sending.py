"""The layers of a document on their way to a card: each waits for an event of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from kvshelf.artifact.heads import cut
from kvshelf.artifact.records import LayerRecord, devices_of, entries_of, tensors_of, with_entries, with_tensors
from kvshelf.kernels.rates import CPU
from kvshelf.kernels.staging import arriving, received


class Sending:
    """Sends the layers of one document to cards as they arrive, on a thread of its own. It sends no more layers once
    nobody refers to this object.

    sent: for each layer a future that is done once its copy is queued, or has the error. Then `received` returns it.
    """

    def __init__(
        self, records: Sequence[Future[LayerRecord]], devices: Sequence[torch.device], heads: tuple[int, int] | None
    ) -> None:
        """devices: of each layer. heads: as of `of_heads`."""
        self._devices = devices
        self._heads = heads
        self._thread = ThreadPoolExecutor(1, "kvshelf-send")
        self._queued: dict[int, tuple[LayerRecord, torch.cuda.Event | None]] = {}
        self.sent: tuple[Future[None], ...] = tuple(Future() for _ in records)
        for index, record in enumerate(records):
            record.add_done_callback(partial(_call, WeakMethod(self._begin), index))

    def received(self, layer: int) -> LayerRecord:
        """A layer that was sent and is not released: later work of this thread on its card waits for the copy. Raises
        the error of a layer that could not be sent."""
        self.sent[layer].result()
        record, event = self._queued[layer]
        if event is not None:
            received(tensors_of([record]), event)
        return record

    def release(self, layer: int) -> None:
        del self._queued[layer]

    def _begin(self, layer: int, record: Future[LayerRecord]) -> None:
        self._thread.submit(_call, WeakMethod(self._send), layer, record)

    def _send(self, layer: int, record: Future[LayerRecord]) -> None:
        try:
            self._queued[layer] = self._queue(record.result(), self._devices[layer])
            self.sent[layer].set_result(None)
        except Exception as error:  # any error: threads wait for the layer
            self.sent[layer].set_exception(error)
        if all(other.done() for other in self.sent):
            self._thread.shutdown(wait=False)

    def _queue(self, record: LayerRecord, device: torch.device) -> tuple[LayerRecord, torch.cuda.Event | None]:
        """The layer on the device, and the event before which nobody may read it there."""
        record = of_heads(record, self._heads)
        if device.type != "cuda" or devices_of(record) != {CPU}:
            return record.to(device), None
        tensors, event = arriving(device).send(tensors_of([record]))
        return with_tensors([record], tensors)[0], event


def of_heads(layer: LayerRecord, heads: tuple[int, int] | None) -> LayerRecord:
    """The KV heads of a layer from the first of `heads` to the one before the second; None: all."""
    entries = entries_of(layer)
    return layer if heads is None or entries is None else with_entries(layer, cut(entries, *heads))


def _call(method: WeakMethod[Callable[..., None]], *args: Any) -> None:
    """Call a method of an object that is still referred to."""
    if (bound := method()) is not None:
        bound(*args)
