"""Rows under the codec `klt`: the coefficients of a transform, rounded to steps and entropy-coded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import torch
import zstandard
from torch import Tensor

from kvshelf.artifact.codecs import RUN_ROWS
from kvshelf.artifact.transforms import STEP_PARTS, RowTransform
from kvshelf.errors import BlobError
from kvshelf.kernels import ans
from kvshelf.kernels.quantize.rows import Move
from kvshelf.kernels.rates import CPU

FIRST_TOKENS: Final = 4

_FRAME: Final = 1 << 31
_WORTH_A_FRAME: Final = 0.9
"""Zstandard is tried in full where its fastest level comes within this share of the other coder's bytes."""
_SHIFTS: Final = 8
"""Tables on either side of the transform's among which a channel chooses: an octave."""
_COUNTED: Final = 1024
"""Sizes of codes that are counted apart when a table is chosen; no table reaches that far."""
_DEAD: Final = 0.15
"""How much further than the next half a coefficient has to be to be rounded away from zero, in steps. Numbers near
zero are the most frequent: on kvshelf-tiny, 2,048 tokens, this saves an eighth of the bytes at step 1.5 and no answer.
"""
_DEAD_WEIGHTED: Final = 0.05
"""The same where all coefficients weigh alike. On SmolLM2, 0.15 has a third more nats at equal bytes."""
_MAX_CODE: Final = (1 << 30) - 1
_RUNS_AT_ONCE: Final = 4
"""Runs that are decoded before their rows are made: those that C decodes side by side. Their codes then fit into a
processor's cache, and the next ones take the same memory."""

Turn = Callable[[Tensor, Tensor], Tensor]
"""Applies a rotation, or undoes it: states `[..., N, D]` fp32 and positions `[N]` to the same shape."""


@dataclass(frozen=True, eq=False)
class _HeadGroup:
    """Heads that are transformed together. head: the number of the only one, None for all heads. order: the table of
    each channel. rows: of each run. sizes: the array's word on the size of each stream. data: `[bytes]`, all streams.
    """

    head: int | None
    order: list[int]
    rows: list[int]
    sizes: Any
    data: Tensor

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each stream."""
        return list(map(int, self.sizes & ~np.uint32(_FRAME)))

    @property
    def framed(self) -> list[bool]:
        """Which streams are Zstandard frames."""
        return list(map(bool, self.sizes & np.uint32(_FRAME)))

    @property
    def streams(self) -> Sequence[Tensor]:
        return torch.split(self.data, self.nbytes)

    def coded(self) -> ans.Runs:
        """The streams that are no frames."""
        streams = [stream for stream, framed in zip(self.streams, self.framed, strict=True) if not framed]
        rows = [count for count, framed in zip(self.rows, self.framed, strict=True) if not framed]
        data = self.data if len(streams) == len(self.rows) else torch.cat([self.data[:0], *streams])
        return ans.Runs(data, list(map(len, streams)), rows, self.order)

    def parts(self, runs: int) -> Iterator[_HeadGroup]:
        """The group, `runs` runs at a time."""
        at = 0
        for start in range(0, len(self.rows), runs):
            part = slice(start, start + runs)
            size = sum(self.nbytes[part])
            yield replace(self, rows=self.rows[part], sizes=self.sizes[part], data=self.data[at : at + size])
            at += size


class ByteRows:
    """Rows held as the bytes of a blob's array, in the memory of the CPU until they are decoded."""

    data: Tensor

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def moved(self, move: Move) -> Self:  # noqa: ARG002
        """Itself: its parts are found by the CPU, whatever decodes them."""
        return self


@dataclass(frozen=True, eq=False)
class CodedRows(ByteRows):
    """The keys or the values of a record, as bytes. Head h has `lengths[h]` rows of `num_channels` numbers.

    data: `[bytes]` uint8, the array of a blob (docs/internals/format.md). dtype: of the rows once decoded.
    """

    data: Tensor
    lengths: tuple[int, ...]
    num_channels: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.lengths), self.num_channels

    @cached_property
    def _words(self) -> Any:
        return self.data.numpy().view("<u4")

    @property
    def step_parts(self) -> int:
        return int(self._words[0])

    @property
    def joint(self) -> bool:
        return bool(self._words[1])

    @property
    def first(self) -> list[int]:
        """Rows of each head that are not coded."""
        return list(map(int, self._words[2 : 2 + len(self.lengths)]))

    @property
    def run_rows(self) -> list[list[int]]:
        """Rows of each run: of all heads together, or of each head."""
        coded = [length - first for length, first in zip(self.lengths, self.first, strict=True)]
        return [
            [min(RUN_ROWS, rows - start) for start in range(0, rows, RUN_ROWS)]
            for rows in (coded[:1] if self.joint else coded)
        ]

    @property
    def _layout(self) -> tuple[int, int, int, int]:
        """Where sizes, shifts, first rows and streams begin, in words."""
        sizes = 2 + len(self.lengths)
        shifts = sizes + sum(map(len, self.run_rows))
        first = shifts + -(-len(self.lengths) * self.num_channels // 8)
        return sizes, shifts, first, first + -(-sum(self.first) * self.num_channels // 2)

    @property
    def _streams(self) -> tuple[int, Any]:
        """Where the streams begin, in words, and the words on their sizes."""
        sizes, shifts, _, streams = self._layout
        return streams, self._words[sizes:shifts]

    @property
    def _shifts(self) -> Any:
        """`[H, D]`: how far each channel's table is from the transform's."""
        _, shifts, first, _ = self._layout
        packed = self._words[shifts:first].view(np.uint8)
        halves = np.stack([packed & 15, packed >> 4], axis=1).ravel()[: len(self.lengths) * self.num_channels]
        return halves.astype(np.int64).reshape(len(self.lengths), self.num_channels) - _SHIFTS

    def require_sound(self, where: str) -> None:
        """Raise `BlobError` unless the array has the parts that its numbers promise. Decodes nothing."""
        heads = len(self.lengths)
        if self.data.numel() % 4 or self.data.numel() // 4 < 2 + heads:
            raise malformed(where, "is too short")
        if self._words[1] > 1 or not 0 < self.step_parts <= 1 << 24:
            raise malformed(where, "has another layout or no step")
        if self.joint and (len(set(self.lengths)) > 1 or len(set(self.first)) > 1):
            raise malformed(where, "has heads of different lengths that are transformed together")
        if any(first > min(length, FIRST_TOKENS) for first, length in zip(self.first, self.lengths, strict=True)):
            raise malformed(where, "has more first rows than entries")
        if sum(length // RUN_ROWS for length in self.lengths) > len(self._words):  # before a list of all runs is made
            raise malformed(where, "is too short")
        begin, sizes = self._streams
        if len(self._words) < begin or begin + int((sizes & ~np.uint32(_FRAME)).sum()) // 4 > 1 << 40:
            raise malformed(where, "is too short")
        nbytes = (sizes & ~np.uint32(_FRAME)).astype(np.int64)
        if (nbytes % 4).any() or begin * 4 + int(nbytes.sum()) != self.data.numel():
            raise malformed(where, "has streams of other sizes")

    def placed(self, states: Tensor, positions: Sequence[Tensor], turn: Turn | None) -> Tensor:
        """Rows `[entries, D]` in `dtype` from `states`. turn: rotates keys to the `positions` of each head, or None."""
        if turn is None:
            return states.to(self.dtype)
        out = states.to(self.dtype, copy=True)
        shape = (len(self.lengths), self.lengths[0], self.num_channels)
        if len(set(self.lengths)) == len(set(self.first)) == 1 and all(map(positions[0].equal, positions)):
            first = self.first[0]  # heads that lie alike are turned in one call
            if first < shape[1]:
                out.view(shape)[:, first:] = turn(states.view(shape)[:, first:], positions[0][first:].long())
            return out
        lengths = list(self.lengths)
        heads = zip(torch.split(out, lengths), torch.split(states, lengths), positions, self.first, strict=True)
        for head, rows, places, first in heads:
            if len(rows) > first:
                head[first:] = turn(rows[first:], places[first:].long())
        return out

    def states(self, transform: RowTransform, tables: ans.Tables) -> Tensor:
        """`[entries, D]` fp32, keys without their rotation; those of the first tokens as they are stored.

        Raises `BlobError` for streams that no encoder writes.
        """
        out = torch.empty(self.shape)
        for group in self._groups(transform, tables):
            basis, done = self._basis(transform, group), 0
            for part in group.parts(_RUNS_AT_ONCE):
                (codes,) = _decoded([part], tables, CPU)
                self._multiply(codes, basis, transform, group, out, done)
                done += sum(part.rows)
        return self._with_first_rows(out)

    def _groups(self, transform: RowTransform, tables: ans.Tables) -> Iterator[_HeadGroup]:
        """The groups of heads, in the order of their streams."""
        shifts = self._shifts
        begin, sizes = self._streams
        at, runs = 4 * begin, 0
        for number, rows in enumerate(self.run_rows):
            head = None if self.joint else number
            order = _shifted(
                transform.order(self.step_parts, head), shifts.ravel() if self.joint else shifts[number], tables
            )
            group = _HeadGroup(head, order, rows, sizes[runs : runs + len(rows)], self.data[at:])
            yield replace(group, data=group.data[: sum(group.nbytes)])
            at, runs = at + sum(group.nbytes), runs + len(rows)

    def _basis(self, transform: RowTransform, group: _HeadGroup) -> Tensor:
        return transform.synthesis(group.head) * (self.step_parts / STEP_PARTS * transform.unit)

    def _multiply(
        self, codes: Tensor, basis: Tensor, transform: RowTransform, group: _HeadGroup, out: Tensor, done: int
    ) -> None:
        """Write rows of `out` `[entries, D]` fp32, behind those that are done, from codes `[C, n]` of all heads, or of
        one alone. basis: `[C, H * D]`, or `[D, D]`. The last channels are often all zeros, and are left out."""
        used = _used(codes)
        heads = range(len(self.lengths)) if group.head is None else [group.head]
        places = torch.split(out, list(self.lengths))
        for head, head_basis in zip(heads, torch.split(basis[:used], self.num_channels, dim=1), strict=True):
            place = places[head][self.first[head] + done :][: codes.shape[1]]
            torch.addmm(transform.mean[head], codes[:used].T, head_basis, out=place)

    def _with_first_rows(self, out: Tensor) -> Tensor:
        _, _, begin, end = self._layout
        raw = torch.from_numpy(self._words[begin:end]).view(torch.bfloat16)
        rows = raw[: sum(self.first) * self.num_channels].view(-1, self.num_channels).float()
        for head, first in zip(torch.split(out, list(self.lengths)), torch.split(rows, self.first), strict=True):
            head[: len(first)] = first
        return out


def states_together(
    arrays: Sequence[tuple[CodedRows, RowTransform]], tables: ans.Tables, device: torch.device
) -> Iterator[Tensor]:
    """The `states` of many arrays on a device. All streams are decoded in one launch, and then the states of one array
    at a time are made. They are those of the CPU but for the rounding of products. Raises as `states`."""
    groups = [list(rows._groups(transform, tables)) for rows, transform in arrays]
    codes = _decoded([group for row_groups in groups for group in row_groups], tables, device)
    for (rows, transform), row_groups in zip(arrays, groups, strict=True):
        out, decoder = torch.empty(rows.shape, device=device), transform.decoder_on(device)
        for group in row_groups:
            rows._multiply(next(codes), rows._basis(decoder, group), decoder, group, out, 0)
        yield rows._with_first_rows(out)


def encode_rows(
    heads: Sequence[Tensor],
    tokens: Sequence[Tensor],
    places: Sequence[Tensor],
    transform: RowTransform,
    tables: ans.Tables,
    *,
    step_parts: int,
    joint: bool,
    undo: Turn | None,
) -> CodedRows:
    """Encode the rows `[n_h, D]` of each head. tokens: the positions of these rows in the document; places: those that
    keys are rotated to; undo: takes the rotation off keys, which would spread every direction over all phases. The
    document's first tokens, which all questions attend to, are unlike others and stay in 16 bits."""
    first = [int((positions < FIRST_TOKENS).sum()) for positions in tokens]
    first_rows = [rows[:count] for rows, count in zip(heads, first, strict=True)]
    states = []
    for rows, positions, count in zip(heads, places, first, strict=True):
        others = rows[count:].float()
        states.append(others if undo is None or not len(others) else undo(others, positions[count:].long()))
    step = step_parts / STEP_PARTS * transform.unit
    groups = [torch.cat(states, dim=1)] if joint else states  # [n, H * D], or [n, D] of each head
    streams, shifts = [], []
    for group, rows in enumerate(groups):
        mean = transform.mean.flatten() if joint else transform.mean[group]
        basis = transform.analysis(None if joint else group)
        dead = _DEAD if transform.weight is None else _DEAD_WEIGHTED
        coefficients = (rows - mean) @ (basis / step)
        rounded = coefficients.sign() * (coefficients.abs() + (0.5 - dead)).floor_()
        codes = rounded.clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int32).T.numpy()
        order = transform.order(step_parts, None if joint else group)
        shifts.append(_best_shifts(codes, tables, order))
        order = _shifted(order, shifts[-1], tables)
        runs = [codes[:, start : start + RUN_ROWS] for start in range(0, codes.shape[1], RUN_ROWS)]
        streams += [_encoded(run, tables, order) for run in runs]
    whole = torch.cat(first_rows).to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    numbers = [step_parts, int(joint), *first, *(size for _, size in streams)]
    data = (
        np.array(numbers, "<u4").tobytes()
        + _packed(np.concatenate(shifts))
        + whole
        + bytes(-len(whole) % 4)
        + b"".join(stream for stream, _ in streams)
    )
    array = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return CodedRows(array, tuple(map(len, heads)), heads[0].shape[1], heads[0].dtype)


def _best_shifts(codes: Any, tables: ans.Tables, order: Sequence[int]) -> Any:
    """For each channel of `[C, n]`, the shift of its table that takes the fewest bits. The deviations of a document are
    not those of the calibration's texts: 2 to 5 % of the bytes (measured on kvshelf-tiny)."""
    best = np.zeros(len(order), np.int64)
    sizes = np.minimum(np.abs(codes), _COUNTED)
    channel_tables = np.array(order)
    for table in np.unique(channel_tables):
        channels = np.flatnonzero(channel_tables == table)
        near = [min(max(table + shift, 0), len(tables.frequencies) - 1) for shift in range(-_SHIFTS, _SHIFTS)]
        bits = np.stack([tables.bits(candidate, _COUNTED) for candidate in near])
        counts = np.stack([np.bincount(sizes[channel], minlength=_COUNTED + 1) for channel in channels])
        costs = counts @ bits.T
        best[channels] = np.where(costs.min(axis=1) < costs[:, _SHIFTS], costs.argmin(axis=1) - _SHIFTS, 0)
    return best


def _shifted(order: Sequence[int], shifts: Any, tables: ans.Tables) -> list[int]:
    return list(map(int, np.clip(np.array(order) + shifts, 0, len(tables.frequencies) - 1)))


def _packed(shifts: Any) -> bytes:
    halves = np.concatenate([shifts + _SHIFTS, np.zeros(-len(shifts) % 8, np.int64)]).astype(np.uint8)
    return bytes(halves[::2] | halves[1::2] << 4)


def _encoded(codes: Any, tables: ans.Tables, order: Sequence[int]) -> tuple[bytes, int]:
    """One run, by the coder that takes fewer bytes, and the word on its size. Text that repeats itself (boilerplate,
    logs) has keys and values that do, too: a dictionary then takes a third of the bytes."""
    stream = ans.encode(codes, tables, order)
    largest = int(np.abs(codes).max(initial=0))
    smallest_type = "<i1" if largest < 1 << 7 else "<i2" if largest < 1 << 15 else "<i4"
    plain = np.ascontiguousarray(codes).astype(smallest_type).tobytes()
    quick = len(zstandard.ZstdCompressor(level=1).compress(plain))
    if quick < _WORTH_A_FRAME * len(stream):
        frame = zstandard.ZstdCompressor(level=19).compress(plain)
        if len(frame) + 4 < len(stream):
            framed = len(frame).to_bytes(4, "little") + frame + bytes(-len(frame) % 4)
            return framed, len(framed) | _FRAME
    return stream, len(stream)


def _decoded(groups: Sequence[_HeadGroup], tables: ans.Tables, device: torch.device) -> Iterator[Tensor]:
    """Codes `[C, rows of all runs]` fp32 of each group."""
    decoded = ans.decode([group.coded() for group in groups], tables, device)
    for group, (codes, sound) in zip(groups, decoded, strict=True):
        if not all(sound):
            raise malformed("a stream", "is not what an encoder writes")
        if any(group.framed):
            runs = list(zip(group.streams, group.rows, group.framed, strict=True))
            coded = iter(torch.split(codes, [count for _, count, framed in runs if not framed], dim=1))
            parts = [
                _unframed(run, count, len(group.order)).to(device) if framed else next(coded)
                for run, count, framed in runs
            ]
            codes = torch.cat(parts, dim=1)
        yield codes


def _used(codes: Tensor) -> int:
    """Channels of `[C, n]` up to the last one that is not all zeros: counted from the end, which reads no more."""
    if codes.device.type != "cpu":
        return int((codes.any(dim=1) * torch.arange(1, len(codes) + 1, device=codes.device)).amax())
    used = len(codes)
    while used and not codes[used - 1].any():
        used -= 1
    return used


def _unframed(run: Tensor, rows: int, channels: int) -> Tensor:
    raw = run.numpy().tobytes()
    size = int.from_bytes(raw[:4], "little")
    most = 4 * rows * channels
    try:
        if zstandard.frame_content_size(raw[4 : 4 + size]) > most:
            raise malformed("a stream", "has too many codes")
        plain = zstandard.ZstdDecompressor().decompress(raw[4 : 4 + size], max_output_size=most)
    except zstandard.ZstdError as error:
        raise malformed("a stream", f"is no Zstandard frame ({error})") from error
    width = len(plain) // (rows * channels) if rows * channels else 0
    if width not in (1, 2, 4) or len(plain) != width * rows * channels:
        raise malformed("a stream", "has another number of codes")
    return torch.from_numpy(np.frombuffer(plain, f"<i{width}").reshape(channels, rows).astype(np.float32))


def malformed(where: str, what: str) -> BlobError:
    """The refusal of an array that no encoder writes."""
    return BlobError(f"{where} {what}", reason="coded_malformed")
