"""Original positions of a layer's kept entries, stored in the smallest of three simple encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvshelf.errors import BlobError, InvalidRequest

Encoding = Literal["range", "bitmap", "delta"]
"""range: every head keeps 0 .. N-1, no bytes. bitmap: N bits per head, least significant first, each head in whole
bytes. delta: one LEB128 varint per entry, the first position of a head, then each gap minus one. The writer takes the
smallest, on a tie the first of these, so equal positions have equal bytes."""

_VARINT_BYTES = 5
"""Longest varint: positions are below 2**31."""

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def encode(positions: Ints, lengths: Sequence[int], num_tokens: int) -> tuple[Encoding, bytes]:
    """Encode positions of all heads, one after the other, ascending within a head, each in [0, num_tokens).

    positions: `[sum(lengths)]`. Raises `InvalidRequest` for positions out of order or range.
    """
    if positions.size and (_gaps(positions, lengths).min() < 0 or positions.max() >= num_tokens):
        raise InvalidRequest(
            f"the positions of a head must ascend from 0 to at most {num_tokens - 1}; this cache's do not "
            "and it cannot be written"
        )
    name = choose(positions, lengths, num_tokens)
    if name == "range":
        return name, b""
    if name == "bitmap":
        bits = np.zeros((len(lengths), num_tokens), np.bool_)  # [heads, N]
        bits[np.repeat(np.arange(len(lengths)), lengths), positions] = True
        return name, np.packbits(bits, axis=1, bitorder="little").tobytes()
    return name, _to_varints(_gaps(positions, lengths)).tobytes()


def choose(positions: Ints, lengths: Sequence[int], num_tokens: int) -> Encoding:
    """The encoding the writer takes for these positions."""
    if _all_kept(lengths, num_tokens):
        return "range"
    if _bitmap_wins(lengths, num_tokens):
        return "bitmap"
    delta_bytes = int(_varint_lengths(_gaps(positions, lengths)).sum())
    return "bitmap" if len(lengths) * _bitmap_stride(num_tokens) <= delta_bytes else "delta"


def decode(name: Encoding, data: memoryview, lengths: Sequence[int], num_tokens: int) -> Callable[[], Ints]:
    """The inverse of `encode`: returns a function that expands the positions, `[sum(lengths)]`, and cannot fail.

    Raises `BlobError` at once for bytes that `encode` cannot have written. Expansion is deferred: it takes ten times as
    long as checking a bitmap, 8 bytes for each stored one, and few readers need positions.
    """
    raw: Bytes = np.frombuffer(data, np.uint8)
    if name == "range":
        if raw.size or not _all_kept(lengths, num_tokens):
            raise BlobError(
                f"positions are stored as 'range', which means all {num_tokens} entries in every head and no bytes, "
                f"but heads have from {min(lengths)} to {max(lengths)} entries and {raw.size} bytes follow",
                reason="positions_malformed",
            )
        return lambda: np.tile(np.arange(num_tokens, dtype=np.int64), len(lengths))
    if name == "bitmap":
        _check_bitmap(raw, lengths, num_tokens)
        expand = partial(_from_bitmap, raw, lengths, num_tokens)
        if _bitmap_wins(lengths, num_tokens):
            return expand
        smallest = choose(expand(), lengths, num_tokens) == name
    else:
        _check_varints(raw, lengths, num_tokens)
        expand = partial(_from_varints, raw, lengths)
        smallest = not _all_kept(lengths, num_tokens) and raw.size < len(lengths) * _bitmap_stride(num_tokens)
    if not smallest:
        raise BlobError(f"positions are stored as {name!r} though another encoding is smaller", reason="not_canonical")
    return expand


def to_deltas(positions: Sequence[int]) -> bytes:
    """One ascending list of positions as `delta`. Raises `InvalidRequest` for a list out of order."""
    gaps = _gaps(np.asarray(positions, np.int64), [len(positions)])
    if gaps.size and gaps.min() < 0:
        raise InvalidRequest("the ends of sentences must ascend from 0; this cache's do not and it cannot be written")
    return _to_varints(gaps).tobytes()


def from_deltas(data: bytes, num_tokens: int) -> tuple[int, ...]:
    """The inverse of `to_deltas`, for positions below `num_tokens`. Raises `BlobError` for other bytes."""
    raw: Bytes = np.frombuffer(data, np.uint8)
    lengths = [int(np.count_nonzero(raw < 0x80))]
    _check_varints(raw, lengths, num_tokens)
    return tuple(_from_varints(raw, lengths).tolist())


def _all_kept(lengths: Sequence[int], num_tokens: int) -> bool:
    return all(length == num_tokens for length in lengths)


def _bitmap_wins(lengths: Sequence[int], num_tokens: int) -> bool:
    """Whether the writer chooses the bitmap whatever the positions are: a varint takes at least one byte per entry."""
    return not _all_kept(lengths, num_tokens) and len(lengths) * _bitmap_stride(num_tokens) <= sum(lengths)


def _bitmap_stride(num_tokens: int) -> int:
    return (num_tokens + 7) // 8


def _gaps(positions: Ints, lengths: Sequence[int]) -> Ints:
    """The first position of each head, then the number of positions skipped between consecutive entries."""
    gaps = np.diff(positions, prepend=0) - 1
    counts = np.asarray(lengths, np.int64)
    first = (np.cumsum(counts) - counts)[counts > 0]  # entries of the heads that have some
    gaps[first] = positions[first]
    return gaps


def _check_bitmap(raw: Bytes, lengths: Sequence[int], num_tokens: int) -> None:
    stride = _bitmap_stride(num_tokens)
    if raw.size != len(lengths) * stride:
        raise BlobError(
            f"a position bitmap of {len(lengths)} heads and {num_tokens} tokens has {len(lengths) * stride} bytes, "
            f"this one has {raw.size}",
            reason="positions_malformed",
        )
    if num_tokens % 8 and np.any(raw[stride - 1 :: stride] >> (num_tokens % 8)):
        raise BlobError(f"a position bitmap marks a position past {num_tokens - 1}", reason="positions_out_of_range")
    marked = np.bitwise_count(raw).reshape(len(lengths), stride).sum(axis=1, dtype=np.int64)  # entries of each head
    for head, (count, expected) in enumerate(zip(marked.tolist(), lengths, strict=True)):
        if count != expected:
            raise BlobError(
                f"the position bitmap marks {count} entries in head {head}, the header says {expected}",
                reason="positions_count",
            )


def _from_bitmap(raw: Bytes, lengths: Sequence[int], num_tokens: int) -> Ints:
    # The index in the flat array minus the start of its head: several times faster than a two-dimensional search.
    flat = np.flatnonzero(np.unpackbits(raw, bitorder="little").view(np.bool_))
    return flat - np.repeat(np.arange(len(lengths)) * (_bitmap_stride(num_tokens) * 8), lengths)


def _check_varints(raw: Bytes, lengths: Sequence[int], num_tokens: int) -> None:
    if raw.size and raw[-1] >= 0x80:
        raise BlobError("the position deltas end within a varint", reason="positions_malformed")
    stored, count = int(np.count_nonzero(raw < 0x80)), sum(lengths)
    if stored != count:
        raise BlobError(f"{stored} position deltas are stored for {count} entries", reason="positions_count")
    for positions in _heads_of_varints(raw, lengths):
        # Gaps cannot be negative, so positions ascend by construction and only the upper end is left to check.
        if int(positions[-1]) >= num_tokens:
            raise BlobError(
                f"position {positions[-1]} is stored for a document of {num_tokens} tokens",
                reason="positions_out_of_range",
            )


def _from_varints(raw: Bytes, lengths: Sequence[int]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *_heads_of_varints(raw, lengths)])


def _heads_of_varints(raw: Bytes, lengths: Sequence[int]) -> Iterator[Ints]:
    """The positions of each head that has entries: head by head, because reading takes 40 bytes for each entry."""
    start = 0
    for length in filter(None, lengths):
        ends = np.flatnonzero(raw[start : start + _VARINT_BYTES * length] < 0x80)[:length] + 1
        if ends.size < length:
            raise _too_long()
        yield np.cumsum(_read_varints(raw[start : start + int(ends[-1])], ends) + 1) - 1
        start += int(ends[-1])


def _varint_lengths(values: Ints) -> Ints:
    """Bytes each value takes: seven bits per byte, at least one byte."""
    lengths = np.ones(values.shape, np.int64)
    for limit in range(1, _VARINT_BYTES):
        lengths += values >= 1 << (7 * limit)
    return lengths


def _to_varints(values: Ints) -> Bytes:
    lengths = _varint_lengths(values)
    starts = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), np.uint8)
    for index in range(_VARINT_BYTES):  # one pass per byte of a varint, never one per token
        has = lengths > index
        more = lengths > index + 1
        out[starts[has] + index] = ((values[has] >> (7 * index)) & 0x7F) | (more[has].astype(np.int64) << 7)
    return out


def _read_varints(raw: Bytes, ends: Ints) -> Ints:
    """Varints of which each one ends before a byte of `ends`."""
    starts = np.concatenate(([0], ends[:-1]))
    lengths = ends - starts
    if int(lengths.max()) > _VARINT_BYTES:
        raise _too_long()
    if np.any((raw[ends - 1] == 0) & (lengths > 1)):
        raise BlobError("a position delta is written with more bytes than it needs", reason="positions_malformed")
    values = np.zeros(ends.shape, np.int64)
    for index in range(_VARINT_BYTES):
        has = lengths > index
        values[has] |= (raw[starts[has] + index].astype(np.int64) & 0x7F) << (7 * index)
    return values


def _too_long() -> BlobError:
    return BlobError(f"a position delta is longer than {_VARINT_BYTES} bytes", reason="positions_malformed")
