"""The documents of a step, each with its slots, as recorded passes read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor

from kvshelf.engine.attention.attachment import Attached, Wait, block
from kvshelf.engine.decode.selection import Selection
from kvshelf.kernels.prefix_attention import BatchLayout, Prefix
from kvshelf.kernels.prefix_attention.heads import PrefixKind, again
from kvshelf.kernels.prefix_attention.work import Setting, TableClass, TabledPrefix, WorkTable, table_of, work_of


class ComposedTables(NamedTuple):
    """The tables by which kernels read all documents of a composition. of: the class; layers: those with prefixes;
    numbers: of one layer behind the other."""

    of: TableClass
    layers: tuple[int, ...]
    numbers: Tensor


class Reading(NamedTuple):
    """How passes have read documents by tables: other documents of these kinds get theirs without a pass. layers: those
    with prefixes."""

    layers: tuple[int, ...]
    setting: Setting
    kinds: tuple[PrefixKind, ...]


class Composition:
    """documents: as their slots see them. layout: of the slots, without suffixes. begins: `[slots]` int32 on the
    device, the position at which the suffix of each begins. tables: None: it has none, or no pass has told yet.
    nbytes: of all that kernels read its documents by."""

    def __init__(
        self,
        key: object,
        shares: Sequence[tuple[Attached | Selection, int]],
        device: torch.device,
        readings: Collection[Reading],
        ends: Sequence[object],
    ) -> None:
        """key: what other compositions have not. readings: by earlier passes. ends: as of a `Seating`."""
        self.key = key
        self._ends = ends
        # What one answer alone reads may have entries in other layers than documents have.
        self._selected = any(isinstance(document, Selection) for document, _ in shares)
        self.documents = [SeatedDocument(document) for document, _ in shares]
        self.layout = BatchLayout(tuple(slots for _, slots in shares), (), device)
        starts = torch.tensor([document.next_position for document, _ in shares])
        self.begins = starts.repeat_interleave(torch.tensor(self.layout.shares)).to(device, torch.int32)
        self.tables: ComposedTables | None = None
        self.nbytes = 0
        for layers, setting in {(reading.layers, reading.setting) for reading in readings}:
            tables = [
                work_of(prefixes, self.layout, setting) for prefixes in map(self._prefixes, layers) if any(prefixes)
            ]
            self._compose(layers, [table for table in tables if table is not None and not table.streamed])
        if self.tables is not None and self.reading not in readings:
            self.tables = None

    @property
    def reading(self) -> Reading | None:
        """By its tables."""
        tables = self.tables
        return None if tables is None else Reading(tables.layers, tables.of.setting, tables.of.kinds)

    def ran(self) -> None:
        """Note by which tables a pass has read its documents. Those of a pass that reads any other way are its own."""
        layers = tuple(layer for layer in self.documents[0].layers if any(self._prefixes(layer)))
        tables = [table_of(list(chain(*self._prefixes(layer)))) for layer in layers]
        self.nbytes = sum(table.nbytes for table in tables if table is not None)
        plain = [table for table in tables if table is not None and not table.streamed]
        if not any(kind.selected for table in plain for kind, _ in table.launches):
            self._compose(layers, plain)

    def _compose(self, layers: tuple[int, ...], tables: Sequence[WorkTable]) -> None:
        self.nbytes = sum(table.nbytes for table in tables)
        if self._selected or len(tables) != len(layers):
            return
        of = TableClass.of(tables, self.layout.num_tokens)
        if of is not None:
            self.tables = ComposedTables(of, layers, torch.cat([of.numbers(table) for table in tables]))
            self.nbytes += self.tables.numbers.nbytes

    def _prefixes(self, layer: int) -> list[tuple[Prefix, ...]]:
        return [document.prefixes(layer) for document in self.documents]


class SeatedDocument:
    """A document as its slots see it: by prefixes of their own. What a form of attention remembers of a prefix, such as
    a table of work on the device, is then made for these slots and lives as long as they."""

    def __init__(self, document: Attached | Selection) -> None:
        self._document = ref(document)
        self._prefixes: dict[int, tuple[Prefix, ...]] = {}

    @property
    def layers(self) -> list[int]:
        """Those that have been read."""
        return list(self._prefixes)

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        """Those of the document, without a copy of their tensors."""
        if layer not in self._prefixes:
            document = self._document()
            assert document is not None, "its rows hold it"
            self._prefixes[layer] = tuple(map(again, document.prefixes(layer, wait)))
        return self._prefixes[layer]


class TabledDocuments:
    """All documents of a composition, as one, where those of others of its class can be seen in their place."""

    def __init__(self, tables: ComposedTables) -> None:
        self._numbers = tables.numbers.clone()
        parts = self._numbers.view(len(tables.layers), -1)
        self._prefixes = {
            layer: TabledPrefix(tables.of.table(part)) for layer, part in zip(tables.layers, parts, strict=True)
        }

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    def take(self, tables: ComposedTables) -> None:
        """See those of another one."""
        self._numbers.copy_(tables.numbers)

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:  # noqa: ARG002
        """One in place of all, where there are some."""
        tabled = self._prefixes.get(layer)
        return () if tabled is None else (cast(Prefix, tabled),)  # to all but the kernels
