"""A compressed cache as the layers of a model read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from kvshelf.kernels.prefix_attention import Prefix
from kvshelf.store.artifact.arriving import ArrivingCache
from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.store.artifact.records import LayerRecord, Rotate

Wait = Callable[[Future[LayerRecord]], None]
"""Called repeatedly while a layer has not arrived."""


def block(record: Future[LayerRecord]) -> None:
    """The `Wait` that blocks. An error of the layer is raised where its result is read."""
    record.exception()


class Attachment:
    """The read-only prefixes of one document, made once for each layer and shared by all its questions.

    The cache may still be arriving: a layer can be used as soon as it is there. Only the model's thread uses it; any
    thread may ask for `arrived` and `failed`.
    """

    def __init__(self, cache: CompressedCache | ArrivingCache, device: torch.device, rotate: Rotate | None) -> None:
        """`rotate` applies the model's RoPE; records whose keys carry no rotation need it, and raise `StateConflict`
        without."""
        self.identity = cache.identity
        self.num_tokens = cache.num_tokens
        self.next_position = cache.next_position
        self.nbytes = cache.nbytes
        self._device = device
        self._rotate = rotate
        self._records = _arrived(cache.layers) if isinstance(cache, CompressedCache) else cache.layers
        self._prefixes: list[tuple[Prefix, ...] | None] = [None] * len(self._records)
        self._arrived = False

    @property
    def num_layers(self) -> int:
        return len(self._records)

    @property
    def arrived(self) -> bool:
        """Whether every layer has arrived or failed."""
        self._arrived = self._arrived or all(record.done() for record in self._records)  # asked before every step
        return self._arrived

    @property
    def failed(self) -> bool:
        """Whether a layer could not be read."""
        return any(record.done() and record.exception() is not None for record in self._records)

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        """The prefixes of the document at this layer, which every token of a question sees.

        Until the layer arrives, `wait` is called repeatedly with the layer's future, and may do other work. Raises the
        error of a layer that could not be read.
        """
        made = self._prefixes[layer]
        if made is None:
            while not self._records[layer].done():
                wait(self._records[layer])
            made = self._records[layer].result().to(self._device).prefixes(self._rotate)
            self._prefixes[layer] = made
        return made


def _arrived(layers: Sequence[LayerRecord]) -> tuple[Future[LayerRecord], ...]:
    futures: tuple[Future[LayerRecord], ...] = tuple(Future() for _ in layers)
    for future, layer in zip(futures, layers, strict=True):
        future.set_result(layer)
    return futures
