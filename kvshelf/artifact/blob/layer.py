"""One layer in a blob's header, and the sizes of its arrays, which follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Final, NamedTuple

from pydantic import FailFast, Field

from kvshelf.artifact.blob.kinds import AnyHeader
from kvshelf.artifact.blob.kinds.record import (
    Count,
    Dims,
    DtypeName,
    RecordHeader,
    RowArray,
    Size,
    Strict,
    inconsistent,
)
from kvshelf.artifact.codecs import BITS
from kvshelf.artifact.shape import ITEM_BYTES, LayerShape, StateRole, StateShape
from kvshelf.errors import BlobError

ALIGNMENT: Final = 64
"""Bytes: a cache line, and the widest vector register. Every array and every segment begins at a multiple of it."""

DIGEST_BYTES: Final = 32

MAX_RECORDS: Final = 16
_MAX_DIMS: Final = 8

Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Span(NamedTuple):
    """Where an array lies. Bytes, counted from the start of its segment; `nbytes` is without padding."""

    offset: int
    nbytes: int


class Cut(NamedTuple):
    """Bytes of a segment that follow the cut before: rows that are in runs, or a part of the segment's head."""

    in_run: bool
    nbytes: int


NO_DIMS: Final = Dims("float32", 0, 0)
"""Of a layer without records."""


class StateHeader(Strict):
    """One `State`, an array of these dimensions behind those of the records."""

    role: StateRole
    number: Count
    dtype: DtypeName
    dims: Annotated[list[Size], Field(min_length=1, max_length=_MAX_DIMS)]

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
        list[AnyHeader],
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
        first, dims = self.records[0], (self.key_dim, self.value_dim, self.dtype)
        return LayerShape(len(first.lengths), *dims, *first.sees, first.latent, states)

    @property
    def joined_bytes(self) -> int:
        """As `Latents.joined_bytes`, of all records."""
        plain = (record for record in self.records if record.latent and record.codec not in BITS)
        row_bytes = (self.key_dim + self.value_dim) * ITEM_BYTES[self.dtype]
        return sum(sum(record.lengths) for record in plain) * row_bytes

    @property
    def unpacked_bytes(self) -> int:
        """As `Packed.unpacked_bytes`, of all records."""
        return sum(record.unpacked_bytes(self.dims) for record in self.records)

    @cached_property
    def arrays(self) -> list[dict[str, Span]]:
        """For each record, the spans of its arrays by name, in segment order."""
        end = 0
        arrays: list[dict[str, Span]] = []
        for record in self.records:
            spans: dict[str, Span] = {}
            for name, nbytes in zip(record.array_sizes(self.dims), record.sizes, strict=True):
                spans[name] = Span(end, nbytes)
                end = aligned(end + nbytes)
            arrays.append(spans)
        return arrays

    @cached_property
    def state_spans(self) -> list[Span]:
        """The span of each state, in segment order."""
        end = sum(aligned(size) for record in self.records for size in record.sizes)
        spans: list[Span] = []
        for state in self.states:
            spans.append(Span(end, state.shape.nbytes))
            end = aligned(end + state.shape.nbytes)
        return spans

    @property
    def runs(self) -> tuple[range, ...]:
        """The numbers of each record's runs within the layer; none for a record that is read whole."""
        ends = list(accumulate((record.run_count for record in self.records), initial=0))
        return tuple(map(range, ends, ends[1:]))

    @property
    def num_runs(self) -> int:
        return sum(record.run_count for record in self.records)

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
        """The spans of all arrays, in segment order."""
        yield from (span for spans in self.arrays for span in spans.values())
        yield from self.state_spans
        yield self.digests

    def cuts(self) -> Iterator[Cut]:
        """The segment up to its array of digests, cut where an array with rows in runs begins or ends."""
        end = 0
        for record, spans, runs in zip(self.records, self.arrays, self.runs, strict=True):
            for array in record.row_arrays(self.dims) if runs else ():
                span = spans[array.name]
                yield Cut(False, span.offset - end)
                yield Cut(True, span.nbytes)
                end = span.offset + span.nbytes
        yield Cut(False, self.digests.offset - end)

    def head_spans(self) -> list[Span]:
        """The parts of the segment's head, in order."""
        spans, end = [], 0
        for in_run, nbytes in (*self.cuts(), Cut(False, self.nbytes - self.digests.offset)):
            if not in_run and nbytes:
                spans.append(Span(end, nbytes))
            end += nbytes
        return spans

    def run_spans(self, run: int) -> list[Span]:
        """The parts of a run, in segment order: array by array, and head by head within an array."""
        number, runs = next((number, runs) for number, runs in self._in_runs if run in runs)
        record = self.records[number]
        first_row = (run - runs.start) * record.run_rows
        spans = []
        for array, starts in self._head_starts[number]:
            for length, start in zip(record.lengths, starts, strict=True):
                if length > first_row:
                    rows = min(record.run_rows, length - first_row)
                    spans.append(Span(start + array.nbytes(first_row), array.nbytes(rows)))
        return spans

    @cached_property
    def _in_runs(self) -> list[tuple[int, range]]:
        """The numbers of the records that have runs, each with the numbers of its runs."""
        return [(number, runs) for number, runs in enumerate(self.runs) if runs]

    @cached_property
    def _head_starts(self) -> dict[int, list[tuple[RowArray, list[int]]]]:
        """For each of these records, its arrays of rows and where each head begins in them."""
        arrays: dict[int, list[tuple[RowArray, list[int]]]] = {}
        for number, _ in self._in_runs:
            record, spans = self.records[number], self.arrays[number]
            arrays[number] = [
                (array, list(accumulate(map(array.nbytes, record.lengths[:-1]), initial=spans[array.name].offset)))
                for array in record.row_arrays(self.dims)
            ]
        return arrays

    def check(self, index: int, num_tokens: int) -> None:
        """Raise `BlobError` unless the records agree with each other and fill a segment of this size."""
        if len({len(record.lengths) for record in self.records}) > 1:
            raise inconsistent(f"the records of layer {index} have different numbers of heads")
        recent = next((record for record in self.records if record.verbatim), None)
        if recent is not None and len(self.records) > 1:
            raise inconsistent(f"layer {index} has other records beside its {recent.kind}")
        if len({record.latent for record in self.records}) > 1:
            raise inconsistent(f"layer {index} has other records beside its latents")
        has_channels = self.key_dim > 0 and self.value_dim > 0
        if not (has_channels if self.records else self.dims == NO_DIMS):
            raise inconsistent(
                f"layer {index} has {len(self.records)} records, of keys of {self.key_dim} and values of "
                f"{self.value_dim} channels"
            )
        places = [(state.role, state.number) for state in self.states]
        if places != sorted(set(places)):
            raise inconsistent(f"the states of layer {index} are not in order, or one is there twice")
        for record in self.records:
            record.check(f"layer {index}", self.dims, num_tokens)
        end = sum(aligned(span.nbytes) for span in self.spans)
        if self.nbytes != end:
            raise BlobError(f"segment {index} says {self.nbytes} bytes, its arrays make {end}", reason="size_mismatch")


def digests_bytes(records: Sequence[RecordHeader]) -> int:
    """Bytes of the digests at the end of a segment, without padding: none without runs."""
    runs = sum(record.run_count for record in records)
    return (runs + 1) * DIGEST_BYTES if runs else 0
