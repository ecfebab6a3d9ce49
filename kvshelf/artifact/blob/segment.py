"""Segments: the arrays of one layer as bytes, and back.

Keys and values of a plain record are one array each; of a quantized one, codes, scales and zeros. This module checks
what the header cannot show, both when writing and when reading, so that everything written can be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvshelf.artifact import positions
from kvshelf.artifact.blob.body import Body
from kvshelf.artifact.blob.header import Header
from kvshelf.artifact.blob.layer import (
    NO_DIMS,
    ChunkHeader,
    Dims,
    DtypeName,
    IndexedHeader,
    KeptHeader,
    LatentsHeader,
    Layer,
    MergedHeader,
    PrunedHeader,
    RecordHeader,
    Span,
    StateHeader,
    WindowHeader,
    class_bytes,
    key_width,
)
from kvshelf.artifact.codecs import BITS, Precision
from kvshelf.artifact.coded import CodedRows
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import (
    Chunk,
    Entries,
    Indexed,
    Kept,
    Latents,
    LayerRecord,
    Merged,
    PackedRecord,
    Pruned,
    Recent,
    State,
    States,
    Window,
    entries_from,
    entries_of,
    parts_of,
    states_of,
)
from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.kernels.groups import Axis, scales_shape
from kvshelf.kernels.quantize.rows import HeadRows, QuantizedRows, Rows

DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PRECISIONS: dict[int, Precision] = {bits: name for name, bits in BITS.items()}
_AXES: dict[str, Axis] = {"keys": "tokens", "values": "channels"}
_HEADERS: dict[str, type[RecordHeader]] = {
    "kept": KeptHeader,
    "pruned": PrunedHeader,
    "indexed": IndexedHeader,
    "window": WindowHeader,
    "chunk": ChunkHeader,
    "latents": LatentsHeader,
    "merged": MergedHeader,
}

Ints = npt.NDArray[np.int64]
Arrays = dict[str, memoryview]
"""The bytes of a record's arrays, in the order of `array_sizes`."""


@dataclass(frozen=True)
class Written:
    """A layer as it is written: its headers, and its arrays in segment order, which share memory with contiguous
    tensors."""

    dims: Dims
    records: list[RecordHeader]
    states: list[StateHeader]
    arrays: list[memoryview]


def write_layer(record: LayerRecord, num_tokens: int) -> Written:
    """Raises `InvalidRequest` for a record that the format cannot hold."""
    entries, states = entries_of(record), states_of(record)
    headers = [_state_header(state) for state in states]
    of_states = [_raw(state.tensor) for state in states]
    if entries is None:
        return Written(NO_DIMS, [], headers, of_states)
    parts = parts_of(entries)
    dims = Dims(_dtype_name(parts), entries.key_dim, entries.value_dim)
    written = [_write_record(part, num_tokens) for part in parts]
    try:
        _require_sound("the layer", entries, num_tokens)
        _require_rows("the layer", parts)
    except BlobError as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    arrays = [data for _, arrays in written for data in arrays.values()]
    return Written(dims, [header for header, _ in written], headers, arrays + of_states)


def read_layer(index: int, header: Header, body: Body) -> LayerRecord:
    """Read a layer whose segment `check_segment` has accepted. Its tensors are views of the body.

    Raises `BlobError` for what no digest can reveal: bytes that `write_layer` does not write.
    """
    record = view_layer(index, header, body)
    entries = entries_of(record)
    if entries is not None:
        found = zip(parts_of(entries), header.layers[index].runs, strict=True)
        _require_rows(f"layer {index}", [part for part, runs in found if runs])
    return record


def view_layer(index: int, header: Header, body: Body) -> LayerRecord:
    """As `read_layer`, before the rows have been read: `require_runs_sound` checks those of runs once they are there.
    Rows of records without runs are checked here."""
    layer = header.layers[index]
    described = zip(layer.records, layer.arrays, strict=True)
    parts = tuple(_Reader(record, spans, layer, body, header.num_tokens).record() for record, spans in described)
    states = tuple(
        State(
            state.role,
            state.number,
            body.tensor(layer.offset + span.offset, DTYPES[state.dtype], math.prod(state.dims)).view(state.dims),
        )
        for state, span in zip(layer.states, layer.state_spans, strict=True)
    )
    if not parts:
        return States(states)
    entries = entries_from(parts)
    _require_sound(f"layer {index}", entries, header.num_tokens)
    _require_rows(f"layer {index}", [part for part, runs in zip(parts, layer.runs, strict=True) if not runs])
    return States(states, entries) if states else entries


def require_runs_sound(where: str, part: PackedRecord, run_rows: int, runs: Sequence[int]) -> None:
    """Raise `BlobError` for what `read_layer` refuses in the rows of some runs. run_rows: of each head in a run. runs:
    counted from 0 in this record."""
    if not runs:
        return
    for rows in (part.keys, part.values):
        if isinstance(rows, QuantizedRows):
            _require_codes(where, _last_bytes(rows, run_rows, runs))


def _last_bytes(rows: QuantizedRows, run_rows: int, runs: Sequence[int]) -> HeadRows:
    """These runs of all heads, joined, with the last byte alone of each row's codes: all that `_require_codes` reads.
    Joined, because the operations on one run of one head take longer than its numbers."""
    found = [
        head.coded(start, min(start + run_rows, len(head)))
        for head in rows.heads()
        for start in (run * run_rows for run in runs)
        if start < len(head)
    ]
    return replace(
        found[0],
        codes=torch.cat([each.codes[:, -1:] for each in found]),
        scales=torch.cat([each.scales for each in found]),
        zeros=torch.cat([each.zeros for each in found]),
    )


def _dtype_name(parts: tuple[PackedRecord, ...]) -> DtypeName:
    for part in parts:
        if part.keys.dtype not in _DTYPE_NAMES or part.values.dtype != part.keys.dtype:
            raise InvalidRequest(
                f"keys are {part.keys.dtype} and values {part.values.dtype}; a blob holds one of "
                f"{', '.join(DTYPES)} for both"
            )
    return _DTYPE_NAMES[parts[0].dtype]


def _state_header(state: State) -> StateHeader:
    if state.tensor.dtype not in _DTYPE_NAMES:
        raise InvalidRequest(f"a state is {state.tensor.dtype}; a blob holds {', '.join(DTYPES)}")
    dims = list(state.tensor.shape)
    return StateHeader(role=state.role, number=state.number, dtype=_DTYPE_NAMES[state.tensor.dtype], dims=dims)


def _write_record(record: PackedRecord, num_tokens: int) -> tuple[RecordHeader, Arrays]:
    codec, group = _precision(record)
    arrays = _row_arrays("keys", record.keys) | _row_arrays("values", record.values)
    encoding, data = positions.encode(_ints(record.entry_positions), record.lengths, num_tokens)
    arrays["positions"] = memoryview(data)
    fields: dict[str, Any] = {
        "kind": record.kind,
        "rope_mode": record.rope_mode,
        "codec": codec,
        "group": group,
        "lengths": record.lengths,
        "position_encoding": encoding,
    }
    if isinstance(record, Window):
        fields["window"] = record.window
    elif isinstance(record, Chunk):
        fields["chunk"] = record.chunk
    elif isinstance(record, Pruned):
        arrays["channels"] = _raw(record.channels)
        fields["channels"] = record.channels.shape[1]
    elif isinstance(record, Indexed):
        arrays["summaries"] = _raw(record.summaries)
        fields |= {"block": record.block, "width": record.summaries.shape[1]}
    elif isinstance(record, Merged):
        slot_encoding, slot_data = positions.encode(_ints(record.slot_positions), record.slot_lengths, num_tokens)
        classes = _ints(record.slot_classes).astype(f"<u{class_bytes(record.lengths)}")
        arrays["slot_positions"] = memoryview(slot_data)
        arrays["slot_classes"] = memoryview(classes.tobytes())
        arrays["slot_scales"] = _raw(record.slot_scales.to(torch.float32))
        fields |= {"slot_lengths": record.slot_lengths, "slot_position_encoding": slot_encoding}
    return _HEADERS[record.kind](**fields, sizes=[len(data) for data in arrays.values()]), arrays


def _precision(record: PackedRecord) -> tuple[Precision, int]:
    """Codec and group of a record, which its keys and values must share."""
    keys, values = record.keys, record.values
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        return "none", 0
    if isinstance(keys, CodedRows) and isinstance(values, CodedRows):
        return "klt", 0
    if isinstance(keys, QuantizedRows) and isinstance(values, QuantizedRows):
        alike = (keys.bits, keys.group, keys.lengths) == (values.bits, values.group, values.lengths)
        if alike and (keys.axis, values.axis, keys.lengths) == ("tokens", "channels", tuple(record.lengths)):
            return _PRECISIONS[keys.bits], keys.group
    raise InvalidRequest(
        "a blob holds keys and values under one codec, keys in groups of entries and values in groups of channels"
    )


def _row_arrays(name: str, rows: Rows | CodedRows) -> Arrays:
    if isinstance(rows, Tensor):
        return {name: _raw(rows)}
    if isinstance(rows, CodedRows):
        return {f"{name}_coded": _raw(rows.data)}
    return {f"{name}_{what}": _raw(getattr(rows, what)) for what in ("codes", "scales", "zeros")}


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _ints(tensor: Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)


@dataclass(frozen=True)
class _Reader:
    """One record of a segment. The header has been checked against the size of the segment."""

    header: RecordHeader
    spans: dict[str, Span]
    layer: Layer
    body: Body
    num_tokens: int

    def record(self) -> PackedRecord:
        header = self.header
        fields: dict[str, Any] = {
            "keys": self._rows("keys", key_width(header, self.layer.dims)),
            "values": self._rows("values", self.layer.value_dim),
            "entries_at": self._positions("positions", header.position_encoding, header.lengths),
            "offsets": offsets_of(header.lengths),
            "rope_mode": header.rope_mode,
        }
        if isinstance(header, WindowHeader):
            return Window(**fields, window=header.window)
        if isinstance(header, ChunkHeader):
            return Chunk(**fields, chunk=header.chunk)
        if isinstance(header, LatentsHeader):
            return Latents(**fields)
        if isinstance(header, PrunedHeader):
            channels = self._tensor("channels", torch.int16, len(header.lengths), header.channels)
            return Pruned(**fields, channels=channels, full_dim=self.layer.key_dim)
        if isinstance(header, IndexedHeader):
            summaries = self._tensor("summaries", torch.bfloat16, header.blocks, header.width)
            return Indexed(**fields, block=header.block, summaries=summaries)
        if isinstance(header, KeptHeader):
            return Kept(**fields)
        classes = np.frombuffer(self._bytes("slot_classes"), f"<u{class_bytes(header.lengths)}")
        return Merged(
            **fields,
            slot_scales=self._tensor("slot_scales", torch.float32, sum(header.slot_lengths)),
            slot_classes=torch.from_numpy(classes.astype(np.int32)),
            slot_positions=self._positions("slot_positions", header.slot_position_encoding, header.slot_lengths)(),
            slot_offsets=offsets_of(header.slot_lengths),
        )

    def _rows(self, name: str, dim: int) -> Rows | CodedRows:
        header, dtype = self.header, DTYPES[self.layer.dtype]
        entries = sum(header.lengths)
        if header.codec == "klt":
            array = f"{name}_coded"
            data = self._tensor(array, torch.uint8, self.spans[array].nbytes)
            rows = CodedRows(data, tuple(header.lengths), dim, dtype)
            rows.require_sound(array)
            return rows
        if header.codec == "none":
            return self._tensor(name, dtype, entries, dim)
        bits, axis = BITS[header.codec], _AXES[name]
        shape = scales_shape(axis, header.group, header.lengths, dim)
        return QuantizedRows(
            codes=self._tensor(f"{name}_codes", torch.uint8, entries, -(-dim * bits // 8)),
            scales=self._tensor(f"{name}_scales", torch.bfloat16, *shape),
            zeros=self._tensor(f"{name}_zeros", torch.bfloat16, *shape),
            bits=bits,
            group=header.group,
            axis=axis,
            num_channels=dim,
            dtype=dtype,
            lengths=tuple(header.lengths),
        )

    def _tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return self.body.tensor(self.layer.offset + self.spans[name].offset, dtype, *shape)

    def _bytes(self, name: str) -> memoryview:
        span = self.spans[name]
        start = self.layer.offset + span.offset
        return self.body.memory[start : start + span.nbytes]

    def _positions(self, name: str, encoding: positions.Encoding, lengths: list[int]) -> Callable[[], Tensor]:
        """Check the positions; returns a function that expands them."""
        expand = positions.decode(encoding, self._bytes(name), lengths, self.num_tokens)
        return lambda: torch.from_numpy(expand().astype(np.int32))


def _require_sound(where: str, record: Entries, num_tokens: int) -> None:
    """Refuse records that attention would misread: codes without a number, slots without a class, repeated tokens,
    windows or chunks of other tokens than the last, an index of other tokens than the first, channels that there are
    not."""
    parts = parts_of(record)
    if isinstance(record, Recent):
        _require_last(where, record, num_tokens)
    for part in parts:
        if isinstance(part, Indexed):
            _require_index(where, part)
        if isinstance(part, Pruned):
            _require_channels(where, part)
        if isinstance(part, Merged):
            _require_classes(_ints(part.slot_classes), part.lengths, part.slot_lengths)
            if not bool(torch.isfinite(part.slot_scales).all()):
                raise BlobError(f"{where} has a slot whose scale is not finite", reason="not_finite")
    if len(parts) > 1:
        entries = [_by_head(part.entry_positions, part.lengths) for part in parts]
        _require_disjoint(where, entries)
        slots = [_by_head(part.slot_positions, part.slot_lengths) for part in parts if isinstance(part, Merged)]
        kept = [found for found, part in zip(entries, parts, strict=True) if isinstance(part, Kept)]
        _require_disjoint(where, slots + kept)


def _require_index(where: str, record: Indexed) -> None:
    first = np.arange(record.lengths[0])
    if not all(np.array_equal(_ints(head), first) for head in record.positions):
        raise BlobError(f"{where} has an index of other tokens than the document's first", reason="inconsistent")
    if not bool(torch.isfinite(record.summaries).all()):
        raise BlobError(f"{where} has a summary that is not finite", reason="not_finite")


def _require_channels(where: str, record: Pruned) -> None:
    channels = _ints(record.channels)  # [kv_heads, D']
    outside = (channels < 0) | (channels >= record.full_dim)
    if outside.any():
        raise BlobError(
            f"{where} has pruned keys with channel {channels[outside][0]}, of {record.full_dim}",
            reason="channel_out_of_range",
        )
    if (np.diff(channels, axis=1) <= 0).any():
        raise BlobError(f"{where} has the channels of pruned keys out of order, or one twice", reason="inconsistent")


def _require_last(where: str, record: Recent, num_tokens: int) -> None:
    last = np.arange(num_tokens - record.lengths[0], num_tokens)
    for head in record.positions:
        if not np.array_equal(_ints(head), last):
            raise BlobError(
                f"{where} has a {record.kind} of other tokens than the document's last", reason="inconsistent"
            )


def _require_rows(where: str, parts: Sequence[PackedRecord]) -> None:
    for part in parts:
        for rows in (part.keys, part.values):
            if isinstance(rows, QuantizedRows):
                _require_codes(where, rows)


def _require_codes(where: str, rows: QuantizedRows | HeadRows) -> None:
    if not rows.finite:
        raise BlobError(f"{where} has a scale or zero whose codes stand for no finite number", reason="not_finite")
    used = rows.num_channels * rows.bits % 8
    if used and bool((rows.codes[:, -1] >> used).any()):
        raise BlobError(f"{where} has codes whose unused bits are not zero", reason="nonzero_padding")


def _require_classes(classes: Ints, lengths: list[int], slot_lengths: list[int]) -> None:
    """Every slot names a class of its head, and every class has a slot."""
    counts = np.repeat(np.asarray(lengths, np.int64), slot_lengths)  # classes of each slot's head
    outside = (classes < 0) | (classes >= counts)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise BlobError(
            f"slot {first} names class {int(classes[first])} of a head of {int(counts[first])}",
            reason="class_out_of_range",
        )
    starts = np.repeat(np.asarray(offsets_of(lengths)[:-1], np.int64), slot_lengths)
    if not np.bincount(classes + starts, minlength=sum(lengths)).all():
        raise BlobError("a class has no slot, so that nothing could ever read it", reason="class_without_slot")


def _by_head(found: Tensor, lengths: list[int]) -> Ints:
    """Positions as numbers that are distinct across heads, ascending."""
    return _ints(found) + np.repeat(np.arange(len(lengths), dtype=np.int64) << 31, lengths)


def _require_disjoint(where: str, parts: list[Ints]) -> None:
    """Refuse a head's position that is in two parts. Sorts, because the header would set the size of a bitmap."""
    together = np.sort(np.concatenate(parts), kind="stable")  # linear, because each part is an ascending run
    twice = together[1:][np.diff(together) == 0]
    if twice.size:
        position = int(twice[0]) % (1 << 31)
        raise BlobError(f"{where} has position {position} of a head in two records", reason="positions_overlap")
