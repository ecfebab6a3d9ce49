"""One layer in a blob's header, and the sizes of its arrays, which follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field

from kvshelf.artifact import positions
from kvshelf.artifact.codecs import BITS, Precision
from kvshelf.artifact.identity import RopeMode
from kvshelf.artifact.shape import ITEM_BYTES, LayerShape, StateRole, StateShape, tokens_seen
from kvshelf.errors import BlobError

ALIGNMENT: Final = 64
"""Bytes: a cache line, and the widest vector register. Every array and every segment begins at a multiple of it."""

RUN_ROWS: Final = 1024
"""Rows of each head that have a digest of their own: a multiple of every codec's group, so that runs share no scale. In
an indexed record they are those of a block."""

DIGEST_BYTES: Final = 32

CHANNEL_BYTES: Final = 2
"""Of the number of a channel, an int16."""

MAX_ARRAY: Final = 4096
INT32_MAX: Final = 2**31 - 1
MAX_RECORDS: Final = 16
_MAX_DIMS: Final = 8

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=INT32_MAX)]
Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Sizes = Annotated[list[Count], Field(max_length=MAX_ARRAY)]
Lengths = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, max_length=MAX_ARRAY)]
DtypeName = Literal["float32", "bfloat16", "float16"]


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Strict(BaseModel):
    """A part of the header: no conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Span(NamedTuple):
    """Where an array lies. Bytes, counted from the start of its segment; `nbytes` is without padding."""

    offset: int
    nbytes: int


class Cut(NamedTuple):
    """Bytes of a segment that follow the cut before: rows that are in runs, or a part of the segment's head."""

    in_run: bool
    nbytes: int


class RowArray(NamedTuple):
    """An array with the rows of a record, packed by head: an item of `item_bytes` for every `rows` rows of a head."""

    name: str
    rows: int
    item_bytes: int

    def nbytes(self, rows: int) -> int:
        """Of so many rows from the first of a head, or of a run, on."""
        return -(-rows // self.rows) * self.item_bytes

    def total(self, lengths: Sequence[int]) -> int:
        """Bytes of all heads, of these lengths."""
        rows = self.rows  # read once, and one row apart: a header may have 200 layers of 128 heads
        items = sum(lengths) if rows == 1 else sum(-(-length // rows) for length in lengths)
        return items * self.item_bytes


class Dims(NamedTuple):
    """What the records of a layer have in common."""

    dtype: DtypeName
    key_dim: int
    value_dim: int


NO_DIMS: Final = Dims("float32", 0, 0)
"""Of a layer without records."""


class _RecordFields(Strict):
    """What all records have. lengths: entries of each KV head. group: that of the cache's codec, 0 under "none".

    sizes: bytes of each array, without padding, in the order in which they lie in the segment.
    """

    rope_mode: RopeMode
    codec: Precision
    group: Count
    lengths: Lengths
    position_encoding: positions.Encoding
    sizes: Sizes


class KeptHeader(_RecordFields):
    """One `Kept` record."""

    kind: Literal["kept"]


class PrunedHeader(_RecordFields):
    """One `Pruned` record. channels: D', those that the keys of each head have."""

    kind: Literal["pruned"]
    channels: Size


class IndexedHeader(_RecordFields):
    """One `Indexed` record. width: W, numbers of a block's summary."""

    kind: Literal["indexed"]
    block: Size
    width: Size

    @property
    def blocks(self) -> int:
        """Of each head."""
        return -(-max(self.lengths) // self.block)


class WindowHeader(_RecordFields):
    """One `Window` record."""

    kind: Literal["window"]
    window: Size

    def seen(self, num_tokens: int) -> int:
        """As `tokens_seen`."""
        return tokens_seen(num_tokens, self.window, None)


class ChunkHeader(_RecordFields):
    """One `Chunk` record."""

    kind: Literal["chunk"]
    chunk: Size

    def seen(self, num_tokens: int) -> int:
        """As `tokens_seen`."""
        return tokens_seen(num_tokens, None, self.chunk)


class LatentsHeader(_RecordFields):
    """One `Latents` record."""

    kind: Literal["latents"]


class MergedHeader(_RecordFields):
    """One `Merged` record. slot_lengths: slots of each KV head."""

    kind: Literal["merged"]
    slot_lengths: Lengths
    slot_position_encoding: positions.Encoding


RECENT: Final = WindowHeader, ChunkHeader
"""The headers of `Recent` records."""

RecordHeader = KeptHeader | PrunedHeader | IndexedHeader | WindowHeader | ChunkHeader | LatentsHeader | MergedHeader


class StateHeader(Strict):
    """One `State`, an array of these dimensions behind those of the records."""

    role: StateRole
    number: Count
    dtype: DtypeName
    dims: Annotated[list[Size], Field(min_length=1, max_length=_MAX_DIMS)]

    @property
    def nbytes(self) -> int:
        """Without padding."""
        return self.shape.nbytes

    @property
    def shape(self) -> StateShape:
        return StateShape(self.role, self.number, self.dtype, tuple(self.dims))


class Layer(Strict):
    """One layer and its segment. Without records its dtype is "float32", and its keys and values have 0 channels.

    offset: bytes from the start of the body (the first aligned byte after the header), so that it does not depend on
    the header's own length. nbytes: the segment with its padding. digest: BLAKE3 of the segment's head, which is those
    bytes without the rows in runs, and ends with the digests of the runs and of all their rows together.
    """

    dtype: DtypeName
    key_dim: Count
    value_dim: Count
    records: Annotated[
        list[Annotated[RecordHeader, Field(discriminator="kind")]],
        Field(max_length=MAX_RECORDS),
        FailFast(),  # see `Header`
    ]
    states: Annotated[list[StateHeader], Field(max_length=MAX_RECORDS), FailFast()]
    offset: Count
    nbytes: Count
    digest: Digest

    @property
    def dims(self) -> Dims:
        return Dims(self.dtype, self.key_dim, self.value_dim)

    @property
    def shape(self) -> LayerShape:
        states = tuple(state.shape for state in self.states)
        if not self.records:
            return LayerShape(states=states)
        first = self.records[0]
        window = first.window if isinstance(first, WindowHeader) else None
        chunk = first.chunk if isinstance(first, ChunkHeader) else None
        latent = isinstance(first, LatentsHeader)
        return LayerShape(len(first.lengths), self.key_dim, self.value_dim, self.dtype, window, chunk, latent, states)

    @property
    def joined_bytes(self) -> int:
        """As `Latents.joined_bytes`, of all records."""
        plain = (record for record in self.records if isinstance(record, LatentsHeader) and record.codec == "none")
        return sum(sum(record.lengths) for record in plain) * self._row_bytes

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all keys and values in `dtype`, and of the states."""
        entries = sum(sum(record.lengths) for record in self.records)
        of_states = sum(state.nbytes for state in self.states)
        return entries * self._row_bytes + of_states

    @property
    def _row_bytes(self) -> int:
        """Bytes of a key and a value in `dtype`."""
        return (self.key_dim + self.value_dim) * ITEM_BYTES[self.dtype]

    @cached_property
    def arrays(self) -> list[dict[str, Span]]:
        """For each record, the spans of its arrays by name, in segment order."""
        end = 0
        found: list[dict[str, Span]] = []
        for record in self.records:
            spans: dict[str, Span] = {}
            for name, nbytes in zip(array_sizes(record, self.dims), record.sizes, strict=True):
                spans[name] = Span(end, nbytes)
                end = aligned(end + nbytes)
            found.append(spans)
        return found

    @cached_property
    def state_spans(self) -> list[Span]:
        """The span of each state, in segment order."""
        end = sum(aligned(size) for record in self.records for size in record.sizes)
        found: list[Span] = []
        for state in self.states:
            found.append(Span(end, state.nbytes))
            end = aligned(end + state.nbytes)
        return found

    @property
    def runs(self) -> tuple[range, ...]:
        """The numbers of each record's runs within the layer; none for a record that is read whole."""
        ends = list(accumulate(map(run_count, self.records), initial=0))
        return tuple(map(range, ends, ends[1:]))

    @property
    def num_runs(self) -> int:
        """Of all records."""
        return sum(map(run_count, self.records))

    @property
    def digests(self) -> Span:
        """The last array of the segment: the digest of each run, then that of the rows of all."""
        nbytes = digests_bytes(self.records)
        return Span(self.nbytes - aligned(nbytes), nbytes)

    @property
    def digests_padding(self) -> int:
        """Bytes behind that array."""
        return self.nbytes - self.digests.offset - self.digests.nbytes

    @property
    def spans(self) -> Iterator[Span]:
        """Those of all arrays, in segment order."""
        yield from (span for spans in self.arrays for span in spans.values())
        yield from self.state_spans
        yield self.digests

    def cuts(self) -> Iterator[Cut]:
        """The segment up to its array of digests, cut where an array with rows in runs begins or ends."""
        end = 0
        for record, spans, runs in zip(self.records, self.arrays, self.runs, strict=True):
            for array in row_arrays(record, self.dims) if runs else ():
                span = spans[array.name]
                yield Cut(False, span.offset - end)
                yield Cut(True, span.nbytes)
                end = span.offset + span.nbytes
        yield Cut(False, self.digests.offset - end)

    def head_spans(self) -> list[Span]:
        """The parts of the segment's head, in order."""
        found, end = [], 0
        for in_run, nbytes in (*self.cuts(), Cut(False, self.nbytes - self.digests.offset)):
            if not in_run and nbytes:
                found.append(Span(end, nbytes))
            end += nbytes
        return found

    def run_spans(self, run: int) -> list[Span]:
        """The parts of a run, in segment order: array by array, and head by head within an array."""
        record, first = next((record, run - own.start) for record, own in self._in_runs if run in own)
        rows, found = run_rows(self.records[record]), []
        for array, starts in self._head_starts[record]:
            for length, start in zip(self.records[record].lengths, starts, strict=True):
                if (left := length - first * rows) > 0:
                    found.append(Span(start + array.nbytes(first * rows), array.nbytes(min(rows, left))))
        return found

    @cached_property
    def _in_runs(self) -> list[tuple[int, range]]:
        """The records that have runs, and the numbers of these."""
        return [(number, own) for number, own in enumerate(self.runs) if own]

    @cached_property
    def _head_starts(self) -> dict[int, list[tuple[RowArray, list[int]]]]:
        """For each of these records, its arrays of rows and where each head begins in them."""
        found: dict[int, list[tuple[RowArray, list[int]]]] = {}
        for number, _ in self._in_runs:
            record, spans = self.records[number], self.arrays[number]
            found[number] = [
                (array, list(accumulate(map(array.nbytes, record.lengths[:-1]), initial=spans[array.name].offset)))
                for array in row_arrays(record, self.dims)
            ]
        return found

    def check(self, index: int, num_tokens: int) -> None:
        """Raise `BlobError` unless the records agree with each other and fill a segment of this size."""
        if len({len(record.lengths) for record in self.records}) > 1:
            raise BlobError(f"the records of layer {index} have different numbers of heads", reason="inconsistent")
        if len(self.records) > 1:
            for recent in (record for record in self.records if isinstance(record, RECENT)):
                raise BlobError(f"layer {index} has other records beside its {recent.kind}", reason="inconsistent")
        if len({isinstance(record, LatentsHeader) for record in self.records}) > 1:
            raise BlobError(f"layer {index} has other records beside its latents", reason="inconsistent")
        if bool(self.records) != (self.key_dim > 0 and self.value_dim > 0) or (
            not self.records and self.dims != NO_DIMS
        ):
            raise BlobError(
                f"layer {index} has {len(self.records)} records, of keys of {self.key_dim} and values of "
                f"{self.value_dim} channels",
                reason="inconsistent",
            )
        places = [(state.role, state.number) for state in self.states]
        if places != sorted(set(places)):
            raise BlobError(
                f"the states of layer {index} are not in order, or one is there twice", reason="inconsistent"
            )
        for record in self.records:
            _check_record(f"layer {index}", record, self.dims, num_tokens)
        end = sum(aligned(span.nbytes) for span in self.spans)
        if self.nbytes != end:
            raise BlobError(f"segment {index} says {self.nbytes} bytes, its arrays make {end}", reason="size_mismatch")


def array_sizes(record: RecordHeader, dims: Dims) -> dict[str, int | None]:
    """Bytes that each array of a record must have, in segment order; None where it depends on the data: positions and
    coded rows.

    Python's integers are unbounded: no product of dimensions overflows.
    """
    sizes: dict[str, int | None] = {array.name: array.total(record.lengths) for array in row_arrays(record, dims)}
    if record.codec == "klt":
        sizes |= {"keys_coded": None, "values_coded": None}
    sizes["positions"] = None
    if isinstance(record, PrunedHeader):
        sizes["channels"] = len(record.lengths) * record.channels * CHANNEL_BYTES
    if isinstance(record, IndexedHeader):
        sizes["summaries"] = record.blocks * record.width * ITEM_BYTES["bfloat16"]
    if isinstance(record, MergedHeader):
        slots = sum(record.slot_lengths)
        sizes["slot_positions"] = None
        sizes["slot_classes"] = slots * class_bytes(record.lengths)
        sizes["slot_scales"] = slots * 4
    return sizes


def key_width(record: RecordHeader, dims: Dims) -> int:
    """Channels that the keys of a record have."""
    return record.channels if isinstance(record, PrunedHeader) else dims.key_dim


def row_arrays(record: RecordHeader, dims: Dims) -> list[RowArray]:
    """The arrays with a record's rows, in segment order; none under codec klt, whose streams are not cut by rows."""
    key_dim = key_width(record, dims)
    if record.codec == "klt":
        return []
    if record.codec == "none":
        item = ITEM_BYTES[dims.dtype]
        return [RowArray("keys", 1, key_dim * item), RowArray("values", 1, dims.value_dim * item)]
    bits, group, item = BITS[record.codec], record.group, ITEM_BYTES["bfloat16"]
    scales = {"keys": (group, key_dim * item), "values": (1, -(-dims.value_dim // group) * item)}
    found: list[RowArray] = []
    for name, dim in (("keys", key_dim), ("values", dims.value_dim)):
        found.append(RowArray(f"{name}_codes", 1, -(-dim * bits // 8)))
        found += [RowArray(f"{name}_{what}", *scales[name]) for what in ("scales", "zeros")]
    return found


def run_count(record: RecordHeader) -> int:
    """How many runs a record has: none if one would hold all of its rows, or if it is read whole at any length."""
    if record.codec == "klt" or not isinstance(record, KeptHeader | IndexedHeader | LatentsHeader):
        return 0
    runs = -(-max(record.lengths) // run_rows(record))
    return runs if runs > 1 else 0


def run_rows(record: RecordHeader) -> int:
    """Rows of each head in a run."""
    return record.block if isinstance(record, IndexedHeader) else RUN_ROWS


def class_bytes(lengths: list[int]) -> int:
    """Bytes of one class index: two, unless a head has more classes than two bytes can count."""
    return 2 if max(lengths) <= 1 << 16 else 4


def digests_bytes(records: Sequence[RecordHeader]) -> int:
    """Bytes of the digests at the end of a segment, without padding: none without runs."""
    runs = sum(map(run_count, records))
    return (runs + 1) * DIGEST_BYTES if runs else 0


def _check_record(where: str, record: RecordHeader, dims: Dims, num_tokens: int) -> None:
    expected = array_sizes(record, dims)
    if len(record.sizes) != len(expected):
        raise BlobError(
            f"{where} says {len(record.sizes)} sizes for the arrays {', '.join(expected)}", reason="size_mismatch"
        )
    for (name, size), found in zip(expected.items(), record.sizes, strict=True):
        if size is not None and found != size:
            raise BlobError(
                f"{where} says {found} bytes of {name}, its shape and dtype make {size}", reason="size_mismatch"
            )
    _check_lengths(where, "entries", record.lengths, num_tokens)
    if isinstance(record, LatentsHeader) and record.rope_mode != "baked":
        raise BlobError(f"{where} has latents whose rotated parts carry no rotation", reason="inconsistent")
    if isinstance(record, LatentsHeader) and len(record.lengths) != 1:
        raise BlobError(f"{where} has latents of {len(record.lengths)} heads; they have one", reason="inconsistent")
    if isinstance(record, PrunedHeader) and record.rope_mode != "baked":
        raise BlobError(f"{where} has pruned keys that carry no rotation", reason="inconsistent")
    if isinstance(record, PrunedHeader) and record.channels > dims.key_dim:
        raise BlobError(
            f"{where} has pruned keys of {record.channels} channels, of {dims.key_dim}", reason="inconsistent"
        )
    if isinstance(record, RECENT):
        _check_recent(where, record, num_tokens)
    if isinstance(record, IndexedHeader):
        _check_indexed(where, record)
    if isinstance(record, MergedHeader):
        _check_lengths(where, "slots", record.slot_lengths, num_tokens)
        if len(record.slot_lengths) != len(record.lengths):
            raise BlobError(
                f"{where} has slots in {len(record.slot_lengths)} heads and classes in {len(record.lengths)}",
                reason="inconsistent",
            )


def _check_recent(where: str, record: WindowHeader | ChunkHeader, num_tokens: int) -> None:
    if record.rope_mode != "baked":
        raise BlobError(f"{where} has a {record.kind} whose keys carry no rotation", reason="inconsistent")
    seen = record.seen(num_tokens)
    if set(record.lengths) != {seen}:
        size = record.window if isinstance(record, WindowHeader) else record.chunk
        raise BlobError(
            f"{where} has {record.kind}s of {min(record.lengths)} to {max(record.lengths)} entries; the document's "
            f"{num_tokens} tokens leave {seen} in a {record.kind} of {size}",
            reason="inconsistent",
        )


def _check_indexed(where: str, record: IndexedHeader) -> None:
    if len(set(record.lengths)) != 1 or not record.lengths[0]:
        raise BlobError(
            f"{where} has indexed heads of {min(record.lengths)} to {max(record.lengths)} entries; each has as many as "
            "the others, and one at least",
            reason="inconsistent",
        )
    if record.group and record.block % record.group:
        raise BlobError(
            f"{where} has an index of blocks of {record.block} entries, and {record.group} share a scale; the blocks "
            "must be a multiple",
            reason="inconsistent",
        )


def _check_lengths(where: str, what: str, lengths: list[int], num_tokens: int) -> None:
    if max(lengths) > num_tokens:
        raise BlobError(
            f"{where} has {max(lengths)} {what} in a head, the document {num_tokens} tokens", reason="positions_count"
        )
