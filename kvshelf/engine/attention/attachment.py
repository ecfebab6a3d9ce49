"""A compressed cache as the layers of a model read it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import CacheDecoder, Coder, codes_bytes, plain_layer, plain_layers
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.opened.partial import PartialCache, PartialLayer
from kvshelf.artifact.packed import Rotate
from kvshelf.artifact.records import (
    Entries,
    LayerRecord,
    PackedRecord,
    State,
    devices_of,
    entries_of,
    parts_of,
    states_of,
    tensors_of,
)
from kvshelf.engine.attention.sending import Sending, of_heads
from kvshelf.errors import BlobError, KvshelfError
from kvshelf.kernels import ans
from kvshelf.kernels.choose import Units
from kvshelf.kernels.prefix_attention import PackedPrefix, Prefix, SelectedPrefix
from kvshelf.kernels.staging import beside
from kvshelf.methods.method import Needs
from kvshelf.methods.selectors.base import StoredLayer, UnitSelector

_LOG = logging.getLogger(__name__)

Wait = Callable[[Future[Any]], None]
"""Called repeatedly while a layer, or some rows of it, have not arrived."""

Records = tuple[Future[LayerRecord], ...]
"""The layers of a document."""

_NUMBERS = count()
"""Numbers of attachments, in the order in which they are made."""

BYTES_TOGETHER = 1 << 30
"""Most bytes of codes that a card decodes at once, unless one layer has more: 4 layers of 32k tokens of the 8B shape.
Their rows take half of it beside, and the tensors in between twice the codes of one layer."""

_ON_A_CARD = Lock()
"""Locked while a card decodes, so that documents that are attached at the same time take that memory in turn."""

_MOST_SELECTORS = 4
"""Selectors whose units an attachment keeps: requests set their parameters, and each would take memory."""


def next_number() -> int:
    """A number that orders documents in a step; later ones are greater."""
    return next(_NUMBERS)


def block(future: Future[Any]) -> None:
    """The `Wait` that blocks. An error is raised where the result is read."""
    future.exception()


class Attachment:
    """The read-only prefixes of one document, made once for each layer and shared by all its questions.

    The cache may still be arriving: a layer can be used as soon as it is there. Only the model's thread uses it; any
    thread may ask for `arrived` and `failed`.
    """

    def __init__(
        self,
        cache: CompressedCache | ArrivingCache | PartialCache,
        devices: Sequence[torch.device],
        rotate: Rotate | None,
        coder: CacheDecoder | None = None,
        *,
        heads: tuple[int, int] | None = None,
        number: int | None = None,
    ) -> None:
        """devices: of each layer. rotate: applies the model's RoPE; records whose keys carry no rotation need it, and
        raise `StateConflict` without. coder: of codec klt, or of residuals; a coded cache is decoded on threads of its
        own, each layer as soon as it arrives. heads: the first KV head that attention reads here and the one behind the
        last, where other processes read the others. number: orders documents in a step; the same in all processes
        that step together."""
        self.number = next_number() if number is None else number
        self.identity = cache.identity
        self.num_tokens = cache.num_tokens
        self.next_position = cache.next_position
        self.sentence_ends = cache.sentence_ends
        self._attached_bytes = cache.attached_bytes
        self._devices = devices
        self._rotate = rotate
        self._heads = heads
        self._coded = cache.coded
        # What other processes read of a document is sent from the host's memory, so that no card holds it whole.
        self._records = _records_of(cache, coder, devices[0] if heads is None and len(set(devices)) == 1 else None)
        self._sending = Sending(self._records, devices, heads) if _is_sent(cache, devices) else None
        self._receiving = Lock()
        self._prefixes: dict[int, tuple[Prefix, ...]] = {}
        self._states: dict[int, tuple[State, ...]] = {}
        self._units: dict[UnitSelector, dict[int, list[tuple[PackedPrefix, Units]]]] = {}
        self._arrived = False

    @property
    def parts(self) -> tuple[Attachment, ...]:
        """This document alone."""
        return (self,)

    @property
    def num_layers(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with those of selectors' units."""
        layers = [layer for layers in list(self._units.values()) for layer in list(layers.values())]
        return self._attached_bytes + sum(units.nbytes for layer in layers for _, units in layer)

    @property
    def arrived(self) -> bool:
        """Whether every layer has arrived, or for a card has been sent, or has failed."""
        self._arrived = self._arrived or all(layer.done() for layer in self._awaited)  # kept: read before every step
        return self._arrived

    @property
    def failed(self) -> bool:
        """Whether a layer could not be read."""
        return any(layer.done() and layer.exception() is not None for layer in self._awaited)

    @property
    def _awaited(self) -> Sequence[Future[Any]]:
        """For each layer the future that is done once attention can read it."""
        return self._records if self._sending is None else self._sending.sent

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        """The prefixes of the document at this layer, which every token of a question sees.

        Until the layer arrives, `wait` is called repeatedly with the layer's future, and may do other work. Raises the
        error of a layer that could not be read.
        """
        if layer not in self._prefixes:
            self._receive(layer, wait)
        return self._prefixes[layer]

    def outlines(self, layer: int) -> tuple[Prefix, ...]:
        """As `prefixes`; of a cache that is read in part, with rows that may not be in memory: see `bring`."""
        return self.prefixes(layer)

    def bring(self, layer: int, rows: Sequence[Tensor], wait: Wait = block) -> None:
        """Read these rows of every head into memory. rows: of each of the `outlines`. `wait` and errors as for
        `prefixes`."""

    def close(self) -> None:
        """Close the file of a cache that is read in part. Later reads raise `StoreUnavailable`."""

    def entries(self, layer: int) -> tuple[PackedRecord, ...]:
        """The records of this layer's entries that attention reads here, one for each of the `prefixes`. Waits until
        the layer has arrived; errors as for these."""
        entries = entries_of(of_heads(self._record(layer, block), self._heads))
        return () if entries is None else parts_of(entries)

    def units(self, selector: UnitSelector, layer: int) -> list[tuple[PackedPrefix, Units]]:
        """The prefixes of this layer, which are packed, each with the units that a selector chooses from. Made once for
        all questions with an equal selector. Thread-safe, once the layer has arrived."""
        while selector not in self._units and len(self._units) >= _MOST_SELECTORS:
            self._units.pop(next(iter(self._units)), None)
        layers = self._units.setdefault(selector, {})
        if layer not in layers:
            prefixes = self.outlines(layer) if Needs.INDEX in selector.needs else self.prefixes(layer)
            packed = tuple(prefix for prefix in prefixes if isinstance(prefix, PackedPrefix))
            stored = StoredLayer(layer, packed, self.entries(layer), self.num_tokens, self.sentence_ends)
            layers[layer] = list(zip(packed, selector.units(stored), strict=True))
        return layers[layer]

    @cached_property
    def read_tokens(self) -> int:
        """Entries of a KV head that a token reads; see `entries_read`. All layers must have arrived."""
        return entries_read(map(self.outlines, range(self.num_layers)))

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that a token reads which attends to all: those of the layers without the positions and columns of
        entries, which no attention reads. All layers must have arrived."""
        records = [self._record(layer, block) for layer in range(self.num_layers)]
        unread = sum(part.unread_bytes for entries in self.layers() for part in parts_of(entries))
        return sum(record.nbytes for record in records) - unread

    def stored(self, codec: str) -> CompressedCache | None:
        """The cache, without its summary, under its codec, once all layers have arrived; None for one whose rows are
        decoded here. Raises the error of a layer that could not be read."""
        return None if self._coded else replace(self.decoded(), codec=codec)

    def decoded(self) -> CompressedCache:
        """The cache with its rows as they are read here, as if of codec none. Otherwise as `stored`."""
        layers = tuple(self._record(layer, block) for layer in range(self.num_layers))
        return CompressedCache(layers, self.num_tokens, self.next_position, self.identity, "none", self.sentence_ends)

    def states(self, layer: int, wait: Wait = block) -> tuple[State, ...]:
        """The states of this layer behind the document's last token, not to be changed. `wait` and errors as for
        `prefixes`."""
        if layer not in self._states:
            self._receive(layer, wait)
        return self._states[layer]

    def layers(self, wait: Wait = block) -> list[Entries]:
        """The entries, of all heads, of the layers that have some, once they have arrived. `wait` and errors as for
        `prefixes`."""
        records = (self._record(layer, wait) for layer in range(self.num_layers))
        return [entries for record in records if (entries := entries_of(record)) is not None]

    def _receive(self, layer: int, wait: Wait) -> None:
        if self._sending is None:
            self._take(layer, of_heads(self._record(layer, wait), self._heads).to(self._devices[layer]))
            return
        _wait_for(self._sending.sent[layer], wait)
        with self._receiving:
            if layer not in self._prefixes:
                self._take(layer, self._sending.received(layer))
                self._sending.release(layer)

    def _take(self, layer: int, record: LayerRecord) -> None:
        entries = entries_of(record)
        self._states[layer] = states_of(record)
        self._prefixes[layer] = () if entries is None else entries.prefixes(self._rotate)

    def _record(self, layer: int, wait: Wait) -> LayerRecord:
        _wait_for(self._records[layer], wait)
        return self._records[layer].result()


class PartialAttachment(Attachment):
    """A document whose rows are read from the shelf once a question needs them, on a CPU. A selector that needs an
    index reads some rows; `prefixes` reads all of a layer.

    It has arrived when all rows are in memory: until then its questions take steps of their own, so that the others go
    on while rows are read. Close it, or the store's file stays open.
    """

    def __init__(self, cache: PartialCache, device: torch.device, rotate: Rotate | None) -> None:
        super().__init__(cache, [device] * cache.num_layers, rotate)
        self._cache = cache
        self._reader = ThreadPoolExecutor(1, "kvshelf-parts")
        self._failed = False

    @property
    def num_layers(self) -> int:
        return self._cache.num_layers

    @property
    def arrived(self) -> bool:
        self._arrived = self._arrived or self._cache.whole
        return self._arrived

    @property
    def failed(self) -> bool:
        return self._failed

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        self._fetch(layer, range(self._opened(layer).num_runs), wait)
        return self.outlines(layer)

    def outlines(self, layer: int) -> tuple[Prefix, ...]:
        return super().prefixes(layer)

    def bring(self, layer: int, rows: Sequence[Tensor], wait: Wait = block) -> None:
        opened = self._opened(layer)
        runs = [
            of_part[number]
            for part_rows, of_part, run_rows in zip(rows, opened.runs, opened.run_rows, strict=True)
            if of_part
            for number in set((part_rows // run_rows).tolist())
        ]
        self._fetch(layer, runs, wait)

    def close(self) -> None:
        self._reader.submit(self._cache.close)  # it waits for a read

    def _record(self, layer: int, wait: Wait) -> LayerRecord:  # noqa: ARG002
        return self._opened(layer).record

    def _opened(self, layer: int) -> PartialLayer:
        try:
            return self._cache.layer(layer)
        except KvshelfError:
            self._failed = True
            raise

    def _fetch(self, layer: int, runs: Iterable[int], wait: Wait) -> None:
        opened = self._opened(layer)
        missing = set(runs) - opened.fetched
        if not missing:
            return
        fetching = self._reader.submit(opened.fetch, missing)
        _wait_for(fetching, wait)
        self._failed = self._failed or fetching.exception() is not None
        fetching.result()


def _wait_for(future: Future[Any], wait: Wait) -> None:
    while not future.done():
        wait(future)


class JointAttachment:
    """Several documents that one question sees, with the attributes of an `Attachment`: prefixes and entries are those
    of all documents in order.

    Each document stays at its own positions, none sees another, and the question stands behind the longest. Their
    layers attend to every entry; `Engine.joined` refuses others.
    """

    def __init__(self, parts: Sequence[Attachment]) -> None:
        longest = max(parts, key=lambda part: part.next_position)
        self.parts = tuple(parts)
        self.number = next_number()
        self.num_layers = longest.num_layers
        self.identity = longest.identity
        self.num_tokens = sum(part.num_tokens for part in parts)
        self.next_position = longest.next_position

    @property
    def arrived(self) -> bool:
        return all(part.arrived for part in self.parts)

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        return tuple(prefix for part in self.parts for prefix in part.prefixes(layer, wait))

    def outlines(self, layer: int) -> tuple[Prefix, ...]:
        return tuple(prefix for part in self.parts for prefix in part.outlines(layer))

    def entries(self, layer: int) -> tuple[PackedRecord, ...]:
        return tuple(record for part in self.parts for record in part.entries(layer))

    @property
    def read_tokens(self) -> int:
        return sum(part.read_tokens for part in self.parts)

    @property
    def read_bytes(self) -> int:
        return sum(part.read_bytes for part in self.parts)

    def states(self, layer: int, wait: Wait = block) -> tuple[State, ...]:  # noqa: ARG002
        """None: states of several documents cannot be joined."""
        return ()


def entries_read(layers: Iterable[Sequence[Prefix]]) -> int:
    """Entries of a KV head that a token reads: the mean over heads, and over the layers that have some."""
    lengths = [sum(map(_mean_length, prefixes)) for prefixes in layers if prefixes]
    return round(sum(lengths) / max(1, len(lengths)))


def _mean_length(prefix: Prefix) -> float:
    if isinstance(prefix, SelectedPrefix):
        return float(prefix.chosen.counts.float().mean())
    return sum(prefix.lengths) / len(prefix.lengths)


Attached = Attachment | JointAttachment
"""The documents that the tokens of a question see."""


def _is_sent(cache: CompressedCache | ArrivingCache | PartialCache, devices: Sequence[torch.device]) -> bool:
    """Whether layers are to be copied to a card."""
    if all(device.type != "cuda" for device in devices):
        return False
    layers = cache.layers if isinstance(cache, CompressedCache) else ()
    return not layers or any(devices_of(layer) - {device} for layer, device in zip(layers, devices, strict=True))


def _records_of(
    cache: CompressedCache | ArrivingCache | PartialCache, coder: CacheDecoder | None, device: torch.device | None
) -> Records:
    """The layers once they have arrived, with plain rows. device: of all layers, whose rows may be decoded there."""
    if isinstance(cache, PartialCache):
        return ()  # `PartialAttachment` has its own
    if isinstance(cache, CompressedCache):
        # Streams are decoded from the CPU, where they wait for no other work of a card.
        records = _arrived((cache.to("cpu") if cache.coded else cache).layers)
    else:
        records = cache.layers
    if not cache.coded:
        return records

    def alone(index: int, record: LayerRecord) -> LayerRecord:
        return plain_layer(record, coder, index, cache.repositioned)

    if isinstance(coder, Coder) and device is not None and ans.side_by_side(device):

        def together(layers: dict[int, LayerRecord]) -> dict[int, LayerRecord]:
            with beside(device) as lend:
                decoded = plain_layers(layers, coder, cache.repositioned, device)
                lend(tensors_of(decoded.values()))
            return decoded

        return _decoded_together(records, together, alone)
    # A product of matrices has all threads of the processor for itself.
    return _decoded(records, alone, 1 if cache.projected else torch.get_num_threads())


def _decoded(records: Records, decode: Callable[[int, LayerRecord], LayerRecord], at_once: int) -> Records:
    """The layers once they are decoded, `at_once` at a time."""
    threads = ThreadPoolExecutor(at_once, "kvshelf-decode")
    decoded: Records = tuple(Future() for _ in records)

    def begin(index: int, record: Future[LayerRecord]) -> None:
        threads.submit(_settle, decoded[index], lambda: decode(index, record.result()))

    for index, record in enumerate(records):
        record.add_done_callback(partial(begin, index))
    return decoded


def _decoded_together(
    records: Records,
    together: Callable[[dict[int, LayerRecord]], dict[int, LayerRecord]],
    alone: Callable[[int, LayerRecord], LayerRecord],
) -> Records:
    """The layers once they are decoded, on a device that takes as long for many as for one: the layers that arrive
    meanwhile are the next ones. Where a stream is unsound, or the device is short of memory, the CPU decodes them one
    by one, and only the layer that cannot be decoded fails."""
    thread = ThreadPoolExecutor(1, "kvshelf-decode")
    decoded: Records = tuple(Future() for _ in records)
    waiting: deque[tuple[int, LayerRecord]] = deque()

    def begin(index: int, record: Future[LayerRecord]) -> None:
        if error := record.exception():
            decoded[index].set_exception(error)
        else:
            waiting.append((index, record.result()))
            thread.submit(decode)

    def decode() -> None:
        layers: dict[int, LayerRecord] = {}
        nbytes = 0
        while waiting and (not layers or nbytes + codes_bytes(waiting[0][1]) <= BYTES_TOGETHER):
            index, layer = waiting.popleft()
            layers[index], nbytes = layer, nbytes + codes_bytes(layer)
        if not layers:  # decoded with those before
            return
        plain: dict[int, LayerRecord] = {}
        try:
            with _ON_A_CARD:
                plain = together(layers)
        except (BlobError, torch.OutOfMemoryError) as error:
            _LOG.warning("layers %s of a cache are decoded on the CPU: %s: %s", [*layers], type(error).__name__, error)
        except Exception as error:  # any other: threads wait for the layers
            for index in layers:
                decoded[index].set_exception(error)
            return
        for index, layer in layers.items():
            _settle(decoded[index], lambda: plain[index] if plain else alone(index, layer))  # noqa: B023 - called at once

    def watch() -> None:  # on the thread that decodes: all layers that have arrived are waiting before it begins
        for index, record in enumerate(records):
            record.add_done_callback(partial(begin, index))

    thread.submit(watch)
    return decoded


def _settle(future: Future[LayerRecord], make: Callable[[], LayerRecord]) -> None:
    try:
        future.set_result(make())
    except Exception as error:  # any error: threads wait for the layer
        future.set_exception(error)


def _arrived(layers: Sequence[LayerRecord]) -> Records:
    futures: Records = tuple(Future() for _ in layers)
    for future, layer in zip(futures, layers, strict=True):
        future.set_result(layer)
    return futures
