"""The connector's part in a worker: reads caches into vLLM's pages while the forward pass runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch

from kvshelf.errors import InternalError, KvshelfError
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.step import Load
from kvshelf.store.artifact.arriving import ArrivingCache

log = structlog.get_logger("kvshelf.vllm")


class ShelfWorker:
    """Writes the entries of its own KV heads. rank: of this worker among those that share the heads. page: entries of a
    page of vLLM."""

    def __init__(self, settings: ShelfSettings, model: ReadingModel, *, rank: int, workers: int, page: int) -> None:
        self._store = settings.home.open()
        self._tenant = settings.tenant
        self._model = model
        self._rank, self._workers, self._page = rank, workers, page
        self._reading: list[_Reading] = []
        self._failed: set[int] = set()

    def start(self, loads: Sequence[Load], layers: Mapping[str, Any]) -> None:
        """Begin to read what a forward pass needs. layers: of vLLM, by name. A cache that several requests want is read
        once."""
        wanted: dict[str, list[Load]] = {}
        for load in loads:
            wanted.setdefault(load.cache_id, []).append(load)
        names = [name for name, layer in layers.items() if getattr(layer, "kv_cache", None) is not None]
        for cache_id, its_loads in wanted.items():
            try:
                cache = self._store.open_cache(cache_id, tenant=self._tenant)
                self._model.require_own(cache)
            except KvshelfError as error:
                self._fail(its_loads, error)
            else:
                self._reading.append(_Reading(cache, its_loads, layers, names))

    def wait(self, name: str) -> None:
        """Returns when the layer `name` is in its pages, or its loads have failed."""
        for reading in self._reading:
            if name not in reading.missing:
                continue
            try:
                self._write(reading, name)
            except KvshelfError as error:
                self._fail(reading.loads, error)
                reading.missing.clear()

    def _write(self, reading: _Reading, name: str) -> None:
        layer = reading.layers[name]
        first = self._rank * self._model.layers[0].kv_heads // self._workers  # several workers have one head of few
        heads = slice(first, first + layer.num_kv_heads)
        entries = reading.loads[0].entries
        found = self._model.layer(reading.cache, _index(name), entries, heads)
        keys, values = (tensor.to(layer.kv_cache.device) for tensor in found)
        for load in reading.loads:
            places = torch.arange(load.first, entries)
            slots = torch.tensor(load.pages)[places // self._page] * self._page + places % self._page
            rows = slice(load.first, None)
            layer.impl.do_kv_cache_update(
                layer, keys[rows], values[rows], layer.kv_cache, slots.to(layer.kv_cache.device)
            )
        reading.missing.discard(name)

    def _fail(self, loads: Sequence[Load], error: KvshelfError) -> None:
        for load in loads:
            log.error("refused", request_id=load.request_id, code=error.code, error=str(error))
            self._failed |= set(load.pages[load.first // self._page :])

    def finish(self) -> None:
        """The forward pass is over: what it did not wait for has failed."""
        for reading in self._reading:
            if reading.missing:
                self._fail(reading.loads, InternalError(f"vLLM did not wait for the layers {sorted(reading.missing)}"))
            reading.cache.close()
        self._reading = []

    def take_failed(self) -> set[int]:
        """Pages of failed loads, once."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._store.close()


class _Reading:
    """A cache that arrives while layers are computed. missing: names of vLLM's layers that are not in their pages."""

    def __init__(
        self, cache: ArrivingCache, loads: Sequence[Load], layers: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        self.cache = cache
        self.loads = loads
        self.layers = layers
        self.missing = set(names)
        threading.Thread(target=cache.read, name="kvshelf-vllm-read", daemon=True).start()


def _index(name: str) -> int:
    """The number of a layer in the whole model, from a name like `model.layers.3.self_attn.attn`."""
    (number,) = re.findall(r"\.(\d+)\.", name)
    return int(number)
