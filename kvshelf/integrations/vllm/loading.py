"""The connector's part in a worker: reads caches into vLLM's pages while the forward pass runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.errors import InternalError, KvshelfError
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.pages import write_rows
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.step import Load
from kvshelf.integrations.vllm.tails import Rows, Tails

log = structlog.get_logger("kvshelf.vllm")


class ShelfWorker:
    """Writes the entries of its own KV heads. rank: of this worker among the `workers` that share the heads. page:
    entries of a page of vLLM."""

    def __init__(self, settings: ShelfSettings, model: ReadingModel, *, rank: int, workers: int, page: int) -> None:
        self._store = settings.open()
        self._model = model
        self._rank, self._workers, self._page = rank, workers, page
        self._layers: Mapping[str, Any] = {}
        self._reading: list[_Reading] = []
        self._tails = Tails()
        self._failed: set[int] = set()

    def start(self, loads: Sequence[Load], layers: Mapping[str, Any]) -> None:
        """Begin to read what a forward pass needs. layers: of vLLM, by name. A cache that several requests want is read
        once."""
        self._layers = {name: layer for name, layer in layers.items() if getattr(layer, "kv_cache", None) is not None}
        wanted: dict[str, list[Load]] = {}
        for load in loads:
            wanted.setdefault(load.cache_id, []).append(load)
        for cache_id, its_loads in wanted.items():
            try:
                self._reading.append(_Reading(its_loads, self._source(cache_id, its_loads), set(self._layers)))
            except KvshelfError as error:
                self._fail(its_loads, error)

    def _source(self, cache_id: str, loads: Sequence[Load]) -> ArrivingCache | Mapping[str, Rows]:
        """The cache, which a thread begins to read, or the rows of its tail where more is not wanted."""
        tail = self._tails.find(cache_id)
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

    def _full_pages(self, load: Load) -> int:
        return load.entries - load.entries % self._page

    def wait(self, name: str) -> None:
        """Returns when the layer `name` is in its pages, or its loads have failed."""
        for reading in self._reading:
            if name in reading.missing:
                try:
                    self._write(reading, name)
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
        reading.missing.discard(name)

    def _rows(self, reading: _Reading, name: str, heads: int) -> Rows:
        """The last entries of a layer, of this worker's heads: all of them, or those of the tail."""
        if not isinstance(reading.source, ArrivingCache):
            return reading.source[name]
        first = self._rank * self._model.layers[0].kv_heads // self._workers  # several workers share one head of few
        entries, full = reading.loads[0].entries, self._full_pages(reading.loads[0])
        keys, values = self._model.layer(reading.source, _index(name), entries, slice(first, first + heads))
        reading.tail[name] = keys[full:].clone(), values[full:].clone()
        return keys, values

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
    """One cache in one step. missing: names of vLLM's layers that are not in their pages. tail: rows to be kept."""

    def __init__(self, loads: Sequence[Load], source: ArrivingCache | Mapping[str, Rows], missing: set[str]) -> None:
        self.loads = loads
        self.source = source
        self.missing = missing
        self.tail: dict[str, Rows] = {}


def _index(name: str) -> int:
    """The number of a layer in the whole model, from a name like `model.layers.3.self_attn.attn`."""
    (number,) = re.findall(r"\.(\d+)\.", name)
    return int(number)
