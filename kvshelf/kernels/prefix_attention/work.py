"""The work table of a launch's programs, made on the host once for as long as a batch does not change.

A program takes one item: some query rows of a share and KV head, and a split, which is a run of rows of one prefix.
One table holds the addresses of all documents' prefixes, so that more documents need no more launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.heads import PrefixKind, heads_of
from kvshelf.kernels.prefix_attention.prefixes import BatchLayout, Prefix, StreamedPrefix
from kvshelf.kernels.transfer import upload

TILE = 64
"""Splits begin at multiples of this many rows, so that no tile of a kernel crosses a group of quantized keys."""

LEAST_SPLIT = 256
"""Fewest rows of a split. In bf16 at D = 128 these are 128 KiB to read; the results of a split, written and read again,
are 4 KiB for a group of 4 query heads."""

COLUMNS = 19
"""int64 numbers of an item, which the kernel reads by place: 0 first token of the share, 1 query rows of the
share, 2 first query row of the item, 3 KV head, 4 and 5 first row of the split and end, 6 where its results go; keys: 7
address of the head, 8 and 9 of its scales and zeros; values: 10 to 12 likewise; slots: 13 address of the classes, 14 of
the scales, 15 stride of the scales, 16 address of the head's bounds; of a selected prefix, 13 address of the head's
chosen rows, 14 of their number. 17 rows of the head in this prefix. 18 address of the channels of pruned keys, or 0."""


class Launch(NamedTuple):
    """`items`: `[n, COLUMNS]` int64 on the device, all of one kind."""

    kind: PrefixKind
    items: Tensor


class Streamed(NamedTuple):
    """A streamed prefix: the share that sees it, its place among the share's prefixes, and the scratch row where its
    results begin."""

    share: int
    place: int
    out: int


@dataclass(frozen=True, eq=False)
class WorkTable:
    """The work of one layer, and where its results go: scratch of `scratch_rows` rows, one for each query row of each
    KV head of each split of each share; the query row varies fastest, the share slowest.

    shares: `[shares, 1 + kv_heads]` int64 on the device, the first scratch row of a share and how many splits each of
    its heads has. block_m: query rows of an item.
    """

    key: TableKey | None
    prefixes: tuple[ReferenceType[Prefix], ...]
    launches: list[Launch]
    streamed: list[Streamed]
    shares: Tensor
    scratch_rows: int
    block_m: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.shares.nbytes + sum(items.nbytes for _, items in self.launches)

    def fits(self, prefixes: Sequence[Prefix], key: TableKey | None) -> bool:
        """Whether this is the table of these prefixes, compared by identity because the table holds addresses."""
        pairs = zip(self.prefixes, prefixes, strict=False)
        return self.key == key and len(self.prefixes) == len(prefixes) and all(one() is other for one, other in pairs)


class TableClass(NamedTuple):
    """The sizes of tables that can be copied over each other. kinds: of each launch. items: most items of each launch.
    shares: most shares."""

    kinds: tuple[PrefixKind, ...]
    items: tuple[int, ...]
    shares: int
    scratch_rows: int
    block_m: int
    setting: Setting

    @classmethod
    def of(cls, tables: Sequence[WorkTable], shares: int) -> TableClass | None:
        """The class of all tables of the layers of one batch; None where they differ in it. shares: most shares."""
        classes = {
            (tuple(kind for kind, _ in table.launches), table.block_m, table.key.setting)
            for table in tables
            if table.key is not None
        }
        if len(classes) != 1:
            return None
        ((kinds, block_m, setting),) = classes
        counts = zip(*([len(items) for _, items in table.launches] for table in tables), strict=True)
        items = tuple(_room(max(of_launch)) for of_launch in counts)
        return cls(kinds, items, shares, _room(max(t.scratch_rows for t in tables)), block_m, setting)

    def numbers(self, table: WorkTable) -> Tensor:
        """The numbers of a table of the class, with room to spare, int64 on its device."""
        parts = []
        for most, (_, items) in zip(self.items, table.launches, strict=True):
            beyond = items[:1].repeat(most - len(items), 1)  # of no query row and no row
            beyond[:, 1:3] = 0
            beyond[:, 5] = beyond[:, 4]
            parts += [items, beyond]
        spare = table.shares.new_zeros(self.shares - len(table.shares), 1 + self.setting.kv_heads)
        return torch.cat([part.flatten() for part in (*parts, table.shares, spare)])

    def table(self, numbers: Tensor) -> WorkTable:
        """The table of the memory that holds such numbers; those of other tables may be copied there."""
        counts = [most * COLUMNS for most in self.items]
        *parts, shares = torch.split(numbers, [*counts, len(numbers) - sum(counts)])
        launches = [Launch(kind, part.view(-1, COLUMNS)) for kind, part in zip(self.kinds, parts, strict=True)]
        return WorkTable(None, (), launches, [], shares.view(self.shares, -1), self.scratch_rows, self.block_m)


def _room(count: int) -> int:
    """At most a quarter more than `count`, so that many counts are of one class."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


@dataclass(frozen=True, eq=False)
class TabledPrefix:
    """A table in place of all prefixes of a batch: the tables of other batches may be copied there. Kernels read it,
    and torch's operations cannot."""

    table: WorkTable


def table_of(prefixes: Sequence[Prefix]) -> WorkTable | None:
    """The table by which a batch has last read all of these prefixes; None if there is none."""
    table = _TABLES.get(prefixes[0])
    return table if table is not None and table.fits(prefixes, table.key) else None


_TABLES: WeakKeyDictionary[Prefix, WorkTable] = WeakKeyDictionary()
"""The last table of each prefix that was first in a batch. Successive decode steps differ only in the lengths of the
suffixes, so each layer finds its table again. A table keeps no prefix alive, and is freed with its first prefix."""


class Setting(NamedTuple):
    """The sizes that a table depends on besides prefixes and shares. group: query heads of a KV head. itemsize: bytes
    of an element of the queries. places: programs that the device runs at a time. least_split: fewest rows of a
    split."""

    kv_heads: int
    group: int
    itemsize: int
    places: int
    least_split: int


class TableKey(NamedTuple):
    """The batch that a table is for, without its prefixes. counts: prefixes of each share."""

    shares: tuple[int, ...]
    counts: tuple[int, ...]
    setting: Setting


def work_of(prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, setting: Setting) -> WorkTable:
    """The table of one layer's prefixes, at least one: that of the previous step, or, if anything it depends on has
    changed, a new one, which takes one copy to the device."""
    flat = [prefix for parts in prefixes for prefix in parts]
    if isinstance(flat[0], TabledPrefix):
        return flat[0].table
    key = TableKey(layout.shares, tuple(map(len, prefixes)), setting)
    table = _TABLES.get(flat[0])
    if table is None or not table.fits(flat, key):
        table = _TABLES[flat[0]] = _make(prefixes, layout, setting, key)
    return table


def _make(prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, setting: Setting, key: TableKey) -> WorkTable:
    packed = [(s, heads_of(p)) for s, parts in enumerate(prefixes) for p in parts if not isinstance(p, StreamedPrefix)]
    kinds = list(dict.fromkeys(heads.kind for _, heads in packed))
    outline = _Outline(
        layout.shares,
        tuple(sum(isinstance(prefix, StreamedPrefix) for prefix in parts) for parts in prefixes),
        tuple(share for share, _ in packed),
        tuple(heads.lengths for _, heads in packed),
        tuple(kinds.index(heads.kind) for _, heads in packed),
        all(kind.plain for kind in kinds),
        setting,
    )
    work = _unplaced(outline)
    items = work.items
    if packed:
        columns = torch.cat([heads.columns for _, heads in packed])
        items = torch.cat([items, columns.index_select(0, work.segments)], dim=1)
    shares, *parts = upload([work.shares, *torch.split(items, work.counts)], layout.device)
    launches = [Launch(kind, part) for kind, part in zip(kinds, parts, strict=True) if len(part)]
    streamed = []
    for share, of_share in enumerate(prefixes):
        rows_of_split = setting.kv_heads * setting.group * layout.shares[share]
        places = (place for place, prefix in enumerate(of_share) if isinstance(prefix, StreamedPrefix))
        for i, place in enumerate(places):  # its splits come first
            streamed.append(Streamed(share, place, int(work.shares[share, 0]) + i * rows_of_split))
    references = tuple(ref(prefix) for of_share in prefixes for prefix in of_share)
    return WorkTable(key, references, launches, streamed, shares, work.scratch_rows, work.block_m)


class _Outline(NamedTuple):
    """The sizes that the work of a layer depends on, without addresses: if every head keeps equally many rows, all
    layers of a model share one outline.

    shares: tokens of each share. streamed: streamed prefixes of each share. share, lengths, kind: of each other prefix,
    its share, the rows of its heads, and the number of its kind. plain: whether all kinds are plain.
    """

    shares: tuple[int, ...]
    streamed: tuple[int, ...]
    share: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    kind: tuple[int, ...]
    plain: bool
    setting: Setting


@dataclass(frozen=True, eq=False)
class _Unplaced:
    """A table without addresses, on the CPU.

    items: `[n, 7]`, by kind, columns 0 to 6. counts: items of each kind. segments: of each item, prefix * kv_heads +
    head. shares: as in `WorkTable`.
    """

    items: Tensor
    counts: list[int]
    segments: Tensor
    shares: Tensor
    scratch_rows: int
    block_m: int


@lru_cache(maxsize=8)
def _unplaced(outline: _Outline) -> _Unplaced:
    """Half a millisecond of small operations, most of a table's time: once for all layers of the same outline."""
    kv_heads, group, itemsize, places, least_split = outline.setting
    rows = torch.tensor(outline.shares) * group  # query rows of each share and KV head
    share = torch.tensor(outline.share, dtype=torch.int64)
    # As many rows as registers hold beside what a tile takes: 64 rows of fp32, or 64 beside codes or slots, spill.
    most = 64 if itemsize == 2 and outline.plain else 32
    block_m = min(most, max(16, 1 << (int(rows.max()) - 1).bit_length()))
    lengths = torch.tensor(outline.lengths, dtype=torch.int64).view(-1, kv_heads)
    blocks = (-(-rows // block_m))[share, None].expand_as(lengths)
    sizes, splits = _cut(lengths, split_size(lengths, blocks, places, least_split))

    counts, first = _numbered(splits, share, torch.tensor(outline.streamed))
    scratch = counts.amax(1) * kv_heads * rows
    base = scratch.cumsum(0) - scratch

    segments = torch.zeros(*lengths.shape, 7, dtype=torch.int64)
    heads, rows_of_prefix = torch.arange(kv_heads), rows[share, None]
    segments[..., 0] = (rows.cumsum(0) - rows)[share, None] // group
    segments[..., 1] = rows_of_prefix
    segments[..., 3] = heads
    segments[..., 5] = lengths
    segments[..., 6] = base[share, None] + (first * kv_heads + heads) * rows_of_prefix
    kinds, order = torch.tensor(outline.kind, dtype=torch.int64).sort(stable=True)
    segments, sizes, splits, blocks = (x[order].flatten(0, 1) for x in (segments, sizes, splits, blocks))
    items, segment = _items(segments, sizes, splits, blocks, kv_heads, block_m)
    return _Unplaced(
        items,
        kinds[segment // kv_heads].bincount(minlength=len(set(outline.kind))).tolist(),
        order[segment // kv_heads] * kv_heads + segment % kv_heads,
        torch.cat([base[:, None], counts], dim=1),
        int(scratch.sum()),
        block_m,
    )


def _cut(lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """For each head, the rows of a split and the number of splits: whole tiles, as even as tiles allow."""
    even = -(-lengths // (-(-lengths // most)).clamp_min(1))
    sizes = (-(-even // TILE) * TILE).clamp_min(TILE)
    return sizes, -(-lengths // sizes)


def _numbered(splits: Tensor, share: Tensor, streamed: Tensor) -> tuple[Tensor, Tensor]:
    """How many splits each head of each share has, `[shares, kv_heads]`, and the number of each prefix's first one.
    Streamed prefixes are counted first, with one split for every head."""
    counts = streamed[:, None].repeat(1, splits.shape[1])
    before = splits.cumsum(0) - splits
    first = before - before[torch.searchsorted(share, share)] + counts[share]
    return counts.index_add_(0, share, splits), first


def _items(
    segments: Tensor, sizes: Tensor, splits: Tensor, blocks: Tensor, kv_heads: int, block_m: int
) -> tuple[Tensor, Tensor]:
    """The items of all segments, `[n, 7]`, and the segment of each item. A segment is given as if it were one item.
    Query blocks of one split are adjacent: the first one's reads leave the rows in the L2 cache for the others."""
    repeats = splits * blocks
    segment = torch.arange(len(repeats)).repeat_interleave(repeats)
    nth = torch.arange(len(segment)) - (repeats.cumsum(0) - repeats)[segment]
    split, block = nth // blocks[segment], nth % blocks[segment]
    items = segments[segment]
    items[:, 2] = block * block_m
    items[:, 4] = split * sizes[segment]
    items[:, 5] = torch.minimum(items[:, 4] + sizes[segment], items[:, 5])
    items[:, 6] += split * kv_heads * items[:, 1]
    return items, segment


def split_size(lengths: Tensor, blocks: Tensor, places: int, least: int) -> int:
    """Most rows of a split, for heads of `lengths` rows that `blocks` items each go over.

    If the heads leave at least half of the device's places free, their splits fill the places once: n heads cut into
    runs of total / (places - n) rows are at most `places` items. Otherwise the places are filled about four times over:
    lengths differ, and a last round that is half empty then costs an eighth.
    """
    total, heads = int((lengths * blocks).sum()), int(blocks[lengths > 0].sum())
    rounds = places - heads if 2 * heads <= places else 4 * places
    return max(least, -(-total // rounds))
