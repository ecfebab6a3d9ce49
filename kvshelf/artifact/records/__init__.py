"""Layer records: the entries kept of one layer of a KV cache, and how attention reads them.

`Kept`     some of the entries, unchanged
`Pruned`   some of the entries, their keys without some of the channels
`Indexed`  the first entries of every head, with a summary of each block of them, by which a question finds blocks
`Window`   the last entries of a layer with a sliding window, all of them
`Chunk`    those of the document's unfinished chunk, of a layer with chunked attention
`Latents`  latents of some of the tokens, from which the model makes the keys and values of all heads (MLA)
`Merged`   classes of merged entries, and the slots that say which tokens a class stands for, after EMS
`Parts`    several of these at once, their entries disjoint: mixed precision, a residual in full precision
`States`   the recurrent and convolution states of a layer, beside its entries or without any

A file each. Keys and values are tensors or `QuantizedRows`. All kinds have `nbytes` and `to(device)`, and those of
entries `kv_heads`, `entries`, `uniform`, `positions`, `dense()` and `prefixes(rotate)`. What a blob has of a kind is in
its file of `kvshelf.artifact.blob.kinds`, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvshelf.artifact.packed import Packed
from kvshelf.artifact.records.indexed import Indexed
from kvshelf.artifact.records.kept import Kept
from kvshelf.artifact.records.latents import Latents
from kvshelf.artifact.records.merged import Merged
from kvshelf.artifact.records.parts import Parts
from kvshelf.artifact.records.pruned import Pruned
from kvshelf.artifact.records.recent import Chunk, Recent, Window
from kvshelf.artifact.records.states import State, States

__all__ = [
    "RECORDS",
    "Chunk",
    "Entries",
    "Indexed",
    "Kept",
    "Latents",
    "LayerRecord",
    "Merged",
    "PackedRecord",
    "Parts",
    "Pruned",
    "Recent",
    "State",
    "States",
    "Window",
    "entries_from",
    "entries_of",
    "is_latent",
    "parts_of",
    "states_of",
    "with_entries",
]

PackedRecord = Packed
"""The kinds that hold entries themselves."""

Entries = PackedRecord | Parts
"""Every kind that has entries."""

LayerRecord = Entries | States
"""Every kind of layer record. Attention, blob and export each handle all of them and refuse others by name."""

RECORDS: Final[Mapping[str, type[PackedRecord]]] = {
    record.kind: record for record in (Kept, Pruned, Indexed, Window, Chunk, Latents, Merged)
}
"""The kinds of which a blob has records (`kvshelf.artifact.blob.kinds`), by name."""


def entries_of(record: LayerRecord) -> Entries | None:
    """The entries of a layer; None where it has none."""
    return record.beside if isinstance(record, States) else record


def parts_of(entries: Entries) -> tuple[PackedRecord, ...]:
    """The records that hold entries themselves."""
    return entries.parts if isinstance(entries, Parts) else (entries,)


def entries_from(parts: Sequence[PackedRecord]) -> Entries:
    """The inverse of `parts_of`, for at least one record."""
    return parts[0] if len(parts) == 1 else Parts(tuple(parts))


def is_latent(entries: Entries) -> bool:
    """Whether a layer holds latents."""
    return parts_of(entries)[0].latent


def states_of(record: LayerRecord) -> tuple[State, ...]:
    """The states of a layer."""
    return record.states if isinstance(record, States) else ()


def with_entries(record: LayerRecord, entries: Entries) -> LayerRecord:
    """The layer with other entries in place of its own."""
    return replace(record, beside=entries) if isinstance(record, States) else entries
