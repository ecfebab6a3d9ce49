"""The private suffixes of a batch's rows: keys and values of each question and answer behind its document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.artifact.records import State
from kvshelf.kernels.prefix_attention import PackedPrefix, PrefixWeights
from kvshelf.kernels.select import pack
from kvshelf.methods.suffixes.base import Columns, SlotTable, SuffixPolicy

_FIRST_CAPACITY = 64


@dataclass(eq=False)
class SuffixRow:
    """One row: the place of its suffix, and the states behind it; None before its first step, and without states.

    logical: tokens that ran behind the document, which count positions. stored: entries of a KV head that are left of
    them, fewer where a suffix policy has reduced them. beside: entries that the row alone has in no slab, as heads have
    different numbers of them: of a KV head on average. most: the most entries in a slab that there will be; None: any
    number. first: the position of its first token.
    """

    most: int | None = None
    first: int = 0
    slab: Slab | None = None
    slot: int = -1
    logical: int = 0
    stored: int = 0
    beside: int = 0
    states: list[tuple[State, ...]] | None = None


class Slab:
    """Rows of one capacity. For each layer keys `[slots, kv_heads, capacity, D]` and values, with Dv for D, or one
    tensor of latents, made when the layer's first states arrive.

    A decode step reads all rows of a slab with one operation: a tensor per row would cost a call per row, layer and
    step. Capacities are 64, 128, 256 ... entries, so that a row costs at most twice its length or 64 entries, and a
    long question never makes its neighbours read its padding.

    Unused entries are zero, or what a reduction left: a masked entry must be finite, as a weight of 0 times NaN is NaN.
    """

    def __init__(self, capacity: int, num_layers: int) -> None:
        self.capacity = capacity
        self.slots = 0
        self._layers: list[tuple[Tensor, ...] | None] = [None] * num_layers
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers if layer is not None for tensor in layer)

    @property
    def empty(self) -> bool:
        return len(self._free) == self.slots

    def states(self, layer: int, *like: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all slots of a layer. Where they are still to be made, or slots to be added, those of
        `like`, `[1, kv_heads, N, D]`, give their heads, sizes, dtype and device."""
        present = self._layers[layer] or (None,) * len(like)
        grown = tuple(_room(states, self.slots, self.capacity, new) for states, new in zip(present, like, strict=True))
        self._layers[layer] = grown
        return grown

    def of_row(self, layer: int, row: SuffixRow) -> tuple[Tensor, ...]:
        """Keys and values of one row at a layer where it has some, `[kv_heads, capacity, D]`, not a copy."""
        of_layer = self._layers[layer]
        assert of_layer is not None
        return tuple(states[row.slot] for states in of_layer)

    def of(self, row: SuffixRow) -> tuple[tuple[Tensor, ...], ...]:
        """A copy of the states of a row, of each layer as in `Turn.layers`."""
        return tuple(
            tuple(states[row.slot, :, : row.stored].clone() for states in layer) if layer is not None else ()
            for layer in self._layers
        )

    def take(self, row: SuffixRow) -> None:
        """Give a row a slot here, and move its tokens from its previous slab."""
        if not self._free:
            self._free = list(range(self.slots, max(1, 2 * self.slots)))[::-1]
            self.slots = max(1, 2 * self.slots)
        slot, previous = self._free.pop(), row.slab
        if previous is not None:
            for layer, old in enumerate(previous._layers):
                if old is None or row.slot >= old[0].shape[0]:
                    continue  # the row has nothing at this layer yet
                for states, old_states in zip(self.states(layer, *old), old, strict=True):
                    states[slot, :, : row.stored] = old_states[row.slot, :, : row.stored]
            previous.release(row)
        row.slab, row.slot = self, slot

    def release(self, row: SuffixRow) -> None:
        """Free a row's slot. The other slots keep their numbers, because a forward pass under way uses them."""
        for layer in self._layers:
            if layer is not None and row.slot < layer[0].shape[0]:
                for states in layer:
                    states[row.slot].zero_()  # all of it: a step that failed may have written beyond the row's length
        self._free.append(row.slot)
        row.slab, row.slot = None, -1


class SuffixPool:
    """All suffixes of one batch."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._slabs: dict[int, Slab] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, those of free places included."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def reserve(self, row: SuffixRow, length: int) -> Slab:
        """The slab with room for a row of `length` entries; moves the row if it has outgrown its own."""
        if row.slab is None or row.slab.capacity < length:
            self._move(row, capacity_for(length, row.most))
        assert row.slab is not None
        return row.slab

    def insert(
        self, row: SuffixRow, place: int, count: int, layers: Iterable[tuple[int, tuple[Tensor, Tensor]]]
    ) -> None:
        """Put `count` entries before the row's entry `place`: of each layer keys `[kv_heads, count, D]` and values."""
        slab = self.reserve(row, row.stored + count)
        for layer, copied in layers:
            for states, new in zip(slab.of_row(layer, row), copied, strict=True):
                insert(states, place, row.stored, new)
        row.stored += count

    def shrink(self, row: SuffixRow, length: int) -> None:
        """Move a row to a smaller slab, if there is one with room for `length` entries."""
        capacity = capacity_for(length, row.most)
        if row.slab is not None and capacity < row.slab.capacity:
            self._move(row, capacity)

    def _move(self, row: SuffixRow, capacity: int) -> None:
        self._slabs.setdefault(capacity, Slab(capacity, self._num_layers)).take(row)
        self._drop_empty(capacity)

    def release(self, row: SuffixRow) -> None:
        """Free a row that has ended."""
        row.states = None
        if row.slab is not None:
            row.slab.release(row)
            self._drop_empty(None)

    def _drop_empty(self, but: int | None) -> None:
        self._slabs = {size: slab for size, slab in self._slabs.items() if size == but or not slab.empty}


@dataclass(frozen=True, eq=False)
class EntriesBeside:
    """An answer's entries of one layer that no slab can hold, as heads or layers have different numbers of them. They
    are read as a prefix, between the entries of a protected question and those that ran since the last reduction.

    positions and columns: as of a `Suffix`, `[kv_heads, M]`. there: `[kv_heads, M]` bool, which of these are entries,
    the last ones of each head.
    """

    prefix: PackedPrefix
    positions: Tensor
    columns: Columns
    there: Tensor

    @classmethod
    def of(
        cls, states: Sequence[Tensor], positions: Tensor, columns: Columns, there: Tensor, *, observed: bool
    ) -> EntriesBeside:
        """states: keys `[kv_heads, M, D]` and values. observed: whether attention is to tell their `weights`."""
        keys, values, _, lengths = pack(states[0], states[1], there)
        weights = PrefixWeights() if observed else None
        return cls(PackedPrefix(keys, values, tuple(lengths), weights=weights), positions, columns, there)

    @property
    def weights(self) -> Tensor | None:
        """What the newest token gave to each, `[kv_heads, group, M]` fp32, where heads have equally many."""
        return None if self.prefix.weights is None else self.prefix.weights.of_token

    @property
    def states(self) -> list[Tensor]:
        """Keys `[kv_heads, M, D]` and values, zeros where no entry is."""
        if self.prefix.stacked is not None:
            return [self.prefix.stacked.keys, self.prefix.stacked.values]
        dense = []
        for rows in (self.prefix.keys, self.prefix.values):
            assert isinstance(rows, Tensor)
            dense.append(rows.new_zeros(*self.there.shape, rows.shape[1]))
            dense[-1][self.there] = rows
        return dense


class NotedEntries:
    """Of one layer, the place of each stored entry among all tokens, and the policy's columns. A column has its first
    value where no entry is yet. Their memory grows with the row, by the capacities of slabs: budget and interval are
    the caller's, and may be far beyond what the answer will ever have.

    beside: the row's entries that are in no slab. slots: the tokens that share those in one.
    """

    def __init__(self, policy: SuffixPolicy) -> None:
        self._first = policy.columns
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._columns: Columns = {}
        self._tokens = 0
        """How many of the row's tokens it has a position for, or had."""
        self.beside: EntriesBeside | None = None
        self.slots: SlotTable | None = None

    def of(self, row: SuffixRow, heads: int, device: torch.device) -> tuple[Tensor, Columns]:
        """Positions `[kv_heads, S]` int64 and columns of the row's entries, not copies."""
        if row.stored > self._positions.shape[1]:
            self._grow(heads, capacity_for(row.stored, row.most), device)
        if new := row.logical - self._tokens:
            places = torch.arange(self._tokens, row.logical, device=device)
            self._positions[:, row.stored - new : row.stored] = places
            self._tokens = row.logical
        columns = {name: column[:, : row.stored] for name, column in self._columns.items()}
        return self._positions[:, : row.stored], columns

    def insert(self, row: SuffixRow, place: int, positions: Tensor, columns: Columns) -> None:
        """Put entries before the row's entry `place`. positions, and what is noted of them already: `[kv_heads, K]`."""
        heads, count = positions.shape
        self.of(row, heads, positions.device)
        if row.stored + count > self._positions.shape[1]:
            self._grow(heads, capacity_for(row.stored + count, row.most), positions.device)
        insert(self._positions, place, row.stored, positions)
        for name, column in self._columns.items():
            first = column.new_full(positions.shape, self._first[name])
            insert(column, place, row.stored, columns.get(name, first).to(column.device))

    def begin(self, slots: SlotTable | None, place: int) -> None:
        """Take the tokens that share entries which were put before the row's entry `place`, with their columns."""
        if slots is not None:
            first = {name: torch.full_like(slots.scales, value) for name, value in self._first.items()}
            owners = torch.where(slots.there, slots.owners + place, -1)
            self.slots = SlotTable(owners, slots.scales, first | slots.columns)

    def _grow(self, heads: int, capacity: int, device: torch.device) -> None:
        old = self._positions.shape[1]
        positions = torch.empty(heads, capacity, dtype=torch.int64, device=device)
        columns = {name: torch.full((heads, capacity), first, device=device) for name, first in self._first.items()}
        if old:
            positions[:, :old] = self._positions
            for name, column in self._columns.items():
                columns[name][:, :old] = column
        self._positions, self._columns = positions, columns

    def keep(self, positions: Tensor, columns: Columns) -> None:
        """Keep these of the entries that stay, and nothing of others."""
        stored = positions.shape[1]
        self._positions[:, :stored] = positions
        for name, column in columns.items():
            self._columns[name][:, :stored] = column
            self._columns[name][:, stored:] = self._first[name]


def insert(entries: Tensor, place: int, end: int, new: Tensor) -> None:
    """Put `new` `[kv_heads, K, ...]` before entry `place` of `entries` `[kv_heads, capacity, ...]`, of which those
    before `end` are in use, in place."""
    behind = place + new.shape[1]
    entries[:, behind : behind + end - place] = entries[:, place:end].clone()
    entries[:, place:behind] = new


def capacity_for(length: int, most: int | None = None) -> int:
    """Entries of memory for a row of `length` entries: the next power of two, at least 64. most: how many it will ever
    have; then no more than these, in steps of 64."""
    doubled = max(_FIRST_CAPACITY, 1 << (length - 1).bit_length())
    return doubled if most is None else min(doubled, -(-most // _FIRST_CAPACITY) * _FIRST_CAPACITY)


def _room(tensor: Tensor | None, slots: int, capacity: int, like: Tensor) -> Tensor:
    if tensor is not None and tensor.shape[0] >= slots:
        return tensor
    grown = like.new_zeros(slots, like.shape[1], capacity, like.shape[3])
    if tensor is not None:
        grown[: tensor.shape[0]] = tensor
    return grown
