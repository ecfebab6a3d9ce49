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
from kvshelf.integrations.vllm.pages import Rows, write_rows
from kvshelf.integrations.vllm.ragged.pages import HeadPages, HeadTables
from kvshelf.integrations.vllm.settings import NO_TABLES, ShelfSettings
from kvshelf.integrations.vllm.step import ConnectorStep, Load

log = structlog.get_logger("kvshelf.vllm")

_REMEMBERED: Final = 1_000
"""Ragged caches of which a worker knows the heads' lengths, 8 bytes each, beside those that are being asked."""

_TAILS_BYTES: Final = 256 << 20


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
        """Begin to read what a forward pass needs, each cache once. layers: of vLLM, by name."""
        self._layers = {name: layer for name, layer in layers.items() if getattr(layer, "kv_cache", None) is not None}
        by_cache: dict[tuple[str, str], list[Load]] = {}
        for load in step.loads:
            by_cache.setdefault((load.cache_id, load.root), []).append(load)
        for (_, root), its_loads in by_cache.items():
            try:
                source = self._source(its_loads)
            except KvshelfError as error:
                self._fail(its_loads, error)
                continue
            self._reading.append(_Reading(its_loads, source, set(self._layers), self._ragged.get(root)))
        self._give_rows(step)

    def _give_rows(self, step: ConnectorStep) -> None:
        """Which requests of the pass have head pages. One without, which would be computed as if it had none, fails."""
        loaded = {load.pages[0] for load in step.loads}
        for page, root in step.ragged.items():
            if root not in self._ragged and page not in loaded:
                log.error("refused", code=InternalError.code, error=f"no head pages of the blob {root} are known")
                self._failed.add(page)
        if self.rows is not None:
            self.rows.requests = {page: self._ragged[of] for page, of in step.ragged.items() if of in self._ragged}
        if len(self._ragged) > _REMEMBERED:
            for root in [root for root in self._ragged if root not in step.unfinished][:-_REMEMBERED]:
                del self._ragged[root]

    def _source(self, loads: Sequence[Load]) -> ArrivingCache | Mapping[str, Rows]:
        """The cache, which a thread begins to read, or the rows of its tail where more is not wanted."""
        load = loads[0]
        tail = self._tails.find(load.kept_as) if not load.root or load.root in self._ragged else None
        if tail is not None and all(load.first >= self._full_pages(load) for load in loads):
            return tail
        cache = self._store.open_cache(load.cache_id, tenant=load.tenant)
        try:
            self._model.require_own(cache, self._store.transforms)
            if load.root:
                self._ragged[load.root] = self._head_pages(cache, load)
        except KvshelfError:
            cache.close()
            raise
        threading.Thread(target=cache.read, name="kvshelf-vllm-read", daemon=True).start()
        return cache

    def _head_pages(self, cache: ArrivingCache, load: Load) -> HeadPages:
        """Where the entries of a ragged cache lie, by the blob's header alone."""
        if self.rows is None:
            raise PolicyUnsupported(NO_TABLES, param="cache_id")
        if cache.root.hex() != load.root:
            raise StateConflict(f"{load.cache_id} was made again after vLLM got the request; ask once more")
        heads, of_layers = self._heads(self.rows.storage.heads), cache.lengths
        lengths = [of_layers[_index(name)][heads] for name in self.rows.index]
        head_pages = HeadPages.of(lengths, load.entries, self._page)
        if not head_pages.fits:
            raise PolicyUnsupported("its heads keep more entries than its manifest says", param="cache_id")
        return head_pages

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
        stored = reading.head_pages.stored(at)
        page_of = stored[0].pages[stored[1]]
        rest = page_of >= reading.head_pages.full
        if isinstance(reading.source, ArrivingCache):
            question, heads = reading.loads[0].entries, self._heads(layer.num_kv_heads)
            rows, known = self._model.ragged_layer(reading.source, _index(name), question, heads), torch.ones_like(rest)
            reading.tail[name] = rows[0][rest], rows[1][rest]
        else:
            rows, known = reading.source[name], rest
        for load in reading.loads:
            missing = page_of >= load.first // self._page
            slots = self.rows.slots(stored, load.pages)[known & missing]
            keys, values = (part[missing[known]] for part in rows)
            layer.impl.do_kv_cache_update(layer, keys, values, self.rows.storage.rows, slots)

    def finish(self) -> None:
        """The forward pass is over: what it did not wait for has failed."""
        for reading in self._reading:
            if reading.missing:
                self._fail(reading.loads, InternalError(f"vLLM did not wait for the layers {sorted(reading.missing)}"))
            elif reading.tail:
                self._tails.keep(reading.loads[0].kept_as, reading.tail)
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
    """One cache in one step. missing: vLLM's layers that are not in their pages yet. tail: rows to be kept."""

    def __init__(
        self,
        loads: Sequence[Load],
        source: ArrivingCache | Mapping[str, Rows],
        missing: set[str],
        head_pages: HeadPages | None,
    ) -> None:
        self.loads = loads
        self.head_pages = head_pages
        self.source = source
        self.missing = missing
        self.tail: dict[str, Rows] = {}


class Tails:
    """The entries on the last, unfinished page of caches that were read. vLLM shares full pages between requests, not
    the last one, so without these every further question would read its whole cache for a few entries. At most 256 MiB;
    the least recently asked go first."""

    def __init__(self) -> None:
        self._kept: dict[str, Mapping[str, Rows]] = {}
        self._nbytes = 0

    def find(self, cache_id: str) -> Mapping[str, Rows] | None:
        """The rows behind the last full page, of each layer by name."""
        rows = self._kept.pop(cache_id, None)
        if rows is not None:
            self._kept[cache_id] = rows
        return rows

    def keep(self, cache_id: str, rows: Mapping[str, Rows]) -> None:
        if cache_id not in self._kept:
            self._kept[cache_id] = rows
            self._nbytes += _nbytes(rows)
        while self._nbytes > _TAILS_BYTES:
            self._nbytes -= _nbytes(self._kept.pop(next(iter(self._kept))))


def _nbytes(rows: Mapping[str, Rows]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in rows.values())


def _index(name: str) -> int:
    """The number of a layer in the whole model, from a name like `model.layers.3.self_attn.attn`."""
    (number,) = re.findall(r"\.(\d+)\.", name)
    return int(number)
