"""What the programs of a launch do: a table of work, made on the host once for as long as a batch stays as it is.

A program takes an item: some query rows of one share and KV head, and a split, a run of rows of one prefix. Prefixes of
any number of documents stand in one table by their addresses, so that launches do not grow with documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import (
    BatchLayout,
    MergedPrefix,
    PackedPrefix,
    Prefix,
    StackedPrefix,
    StreamedPrefix,
)
from kvshelf.kernels.prefix_attention.slots import FoldedSlots, fold
from kvshelf.kernels.prefix_attention.upload import upload
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows

TILE = 64
"""Splits begin at multiples of this many rows, so that no tile of a kernel crosses a group of quantized keys."""

LEAST_SPLIT = 256
"""Fewest rows of a split. In bf16 at D = 128 these are 128 KiB to read; what a split leaves behind is written and read
again, 4 KiB for a group of 4 query heads."""

COLUMNS = 17
"""int64 numbers of an item. The kernel reads them by their place: 0 first token of the share, 1 query rows of the
share, 2 first query row of the item, 3 KV head, 4 and 5 first row of the split and end, 6 where its results go; keys: 7
address of the head, 8 and 9 of its scales and zeros; values: 10 to 12 likewise; slots: 13 address of the classes, 14 of
the scales, 15 stride of the scales, 16 address of the head's bounds."""


class RowKind(NamedTuple):
    """How keys or values lie in memory; bits 0: plain. stride: elements, or bytes of codes, from row to row. aligned:
    every row begins at a multiple of 16 bytes."""

    bits: int
    group: int
    by_tokens: bool
    stride: int
    aligned: bool


class Kind(NamedTuple):
    """What a launch is compiled for: all prefixes of a kind share it."""

    merged: bool
    keys: RowKind
    values: RowKind

    @property
    def plain(self) -> bool:
        """Whether a row is a token and is read as it is."""
        return not (self.merged or self.keys.bits or self.values.bits)


class Launch(NamedTuple):
    """`items`: `[n, COLUMNS]` int64 on the device, all of one kind."""

    kind: Kind
    items: Tensor


class Streamed(NamedTuple):
    """A streamed prefix: the share that sees it, its place among the share's prefixes, and the scratch row where its
    results begin."""

    share: int
    place: int
    out: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of one layer, and where its results go: scratch of `scratch_rows` rows, one for each query row of each
    KV head of each split of each share, in this order from the inside out.

    shares: `[shares, 1 + kv_heads]` int64 on the device, the first scratch row of a share and how many splits each of
    its heads has. block_m: query rows of an item.
    """

    made_for: tuple[object, ...]
    prefixes: tuple[ReferenceType[Prefix], ...]
    launches: list[Launch]
    streamed: list[Streamed]
    shares: Tensor
    scratch_rows: int
    block_m: int

    def fits(self, prefixes: Sequence[Prefix], made_for: tuple[object, ...]) -> bool:
        """Whether this is the plan of these prefixes; identity counts, for it holds addresses."""
        return self.made_for == made_for and all(
            mine() is given for mine, given in zip(self.prefixes, prefixes, strict=True)
        )


_PLANS: WeakKeyDictionary[Prefix, Plan] = WeakKeyDictionary()
"""The last plan of each prefix that stood first in a batch. One decode step differs from the next in the lengths of the
suffixes only, so each layer finds its plan again. A plan keeps no prefix alive, and goes with its first one."""


class Setting(NamedTuple):
    """What a plan depends on besides prefixes and shares. group: query heads of a KV head. itemsize: bytes of an
    element of the queries. places: programs that the device runs at a time. least_split: fewest rows of a split."""

    kv_heads: int
    group: int
    itemsize: int
    places: int
    least_split: int


def plan_of(prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, setting: Setting) -> Plan:
    """The plan of one layer's prefixes, of which there is at least one: that of the step before, or where anything it
    depends on has changed a new one, which takes one copy to the device."""
    given = [prefix for parts in prefixes for prefix in parts]
    made_for = (layout.shares, tuple(map(len, prefixes)), setting)
    plan = _PLANS.get(given[0])
    if plan is None or not plan.fits(given, made_for):
        plan = _PLANS[given[0]] = _Planner(prefixes, layout, setting).plan(made_for)
    return plan


class _Planner:
    """Makes one plan, on the CPU. Every tensor is int64; `[packed, kv_heads]` has a row for each prefix of each share
    that is not streamed."""

    def __init__(self, prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, setting: Setting) -> None:
        self._prefixes, self._layout, self._kv_heads = prefixes, layout, setting.kv_heads
        self._rows = torch.tensor(layout.shares) * setting.group  # query rows of each share and KV head
        packed = [(s, p) for s, parts in enumerate(prefixes) for p in parts if not isinstance(p, StreamedPrefix)]
        self._share = torch.tensor([s for s, _ in packed], dtype=torch.int64)
        self._heads = [_heads_of(prefix) for _, prefix in packed]
        # As many rows as registers hold beside what a tile takes: 64 rows of fp32, or 64 beside codes or slots, spill.
        most = 64 if setting.itemsize == 2 and all(heads.kind.plain for heads in self._heads) else 32
        self._block_m = min(most, max(16, 1 << (int(self._rows.max()) - 1).bit_length()))
        empty = self._share.new_empty(0, setting.kv_heads)
        self._lengths = torch.stack([heads.lengths for heads in self._heads]) if packed else empty
        self._blocks = (-(-self._rows // self._block_m))[self._share, None].expand_as(self._lengths)
        size = split_size(self._lengths, self._blocks, setting.places, setting.least_split)
        # The splits of a head share its rows evenly.
        even = -(-self._lengths // (-(-self._lengths // size)).clamp_min(1))
        self._sizes = (-(-even // TILE) * TILE).clamp_min(TILE)
        self._splits = -(-self._lengths // self._sizes)

    def plan(self, made_for: tuple[object, ...]) -> Plan:
        counts, first = self._numbered()
        scratch = counts.amax(1) * self._kv_heads * self._rows
        base = scratch.cumsum(0) - scratch
        segments = self._segments(base, first)
        kinds = list(dict.fromkeys(heads.kind for heads in self._heads))
        kind = torch.tensor([kinds.index(heads.kind) for heads in self._heads])
        tables = [
            torch.cat([base[:, None], counts], dim=1),
            *(self._items(segments, kind == i) for i in range(len(kinds))),
        ]
        shares, *items = upload(tables, self._layout.device)
        return Plan(
            made_for,
            tuple(ref(prefix) for parts in self._prefixes for prefix in parts),
            [Launch(kind, part) for kind, part in zip(kinds, items, strict=True) if len(part)],
            self._streamed(base.tolist()),
            shares,
            int(scratch.sum()),
            self._block_m,
        )

    def _numbered(self) -> tuple[Tensor, Tensor]:
        """How many splits each head of each share has, `[shares, kv_heads]`, and the number of the first one of each
        packed prefix. Streamed prefixes come first, for all their heads have one."""
        counts = torch.tensor([[sum(isinstance(p, StreamedPrefix) for p in parts)] for parts in self._prefixes])
        counts = counts.repeat(1, self._kv_heads)
        first = torch.empty_like(self._splits)
        for i, share in enumerate(self._share.tolist()):
            first[i] = counts[share]
            counts[share] += self._splits[i]
        return counts, first

    def _segments(self, base: Tensor, first: Tensor) -> Tensor:
        """Each head of each packed prefix as if it were one item: `[packed, kv_heads, COLUMNS]`."""
        segments = torch.zeros(*self._lengths.shape, COLUMNS, dtype=torch.int64)
        heads, rows = torch.arange(self._kv_heads), self._rows[self._share, None]
        starts = torch.tensor(self._layout.share_ends) - torch.tensor(self._layout.shares)
        segments[..., 0] = starts[self._share, None]
        segments[..., 1] = rows
        segments[..., 3] = heads
        segments[..., 5] = self._lengths
        segments[..., 6] = base[self._share, None] + (first * self._kv_heads + heads) * rows
        for segment, of_prefix in zip(segments, self._heads, strict=True):
            segment[:, 7:] = of_prefix.columns
        return segments

    def _items(self, segments: Tensor, chosen: Tensor) -> Tensor:
        """The items of the chosen prefixes, `[n, COLUMNS]`. Query blocks of one split stand side by side: what the
        first reads, the others find in the L2 cache."""
        sizes, splits, blocks = (x[chosen].flatten() for x in (self._sizes, self._splits, self._blocks))
        repeats = splits * blocks
        segment = torch.arange(len(repeats)).repeat_interleave(repeats)
        nth = torch.arange(len(segment)) - (repeats.cumsum(0) - repeats)[segment]
        split, block = nth // blocks[segment], nth % blocks[segment]
        items = segments[chosen].flatten(0, 1)[segment]
        items[:, 2] = block * self._block_m
        items[:, 4] = split * sizes[segment]
        items[:, 5] = torch.minimum(items[:, 4] + sizes[segment], items[:, 5])
        items[:, 6] += split * self._kv_heads * items[:, 1]
        return items

    def _streamed(self, base: list[int]) -> list[Streamed]:
        found = []
        for share, (parts, rows) in enumerate(zip(self._prefixes, self._rows.tolist(), strict=True)):
            places = [place for place, prefix in enumerate(parts) if isinstance(prefix, StreamedPrefix)]
            found += [Streamed(share, p, base[share] + i * self._kv_heads * rows) for i, p in enumerate(places)]
        return found


def split_size(lengths: Tensor, blocks: Tensor, places: int, least: int) -> int:
    """Most rows of a split, for heads of `lengths` rows that `blocks` items each go over.

    Where the heads leave at least half of the device's places free, their splits fill it once: n heads cut into runs of
    total / (places - n) rows are at most `places` items. Otherwise the places are filled about four times over: lengths
    differ, and a last round that is half empty then costs an eighth.
    """
    total, heads = int((lengths * blocks).sum()), int(blocks[lengths > 0].sum())
    rounds = places - heads if 2 * heads <= places else 4 * places
    return max(least, -(-total // rounds))


@dataclass(frozen=True, eq=False)
class _Heads:
    """A prefix as the kernel reads it: rows of each head `[kv_heads]` (of a merged one the most there can be), columns
    7 to 16 `[kv_heads, 10]`, and what of it nobody else keeps alive."""

    kind: Kind
    lengths: Tensor
    columns: Tensor
    slots: FoldedSlots | None


_HEADS: WeakKeyDictionary[Prefix, _Heads] = WeakKeyDictionary()
"""Made once for each prefix: batches change more often than the documents in them."""


def _heads_of(prefix: PackedPrefix | StackedPrefix | MergedPrefix) -> _Heads:
    heads = _HEADS.get(prefix)
    if heads is None:
        heads = _HEADS[prefix] = _read(prefix)
    return heads


def _read(prefix: PackedPrefix | StackedPrefix | MergedPrefix) -> _Heads:
    match prefix:
        case StackedPrefix(keys, values):
            of_keys, of_values = _stacked_rows(keys), _stacked_rows(values)
            lengths = (keys.shape[1],) * keys.shape[0]
        case PackedPrefix(keys, values, lengths) | MergedPrefix(keys, values, lengths):
            of_keys, of_values = _packed_rows(keys, lengths), _packed_rows(values, lengths)
    of_slots, slots = torch.zeros(len(lengths), 4, dtype=torch.int64), None
    if isinstance(prefix, MergedPrefix):
        slots = fold(prefix)
        lengths = slots.most
        of_slots[:, 0] = slots.classes.data_ptr()
        of_slots[:, 1] = slots.scales.data_ptr()
        of_slots[:, 2] = slots.scales.stride(0)
        of_slots[:, 3] = slots.bounds.data_ptr() + torch.arange(len(lengths)) * slots.bounds.itemsize
    columns = torch.cat([of_keys[1], of_values[1], of_slots], dim=1)
    return _Heads(Kind(slots is not None, of_keys[0], of_values[0]), torch.tensor(lengths), columns, slots)


def _stacked_rows(states: Tensor) -> tuple[RowKind, Tensor]:
    """See `_packed_rows`."""
    columns = torch.zeros(states.shape[0], 3, dtype=torch.int64)
    step, stride = (n * states.itemsize for n in states.stride()[:2])
    columns[:, 0] = states.data_ptr() + torch.arange(states.shape[0]) * step
    aligned = (states.data_ptr() | step | stride) % 16 == 0
    return RowKind(0, 0, False, states.stride(1), aligned), columns


def _packed_rows(rows: Rows, lengths: Sequence[int]) -> tuple[RowKind, Tensor]:
    """The kind of keys or values, and the addresses of each head, of its scales and of its zeros `[kv_heads, 3]`."""
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    data = rows.codes if isinstance(rows, QuantizedRows) else rows
    stride = data.stride(0)
    columns = torch.zeros(len(lengths), 3, dtype=torch.int64)
    columns[:, 0] = data.data_ptr() + starts * stride * data.itemsize
    aligned = (data.data_ptr() | stride * data.itemsize) % 16 == 0
    if not isinstance(rows, QuantizedRows):
        return RowKind(0, 0, False, stride, aligned), columns
    assert rows.scales.is_contiguous()
    assert rows.zeros.is_contiguous()
    by_tokens = rows.axis == "tokens"
    if by_tokens:
        counts = -(-counts // rows.group)
        starts = counts.cumsum(0) - counts
    for column, table in ((1, rows.scales), (2, rows.zeros)):
        columns[:, column] = table.data_ptr() + starts * table.shape[1] * table.itemsize
    return RowKind(rows.bits, rows.group, by_tokens, stride, aligned), columns
