"""Pages of vLLM for caches whose heads keep different numbers of entries: a KV head has a page table of its own.

A page of vLLM has `page` places in every head of every layer. Taken apart, it is layers x heads head pages, and the
full ones of a cache lie in the head pages of a request's first pages one after another, whichever layer and head a head
page belongs to. What is behind the last full head page of a head, and then the question and the answer, lies in the
head's own head pages of the request's later pages, which no other request reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor


def stand_ins(kept_tokens: int, page: int) -> int:
    """Tokens that a request has in the place of the document: those of the pages that hold full head pages, and all but
    one of the page behind them, so that the longest rest of a head has room there, and the question behind it.
    kept_tokens: the mean of its heads, rounded."""
    return (kept_tokens // page + 2) * page - 1


def full_of(stand_ins: int, page: int) -> int:
    """Pages that hold the full head pages of a cache. stand_ins: of a request to it."""
    return (stand_ins + 1) // page - 1


class Spread(NamedTuple):
    """Where entries lie. pages: which page of the request; layers, heads: whose head page in it."""

    pages: Tensor
    layers: Tensor
    heads: Tensor


@dataclass(frozen=True, eq=False)
class HeadPages:
    """The head pages of a request. lengths: int64 `[layers, heads]`, entries of the cache. stand_ins: of the request,
    and full: its pages with full head pages; 0 for a request without a cache."""

    lengths: Tensor
    stand_ins: int
    full: int
    page: int

    @classmethod
    def plain(cls, layers: int, heads: int, page: int) -> Self:
        """Of a request that is vLLM's own, or asks a cache with equally many entries everywhere: as vLLM has them."""
        return cls(torch.zeros(layers, heads, dtype=torch.int64), 0, 0, page)

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], stand_ins: int, page: int) -> Self:
        return cls(torch.tensor(lengths, dtype=torch.int64), stand_ins, full_of(stand_ins, page), page)

    @property
    def fits(self) -> bool:
        return int((self.lengths // self.page).sum()) <= self.full * self.lengths.numel()

    def spread(self, tokens: int, of: slice = slice(None)) -> Spread:
        """The head pages of every head of some layers `[layers, heads, most]` for a request that has so many tokens,
        stand-ins included; those behind a head's own repeat its last page."""
        layers, heads = self.lengths.shape
        full = self.lengths // self.page
        first = (full.flatten().cumsum(0) - full.flatten()).view(layers, heads)[of]
        own_pages = -(-(self.lengths % self.page + tokens - self.stand_ins) // self.page)[of]
        full, layer = full[of], torch.arange(layers)[of, None, None]
        column = torch.arange(int((full + own_pages).max()))
        number = first[..., None] + column
        shared = column < full[..., None]
        own_number = (self.full + column - full[..., None]).clamp(max=self.full + int(own_pages.max()) - 1)
        return Spread(
            torch.where(shared, number // (layers * heads), own_number),
            torch.where(shared, number // heads % layers, layer),
            torch.where(shared, number % heads, torch.arange(heads)[:, None]),
        )

    def stored(self, layer: int) -> tuple[Spread, Tensor, Tensor]:
        """Where the entries of a layer lie, head by head: head pages, each entry's head page, and its place there."""
        pages, *others = (part[0].flatten() for part in self.spread(self.stand_ins, slice(layer, layer + 1)))
        lengths = self.lengths[layer]
        place = torch.cat([torch.arange(length) for length in lengths.tolist()])
        first = torch.arange(len(lengths)) * (len(pages) // len(lengths))
        return Spread(pages, *others), first.repeat_interleave(lengths) + place // self.page, place % self.page


class Storage:
    """All pages of vLLM as one row of head pages. Of layers with the same shape in one allocation."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """caches: `[pages, heads, page, 2 D]`, a view of each layer."""
        _, self.heads, self.page, width = caches[0].shape
        self._size = self.page * width
        self._origins = torch.tensor([cache.storage_offset() for cache in caches]) // self._size
        self._steps = torch.tensor([cache.stride()[:2] for cache in caches]) // self._size
        total = caches[0].untyped_storage().nbytes() // caches[0].element_size() // self._size
        self.rows = caches[0].as_strided((total, 1, self.page, width), (self._size, self._size, width, 1), 0)

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> Self | None:
        """None where head pages are no whole parts of one allocation."""
        first = caches[0]
        size = first.shape[2:].numel()
        alike = all(
            cache.shape == first.shape
            and cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and cache.stride()[2:] == (first.shape[3], 1)
            and not any(part % size for part in (cache.storage_offset(), *cache.stride()[:2]))
            for cache in caches
        )
        return cls(caches) if alike else None

    def numbers(self, spread: Spread, pages: Tensor) -> Tensor:
        """Which rows those head pages are. pages: int64, those of the request."""
        steps = self._steps[spread.layers]
        return self._origins[spread.layers] + pages[spread.pages] * steps[..., 0] + spread.heads * steps[..., 1]


@dataclass(frozen=True, eq=False)
class StepRows:
    """What one forward pass reads and writes, as rows: a row is a KV head of a request. tables: int32
    `[layers, rows, most]`; lengths: int32 `[layers, rows]`; slots: int64 `[layers, tokens x heads]` of new tokens;
    order: int64, which of the tokens x heads, in the rows' order; starts: int32, where each row's begin."""

    tables: Tensor
    lengths: Tensor
    slots: Tensor
    order: Tensor
    starts: Tensor


class HeadTables:
    """The rows of what a worker computes. requests: ragged ones of this step, by the number of the first page."""

    def __init__(self, storage: Storage, names: Sequence[str]) -> None:
        self.storage: Final = storage
        self.index: Final[Mapping[str, int]] = {name: at for at, name in enumerate(names)}
        self.requests: Mapping[int, HeadPages] = {}
        self._last: tuple[Any, StepRows | None] = (None, None)
        self._tables: dict[int, _Table] = {}

    def slots(self, stored: tuple[Spread, Tensor, Tensor], pages: Sequence[int]) -> Tensor:
        """The slot of each entry in `storage.rows`. stored: of `HeadPages`. pages: of the request."""
        spread, which, places = stored
        return self.storage.numbers(spread, torch.tensor(pages))[which] * self.storage.page + places

    def of(self, metadata: Any) -> StepRows | None:
        """None where all heads of the pass have equal lengths. metadata: of vLLM's attention, one object for all
        layers."""
        if not self.requests:
            return None
        if self._last[0] is not metadata:
            self._last = metadata, self._make(metadata)
        return self._last[1]

    def _make(self, metadata: Any) -> StepRows | None:
        layers, heads, page = len(self.index), self.storage.heads, self.storage.page
        starts, totals = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        plans = [self.requests.get(int(first)) for first in metadata.block_table[: len(starts) - 1, 0]]
        if not any(plans):
            return None
        plain = HeadPages.plain(layers, heads, page)
        tables, lengths, slots, order = [], [], [], []
        before, self._tables = self._tables, {}
        for request, head_pages in enumerate(plans):
            plan = head_pages or plain
            begin, end, total = starts[request], starts[request + 1], totals[request]
            pages = metadata.block_table[request, : -(-total // page)].long()
            table = self._table(before.get(int(pages[0])), head_pages, pages)
            entries = plan.lengths[..., None] + torch.arange(total - end + begin, total) - plan.stand_ins
            places = table.gather(2, entries // page).long()
            slots.append((places * page + entries % page).transpose(1, 2).flatten(1))
            tables.append(table)
            lengths.append(plan.lengths + total - plan.stand_ins)
            order.append((torch.arange(begin, end) * heads + torch.arange(heads)[:, None]).flatten())
        most = max(table.shape[2] for table in tables)
        padded = [torch.nn.functional.pad(table, (0, most - table.shape[2])) for table in tables]
        counts = torch.tensor(starts).diff().repeat_interleave(heads)
        return StepRows(
            torch.cat(padded, 1),
            torch.cat(lengths, 1).int(),
            torch.cat(slots, 1),
            torch.cat(order),
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        )

    def _table(self, before: _Table | None, head_pages: HeadPages | None, pages: Tensor) -> Tensor:
        """The rows of a request `[layers, heads, most]`, int32: those of the pass before, unless a page has come."""
        if before is None or before.head_pages is not head_pages or not before.pages.equal(pages):
            plan = head_pages or HeadPages.plain(len(self.index), self.storage.heads, self.storage.page)
            spread = plan.spread(len(pages) * self.storage.page)
            before = _Table(head_pages, pages, self.storage.numbers(spread, pages).int())
        self._tables[int(pages[0])] = before
        return before.rows


class _Table(NamedTuple):
    """The rows of a request of which these are the pages. head_pages: None if it is vLLM's own."""

    head_pages: HeadPages | None
    pages: Tensor
    rows: Tensor


def rows_of(layers: Mapping[str, Any]) -> HeadTables | None:
    """Gives all layers of a worker the same rows. layers: of vLLM, by name. None where another attention than
    `attention.RowsImpl` runs them or one with sinks, slopes or a window, which it does not cut to one head, and where
    their pages are not of one shape in one allocation."""
    if not all(hasattr(layer.impl, "rows") and _is_plain(layer.impl) for layer in layers.values()):
        return None
    storage = Storage.of([layer.kv_cache for layer in layers.values()])
    if storage is None:
        return None
    rows = HeadTables(storage, list(layers))
    for layer in layers.values():
        layer.impl.rows = rows
    return rows


def _is_plain(impl: Any) -> bool:
    return impl.sinks is None and impl.alibi_slopes is None and impl.sliding_window == -1
