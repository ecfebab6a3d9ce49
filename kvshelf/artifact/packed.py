"""The base of all records that hold entries: rows packed by head, and their positions in the document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coded import CodedRows
from kvshelf.artifact.identity import RopeMode
from kvshelf.artifact.planes import PlaneRows
from kvshelf.errors import StateConflict
from kvshelf.kernels.prefix_attention.prefixes import PackedPrefix, Prefix, StreamedPrefix
from kvshelf.kernels.quantize.rows import HeadRows, Move, QuantizedRows, Rows, by_head, plain
from kvshelf.kernels.transfer import upload_numbers

Stored = Rows | CodedRows | PlaneRows
"""Rows as a record holds them. The last two are decoded before attention reads them (`coder.plain_layer`)."""

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Applies the model's RoPE: keys `[n, D]` fp32 and positions `[n]` int64 to keys `[n, D]`."""


class HeadView(NamedTuple):
    """One head's entries as views: keys `[kept, D]`, values `[kept, Dv]`, positions `[kept]` int32."""

    keys: Tensor | HeadRows
    values: Tensor | HeadRows
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """Entries of a layer, packed by head. Head h owns rows `offsets[h]` to `offsets[h + 1]`.

    Rows are not padded: heads of different lengths need no fake keys on disk or in memory, and heads of equal length
    can still be viewed as `[kv_heads, kept, D]` without a copy.

    keys: `[entries, D]` and values: `[entries, Dv]`, in the model's dtype, contiguous, each head's rows in ascending
    position; or the same as `QuantizedRows`; or as the other kinds of `Stored`, which have to be decoded before
    anything reads them.
    entries_at: `[entries]` int32, the value of `entry_positions`, or a function that computes it on first use and
    cannot fail: expanding the bitmaps of a 64 MB cache takes half as long as receiving it, and attention needs no
    positions. Two threads may both call it; the results are equal. `rope_mode` says whether the rotation of RoPE is in
    the keys ("baked") or still to be applied ("pre").

    importance: `[entries]` fp32, higher is more important, or None; codec `mixed` chooses entries by it. precise: how
    many entries of each head, the most important ones, are to have more bits (`mixed:share=policy`), or None. Both
    exist in memory only, not in blobs, and do not count in `nbytes`.

    columns: numbers of each entry by name, `[entries]` fp32 each (`column_lengths`), with which an answer goes on
    (`keep_scores` of a policy). No attention reads them, and no codec changes them.
    """

    kind: ClassVar[str]
    """Each kind is a class below this one (`records`), with fields of its own and what differs of these methods."""
    own_tensors: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors that no other kind has."""
    row_names: ClassVar[tuple[str, ...]] = ("keys", "values")
    """The fields with rows that are encoded and stored."""
    continues: ClassVar[bool] = False
    """Whether rows of later tokens may stand behind its own."""
    latent: ClassVar[bool] = False
    projected: ClassVar[bool] = False
    """Whether its rows are what the model makes keys and values of, which it does before attention reads them."""

    keys: Stored
    values: Stored
    entries_at: Tensor | Callable[[], Tensor]
    offsets: tuple[int, ...]
    rope_mode: RopeMode = "baked"
    importance: Tensor | None = None
    precise: tuple[int, ...] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = self.offsets[-1]
        # Internal invariants; bytes from outside are checked by the blob reader, with named errors.
        assert self.offsets[0] == 0
        assert list(self.offsets) == sorted(self.offsets)
        assert self.keys.shape[0] == self.values.shape[0] == sum(self.row_lengths)
        assert not isinstance(self.entries_at, Tensor) or self.entries_at.shape[0] == entries
        assert self.importance is None or self.importance.shape == (entries,)
        assert self.precise is None or len(self.precise) == self.kv_heads
        assert all(numbers.shape == (sum(self.column_lengths),) for numbers in self.columns.values())

    @property
    def kv_heads(self) -> int:
        return len(self.offsets) - 1

    @property
    def key_dim(self) -> int:
        """D."""
        return self.keys.shape[1]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys, once dequantized."""
        return self.keys.dtype

    @property
    def entries(self) -> int:
        """Stored entries over all heads: what a budget counts."""
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> list[int]:
        """Entries of each head."""
        return [end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)]

    @property
    def row_lengths(self) -> list[int]:
        return self.lengths

    @property
    def column_lengths(self) -> list[int]:
        """Numbers of each head in a column."""
        return self.lengths

    def of_entries(self, column: str) -> list[Tensor]:
        """The numbers of a column of each entry, head by head, fp32; NaN where there are none."""
        none = torch.full_like(self.entry_positions, torch.nan, dtype=torch.float32)
        return list(torch.split(self.columns.get(column, none), self.lengths))

    @cached_property
    def uniform(self) -> bool:
        """Whether every head keeps the same number of entries."""
        return len(set(self.lengths)) <= 1

    @property
    def quantized(self) -> bool:
        return isinstance(self.keys, QuantizedRows) or isinstance(self.values, QuantizedRows)

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """Keys and values. Raises `StateConflict` for coded ones: see `Stored`."""
        keys, values = self.keys, self.values
        if isinstance(keys, CodedRows | PlaneRows) or isinstance(values, CodedRows | PlaneRows):
            codec = "klt" if isinstance(keys, CodedRows) else "lossless"
            raise StateConflict(f"the cache is under codec {codec}; decode it with its model: Engine.decoded(cache)")
        return keys, values

    @cached_property
    def entry_positions(self) -> Tensor:
        """`[entries]` int32, original positions in the document, ascending within a head."""
        return self.entries_at if isinstance(self.entries_at, Tensor) else self.entries_at()

    @property
    def positions(self) -> list[Tensor]:
        """One ascending int tensor of original positions per KV head."""
        return list(torch.split(self.entry_positions, self.lengths))

    @property
    def tokens(self) -> tuple[Tensor, list[int]]:
        """Positions of the tokens that attention sees, int32, head by head, and how many each head has."""
        return self.entry_positions, self.lengths

    @property
    def sees(self) -> tuple[int | None, int | None]:
        """The window and the chunk of a `LayerShape`."""
        return None, None

    @property
    def joined_bytes(self) -> int:
        """Bytes of a copy that attention reads in place of the rows."""
        return 0

    @property
    def unpacked_bytes(self) -> int:
        """Bytes that its rows take more once they are decoded; 0 for those that are read as they are."""
        coded = (rows for rows in (self.keys, self.values) if isinstance(rows, CodedRows | PlaneRows))
        return sum(math.prod(rows.shape) * rows.dtype.itemsize - rows.nbytes for rows in coded)

    @property
    def made_bytes(self) -> tuple[int, int]:
        """Bytes of the keys and values that the model makes of its rows, if it does, and of the decoded rows."""
        return 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes held in memory, with positions expanded and without `importance`."""
        tensors: int = sum(getattr(self, name).nbytes for name in ("keys", "values", *self.own_tensors))
        return tensors + self.unread_bytes

    @property
    def unread_bytes(self) -> int:
        """Bytes of positions and columns, which no attention reads."""
        numbers = len(self.columns) * sum(self.column_lengths)
        return self.entries * torch.int32.itemsize + numbers * torch.float32.itemsize

    def heads(self) -> list[tuple[Tensor, Tensor]]:
        """Keys `[kept_h, D]` and values `[kept_h, Dv]` of each KV head, as views; `StateConflict` if quantized."""
        keys, values = self.rows
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise StateConflict("a quantized record has no views of its keys and values; use dense() or prefixes()")
        return list(zip(torch.split(keys, self.lengths), torch.split(values, self.lengths), strict=True))

    def views(self) -> list[HeadView]:
        """Keys, values and positions of each KV head, quantized where the record is."""
        keys, values = (by_head(rows, self.lengths) for rows in self.rows)
        return [HeadView(*head) for head in zip(keys, values, self.positions, strict=True)]

    def plain_heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys `[kept_h, D]` and values `[kept_h, Dv]` of each KV head, dequantized."""
        keys, values = (list(torch.split(plain(rows), self.lengths)) for rows in self.rows)
        return keys, values

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[kv_heads, max_kept, D]`, values `[kv_heads, max_kept, Dv]`, and valid `[kv_heads, max_kept]` bool.

        Entries in ascending position, dequantized. Rows past a head's own length are zero and not valid. For
        inspection; attention never pads.
        """
        return padded(*self.plain_heads())

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:
        """The prefixes of this layer for attention. `rotate` is needed for keys that carry no rotation yet.

        Rows are read in place, quantized or not. Keys without rotation are rotated a block of rows at a time, and the
        result is not kept. Raises `StateConflict` when the model has no rotation to apply.
        """
        rotate = rotation(self.rope_mode, rotate)
        lengths = tuple(self.lengths)
        if rotate is None:
            return (PackedPrefix(*self.rows, lengths),)
        return (StreamedPrefix(lengths, partial(_block, self.views(), rotate)),)

    def select(self, chosen: Tensor, lengths: Sequence[int] | None = None) -> Packed:
        """The entries that `chosen` `[entries]` bool marks, of a record that is not quantized. lengths: their number in
        each head, for which this else waits for the device."""
        return replace(self, **self.selected(chosen, lengths))

    def selected(self, chosen: Tensor, lengths: Sequence[int] | None = None) -> dict[str, Any]:
        """The fields of this class for the entries that `chosen` marks. As of `select`."""
        assert isinstance(self.keys, Tensor)
        assert isinstance(self.values, Tensor)
        if lengths is None:
            lengths = torch.stack([head.sum() for head in torch.split(chosen, self.lengths)]).tolist()
        assert lengths is not None
        places = marked(chosen, sum(lengths))
        rows = self.rows_of(chosen, places)
        return {
            "keys": self.keys.index_select(0, rows),
            "values": self.values.index_select(0, rows),
            "entries_at": self.entry_positions.index_select(0, places),
            "offsets": offsets_of(lengths),
            "rope_mode": self.rope_mode,
            "importance": None if self.importance is None else self.importance.index_select(0, places),
            "columns": {name: numbers.index_select(0, places) for name, numbers in self.columns.items()},
        }

    def rows_of(self, chosen: Tensor, places: Tensor) -> Tensor:  # noqa: ARG002
        """The rows of the entries that `chosen` `[entries]` bool marks, which are at these places `[n]`."""
        return places

    def placed(self, first: int) -> Self:
        """The same entries in a document whose first token stands at position `first`."""
        return self._repositioned(lambda positions: positions + first)

    def at(self, places: Tensor) -> Self:
        """The same entries in a document in which token i stands at `places[i]`, `[N]`."""
        return self._repositioned(lambda positions: places.to(positions.device)[positions.long()].to(positions.dtype))

    def _repositioned(self, place: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, entries_at=place(self.entry_positions))

    def require_codec(self, codec: Codec) -> None:
        """Raise `InvalidRequest` for a codec that cannot encode this kind."""

    def own_cut(self, first: int, last: int) -> dict[str, Any]:  # noqa: ARG002
        """The fields of this kind alone in a record of KV heads `first` to `last - 1`."""
        return {}

    @classmethod
    def own_joined(cls, records: Sequence[Any]) -> dict[str, Any]:
        """The fields of this kind alone in a record whose heads are those of `records`, one after the other."""
        return {name: torch.cat([getattr(record, name) for record in records]) for name in cls.own_tensors}

    def to(self, device: torch.device | str) -> Self:
        """The same record on another device; itself when it is there already."""
        return self if self.keys.device == torch.device(device) else self.moved(lambda tensor: tensor.to(device))

    def moved(self, move: Move) -> Self:
        """The same record with what `move` makes of each of its tensors, in order."""

        def move_rows(rows: Any) -> Any:
            return move(rows) if isinstance(rows, Tensor) else rows.moved(move)

        rows = {name: move_rows(getattr(self, name)) for name in ("keys", "values", *self.own_tensors)}
        importance = None if self.importance is None else move(self.importance)
        columns = {name: move(numbers) for name, numbers in self.columns.items()}
        return replace(self, **rows, entries_at=move(self.entry_positions), importance=importance, columns=columns)


def in_spans(positions: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Which positions lie in one of these spans: bool, of the same shape. spans: ascending and apart."""
    edges = upload_numbers([edge for span in spans for edge in span], positions.device).to(positions.dtype)
    return torch.bucketize(positions.contiguous(), edges, right=True) % 2 == 1


def marked(chosen: Tensor, count: int) -> Tensor:
    """The places `[count]` int64 that `chosen` `[n]` bool marks; count: how many those are."""
    if chosen.device.type == "cpu":
        places = chosen.nonzero().flatten()
        assert len(places) == count
        return places
    return torch.nonzero_static(chosen, size=count).flatten()  # which waits for no size


def offsets_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """The first row of each head, then the end of the last head: heads + 1 numbers."""
    return tuple(accumulate(lengths, initial=0))


def padded(keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of all heads, padded with zeros to the longest head, and the mask of valid rows."""
    lengths = torch.tensor([len(head) for head in keys], device=keys[0].device)
    all_keys, all_values = (pad_sequence(list(heads), batch_first=True) for heads in (keys, values))
    columns = torch.arange(all_keys.shape[1], device=lengths.device)
    return all_keys, all_values, columns < lengths.unsqueeze(1)


def rotation(rope_mode: RopeMode, rotate: Rotate | None) -> Rotate | None:
    """The rotation the keys still need, None if they carry it. Raises `StateConflict` if the model has none."""
    if rope_mode == "baked":
        return None
    if rotate is None:
        raise StateConflict(
            "the keys of this cache are stored without their rotation, and the model it is attached to has none to "
            "apply"
        )
    return rotate


def _block(views: Sequence[HeadView], rotate: Rotate, head: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some entries of a head, dequantized and rotated."""
    view = views[head]
    keys, values = view.keys[start:stop], view.values[start:stop]
    return rotate(keys.float(), view.positions[start:stop].long()).to(values.dtype), values
