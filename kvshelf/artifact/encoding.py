"""Encoding of layers under a codec (see `codecs` for the codecs and their texts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Final

import torch
from torch import Tensor

from kvshelf.artifact.codecs import BITS, Codec, Precision, refused
from kvshelf.artifact.coder import LayerCoder
from kvshelf.artifact.packed import Packed, in_spans
from kvshelf.artifact.planes import encode_planes
from kvshelf.artifact.records import Entries, PackedRecord, Pruned, entries_from, parts_of
from kvshelf.kernels.groups import Axis
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.kernels.transfer import download

AXES: Final[Mapping[str, Axis]] = {"keys": "tokens", "values": "channels"}
"""What a group of a record's rows is made of."""


class Refusals:
    """What a codec refuses because of numbers. Those of a device are looked at together, so that no layer waits."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, str]] = []

    def unless(self, sound: Tensor, why: str) -> None:
        """Refuse unless `sound`, a bool without dimensions: raises `InvalidRequest` here for one on the CPU."""
        self._pending.append((sound, why))
        if sound.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Raise `InvalidRequest` for the first that is not sound. Waits for the device."""
        pending, self._pending = self._pending, []
        for sound, (_, why) in zip(download([sound for sound, _ in pending]), pending, strict=True):
            if not sound:
                raise refused(why)


def encode(
    codec: Codec,
    record: Entries,
    where: str = "the layer",
    coder: LayerCoder | None = None,
    classes: Tensor | None = None,
    whole_groups: bool = False,
    refusals: Refusals | None = None,
) -> Entries:
    """The record encoded under a codec, without `importance`; the input stays unchanged.

    Each part of `Parts` is encoded separately, with its own residual and share; pruned entries with others behind them
    have no residual. `where` names the record in errors. classes: those of `classes_of`, under klt with classes.
    whole_groups: let the residual grow until the entries before it fill their groups, so that others can be appended to
    these without coding them again. refusals: of several layers, which the caller settles. Raises `InvalidRequest` for
    a record that is quantized already, holds NaN or infinity, or lacks the importance that mixed chooses by.
    """
    if refusals is None:
        encoded = encode(codec, record, where, coder, classes, whole_groups, refusals := Refusals())
        refusals.settle()
        return encoded
    if codec.name == "none":
        return record
    parts = parts_of(record)
    for part in parts:
        part.require_codec(codec)
    if codec.name == "lossless":
        planes = []
        for part in parts:
            _require_plain(part, where)
            rows: dict[str, Any] = {name: encode_planes(getattr(part, name)) for name in part.row_names}
            planes.append(replace(part.to("cpu"), **rows, importance=None, precise=None))
        return entries_from(planes)
    if codec.name == "klt":
        if coder is None:
            raise refused("codec klt needs the transforms of the model; encode the cache by its engine: Engine.encoded")
        for part in parts:
            _require_encodable(part, where, refusals)
        by_class = _by_class(codec, parts, classes)
        pieces = [coder.encoded(piece, class_codec, where) for class_codec, piece in by_class]
    else:
        pieces = []
        for part in parts:
            # The newest entries beside pruned ones have a part and a residual of their own.
            with_residual = not isinstance(part, Pruned) or part is parts[-1]
            part_codec = codec if with_residual else replace(codec, residual=0)
            pieces += _pieces(part_codec, part, where, whole_groups, refusals)
    return entries_from(pieces) if pieces else record  # without pieces, the layer kept no entries


def apart(
    layers: Sequence[Entries], spans: Sequence[tuple[int, int]]
) -> list[tuple[list[PackedRecord], list[PackedRecord]]]:
    """For each layer, the records of its entries in protected `spans`, which no codec touches, and those of its other
    entries. The device is asked once for the counts of all layers."""
    if not spans:
        return [([], list(parts_of(entries))) for entries in layers]
    parts = [part for entries in layers for part in parts_of(entries)]
    inside = [in_spans(part.entry_positions, spans) for part in parts]
    counts = [
        torch.stack([head.sum() for head in torch.split(mask, part.lengths)])
        for mask, part in zip(inside, parts, strict=True)
    ]
    counted = zip(parts, inside, [numbers.tolist() for numbers in download(counts)], strict=True)
    return [_parted(list(islice(counted, len(parts_of(entries))))) for entries in layers]


def _parted(parts: Sequence[tuple[PackedRecord, Tensor, list[int]]]) -> tuple[list[PackedRecord], list[PackedRecord]]:
    """As `apart`, of one layer. parts: each with a mask of its entries in spans, and their number in each head."""
    protected, others = [], []
    for part, inside, counts in parts:
        other_counts = _others(part, counts)
        if any(counts):
            protected.append(replace(part.select(inside, counts), importance=None, precise=None))
        if any(other_counts):
            others.append(replace(part.select(~inside, other_counts), precise=part.precise) if any(counts) else part)
    return protected, others


def classes_of(codec: Codec, layers: Sequence[Entries], num_tokens: int) -> list[Tensor]:
    """The class of each entry of each layer, `[entries]` int64, under klt with classes. num_tokens: of the document.

    The most important entries of the whole cache are in the finest class, until it has its share of the document's
    entries, and so on; equal ones by their order. The last class takes the rest. One threshold for all layers, because
    layers that keep their own share of each class lose answers: on kvshelf-tiny, kvcues at half removed under
    `classes=1.5/4,shares=25/25` answers 90 % so, and 98 % by one threshold.
    """
    importance = [
        _importance(codec, part, f"layer {index}").cpu()
        for index, layer in enumerate(layers)
        for part in parts_of(layer)
    ]
    order = torch.cat(importance).argsort(descending=True, stable=True)
    whole = num_tokens * sum(layer.kv_heads for layer in layers)
    ends = torch.tensor([int(whole * share / 100) for share in accumulate(codec.shares[:-1])])
    classes = torch.empty_like(order)
    classes[order] = torch.bucketize(torch.arange(len(order)), ends, right=True)
    return list(torch.split(classes, [layer.entries for layer in layers]))


def _by_class(
    codec: Codec, parts: Sequence[PackedRecord], classes: Tensor | None
) -> Iterator[tuple[Codec, PackedRecord]]:
    """The records of one layer, each with the codec of its class."""
    if classes is None:
        yield from ((codec, part) for part in parts)
        return
    steps = [replace(codec, step=step, classes=(), shares=()) for step in codec.classes]
    for part, members in zip(parts, torch.split(classes, [part.entries for part in parts]), strict=True):
        for number, class_codec in enumerate(steps):
            chosen = (members == number).to(part.entry_positions.device)
            if chosen.any():
                yield class_codec, part.select(chosen)


def _pieces(
    codec: Codec, record: PackedRecord, where: str, whole_groups: bool, refusals: Refusals
) -> list[PackedRecord]:
    _require_encodable(record, where, refusals)
    split: tuple[tuple[Precision, Tensor, Sequence[int]], ...]
    if codec.name == "mixed":
        important, counts = _important(codec, record, where)
        split = ((codec.high, important, counts), (codec.low, ~important, _others(record, counts)))
    else:
        last, counts = _last(record, codec.residual, codec.group if whole_groups else 1)
        split = ((codec.name, ~last, _others(record, counts)), ("none", last, counts))
    return [
        _quantized(codec, record.select(chosen, lengths), precision, where, refusals)
        for precision, chosen, lengths in split
        if any(lengths)
    ]


def _others(record: PackedRecord, counts: Sequence[int]) -> list[int]:
    """The number of each head's entries beyond `counts`."""
    return [length - count for length, count in zip(record.lengths, counts, strict=True)]


def _important(codec: Codec, record: PackedRecord, where: str) -> tuple[Tensor, Sequence[int]]:
    """`[entries]` bool: the most important `share` of each head's entries, or as many as the policy says; ties go to
    the earlier entry. And their number in each head."""
    importance, counts = _importance(codec, record, where), _precise(codec, record, where)
    chosen = torch.zeros(record.entries, dtype=torch.bool, device=importance.device)
    heads = zip(record.offsets, torch.split(importance, record.lengths), strict=False)
    for (start, head), count in zip(heads, counts, strict=True):
        chosen.index_fill_(0, start + head.argsort(descending=True, stable=True)[:count], 1)
    return chosen, counts


def _precise(codec: Codec, record: PackedRecord, where: str) -> Sequence[int]:
    """How many entries of each head have more bits."""
    if codec.share != "policy":
        # The small term keeps 0.29 of 100 from rounding down to 28, as in budgets.
        return [int(length * codec.share + 1e-9) for length in record.lengths]
    if record.precise is None:
        raise refused(f"{where} does not say how many entries have more bits; give codec mixed a number as its share")
    return [min(count, length) for count, length in zip(record.precise, record.lengths, strict=True)]


def _importance(codec: Codec, record: PackedRecord, where: str) -> Tensor:
    """`[entries]` fp32."""
    if record.importance is None:
        raise refused(
            f"codec {codec.name} chooses by importance, and {where} carries none any more; encode the cache when it is "
            "compressed, under a policy that scores entries"
        )
    return record.importance


def _quantized(
    codec: Codec, record: PackedRecord, precision: Precision, where: str, refusals: Refusals
) -> PackedRecord:
    record = replace(record, importance=None, precise=None)
    if precision == "none":
        return record
    coding: dict[str, Any] = {"bits": BITS[precision], "group": codec.group}
    rows: dict[str, Any] = {
        name: QuantizedRows.quantize(getattr(record, name), record.row_lengths, axis=AXES[name], **coding)
        for name in record.row_names
    }
    why = f"{where} holds numbers too near the largest of {record.dtype} for codec {codec.name}"
    for array in rows.values():
        refusals.unless(array.finite, why)
    return replace(record, **rows)


def _last(record: Packed, count: int, group: int) -> tuple[Tensor, list[int]]:
    """`[entries]` bool: the last `count` entries of each head or a few more, behind whole groups; and their numbers."""
    last = torch.zeros(record.entries, dtype=torch.bool, device=record.entry_positions.device)
    before = [max(0, length - count) // group * group for length in record.lengths]
    for start, stop, whole in zip(record.offsets, record.offsets[1:], before, strict=False):
        last[start + whole : stop] = True
    return last, _others(record, before)


def _require_plain(record: PackedRecord, where: str) -> None:
    for name, rows in (("keys", record.keys), ("values", record.values)):
        if not isinstance(rows, Tensor):
            raise refused(f"the {name} of {where} are encoded already and are not encoded again")


def _require_encodable(record: PackedRecord, where: str, refusals: Refusals) -> None:
    _require_plain(record, where)
    for name, rows in (("keys", record.keys), ("values", record.values)):
        assert isinstance(rows, Tensor)
        why = f"the {name} of {where} hold NaN or infinity, which no quantizing codec can store"
        refusals.unless(torch.isfinite(rows).all(), why)
