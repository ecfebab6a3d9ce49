"""Protected tokens: no policy sees them, and they are put back once it has chosen among the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Entries, Kept, entries_from, parts_of
from kvshelf.kernels.transfer import upload, upload_numbers
from kvshelf.methods.policies.view import LayerView

_BEYOND: Final = 1 << 31
"""More than any position."""


def aside(layer: LayerView) -> Kept:
    """The entries of a layer's protected tokens. layer: as it is stored."""
    rows = upload([layer.document.protected.nonzero()[:, 0]], layer.keys.device)[0]
    return protected_entries(layer.keys[:, rows], layer.values[:, rows], rows)


def protected_entries(keys: Tensor, values: Tensor, places: Tensor) -> Kept:
    """The record of protected tokens at these places of the document, `[P]`. keys: `[kv_heads, P, D]`; values:
    `[kv_heads, P, Dv]`."""
    heads = len(keys)
    return Kept(
        keys=keys.flatten(0, 1),
        values=values.flatten(0, 1),
        entries_at=places.to(torch.int32).repeat(heads),
        offsets=offsets_of([len(places)] * heads),
        importance=torch.full((heads * len(places),), torch.inf, device=keys.device),
    )


def put_back(chosen: Entries, protected: Kept, places: Sequence[int]) -> Entries:
    """The entries that a policy chose among the tokens at these places of the document, and the protected ones. In one
    record where entries are tokens as they are, so that a cache under codec none has the records of any other."""
    at = upload_numbers(places, protected.entry_positions.device)
    parts = [part.at(at) for part in parts_of(chosen)]
    first, *others = parts
    if not others and type(first) is Kept and first.rope_mode == protected.rope_mode and not first.columns:
        return _merged(first, protected)  # without columns, as protected entries have none
    return entries_from([protected, *parts])


def _merged(chosen: Kept, protected: Kept) -> Kept:
    """The entries of both, those of a head in order of their positions."""
    records = (chosen, protected)
    positions = torch.cat([record.entry_positions for record in records])
    heads = torch.cat([_heads(record) for record in records])
    order = (heads * _BEYOND + positions).argsort()

    def together(name: str) -> Tensor:
        rows: Tensor = torch.cat([getattr(record, name) for record in records])[order]
        return rows

    return Kept(
        keys=together("keys"),
        values=together("values"),
        entries_at=positions[order],
        offsets=offsets_of([sum(pair) for pair in zip(chosen.lengths, protected.lengths, strict=True)]),
        rope_mode=chosen.rope_mode,
        importance=None if chosen.importance is None else together("importance"),
        precise=chosen.precise,
    )


def _heads(record: Kept) -> Tensor:
    """The head of each entry, `[entries]` int64."""
    device = record.entry_positions.device
    lengths = upload_numbers(record.lengths, device)
    return torch.arange(record.kv_heads, device=device).repeat_interleave(lengths, output_size=record.entries)
