"""The layers of a stored cache, the parent, joined with those of tokens that are appended to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kvshelf.artifact.blob.layer import MAX_RECORDS
from kvshelf.artifact.codecs import BITS, Codec, refused
from kvshelf.artifact.coder import plain_record
from kvshelf.artifact.encoding import apart
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.planes import PlaneRows, encode_planes
from kvshelf.artifact.records import (
    Entries,
    LayerRecord,
    PackedRecord,
    Recent,
    entries_from,
    entries_of,
    parts_of,
    with_entries,
)
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows, by_head, plain

_JOIN_AT: Final = 12
"""Records of a layer from which on neighbours are joined, which copies them. Attention reads each by an operation."""

Encode = Callable[[Sequence[LayerRecord]], Sequence[LayerRecord]]
"""Encodes layers under the parent's codec, in whole groups."""


def placed(entries: Entries, first: int) -> Entries:
    """The entries of a document as those of one in which its first token stands at position `first`."""
    if not first:
        return entries
    return entries_from([part.placed(first) for part in parts_of(entries)])


def followed(parent: Sequence[LayerRecord], appended: Sequence[LayerRecord]) -> list[LayerRecord]:
    """The layers of a document once tokens are appended to it, without a codec. parent, appended: the layers of both,
    the appended ones at their places in the whole document."""
    return [_with_parts(new, (*_staying(old), *_parts(new))) for old, new in zip(parent, appended, strict=True)]


def grown(
    parent: Sequence[LayerRecord], appended: Sequence[LayerRecord], codec: str, encode: Encode
) -> list[LayerRecord]:
    """As `followed`, under the codec of the parent. The appended layers are not encoded yet; `encode` does it. Records
    of the parent stay as they are, so that a home has one copy of their bytes. Only windows and chunks, states, and the
    residual of a quantizing codec give way.

    Raises `InvalidRequest` where a layer would have more records than a blob holds.
    """
    cut = [_cut(old, Codec.parse(codec)) for old in parent]
    unencoded = [
        _with_parts(new, _with_residual(residual, new)) for (_, residual), new in zip(cut, appended, strict=True)
    ]
    layers: list[LayerRecord] = []
    for (staying, _), new in zip(cut, encode(unencoded), strict=True):
        parts = (*staying, *_parts(new))
        if len(parts) >= _JOIN_AT:
            parts = joined(parts)
        if len(parts) > MAX_RECORDS:
            raise InvalidRequest(
                f"this cache has been appended to so often that its layers would have {len(parts)} records, and a blob "
                f"holds {MAX_RECORDS}; records under codec {codec} cannot be joined. Compress the whole document anew",
                param="cache_id",
            )
        layers.append(_with_parts(new, parts))
    return layers


def joined(parts: Sequence[PackedRecord]) -> tuple[PackedRecord, ...]:
    """The records of a layer, fewer where the rows of one can stand behind those of another just as they are: plain
    ones, and codes behind whole groups. A first record with most of the entries stays alone: it is what a home has one
    copy of for all that grew from it."""
    alone = 1 if parts[0].entries > sum(part.entries for part in parts[1:]) else 0
    groups: list[list[PackedRecord]] = [[part] for part in parts[:alone]]
    for part in parts[alone:]:
        group = next((group for group in groups[alone:] if _continues(group[-1], part)), None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    return tuple(group[0] if len(group) == 1 else _one(group) for group in groups)


def plain_again(layer: LayerRecord, spans: Sequence[tuple[int, int]]) -> LayerRecord:
    """A layer under a quantizing codec with plain rows, its residual behind the entries that it was cut from, so that
    it can be encoded anew; what lies in protected `spans` stays a record of its own. Raises `InvalidRequest` for kinds
    of records that do not go on in another."""
    entries = entries_of(layer)
    if entries is None or isinstance(entries, Recent):
        return layer
    ((protected, others),) = apart([entries], spans)
    parts = [replace(part, keys=plain(part.rows[0]), values=plain(part.rows[1])) for part in others]
    if len(parts) > 1:
        if not all(part.continues and _alike(parts[0], part) for part in parts):
            raise refused("records of this kind are not coded a second time")
        parts = [_one(parts)]
    return with_entries(layer, entries_from([*protected, *parts]))


def _parts(layer: LayerRecord) -> tuple[PackedRecord, ...]:
    entries = entries_of(layer)
    return () if entries is None else tuple(part for part in parts_of(entries) if part.entries)


def _staying(layer: LayerRecord) -> tuple[PackedRecord, ...]:
    """The records of a layer that tokens behind it leave as they are."""
    return tuple(part for part in _parts(layer) if not isinstance(part, Recent))


def _cut(layer: LayerRecord, codec: Codec) -> tuple[tuple[PackedRecord, ...], PackedRecord | None]:
    """The records of a layer that stay, and its residual, which does not."""
    staying = _staying(layer)
    if codec.name not in BITS or not staying:
        return staying, None
    last = staying[-1]
    if not last.continues or last.quantized:
        return staying, None
    return staying[:-1], last


def _with_residual(residual: PackedRecord | None, new: LayerRecord) -> tuple[PackedRecord, ...]:
    """The parent's residual and the new entries, if possible as one record, in which fewer groups are cut short."""
    parts = _parts(new)
    if residual is None:
        return parts
    if len(parts) == 1 and _alike(residual, parts[0]):
        return (_one([replace(residual, importance=None), replace(parts[0], importance=None)]),)
    return (residual, *parts)


def _with_parts(layer: LayerRecord, parts: Sequence[PackedRecord]) -> LayerRecord:
    """The layer with these records in place of its own; as it is without any."""
    return with_entries(layer, entries_from(parts)) if parts else layer


def _continues(first: PackedRecord, then: PackedRecord) -> bool:
    """Whether the rows of `then` can stand behind those of `first` in one record, and take the same numbers there."""
    if not _alike(first, then) or not first.continues or first.dtype != then.dtype:
        return False
    rows, others = first.keys, then.keys
    if isinstance(rows, QuantizedRows) and isinstance(others, QuantizedRows):
        return (rows.bits, rows.group) == (others.bits, others.group) and not any(n % rows.group for n in rows.lengths)
    return any(isinstance(rows, kind) and isinstance(others, kind) for kind in (Tensor, PlaneRows))


def _alike(first: PackedRecord, then: PackedRecord) -> bool:
    """Whether they are of one kind, with the same columns."""
    return (
        type(first) is type(then) and first.rope_mode == then.rope_mode and first.columns.keys() == then.columns.keys()
    )


def _one(records: Sequence[PackedRecord]) -> PackedRecord:
    """Records of which each continues the one before, as one."""
    first = records[0]
    if isinstance(first.keys, PlaneRows):
        whole = _one([plain_record(record) for record in records])
        coded = [encode_planes(rows) for rows in whole.rows]  # type: ignore[arg-type]  # tensors, once decoded
        return replace(whole, keys=coded[0], values=coded[1])
    lengths = [sum(of_head) for of_head in zip(*(record.lengths for record in records), strict=True)]
    keys, values = (_rows([record.rows[which] for record in records], records, lengths) for which in (0, 1))
    columns = {
        name: _by_head([torch.split(record.columns[name], record.lengths) for record in records])
        for name in first.columns
    }
    return replace(
        first,
        keys=keys,
        values=values,
        entries_at=_by_head([record.positions for record in records]),
        offsets=offsets_of(lengths),
        importance=None,
        precise=None,
        columns=columns,
    )


def _rows(rows: Sequence[Rows], records: Sequence[PackedRecord], lengths: Sequence[int]) -> Rows:
    heads = [by_head(array, record.lengths) for array, record in zip(rows, records, strict=True)]
    first = rows[0]
    if isinstance(first, Tensor):
        return _by_head(heads)  # type: ignore[arg-type]  # all are tensors
    codes, scales, zeros = (
        _by_head([[getattr(head, name) for head in record_heads] for record_heads in heads])
        for name in ("codes", "scales", "zeros")
    )
    return replace(first, codes=codes, scales=scales, zeros=zeros, lengths=tuple(lengths))


def _by_head(records: Sequence[Sequence[Tensor]]) -> Tensor:
    """Tensors of each record and head, `[rows, ...]`, as one, head by head."""
    return torch.cat([rows for of_head in zip(*records, strict=True) for rows in of_head])
