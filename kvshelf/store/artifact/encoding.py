"""Encoding of layers under a codec (see `codecs` for the codecs and their texts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.store.artifact.codecs import BITS, Codec, Precision, refused
from kvshelf.store.artifact.packed import Packed
from kvshelf.store.artifact.records import LayerRecord, PackedRecord, Parts


class LayerCoder(Protocol):
    """Encodes the records of one layer under the codec `klt` (`Coder.layer` makes it)."""

    def encoded(self, record: PackedRecord, codec: Codec, where: str) -> PackedRecord: ...


def encode(codec: Codec, record: LayerRecord, where: str = "the layer", coder: LayerCoder | None = None) -> LayerRecord:
    """The record encoded under a codec, without `importance`; the input stays unchanged.

    Each part of `Parts` is encoded separately, with its own residual and share. `where` names the record in errors.
    Raises `InvalidRequest` for a record that is quantized already, holds NaN or infinity, or lacks the importance
    that mixed chooses by.
    """
    if codec.name == "none":
        return record
    parts = record.parts if isinstance(record, Parts) else (record,)
    if codec.name == "klt":
        if coder is None:
            raise refused("codec klt needs the transforms of the model; encode the cache by its engine: Engine.encoded")
        for part in parts:
            _require_encodable(part, where)
        coded = tuple(coder.encoded(part, codec, where) for part in parts)
        return coded[0] if len(coded) == 1 else Parts(coded)
    pieces = [piece for part in parts for piece in _pieces(codec, part, where)]
    if not pieces:  # the layer kept no entries
        return record
    return pieces[0] if len(pieces) == 1 else Parts(tuple(pieces))


def _pieces(codec: Codec, record: PackedRecord, where: str) -> list[PackedRecord]:
    _require_encodable(record, where)
    split: tuple[tuple[Precision, Tensor], ...]
    if codec.name == "mixed":
        important = _important(codec, record, where)
        split = ((codec.high, important), (codec.low, ~important))
    else:
        last = _last(record, codec.residual)
        split = ((codec.name, ~last), ("none", last))
    return [_quantized(codec, record.select(chosen), precision, where) for precision, chosen in split if chosen.any()]


def _important(codec: Codec, record: PackedRecord, where: str) -> Tensor:
    """`[entries]` bool: the most important `share` of each head's entries; ties go to the earlier entry."""
    if record.importance is None:
        raise refused(
            f"codec mixed chooses by importance, and {where} carries none any more; encode the cache when it is "
            "compressed, under a policy that scores entries"
        )
    chosen = torch.zeros(record.entries, dtype=torch.bool, device=record.importance.device)
    for start, length, head in zip(
        record.offsets, record.lengths, torch.split(record.importance, record.lengths), strict=False
    ):
        # The small term keeps 0.29 of 100 from rounding down to 28, as in budgets.
        count = int(length * codec.share + 1e-9)
        chosen[start + head.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def _quantized(codec: Codec, record: PackedRecord, precision: Precision, where: str) -> PackedRecord:
    if precision == "none":
        return replace(record, importance=None)
    assert isinstance(record.keys, Tensor)
    assert isinstance(record.values, Tensor)
    bits = BITS[precision]
    keys = QuantizedRows.quantize(record.keys, record.lengths, bits=bits, group=codec.group, axis="tokens")
    values = QuantizedRows.quantize(record.values, record.lengths, bits=bits, group=codec.group, axis="channels")
    if not (keys.finite and values.finite):
        raise refused(f"{where} holds numbers too near the largest of {record.dtype} for codec {codec.name}")
    return replace(record, keys=keys, values=values, importance=None)


def _last(record: Packed, count: int) -> Tensor:
    """`[entries]` bool: the last `count` entries of each head."""
    last = torch.zeros(record.entries, dtype=torch.bool, device=record.entry_positions.device)
    for start, stop in zip(record.offsets, record.offsets[1:], strict=False):
        last[max(start, stop - count) : stop] = True
    return last


def _require_encodable(record: PackedRecord, where: str) -> None:
    for name, rows in (("keys", record.keys), ("values", record.values)):
        if not isinstance(rows, Tensor):
            raise refused(f"the {name} of {where} are encoded already and are not encoded again")
        if not bool(torch.isfinite(rows).all()):
            raise refused(f"the {name} of {where} hold NaN or infinity, which no quantizing codec can store")
