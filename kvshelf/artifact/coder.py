"""The codec `klt` for one model, by its transforms and its RoPE; and plain rows from those of any coding codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from kvshelf.artifact.codecs import Codec, refused
from kvshelf.artifact.coded import FIRST_TOKENS, CodedRows, Turn, encode_rows, states_together
from kvshelf.artifact.packed import Packed
from kvshelf.artifact.planes import PlaneRows
from kvshelf.artifact.records import LayerRecord, Merged, PackedRecord, entries_from, entries_of, parts_of, with_entries
from kvshelf.artifact.transforms import STEP_PARTS, Kind, RowTransform, Transforms
from kvshelf.kernels.ans import Tables


class LayerDecoder(Protocol):
    """Makes plain rows of the records of one layer."""

    def decoded(self, record: PackedRecord) -> PackedRecord: ...


class CacheDecoder(Protocol):
    """Makes plain rows of the caches of one model: a `Coder`, or an `engine.forward.projection.Projection`."""

    def layer(self, index: int, repositioned: bool) -> LayerDecoder: ...


@dataclass(frozen=True, eq=False)
class Coder:
    """Encodes and decodes caches of one model. rotate and unrotate: its RoPE."""

    transforms: Transforms
    rotate: Turn
    unrotate: Turn

    def layer(self, index: int, repositioned: bool) -> LayerCoder:
        """For the records of one layer. repositioned: of a cache whose keys stand at their places within it."""
        return LayerCoder(self, self.transforms.layers[index], self.transforms.tables, repositioned)


@dataclass(frozen=True, eq=False)
class LayerCoder:
    """Encodes and decodes the records of one layer. Made by `Coder.layer`."""

    coder: Coder
    transform: Mapping[Kind, RowTransform]
    tables: Tables
    repositioned: bool

    def encoded(self, record: PackedRecord, codec: Codec, where: str) -> PackedRecord:
        """The record with coded rows, on the CPU. Raises `InvalidRequest` for `heads=joint` of different tokens."""
        record = record.to("cpu")
        assert isinstance(record.keys, Tensor)
        assert isinstance(record.values, Tensor)
        joint = not isinstance(record, Merged) and _alike(record)
        if codec.heads == "joint" and not joint:
            raise refused(f"the heads of {where} keep different tokens, and heads=joint transforms them together")
        joint = joint and codec.heads != "each"
        unrotate = self.coder.unrotate if record.rope_mode == "baked" else None

        def coded(kind: Kind, rows: Tensor, undo: Turn | None, positions: list[Tensor]) -> CodedRows:
            transform = self.transform[kind]
            step = codec.step * (transform.multiplier if codec.steps == "kl" else 1)
            return encode_rows(
                torch.split(rows, record.lengths),
                record.positions,
                positions,
                transform,
                self.tables,
                step_parts=round(step * STEP_PARTS),
                joint=joint,
                undo=undo,
            )

        places = self._places(record)
        keys = coded("keys", record.keys, unrotate, places)
        rows = record.values
        if self.transform["values"].joint_slope is not None:
            rows = rows.float() - self._foretold(record, keys.states(self.transform["keys"], self.tables), joint=joint)
        values = replace(coded("values", rows, None, places), dtype=record.values.dtype)
        return replace(record, keys=keys, values=values, importance=None, precise=None)

    def decoded(self, record: PackedRecord) -> PackedRecord:
        """The record with plain rows. Raises `BlobError` for streams that no encoder writes."""
        if not _coded(record):
            return record
        states = (rows.states(self.transform[kind], self.tables) for kind, rows in _coded(record).items())
        return self._finished(record, *states)

    def on(self, device: torch.device) -> LayerCoder:
        """The decoder whose transforms are on a device."""
        return replace(self, transform={kind: rows.decoder_on(device) for kind, rows in self.transform.items()})

    def _finished(self, record: PackedRecord, states: Tensor, values: Tensor) -> PackedRecord:
        """The record with plain rows, from the states of its keys and values, on their device."""
        assert isinstance(record.keys, CodedRows)
        assert isinstance(record.values, CodedRows)
        rotate = self.coder.rotate if record.rope_mode == "baked" else None
        places = [places.to(states.device) for places in self._places(record)]
        keys = record.keys.placed(states, places, rotate)
        if self.transform["values"].joint_slope is not None:
            values += self._foretold(record, states, joint=record.values.joint)
        return replace(record, keys=keys, values=record.values.placed(values, (), None))

    def _foretold(self, record: Packed, keys: Tensor, *, joint: bool) -> Tensor:
        """How far values `[entries, D]` fp32 are expected to be from their means: foretold from decoded keys, before
        the rotation, which gives other last bits in each form. 0 for the first tokens, whose keys are unlike others."""
        values = self.transform["values"]
        assert values.joint_slope is not None
        assert values.per_head_slope is not None
        heads = torch.split(keys, record.lengths)
        states = [rows - mean for rows, mean in zip(heads, self.transform["keys"].mean, strict=True)]
        if joint:
            whole = torch.cat(states, dim=1) @ values.joint_slope
            expected = torch.cat(torch.split(whole, values.per_head_slope.shape[2], dim=1))
        else:
            expected = torch.cat([rows @ slope for rows, slope in zip(states, values.per_head_slope, strict=True)])
        first = torch.cat(record.positions).to(keys.device) < FIRST_TOKENS
        return expected.masked_fill_(first[:, None], 0)

    def _places(self, record: Packed) -> list[Tensor]:
        """The positions that the keys of each head are rotated to, on the CPU, as the keys are while they are coded."""
        if self.repositioned:
            return [torch.arange(length) for length in record.lengths]
        return [positions.cpu() for positions in record.positions]


def plain_layers(
    layers: Mapping[int, LayerRecord], coder: Coder, repositioned: bool, device: torch.device
) -> dict[int, LayerRecord]:
    """As `plain_layer`, of several layers at once, whose rows are then on a device that decodes streams side by side.
    Takes `codes_bytes` of all layers, and twice that of one. Raises as `plain_layer`, whichever of the layers it is."""
    records: dict[int, list[PackedRecord]] = {
        index: [plain_record(part) for part in parts_of(entries)]
        for index, layer in layers.items()
        if (entries := entries_of(layer)) is not None
    }
    coders = {index: coder.layer(index, repositioned) for index in records}
    arrays = [
        (rows, coders[index].transform[kind])
        for index, parts in records.items()
        for part in parts
        for kind, rows in _coded(part).items()
    ]
    states = states_together(arrays, coder.transforms.tables, device)
    plain: dict[int, LayerRecord] = {}
    for index, layer in layers.items():
        parts = [
            coders[index].on(device)._finished(part, next(states), next(states)) if _coded(part) else part
            for part in records.get(index, ())
        ]
        plain[index] = with_entries(layer, entries_from(parts)) if parts else layer
    return plain


def codes_bytes(layer: LayerRecord) -> int:
    """Bytes of a layer's codes once they are decoded, as fp32."""
    entries = entries_of(layer)
    parts = () if entries is None else parts_of(entries)
    return sum(prod(rows.shape) * torch.float32.itemsize for part in parts for rows in _coded(part).values())


def plain_layer(layer: LayerRecord, coder: CacheDecoder | None, index: int, repositioned: bool) -> LayerRecord:
    """A layer of a cache with plain rows in place of those under codec klt or lossless, and of residuals. coder: of
    klt, or of residuals; lossless needs none. index, repositioned: as of `Coder.layer`. Raises `BlobError` for
    streams that no encoder writes."""
    entries = entries_of(layer)
    if entries is None:
        return layer
    decoder = None if coder is None else coder.layer(index, repositioned)
    return with_entries(layer, entries_from([plain_record(part, decoder) for part in parts_of(entries)]))


def plain_record(record: PackedRecord, decoder: LayerDecoder | None = None) -> PackedRecord:
    """As `plain_layer`, of one record."""
    rows = {name: getattr(record, name) for name in record.row_names}
    planes: dict[str, Any] = {name: array.decode() for name, array in rows.items() if isinstance(array, PlaneRows)}
    record = replace(record, **planes) if planes else record
    return record if decoder is None else decoder.decoded(record)


def _coded(record: PackedRecord) -> dict[Kind, CodedRows]:
    """The keys and the values of a coded record; of any other record nothing."""
    rows: dict[Kind, Any] = {"keys": record.keys, "values": record.values}
    return rows if all(isinstance(array, CodedRows) for array in rows.values()) else {}


def _alike(record: Packed) -> bool:
    if not record.uniform:
        return False
    positions = record.entry_positions.view(record.kv_heads, -1)
    return bool((positions == positions[:1]).all())
