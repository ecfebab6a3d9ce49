"""A stored cache while it is being read: layers can be used as soon as their own digests are checked."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from io import RawIOBase
from itertools import chain
from typing import Final, Self

from kvshelf.artifact import blob
from kvshelf.artifact.blob.body import Body
from kvshelf.artifact.blob.frame import BlobSummary
from kvshelf.artifact.blob.segment import read_layer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.memory import fill, used_memory
from kvshelf.artifact.records import LayerRecord
from kvshelf.errors import StoreUnavailable

_READ_AHEAD_BYTES: Final = 16 << 20
"""Smallest body that is read ahead by a second thread: for 8 MB a thread costs processor time and saves none."""

_PORTION_BYTES: Final = 8 << 20
"""Most bytes of layers handed out at once. Streaming bytes and building records evict each other from the processor's
caches: layer by layer, 64 MB in 32 layers take a fifth longer."""

_BATCH_BYTES: Final = 4 << 20
"""Most bytes of layers read at once; they are hashed one by one. In smaller batches, reading and hashing evict each
other's code from the processor's caches more often; with larger ones, hashing waits for memory."""

Guard = Callable[[], AbstractContextManager[None]]
"""Makes a `with` block that turns errors of a store's bytes and medium into the errors that the store promises."""


class OpenedCache(abc.ABC):
    """What the verified header of a stored cache says. Close it, or use it in a `with` block."""

    place: str = "home"
    """Where the bytes come from: home, or the name of a tier."""

    def __init__(self, summary: BlobSummary) -> None:
        self._header = header = summary.header
        self.identity = header.to_identity()
        self.num_tokens = header.num_tokens
        self.next_position = header.next_position
        self.codec = header.codec
        self.sentence_ends = header.sentences
        self.shape = header.shape
        self.num_layers = len(header.layers)
        self.nbytes = header.body_bytes
        """Bytes of all layers together."""
        self.coded = header.coded
        self.projected = header.projected
        self.made_at_steps = header.made_at_steps
        self.residual_widths = header.residual_widths
        self.attached_bytes = header.attached_bytes
        """As `CompressedCache.attached_bytes`."""
        self.root = summary.root
        """The blob's root digest: equal roots mean equal content. `Manifest.blob_digest` is its hex form."""

    @property
    def lengths(self) -> list[list[int]]:
        """Entries of each head of each layer."""
        layers = ([record.lengths for record in layer.records] for layer in self._header.layers)
        return [[sum(of_head) for of_head in zip(*lengths, strict=True)] for lengths in layers]

    @abc.abstractmethod
    def close(self) -> None:
        """End the reading. May be called more than once; what is not read by then raises `StoreUnavailable`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ArrivingCache(OpenedCache):
    """A stored cache with a verified header, whose layers arrive in order, a few at a time.

    One thread calls `read`; other threads wait for single `layers`, or for all layers in `cache`. A layer resolves when
    the digests of its portion are checked. `close` ends the reading early. Made by `Store.open_cache`.
    """

    on_read: Callable[[CompressedCache], None] | None = None
    """Called with the cache once `read` has handed out its last layer, on the same thread. It must not raise."""

    elsewhere: Callable[[], ArrivingCache] | None = None
    """Opens another copy of the cache, when reading this one fails; the layers then raise that copy's errors."""

    def __init__(
        self, summary: BlobSummary, body: RawIOBase | memoryview, guard: Guard, *, read_ahead: bool = True
    ) -> None:
        """body: a file at the first byte of the body, which is read once, in order, and closed; or the body in memory,
        which must not change, because layers become views of it. read_ahead: as `Blobs.read_ahead`."""
        super().__init__(summary)
        self._body = None if isinstance(body, memoryview) else body
        self._memory = body if isinstance(body, memoryview) else None
        self._guard = guard
        self._resolved = 0  # layers that `read` has handed out
        self._turn = threading.Lock()  # held while the file is read, so that it is not closed meanwhile
        self.summary = tuple(self._header.summary)
        """As of a `CompressedCache`."""
        self.repositioned = self.next_position != self.num_tokens
        self._read_ahead = read_ahead and self.nbytes >= _READ_AHEAD_BYTES
        self.layers: tuple[Future[LayerRecord], ...] = tuple(Future() for _ in range(self.num_layers))
        """The layers in order. When reading fails, the layer at fault and all later ones get the error."""
        for layer in self.layers:
            layer.set_running_or_notify_cancel()  # one waiter must not cancel what others wait for

    def read(self, *, together: bool = False) -> None:
        """Read, verify and resolve the layers in order, on the caller's thread. Call it once.

        together: resolve all at the end, which is cheaper if no thread waits for the first layers.

        Errors (`CacheCorrupt`, `StoreUnavailable`) go to the futures; nothing is raised here. A corrupt cache is
        quarantined before the futures resolve. All tensors share one buffer of `nbytes`.
        """
        with self._turn:
            if self.layers[0].done():  # closed, or read before
                self._close_body()
                return
            try:
                with self._guard():
                    self._read_layers(together)
            except Exception as error:  # any error: waiting threads must get it
                self._read_elsewhere(error)
            finally:
                self.close()  # no thread is left waiting, even if this one is interrupted
                self._close_body()
        if self.on_read is not None and not any(layer.exception() for layer in self.layers):
            self.on_read(self.cache())

    def cache(self) -> CompressedCache:
        """The whole cache. Waits for all layers, and raises the error of the first one that failed."""
        return CompressedCache.of(self._header, tuple(layer.result() for layer in self.layers))

    def close(self) -> None:
        """Close the file. Layers not read yet raise `StoreUnavailable`; the others stay usable.

        May be called from any thread and more than once; a `read` in progress ends before its next layers.
        """
        self._refuse(StoreUnavailable("the cache was closed before this layer was read; open it again"))
        if self._turn.acquire(blocking=False):  # otherwise the reader closes the file when it ends
            self._close_body()
            self._turn.release()

    def _close_body(self) -> None:
        if self._body is not None:
            self._body.close()

    def _read_layers(self, together: bool) -> None:
        memory = used_memory(self.nbytes) if self._memory is None else self._memory
        layers = self._header.layers
        sizes = [layer.nbytes for layer in layers]
        portions = [range(len(layers))] if together else list(portions_of(sizes))
        ends = {portion.stop for portion in portions}
        batches = [batch for portion in portions for batch in batches_of(sizes, portion)]
        checked = handed = 0
        try:
            with closing(self._batches(memory, batches)) as filled:
                for index in chain.from_iterable(filled):
                    if self.layers[index].done():  # closed
                        return
                    layer = layers[index]
                    blob.check_segment(index, layer, memory[layer.offset : layer.offset + layer.nbytes])
                    checked = index + 1
                    if checked in ends:
                        self._hand_out(range(handed, checked), memory)
                        handed = checked
        finally:
            self._hand_out(range(handed, checked), memory)

    def _hand_out(self, checked: range, memory: memoryview) -> None:
        header = self._header
        body = Body(memory)
        with suppress(InvalidStateError):  # closed meanwhile; later layers have their error
            for index in checked:
                self.layers[index].set_result(read_layer(index, header, body))
                self._resolved = index + 1

    def _batches(self, memory: memoryview, batches: Sequence[range]) -> Generator[range]:
        """Batches of layers in order, each yielded with its segments read.

        When reading ahead, a thread reads the next batch while the caller hashes this one: both take about as long.
        """
        if self._body is None:
            yield from batches
        elif not self._read_ahead:
            for batch in batches:
                self._fill(memory, batch)
                yield batch
        else:
            with ThreadPoolExecutor(1, "kvshelf-read") as ahead:
                following = ahead.submit(self._fill, memory, batches[0])
                for index, batch in enumerate(batches, 1):
                    following.result()
                    if index < len(batches):
                        following = ahead.submit(self._fill, memory, batches[index])
                    yield batch

    def _fill(self, memory: memoryview, batch: range) -> None:
        first, last = (self._header.layers[index] for index in (batch[0], batch[-1]))
        assert self._body is not None
        fill(self._body, memory[first.offset : last.offset + last.nbytes])

    def _read_elsewhere(self, error: Exception) -> None:
        """Read the missing layers from another copy of the cache; without one, they get `error`."""
        if self.elsewhere is None:
            return self._refuse(error)
        try:
            with self.elsewhere() as other:
                if other.root != self.root:  # the cache was replaced meanwhile
                    return self._refuse(error)
                for layer, copy in zip(self.layers, other.layers, strict=True):
                    copy.add_done_callback(partial(_pass_on, layer))
                other.read()
        except Exception as failure:  # as in `read`
            self._refuse(failure)

    def _refuse(self, error: Exception) -> None:
        for layer in self.layers[self._resolved :]:
            with suppress(InvalidStateError):  # already resolved, or refused: `read` and `close` may both refuse
                layer.set_exception(error)


def portions_of(sizes: Sequence[int]) -> Iterator[range]:
    """Split layers of these sizes into portions: one layer first, because a caller waits for it, then doubling."""
    start, limit = 0, 1
    while start < len(sizes):
        stop, nbytes = start, 0
        while stop < len(sizes) and nbytes < limit:
            nbytes += sizes[stop]
            stop += 1
        yield range(start, stop)
        start, limit = stop, min(2 * nbytes, _PORTION_BYTES)


def batches_of(sizes: Sequence[int], portion: range) -> Iterator[range]:
    """Split a portion into batches of at most `_BATCH_BYTES`, but at least one layer each."""
    start, nbytes = portion.start, 0
    for index in portion:
        if nbytes and nbytes + sizes[index] > _BATCH_BYTES:
            yield range(start, index)
            start, nbytes = index, 0
        nbytes += sizes[index]
    yield range(start, portion.stop)


def _pass_on(layer: Future[LayerRecord], copy: Future[LayerRecord]) -> None:
    if layer.done():
        return
    with suppress(InvalidStateError):  # closed meanwhile
        error = copy.exception()
        if error is None:
            layer.set_result(copy.result())
        else:
            layer.set_exception(error)
