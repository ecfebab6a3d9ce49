"""The connector's part in a worker: reads caches into vLLM's pages while the forward pass runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog
import torch

from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.errors import InternalError, KvshelfError, PolicyUnsupported, StateConflict
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.pages import write_rows
from kvshelf.integrations.vllm.ragged.pages import HeadPages, HeadTables
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.step import ConnectorStep, Load
from kvshelf.integrations.vllm.tails import Rows, Tails

log = structlog.get_logger("kvshelf.vllm")

_REMEMBERED: Final = 10_000
"""Ragged caches whose head pages a worker knows, besides those that are being asked: some kilobytes each."""


class ShelfWorker:
    """Writes the entries of its own KV heads. rank: of this worker among the `workers` that share the heads. page:
    entries of a page of vLLM. rows: what gives heads page tables of their own, where vLLM's attention can."""

    rows: HeadTables | None = None

    def __init__(self, settings: ShelfSettings, model: ReadingModel, *, rank: int, workers: int, page: int) -> None:
        self._store = settings.open()
        self._model = model
        self._rank, self._workers, self._page = rank, workers, page
        self._layers: Mapping[str, Any] = {}
        self._reading: list[_Reading] = []
        self._tails = Tails()
        self._failed: set[int] = set()
        self._ragged: dict[str, HeadPages] = {}

    def start(self, step: ConnectorStep, layers: Mapping[str, Any]) -> None:
        """Begin to read what a forward pass needs. layers: of vLLM, by name. A cache that several requests want is read
        once."""
        self._layers = {name: layer for name, layer in layers.items() if getattr(layer, "kv_cache", None) is not None}
        wanted: dict[str, list[Load]] = {}
        for load in step.loads:
            wanted.setdefault(load.cache_id, []).append(load)
        for cache_id, its_loads in wanted.items():
            try:
                reading = _Reading(its_loads, self._source(cache_id, its_loads), set(self._layers))
            except KvshelfError as error:
                self._fail(its_loads, error)
                continue
            self._reading.append(reading)
            if its_loads[0].ragged:
                self._try(reading, self._find_head_pages)
        if self.rows is not None:
            self.rows.requests = {page: self._ragged[of] for page, of in step.ragged.items() if of in self._ragged}
        for cache_id in [of for of in self._ragged if of not in step.unfinished][:-_REMEMBERED]:
            del self._ragged[cache_id]

    def _source(self, cache_id: str, loads: Sequence[Load]) -> ArrivingCache | Mapping[str, Rows]:
        """The cache, which a thread begins to read, or the rows of its tail where more is not wanted."""
        tail = self._tails.find(cache_id) if not loads[0].ragged or cache_id in self._ragged else None
        if tail is not None and all(load.first >= self._full_pages(load) for load in loads):
            return tail
        cache = self._store.open_cache(cache_id, tenant=loads[0].tenant)
        try:
            self._model.require_own(cache, self._store.transforms)
        except KvshelfError:
            cache.close()
            raise
        threading.Thread(target=cache.read, name="kvshelf-vllm-read", daemon=True).start()
        return cache

    def _find_head_pages(self, reading: _Reading) -> None:
        """Where the entries of a ragged cache lie. Waits for all of its layers."""
        load = reading.loads[0]
        if self.rows is None or self._workers > 1:
            raise PolicyUnsupported(
                "its heads keep different numbers of entries, for which this vLLM has no page tables: that takes one "
                "worker on a CPU, a tested version with the plug-in kvshelf, and equal heads in every layer",
                param="cache_id",
            )
        if isinstance(reading.source, ArrivingCache):
            lengths = self._model.lengths(reading.source, self._heads(self.rows.storage.heads))
            head_pages = HeadPages.of(lengths, load.entries, self._page)
            if not head_pages.fits:
                raise PolicyUnsupported("its heads keep more entries than its manifest says", param="cache_id")
            if not self._ragged.setdefault(load.cache_id, head_pages).lengths.equal(head_pages.lengths):
                raise StateConflict(
                    f"{load.cache_id} was made again with other entries since it was asked; restart vLLM"
                )
        reading.head_pages = self._ragged[load.cache_id]

    def _heads(self, count: int) -> slice:
        first = self._rank * self._model.layers[0].kv_heads // self._workers  # several workers share one head of few
        return slice(first, first + count)

    def _full_pages(self, load: Load) -> int:
        return load.entries - load.entries % self._page

    def wait(self, name: str) -> None:
        """Returns when the layer `name` is in its pages, or its loads have failed."""
        for reading in self._reading:
            if name in reading.missing:
                ragged = reading.head_pages is not None
                self._try(reading, partial(self._write_ragged if ragged else self._write, name=name))
                reading.missing.discard(name)

    def _try(self, reading: _Reading, step: Callable[[_Reading], None]) -> None:
        try:
            step(reading)
        except KvshelfError as error:
            self._fail(reading.loads, error)
            reading.missing.clear()
            reading.tail.clear()

    def _write(self, reading: _Reading, name: str) -> None:
        layer = self._layers[name]
        rows = self._rows(reading, name, layer.num_kv_heads)
        for load in reading.loads:
            missing = load.entries - load.first
            keys, values = (part[len(part) - missing :] for part in rows)
            write_rows(layer, (keys, values), load.first, load.pages, self._page)

    def _rows(self, reading: _Reading, name: str, heads: int) -> Rows:
        """The last entries of a layer, of this worker's heads: all of them, or those of the tail."""
        if not isinstance(reading.source, ArrivingCache):
            return reading.source[name]
        entries, full = reading.loads[0].entries, self._full_pages(reading.loads[0])
        keys, values = self._model.layer(reading.source, _index(name), entries, self._heads(heads))
        reading.tail[name] = keys[full:].clone(), values[full:].clone()
        return keys, values

    def _write_ragged(self, reading: _Reading, name: str) -> None:
        assert self.rows is not None
        assert reading.head_pages is not None
        layer, at = self._layers[name], self.rows.index[name]
        page_of = reading.head_pages.page_of(at)
        rest = page_of >= reading.head_pages.full
        if isinstance(reading.source, ArrivingCache):
            question, heads = reading.loads[0].entries, self._heads(layer.num_kv_heads)
            rows, there = self._model.ragged_layer(reading.source, _index(name), question, heads), torch.ones_like(rest)
            reading.tail[name] = rows[0][rest], rows[1][rest]
        else:
            rows, there = reading.source[name], rest
        for load in reading.loads:
            wanted = page_of >= load.first // self._page
            slots = self.rows.slots(reading.head_pages, at, load.pages)[there & wanted]
            keys, values = (part[wanted[there]] for part in rows)
            layer.impl.do_kv_cache_update(layer, keys, values, self.rows.storage.rows, slots)

    def finish(self) -> None:
        """The forward pass is over: what it did not wait for has failed."""
        for reading in self._reading:
            if reading.missing:
                self._fail(reading.loads, InternalError(f"vLLM did not wait for the layers {sorted(reading.missing)}"))
            elif reading.tail:
                self._tails.keep(reading.loads[0].cache_id, reading.tail)
            if isinstance(reading.source, ArrivingCache):
                reading.source.close()
        self._reading = []

    def _fail(self, loads: Sequence[Load], error: KvshelfError) -> None:
        for load in loads:
            log.error("refused", request_id=load.request_id, code=error.code, error=str(error))
            self._failed |= set(load.pages[load.first // self._page :])

    def take_failed(self) -> set[int]:
        """Pages of failed loads, once."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._store.close()


class _Reading:
    """One cache in one step. missing: names of vLLM's layers that are not in their pages. head_pages: of a ragged
    cache. tail: rows to be kept."""

    def __init__(self, loads: Sequence[Load], source: ArrivingCache | Mapping[str, Rows], missing: set[str]) -> None:
        self.loads = loads
        self.head_pages: HeadPages | None = None
        self.source = source
        self.missing = missing
        self.tail: dict[str, Rows] = {}


def _index(name: str) -> int:
    """The number of a layer in the whole model, from a name like `model.layers.3.self_attn.attn`."""
    (number,) = re.findall(r"\.(\d+)\.", name)
    return int(number)
