"""The memory layout of the heads of one prefix, as the programs of a kernel read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import (
    MergedPrefix,
    PackedPrefix,
    Prefix,
    SelectedPrefix,
    StackedPrefix,
    channels_of,
)
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows

SLOTS_PER_ROW = 8
"""A class of n slots becomes ceil(n / 8) rows. With rows of any length, one large class would hold up its whole tile;
rows of one slot would multiply the class's key and value anew for each."""


class RowKind(NamedTuple):
    """The memory layout of keys or values. bits: 0 for plain rows. stride: elements, or bytes of codes, from row to
    row. dim: channels. aligned: every row begins at a multiple of 16 bytes."""

    bits: int
    group: int
    by_tokens: bool
    stride: int
    dim: int
    aligned: bool


class PrefixKind(NamedTuple):
    """The memory layout that a launch is compiled for; all prefixes of a kind share it. selected: a table names the
    rows."""

    merged: bool
    keys: RowKind
    values: RowKind
    selected: bool = False

    @property
    def plain(self) -> bool:
        """Whether each row is a token, neither coded nor named by a table."""
        return not (self.merged or self.selected or self.keys.bits or self.values.bits)


@dataclass(frozen=True, eq=False)
class FoldedSlots:
    """The slots of a merged prefix by class, so that a class is multiplied once and not once per slot: rows of up to
    eight slots of one class, head after head, on the device of the prefix.

    classes: `[rows]` int32, the class within its head. scales: `[8, rows]` fp32, NaN where a row has fewer slots.
    bounds: `[kv_heads + 1]` int64; head h owns rows `bounds[h]` to `bounds[h + 1]`. Only the device knows the number of
    rows; `most[h]` is an upper bound for head h, and the tensors are unused behind the last row.
    """

    classes: Tensor
    scales: Tensor
    bounds: Tensor
    most: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Heads:
    """A prefix as the kernel reads it. lengths: rows of each head (of a merged prefix, at most). columns: columns 7 to
    18 of its items (see `work`), `[kv_heads, 12]` int64 on the CPU. slots: tensors that nothing else keeps alive."""

    kind: PrefixKind
    lengths: tuple[int, ...]
    columns: Tensor
    slots: FoldedSlots | None


_HEADS: WeakKeyDictionary[Prefix, Heads] = WeakKeyDictionary()
"""Made once for each prefix: batches change more often than the documents in them."""

_FIRST: WeakKeyDictionary[Prefix, Prefix] = WeakKeyDictionary()
"""The prefix that `again` copied, by its copy."""


def again(prefix: Prefix) -> Prefix:
    """A copy of a prefix, which gets work tables of its own. Its tensors and heads are the same, so slots are folded
    once."""
    copy = replace(prefix)
    _FIRST[copy] = prefix
    return copy


def heads_of(prefix: PackedPrefix | StackedPrefix | MergedPrefix | SelectedPrefix) -> Heads:
    """The addresses and memory layout of a prefix; its tensors must keep these addresses."""
    first = _FIRST.get(prefix, prefix)
    heads = _HEADS.get(first)
    if heads is None:
        heads = _HEADS[first] = _read(prefix)
    return heads


def _read(prefix: PackedPrefix | StackedPrefix | MergedPrefix | SelectedPrefix) -> Heads:
    match prefix:
        case SelectedPrefix():
            return _selected(prefix)
        case StackedPrefix(keys, values):
            of_keys, of_values = _stacked_rows(keys), _stacked_rows(values)
            lengths = (keys.shape[1],) * keys.shape[0]
        case PackedPrefix(keys, values, lengths) | MergedPrefix(keys, values, lengths):
            of_keys, of_values = _packed_rows(keys, lengths), _packed_rows(values, lengths)
    of_slots, slots = [(0, 0, 0, 0)] * len(lengths), None
    if isinstance(prefix, MergedPrefix):
        slots = fold(prefix)
        shared = slots.classes.data_ptr(), slots.scales.data_ptr(), slots.scales.stride(0)
        of_slots = [(*shared, bound) for bound in _addresses(slots.bounds, [1] * len(lengths))]
        lengths = slots.most
    channels = channels_of(prefix)
    of_channels = [0] * len(lengths) if channels is None else _addresses(channels, [1] * len(lengths))
    parts = zip(of_keys[1], of_values[1], of_slots, lengths, of_channels, strict=True)
    columns = [[*k, *v, *s, rows, c] for k, v, s, rows, c in parts]
    kind = PrefixKind(slots is not None, of_keys[0], of_values[0])
    return Heads(kind, tuple(lengths), torch.tensor(columns), slots)


def fold(prefix: MergedPrefix) -> FoldedSlots:
    """Sort the slots of a prefix by class. Done once for a prefix; slots * 12 bytes, and no device sync."""
    device = prefix.slot_scales.device
    num_slots, num_classes = sum(prefix.slot_lengths), sum(prefix.lengths)
    most = tuple(
        min(classes, slots) + slots // SLOTS_PER_ROW
        for classes, slots in zip(prefix.lengths, prefix.slot_lengths, strict=True)
    )
    class_bounds = torch.tensor((0, *prefix.lengths)).cumsum(0).to(device)
    of_head = class_bounds[:-1].repeat_interleave(
        torch.tensor(prefix.slot_lengths, device=device), output_size=num_slots
    )
    ids, order = (of_head + prefix.slot_classes).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_classes, device=device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    row_ends = ((counts + SLOTS_PER_ROW - 1) // SLOTS_PER_ROW).cumsum(0)
    row_bounds = torch.cat([row_ends.new_zeros(1), row_ends])
    rank = torch.arange(num_slots, device=device) - (ends - counts)[ids]  # among the slots of the class
    rows = row_bounds[ids] + rank // SLOTS_PER_ROW

    scales = torch.full((SLOTS_PER_ROW * sum(most),), torch.nan, device=device)
    scales.index_copy_(0, rank % SLOTS_PER_ROW * sum(most) + rows, prefix.slot_scales[order])
    classes = torch.zeros(sum(most), dtype=torch.int32, device=device)
    classes.scatter_(0, rows, prefix.slot_classes[order])  # the slots of a row all write the same class
    return FoldedSlots(classes, scales.view(SLOTS_PER_ROW, -1), row_bounds[class_bounds], most)


def _selected(prefix: SelectedPrefix) -> Heads:
    """The heads of the base, with the addresses of each head's rows and of their number."""
    base, (rows, counts) = heads_of(prefix.base), (prefix.chosen.rows, prefix.chosen.counts)
    columns = base.columns.clone()
    columns[:, 6] = rows.data_ptr() + torch.arange(len(rows)) * rows.stride(0) * rows.itemsize
    columns[:, 7] = counts.data_ptr() + torch.arange(len(rows)) * counts.itemsize
    return Heads(base.kind._replace(selected=True), prefix.lengths, columns, None)


def _stacked_rows(states: Tensor) -> tuple[RowKind, list[tuple[int, int, int]]]:
    """See `_packed_rows`."""
    start = states.data_ptr()
    step, stride = (n * states.itemsize for n in states.stride()[:2])
    columns = [(start + head * step, 0, 0) for head in range(states.shape[0])]
    return RowKind(0, 0, False, states.stride(1), states.shape[2], (start | step | stride) % 16 == 0), columns


def _packed_rows(rows: Rows, lengths: Sequence[int]) -> tuple[RowKind, list[tuple[int, int, int]]]:
    """The kind of keys or values, and the addresses of each head, of its scales and of its zeros."""
    data = rows.codes if isinstance(rows, QuantizedRows) else rows
    stride = data.stride(0) * data.itemsize
    aligned = (data.data_ptr() | stride) % 16 == 0
    heads = _addresses(data, lengths)
    if not isinstance(rows, QuantizedRows):
        return RowKind(0, 0, False, data.stride(0), rows.shape[1], aligned), [(head, 0, 0) for head in heads]
    assert rows.scales.is_contiguous()
    assert rows.zeros.is_contiguous()
    by_tokens = rows.axis == "tokens"
    groups = [-(-length // rows.group) for length in lengths] if by_tokens else lengths
    columns = list(zip(heads, _addresses(rows.scales, groups), _addresses(rows.zeros, groups), strict=True))
    return RowKind(rows.bits, rows.group, by_tokens, data.stride(0), rows.shape[1], aligned), columns


def _addresses(table: Tensor, lengths: Sequence[int]) -> list[int]:
    """Where the rows of each head begin."""
    start, step = table.data_ptr(), table.stride(0) * table.itemsize
    return [start + rows * step for rows in accumulate(lengths[:-1], initial=0)]
