"""Layer records cut and joined by KV heads, for processes that share the heads of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Entries, PackedRecord, entries_from, parts_of
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows


def cut(entries: Entries, first: int, last: int) -> Entries:
    """The KV heads `first` to `last - 1` of a layer, in their own memory. Raises `StateConflict` for coded layers."""
    return entries_from([_cut(part, first, last) for part in parts_of(entries)])


def joined(parts: Sequence[Entries]) -> Entries:
    """A layer whose heads are those of `parts`, one after the other. Rows must not be quantized."""
    if len(parts) == 1:
        return parts[0]
    return entries_from([_joined(records) for records in zip(*map(parts_of, parts), strict=True)])


def _cut(record: PackedRecord, first: int, last: int) -> PackedRecord:
    keys, values = record.rows
    rows, ends = slice(record.offsets[first], record.offsets[last]), offsets_of(record.column_lengths)
    fields: dict[str, Any] = {
        "keys": _rows_cut(keys, rows, first, last),
        "values": _rows_cut(values, rows, first, last),
        "entries_at": record.entry_positions[rows].clone(),
        "offsets": offsets_of(record.lengths[first:last]),
        "importance": None if record.importance is None else record.importance[rows].clone(),
        "precise": None if record.precise is None else record.precise[first:last],
        "columns": {name: numbers[ends[first] : ends[last]].clone() for name, numbers in record.columns.items()},
    }
    return replace(record, **fields, **record.own_cut(first, last))


def _rows_cut(rows: Rows, place: slice, first: int, last: int) -> Rows:
    if isinstance(rows, Tensor):
        return rows[place].clone()
    heads = rows.heads()[first:last]
    coded: dict[str, Any] = {
        name: torch.cat([getattr(head, name) for head in heads]) for name in ("codes", "scales", "zeros")
    }
    return replace(rows, **coded, lengths=rows.lengths[first:last])


def _joined(records: Sequence[PackedRecord]) -> PackedRecord:
    def of_all(name: str) -> Tensor:
        return torch.cat([getattr(record, name) for record in records])

    assert not any(isinstance(rows, QuantizedRows) for record in records for rows in record.rows)
    first = records[0]
    fields: dict[str, Any] = {
        "keys": of_all("keys"),
        "values": of_all("values"),
        "entries_at": of_all("entry_positions"),
        "offsets": offsets_of(list(chain.from_iterable(record.lengths for record in records))),
        "importance": None if first.importance is None else of_all("importance"),
        "precise": None if first.precise is None else tuple(n for record in records for n in record.precise or ()),
        "columns": {name: torch.cat([record.columns[name] for record in records]) for name in first.columns},
    }
    return replace(first, **fields, **first.own_joined(records))
