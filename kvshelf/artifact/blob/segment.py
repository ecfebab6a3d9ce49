"""The arrays of one layer as bytes, and back; both ways check what the header cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvshelf.artifact import records
from kvshelf.artifact.blob.body import Body
from kvshelf.artifact.blob.header import Header
from kvshelf.artifact.blob.kinds import KINDS
from kvshelf.artifact.blob.kinds.record import Arrays, Dims, DtypeName, Ints, RecordHeader, ints
from kvshelf.artifact.blob.layer import NO_DIMS, Layer, Span, StateHeader
from kvshelf.artifact.codecs import BITS, CODED, Precision
from kvshelf.artifact.coded import CodedRows
from kvshelf.artifact.encoding import AXES
from kvshelf.artifact.packed import Stored, offsets_of
from kvshelf.artifact.planes import PlaneRows
from kvshelf.artifact.positions import Encoding, decode, encode
from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.kernels.groups import scales_shape
from kvshelf.kernels.quantize.rows import HeadRows, QuantizedRows

DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PRECISIONS: dict[int, Precision] = {bits: name for name, bits in BITS.items()}
_PLAIN_OR_CODED: dict[type, Precision] = {Tensor: "none", CodedRows: "klt", PlaneRows: "lossless"}


@dataclass(frozen=True)
class Written:
    """A layer's headers and its arrays in segment order. The arrays share memory with contiguous tensors."""

    dims: Dims
    records: list[RecordHeader]
    states: list[StateHeader]
    arrays: list[memoryview]


def write_layer(record: records.LayerRecord, num_tokens: int) -> Written:
    """Raises `InvalidRequest` for a record that the format cannot hold."""
    entries, states = records.entries_of(record), records.states_of(record)
    state_headers = [_state_header(state) for state in states]
    state_arrays = [_raw(state.tensor) for state in states]
    if entries is None:
        return Written(NO_DIMS, [], state_headers, state_arrays)
    parts = records.parts_of(entries)
    dims = Dims(_dtype_name(parts), entries.key_dim, entries.value_dim)
    written = [_write_record(part, _Target(num_tokens)) for part in parts]
    try:
        _require_sound("the layer", entries, num_tokens)
        _require_rows("the layer", parts)
    except BlobError as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    arrays = [data for _, arrays in written for data in arrays.values()]
    return Written(dims, [header for header, _ in written], state_headers, arrays + state_arrays)


def read_layer(index: int, header: Header, body: Body) -> records.LayerRecord:
    """Read a layer whose segment `check_segment` has accepted. Its tensors are views of the body.

    Raises `BlobError` for what no digest can reveal: bytes that `write_layer` does not write.
    """
    record = view_layer(index, header, body)
    entries = records.entries_of(record)
    if entries is not None:
        parts = zip(records.parts_of(entries), header.layers[index].runs, strict=True)
        _require_rows(f"layer {index}", [part for part, runs in parts if runs])
    return record


def view_layer(index: int, header: Header, body: Body) -> records.LayerRecord:
    """As `read_layer`, before the rows in runs have been read; `require_runs_sound` checks those later."""
    layer = header.layers[index]
    parts = tuple(
        _Reader(record, spans, layer, body, header.num_tokens).record()
        for record, spans in zip(layer.records, layer.arrays, strict=True)
    )
    states = tuple(
        records.State(
            state.role,
            state.number,
            body.tensor(layer.offset + span.offset, DTYPES[state.dtype], math.prod(state.dims)).view(state.dims),
        )
        for state, span in zip(layer.states, layer.state_spans, strict=True)
    )
    if not parts:
        return records.States(states)
    entries = records.entries_from(parts)
    _require_sound(f"layer {index}", entries, header.num_tokens)
    _require_rows(f"layer {index}", [part for part, runs in zip(parts, layer.runs, strict=True) if not runs])
    return records.States(states, entries) if states else entries


def require_runs_sound(where: str, part: records.PackedRecord, run_rows: int, runs: Sequence[int]) -> None:
    """Raise `BlobError` for what `read_layer` refuses in the rows of some runs. run_rows: rows of each head in a run.
    runs: numbers of runs, counted from 0 in this record."""
    if not runs:
        return
    for rows in (part.keys, part.values):
        if isinstance(rows, QuantizedRows):
            _require_codes(where, _last_bytes(rows, run_rows, runs))


def _last_bytes(rows: QuantizedRows, run_rows: int, runs: Sequence[int]) -> HeadRows:
    """These runs of all heads, joined, with the last byte alone of each row's codes: all that `_require_codes` reads.
    Joined, because the operations on one run of one head take longer than its numbers."""
    pieces = [
        head.coded(start, min(start + run_rows, len(head)))
        for head in rows.heads()
        for start in (run * run_rows for run in runs)
        if start < len(head)
    ]
    return replace(
        pieces[0],
        codes=torch.cat([piece.codes[:, -1:] for piece in pieces]),
        scales=torch.cat([piece.scales for piece in pieces]),
        zeros=torch.cat([piece.zeros for piece in pieces]),
    )


def _dtype_name(parts: tuple[records.PackedRecord, ...]) -> DtypeName:
    for part in parts:
        if part.keys.dtype not in _DTYPE_NAMES or part.values.dtype != part.keys.dtype:
            raise InvalidRequest(
                f"keys are {part.keys.dtype} and values {part.values.dtype}; a blob holds one of "
                f"{', '.join(DTYPES)} for both"
            )
    return _DTYPE_NAMES[parts[0].dtype]


def _state_header(state: records.State) -> StateHeader:
    if state.tensor.dtype not in _DTYPE_NAMES:
        raise InvalidRequest(f"a state is {state.tensor.dtype}; a blob holds {', '.join(DTYPES)}")
    dims = list(state.tensor.shape)
    return StateHeader(role=state.role, number=state.number, dtype=_DTYPE_NAMES[state.tensor.dtype], dims=dims)


def _write_record(record: records.PackedRecord, target: _Target) -> tuple[RecordHeader, Arrays]:
    codec, group = _precision(record)
    arrays: Arrays = {}
    for name in record.row_names:
        arrays |= _row_arrays(name, getattr(record, name))
    encoding, arrays["positions"] = target.positions(record.entry_positions, record.lengths)
    fields: dict[str, Any] = {
        "kind": record.kind,
        "rope_mode": record.rope_mode,
        "codec": codec,
        "group": group,
        "lengths": record.lengths,
        "position_encoding": encoding,
    }
    kind_fields, kind_arrays = KINDS[record.kind].write(record, target)
    fields |= kind_fields
    arrays |= kind_arrays
    if names := sorted(record.columns):
        fields["columns"] = names
        arrays["columns"] = target.raw(torch.stack([record.columns[name].float() for name in names]))
    return KINDS[record.kind](**fields, sizes=[len(data) for data in arrays.values()]), arrays


def _precision(record: records.PackedRecord) -> tuple[Precision, int]:
    """Codec and group of a record, which its keys and values must share."""
    rows = {name: getattr(record, name) for name in record.row_names}
    for kind, name in _PLAIN_OR_CODED.items():
        if all(isinstance(array, kind) for array in rows.values()):
            return name, 0
    coded = {name: array for name, array in rows.items() if isinstance(array, QuantizedRows)}
    alike = {(array.bits, array.group, array.lengths) for array in coded.values()}
    if len(coded) == len(rows) and len(alike) == 1 and all(AXES[name] == array.axis for name, array in coded.items()):
        bits, group, lengths = alike.pop()
        if lengths == tuple(record.row_lengths):
            return _PRECISIONS[bits], group
    raise InvalidRequest(
        "a blob holds keys and values under one codec, keys in groups of entries and values in groups of channels"
    )


def _row_arrays(name: str, rows: Stored) -> Arrays:
    if isinstance(rows, Tensor):
        return {name: _raw(rows)}
    if isinstance(rows, CodedRows | PlaneRows):
        return {f"{name}_coded": _raw(rows.data)}
    return {f"{name}_{what}": _raw(getattr(rows, what)) for what in ("codes", "scales", "zeros")}


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Target:
    """The `kinds.record.Target` of a document of `num_tokens` tokens."""

    num_tokens: int

    raw = staticmethod(_raw)

    def positions(self, positions: Tensor, lengths: list[int]) -> tuple[Encoding, memoryview]:
        encoding, data = encode(ints(positions), lengths, self.num_tokens)
        return encoding, memoryview(data)


@dataclass(frozen=True)
class _Reader:
    """The `kinds.record.RecordArrays` of one record in a segment, whose size the header has been checked against."""

    header: RecordHeader
    spans: dict[str, Span]
    layer: Layer
    body: Body
    num_tokens: int

    def record(self) -> records.PackedRecord:
        header = self.header
        channels = {"keys": header.key_dim(self.dims), "values": self.dims.value_dim}
        rows: dict[str, Any] = {name: self._rows(name, channels[name]) for name in header.row_names}
        none = torch.empty(sum(header.row_lengths), 0, dtype=DTYPES[self.dims.dtype])
        columns: dict[str, Tensor] = {}
        if names := header.columns:
            numbers = self.tensor("columns", "float32", len(names), sum(header.column_lengths))
            columns = dict(zip(names, numbers, strict=True))
        return records.RECORDS[header.kind](
            **{"values": none} | rows,
            entries_at=self.positions("positions", header.position_encoding, header.lengths),
            offsets=offsets_of(header.lengths),
            rope_mode=header.rope_mode,
            columns=columns,
            **header.read(self),
        )

    @property
    def dims(self) -> Dims:
        return self.layer.dims

    def _rows(self, name: str, dim: int) -> Stored:
        header, dtype = self.header, DTYPES[self.dims.dtype]
        lengths = header.row_lengths
        entries = sum(lengths)
        if header.codec in CODED:
            array = f"{name}_coded"
            data = self.tensor(array, "uint8", self.spans[array].nbytes)
            klt = header.codec == "klt"
            rows = CodedRows(data, tuple(lengths), dim, dtype) if klt else PlaneRows(data, entries, dim, dtype)
            rows.require_sound(array)
            return rows
        if header.codec == "none":
            return self.tensor(name, self.dims.dtype, entries, dim)
        bits, axis = BITS[header.codec], AXES[name]
        shape = scales_shape(axis, header.group, lengths, dim)
        return QuantizedRows(
            codes=self.tensor(f"{name}_codes", "uint8", entries, -(-dim * bits // 8)),
            scales=self.tensor(f"{name}_scales", "bfloat16", *shape),
            zeros=self.tensor(f"{name}_zeros", "bfloat16", *shape),
            bits=bits,
            group=header.group,
            axis=axis,
            num_channels=dim,
            dtype=dtype,
            lengths=tuple(lengths),
        )

    def tensor(self, name: str, dtype: str, *shape: int) -> Tensor:
        return self.body.tensor(self._start(name), getattr(torch, dtype), *shape)

    def positions(self, name: str, encoding: Encoding, lengths: list[int]) -> Callable[[], Tensor]:
        start = self._start(name)
        data = self.body.memory[start : start + self.spans[name].nbytes]
        expand = decode(encoding, data, lengths, self.num_tokens)
        return lambda: torch.from_numpy(expand().astype(np.int32))

    def _start(self, name: str) -> int:
        return self.layer.offset + self.spans[name].offset


def _require_sound(where: str, record: records.Entries, num_tokens: int) -> None:
    """Refuse records that attention would misread, as their kind requires, and a token that two records have."""
    parts = records.parts_of(record)
    for part in parts:
        KINDS[part.kind].require_sound(where, part, num_tokens)
        if not all(bool(numbers.isfinite().all()) for numbers in part.columns.values()):
            raise BlobError(f"{where} has a column with numbers that are not finite", reason="not_finite")
    if len(parts) > 1:
        _require_disjoint(where, [_by_head(part.entry_positions, part.lengths) for part in parts])
        if any(part.tokens[0] is not part.entry_positions for part in parts):
            _require_disjoint(where, [_by_head(*part.tokens) for part in parts])


def _require_rows(where: str, parts: Sequence[records.PackedRecord]) -> None:
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


def _by_head(positions: Tensor, lengths: list[int]) -> Ints:
    """Positions as numbers that are distinct across heads, ascending."""
    return ints(positions) + np.repeat(np.arange(len(lengths), dtype=np.int64) << 31, lengths)


def _require_disjoint(where: str, parts: list[Ints]) -> None:
    """Refuse a head's position that is in two parts. Sorts, because the header would set the size of a bitmap."""
    together = np.sort(np.concatenate(parts), kind="stable")  # linear, because each part is an ascending run
    twice = together[1:][np.diff(together) == 0]
    if twice.size:
        position = int(twice[0]) % (1 << 31)
        raise BlobError(f"{where} has position {position} of a head in two records", reason="positions_overlap")
