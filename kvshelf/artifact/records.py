"""Layer records: the entries kept of one layer of a KV cache, and how attention reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.packed import HeadView, Packed, Rotate, marked, offsets_of, padded, rotation
from kvshelf.artifact.shape import StateRole, StateShape, tokens_seen
from kvshelf.errors import StateConflict
from kvshelf.kernels.prefix_attention.prefixes import MergedPrefix, PackedPrefix, Prefix, StreamedPrefix
from kvshelf.kernels.quantize.rows import Move, Rows, plain
from kvshelf.kernels.transfer import upload_numbers


@dataclass(frozen=True, eq=False)
class Kept(Packed):
    """Some of a layer's entries, unchanged but for the codec. An entry is a token. See `Packed` for the fields."""

    kind: ClassVar[str] = "kept"
    continues: ClassVar[bool] = True

    def select(self, chosen: Tensor, lengths: Sequence[int] | None = None) -> Kept:
        return Kept(**self.selected(chosen, lengths))


@dataclass(frozen=True, eq=False)
class Pruned(Packed):
    """Some tokens whose keys have D' of the D channels, which differ by head (ThinK, arXiv 2407.21018).

    keys: `[entries, D']`. channels: `[kv_heads, D']` int16, ascending. full_dim: D. Keys carry their rotation, which
    could not be applied to some of the channels. `views` and `dense` give them D channels, with zeros.
    """

    kind: ClassVar[str] = "pruned"
    own_tensors: ClassVar[tuple[str, ...]] = ("channels",)

    channels: Tensor = field(kw_only=True)
    full_dim: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.rope_mode == "baked"
        assert self.channels.shape == (self.kv_heads, self.keys.shape[1])
        assert self.channels.dtype == torch.int16

    @property
    def key_dim(self) -> int:
        return self.full_dim

    def views(self) -> list[HeadView]:
        return [view._replace(keys=self._widened(head, view.keys[:])) for head, view in enumerate(super().views())]

    def plain_heads(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = super().plain_heads()
        return [self._widened(head, rows) for head, rows in enumerate(keys)], values

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:  # noqa: ARG002
        return (PackedPrefix(*self.rows, tuple(self.lengths), self.channels.to(torch.int32)),)

    def require_codec(self, codec: Codec) -> None:
        codec.require_pruned()

    def own_cut(self, first: int, last: int) -> dict[str, Any]:
        return {"channels": self.channels[first:last].clone()}

    def _widened(self, head: int, keys: Tensor) -> Tensor:
        """`[kept_h, D']` as `[kept_h, D]`."""
        whole = keys.new_zeros(len(keys), self.full_dim)
        whole[:, self.channels[head].long()] = keys
        return whole


@dataclass(frozen=True, eq=False)
class Indexed(Packed):
    """The first tokens of a document, the same in every head, and an index of them: a summary of each `block` tokens.

    The last block may be shorter. The policy that made a summary says what it is. summaries: `[blocks, W]` bf16.
    A blob stores the index before the rows, and a digest of each block: a question reads the blocks that it chooses.
    """

    kind: ClassVar[str] = "indexed"
    own_tensors: ClassVar[tuple[str, ...]] = ("summaries",)

    block: int = field(kw_only=True)
    summaries: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.uniform
        assert self.summaries.shape[0] == -(-self.lengths[0] // self.block)
        assert self.summaries.dtype == torch.bfloat16

    def select(self, chosen: Tensor, lengths: Sequence[int] | None = None) -> Kept | Indexed:
        """See `Packed.select`. The index stays with the first tokens; other entries have none."""
        selected = self.selected(chosen, lengths)
        if not bool(chosen[0]):
            return Kept(**selected)
        blocks = -(-selected["offsets"][1] // self.block)
        return Indexed(**selected, block=self.block, summaries=self.summaries[:blocks])

    def require_codec(self, codec: Codec) -> None:
        codec.require_blocks(self.block)

    @classmethod
    def own_joined(cls, records: Sequence[Any]) -> dict[str, Any]:
        """A summary has a part of each query head."""
        return {"summaries": torch.cat([record.summaries for record in records], dim=1)}


@dataclass(frozen=True, eq=False)
class Recent(Packed):
    """The last tokens of a document in a layer whose queries see no others. Kept verbatim, under every policy and
    codec: they do not grow with the document.

    A question sees fewer of them with each of its tokens; `LogitRules` say which.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.uniform

    @staticmethod
    def of(keys: Tensor, values: Tensor, window: int | None, chunk: int | None = None) -> Recent:
        """From the keys `[kv_heads, N, D]` and values `[kv_heads, N, Dv]` of a document."""
        return Recent._ending_at(keys.shape[1], keys, values, window, chunk)

    def followed_by(self, keys: Tensor, values: Tensor, end: int) -> Recent:
        """The last tokens after T more, of keys `[kv_heads, T, D]` and values, up to `end` tokens of the document."""
        old_keys, old_values = (torch.stack(heads) for heads in self.plain_heads())  # [kv_heads, kept, D]
        keys = torch.cat([old_keys.to(keys.device), keys], dim=1)
        values = torch.cat([old_values.to(values.device), values], dim=1)
        return Recent._ending_at(end, keys, values, *self.sees)

    @staticmethod
    def _ending_at(end: int, keys: Tensor, values: Tensor, window: int | None, chunk: int | None) -> Recent:
        """From keys `[kv_heads, N, D]` and values of the document's last N tokens, no fewer than are seen."""
        heads, tokens, _ = keys.shape
        kept = tokens_seen(end, window, chunk)
        fields: dict[str, Any] = {
            "keys": keys[:, tokens - kept :].flatten(0, 1),
            "values": values[:, tokens - kept :].flatten(0, 1),
            "entries_at": torch.arange(end - kept, end, dtype=torch.int32, device=keys.device).repeat(heads),
            "offsets": offsets_of([kept] * heads),
        }
        if chunk is not None:
            return Chunk(**fields, chunk=chunk)
        assert window is not None
        return SlidingWindow(**fields, window=window)


@dataclass(frozen=True, eq=False)
class SlidingWindow(Recent):
    """The last tokens of a layer whose queries see `window` tokens, themselves included: at most `window - 1`."""

    kind: ClassVar[str] = "window"

    window: int = field(kw_only=True)

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return self.window, None


@dataclass(frozen=True, eq=False)
class Chunk(Recent):
    """The tokens of the document's unfinished chunk, of a layer whose queries see their chunk of `chunk` tokens."""

    kind: ClassVar[str] = "chunk"

    chunk: int = field(kw_only=True)

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return None, self.chunk


@dataclass(frozen=True, eq=False)
class Latents(Packed):
    """Some tokens of a layer with latent attention (MLA, arXiv 2405.04434, section 2.1), for all its heads together.

    keys: the latents `[entries, rank]`, of which the model makes the keys and values of each head by one product.
    values: the part of a token's key that all heads share, rotated to its position, `[entries, rope]`. One head.

    Nothing is expanded: queries are brought into the latent space instead (`Absorbed`), where a token has the key
    `[latent, rotated]` and the value `latent`.
    """

    kind: ClassVar[str] = "latents"
    continues: ClassVar[bool] = True
    latent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.kv_heads == 1
        assert self.rope_mode == "baked"

    @classmethod
    def of(cls, record: Packed) -> Latents:
        """From a record of one head, whose keys are latents and whose values are rotated parts."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(Packed)})

    @property
    def joined_bytes(self) -> int:
        """Bytes of a copy with latents and rotated parts side by side; quantized rows are read in place."""
        return 0 if self.quantized else self.entries * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:  # noqa: ARG002
        """See `Packed.prefixes`. Keys `[entries, rank + rope]`; values are their first `rank` channels, not a copy."""
        latents, rotated = self.rows
        if isinstance(latents, Tensor) and isinstance(rotated, Tensor):
            joined = torch.cat([latents, rotated], dim=1)
            return (PackedPrefix(joined, joined[:, : self.key_dim], (self.entries,)),)
        return (StreamedPrefix((self.entries,), partial(_joined_block, self.views()[0], self.key_dim)),)


@dataclass(frozen=True, eq=False)
class Merged(Packed):
    """Classes of merged entries and the slots that stand for the tokens in them (EMS, arXiv 2412.08521).

    An entry is a class: the key (a direction) and the value that its tokens share. `entry_positions` are the positions
    of the class centers. Slot i stands for the token at `slot_positions[i]`: its key is `slot_scales[i] *
    keys[slot_classes[i]]`, its value `values[slot_classes[i]]`. A token that is its own class has scale 1 and its own
    key. Tokens that were evicted have no slot: a slot with a zero key would still take part of the softmax.

    With rope_mode "baked", slots need no rotation; with "pre", attention rotates each slot to its own position.

    slot_scales: `[slots]` fp32. slot_classes: `[slots]` int32, the class's index within its head. slot_positions:
    `[slots]` int32, ascending within a head. slot_offsets: head h owns slots `slot_offsets[h]` to
    `slot_offsets[h + 1]`. columns: of each slot.
    """

    kind: ClassVar[str] = "merged"
    own_tensors: ClassVar[tuple[str, ...]] = ("slot_scales", "slot_classes", "slot_positions")

    slot_scales: Tensor = field(kw_only=True)
    slot_classes: Tensor = field(kw_only=True)
    slot_positions: Tensor = field(kw_only=True)
    slot_offsets: tuple[int, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.slot_offsets[0] == 0
        assert list(self.slot_offsets) == sorted(self.slot_offsets)
        assert len(self.slot_offsets) == len(self.offsets)
        for tensor in (self.slot_scales, self.slot_classes, self.slot_positions):
            assert tensor.shape == (self.slots,)

    @property
    def slots(self) -> int:
        """Slots over all heads. A budget counts `entries` instead."""
        return self.slot_offsets[-1]

    @property
    def slot_lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.slot_offsets, self.slot_offsets[1:], strict=False)]

    @property
    def column_lengths(self) -> list[int]:
        return self.slot_lengths

    def of_entries(self, column: str) -> list[Tensor]:
        """As `Packed.of_entries`: the numbers of centers."""
        if column not in self.columns:
            return super().of_entries(column)
        heads = torch.split(self.columns[column], self.slot_lengths)
        return [numbers[~beside] for numbers, beside in zip(heads, self.beside, strict=True)]

    @property
    def beside(self) -> list[Tensor]:
        """For each head `[slots_h]` bool: whether a slot is of another token than the center of its class."""
        positions = torch.split(self.slot_positions, self.slot_lengths)
        classes = torch.split(self.slot_classes.long(), self.slot_lengths)
        heads = zip(positions, classes, self.positions, strict=True)
        return [slots != centers[slot_classes] for slots, slot_classes, centers in heads]

    @property
    def centered(self) -> bool:
        """Whether the center of each class is a token of it, with the class's key."""
        centers = [~beside for beside in self.beside]
        scales = torch.split(self.slot_scales, self.slot_lengths)
        unscaled = all(bool((head[mask] == 1).all()) for head, mask in zip(scales, centers, strict=True))
        return unscaled and [int(mask.sum()) for mask in centers] == self.lengths

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:
        """The slots of this layer, as prefixes for attention. See `Packed.prefixes`.

        If slots need no rotation, those of a class differ only by a factor and are never expanded. Otherwise they are
        expanded a block of rows at a time.
        """
        rotate = rotation(self.rope_mode, rotate)
        lengths, slot_lengths = tuple(self.lengths), tuple(self.slot_lengths)
        if rotate is None:
            return (MergedPrefix(*self.rows, lengths, self.slot_scales, self.slot_classes, slot_lengths),)
        slots = zip(
            torch.split(self.slot_scales, self.slot_lengths),
            torch.split(self.slot_classes.long(), self.slot_lengths),
            torch.split(self.slot_positions, self.slot_lengths),
            strict=True,
        )
        heads = list(zip(self.views(), slots, strict=True))
        return (StreamedPrefix(slot_lengths, partial(_slot_block, heads, rotate)),)

    def select(self, chosen: Tensor, lengths: Sequence[int] | None = None) -> Merged:
        """The classes that `chosen` `[entries]` bool marks, and their slots. Waits for the device; not if quantized."""
        starts = upload_numbers(self.offsets[:-1], chosen.device)
        slot_lengths = upload_numbers(self.slot_lengths, chosen.device)
        slot_starts = starts.repeat_interleave(slot_lengths, output_size=self.slots)
        rows = slot_starts + self.slot_classes  # each slot's class as a row of `keys`
        chosen_slots = chosen[rows]
        counts = torch.stack([head.sum() for head in torch.split(chosen_slots, self.slot_lengths)]).tolist()
        slots = marked(chosen_slots, sum(counts))
        selected = self.selected(chosen, lengths)
        # A class's new index within its head: the chosen rows before it, minus those before its head.
        before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
        classes = before[rows] - before[slot_starts]
        selected["columns"] = {name: numbers[slots] for name, numbers in self.columns.items()}
        return Merged(
            **selected,
            slot_scales=self.slot_scales[slots],
            slot_classes=classes[slots].to(torch.int32),
            slot_positions=self.slot_positions[slots],
            slot_offsets=offsets_of(counts),
        )

    @property
    def tokens(self) -> tuple[Tensor, list[int]]:
        return self.slot_positions, self.slot_lengths

    def _repositioned(self, place: Callable[[Tensor], Tensor]) -> Merged:
        return replace(super()._repositioned(place), slot_positions=place(self.slot_positions))

    def own_cut(self, first: int, last: int) -> dict[str, Any]:
        slots = slice(self.slot_offsets[first], self.slot_offsets[last])
        cut = {name: getattr(self, name)[slots].clone() for name in self.own_tensors}
        return cut | {"slot_offsets": offsets_of(self.slot_lengths[first:last])}

    @classmethod
    def own_joined(cls, records: Sequence[Any]) -> dict[str, Any]:
        lengths = [length for record in records for length in record.slot_lengths]
        return super().own_joined(records) | {"slot_offsets": offsets_of(lengths)}


@dataclass(frozen=True, eq=False)
class Residuals(Packed):
    """Some tokens, the same in every head, of which the layer's input is stored, the residual stream before its norm
    (KV-Direct, arXiv 2603.19664). The model makes their keys and values again before anything reads them: see
    `coder.CacheDecoder`.

    keys: the residuals `[tokens, width]`, one row for all heads. values: `[tokens, 0]`: there is nothing else to store.
    full_dims: D and Dv, of the keys and values that it stands for. Those keys carry their rotation. maker: makes keys
    and values `[kv_heads, n, ...]` of residuals `[n, width]` at positions `[n]` whenever attention reads them, or None;
    in memory only.
    """

    kind: ClassVar[str] = "residuals"
    row_names: ClassVar[tuple[str, ...]] = ("keys",)
    projected: ClassVar[bool] = True

    full_dims: tuple[int, int] = field(kw_only=True)
    maker: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.uniform
        assert self.rope_mode == "baked"

    @property
    def key_dim(self) -> int:
        return self.full_dims[0]

    @property
    def value_dim(self) -> int:
        return self.full_dims[1]

    @property
    def row_lengths(self) -> list[int]:
        return self.lengths[:1]

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """Raises `StateConflict`: there are no keys and values before the model has made them."""
        raise StateConflict(
            "the cache has residuals in place of keys and values; decode it with its model: Engine.decoded(cache)"
        )

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:
        """See `Packed.prefixes`. A `maker` makes the keys and values of the whole layer when they are read."""
        if self.maker is None:
            return super().prefixes(rotate)
        return (StreamedPrefix(tuple(self.lengths), _MadeWhenRead(self, self.maker)),)

    @property
    def made_bytes(self) -> tuple[int, int]:
        return self.entries * sum(self.full_dims) * self.dtype.itemsize, self.keys.nbytes + self.unpacked_bytes

    def rows_of(self, chosen: Tensor, places: Tensor) -> Tensor:
        heads = chosen.view(self.kv_heads, -1)
        if not bool((heads == heads[0]).all()):
            raise StateConflict(
                "a token has one residual for all heads, which choose other tokens; decode the cache first"
            )
        return places[: len(places) // self.kv_heads]

    def require_codec(self, codec: Codec) -> None:
        codec.require_residuals()

    def with_rows(self, keys: Tensor, values: Tensor) -> Kept:
        """The entries with the keys `[kv_heads, tokens, D]` and values `[kv_heads, tokens, Dv]` that the model made."""
        packed = {field.name: getattr(self, field.name) for field in fields(Packed)}
        return Kept(**packed | {"keys": keys.flatten(0, 1), "values": values.flatten(0, 1)})


RECORDS: Final[Mapping[str, type[PackedRecord]]] = {
    record.kind: record for record in (Kept, Pruned, Indexed, SlidingWindow, Chunk, Latents, Residuals, Merged)
}
"""The kinds of records in a blob (`kvshelf.artifact.blob.kinds`), by name."""

PackedRecord = Packed
"""The kinds that hold entries themselves."""


@dataclass(frozen=True, eq=False)
class Parts:
    """One layer as several records with the same heads and disjoint tokens. Attention sums over all of them."""

    kind: ClassVar[str] = "parts"

    parts: tuple[PackedRecord, ...]

    def __post_init__(self) -> None:
        assert len(self.parts) > 1
        assert len({(part.kv_heads, part.key_dim, part.value_dim, part.dtype) for part in self.parts}) == 1

    @property
    def kv_heads(self) -> int:
        return self.parts[0].kv_heads

    @property
    def key_dim(self) -> int:
        return self.parts[0].key_dim

    @property
    def value_dim(self) -> int:
        return self.parts[0].value_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def entries(self) -> int:
        return sum(part.entries for part in self.parts)

    @cached_property
    def lengths(self) -> list[int]:
        return [sum(lengths) for lengths in zip(*(part.lengths for part in self.parts), strict=True)]

    @cached_property
    def uniform(self) -> bool:
        return len(set(self.lengths)) <= 1

    @property
    def positions(self) -> list[Tensor]:
        """One ascending int tensor of original positions per KV head, merged over the parts."""
        return [head.sort().values for head in self._together([part.positions for part in self.parts])]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        order = [head.argsort() for head in self._together([part.positions for part in self.parts])]
        keys = self._together([part.plain_heads()[0] for part in self.parts])
        values = self._together([part.plain_heads()[1] for part in self.parts])
        return padded(
            [head[index] for head, index in zip(keys, order, strict=True)],
            [head[index] for head, index in zip(values, order, strict=True)],
        )

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:
        return tuple(prefix for part in self.parts for prefix in part.prefixes(rotate))

    def to(self, device: torch.device | str) -> Parts:
        moved = tuple(part.to(device) for part in self.parts)
        return self if all(a is b for a, b in zip(moved, self.parts, strict=True)) else Parts(moved)

    def moved(self, move: Move) -> Parts:
        return Parts(tuple(part.moved(move) for part in self.parts))

    @staticmethod
    def _together(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [torch.cat(heads) for heads in zip(*parts, strict=True)]


Entries = PackedRecord | Parts
"""Every kind that has entries."""


class State(NamedTuple):
    """A recurrent state of a layer, or the last inputs of its convolution, behind the document's last token. number: of
    the states of this role in the layer. tensor: `[...]`, without a dimension for rows."""

    role: StateRole
    number: int
    tensor: Tensor

    @property
    def shape(self) -> StateShape:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return StateShape(self.role, self.number, dtype, tuple(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class States:
    """A layer that keeps more than entries, or none: a linear attention, a convolution, an MLP alone (no states, no
    entries). Kept verbatim under every policy and codec: states do not grow with the document.

    They cannot be shared as entries are: each token that follows changes them, so a row of a batch needs its own copy.
    """

    kind: ClassVar[str] = "states"

    states: tuple[State, ...]
    beside: Entries | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory, the entries' included."""
        return self.states_nbytes + (self.beside.nbytes if self.beside is not None else 0)

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states alone."""
        return sum(state.tensor.nbytes for state in self.states)

    def to(self, device: torch.device | str) -> States:
        states = (state._replace(tensor=state.tensor.to(device)) for state in self.states)
        return States(tuple(states), None if self.beside is None else self.beside.to(device))

    def moved(self, move: Move) -> States:
        states = (state._replace(tensor=move(state.tensor)) for state in self.states)
        return States(tuple(states), None if self.beside is None else self.beside.moved(move))


LayerRecord = Entries | States
"""Every kind of layer record. Attention, blob and export each handle all of them and refuse others by name."""


def entries_of(record: LayerRecord) -> Entries | None:
    """The entries of a layer; None where it has none."""
    return record.beside if isinstance(record, States) else record


def parts_of(entries: Entries) -> tuple[PackedRecord, ...]:
    """The records that hold entries themselves."""
    return entries.parts if isinstance(entries, Parts) else (entries,)


def entries_from(parts: Sequence[PackedRecord]) -> Entries:
    """The inverse of `parts_of`, for at least one record."""
    return parts[0] if len(parts) == 1 else Parts(tuple(parts))


def is_latent(entries: Entries) -> bool:
    return parts_of(entries)[0].latent


def states_of(record: LayerRecord) -> tuple[State, ...]:
    return record.states if isinstance(record, States) else ()


def devices_of(record: LayerRecord) -> set[torch.device]:
    """Where a layer is: coded rows stay on the CPU, wherever their positions are."""
    entries = entries_of(record)
    parts = () if entries is None else parts_of(entries)
    rows = {array.device for part in parts for array in (part.keys, part.entries_at) if not callable(array)}
    return rows | {state.tensor.device for state in states_of(record)}


def tensors_of(layers: Iterable[LayerRecord]) -> list[Tensor]:
    """All tensors of the layers, in the order of `moved`."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for layer in layers:
        layer.moved(note)
    return tensors


def with_tensors(layers: Iterable[LayerRecord], tensors: Iterable[Tensor]) -> list[LayerRecord]:
    """The layers with these tensors in place of their own, in the order of `tensors_of`."""
    others = iter(tensors)
    return [layer.moved(lambda _: next(others)) for layer in layers]


def with_entries(record: LayerRecord, entries: Entries) -> LayerRecord:
    """The layer with other entries in place of its own."""
    return replace(record, beside=entries) if isinstance(record, States) else entries


class _MadeWhenRead:
    """A `Block` over residuals. The first read makes the keys and values of all heads; the last read drops them."""

    def __init__(self, record: Residuals, maker: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._record = record
        self._maker = maker
        self._rows: tuple[Tensor, Tensor] | None = None

    def __call__(self, head: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = self._rows or self._maker(plain(self._record.keys), self._record.positions[0])  # type: ignore[arg-type]
        ended = head == self._record.kv_heads - 1 and stop == self._record.lengths[0]
        self._rows = None if ended else rows
        keys, values = rows
        return keys[head, start:stop], values[head, start:stop]


def _joined_block(view: HeadView, rank: int, head: int, start: int, stop: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Keys and values of some latents, dequantized. head: 0, the only one."""
    joined = torch.cat([view.keys[start:stop], view.values[start:stop]], dim=1)
    return joined, joined[:, :rank]


def _slot_block(
    heads: Sequence[tuple[HeadView, tuple[Tensor, Tensor, Tensor]]], rotate: Rotate, head: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots of a head, expanded from their classes and rotated to their own positions."""
    view, (scales, classes, positions) = heads[head]
    chosen = classes[start:stop]
    values = view.values[chosen]
    keys = view.keys[chosen].float() * scales[start:stop, None]
    return rotate(keys, positions[start:stop].long()).to(values.dtype), values
