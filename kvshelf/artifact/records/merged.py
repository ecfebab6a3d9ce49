"""Classes of merged entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from kvshelf.artifact.packed import HeadView, Packed, Rotate, offsets_of, rotation
from kvshelf.kernels.prefix_attention.prefixes import MergedPrefix, Prefix, StreamedPrefix

_SLOTS: Final = ("slot_scales", "slot_classes", "slot_positions")


@dataclass(frozen=True, eq=False)
class Merged(Packed):
    """Classes of merged entries and the slots that stand for the tokens in them (EMS, arXiv 2412.08521).

    An entry is a class: the key (a direction) and the value that its tokens share. `entry_positions` are the positions
    of the class centers. Slot i stands for the token at `slot_positions[i]`: its key is `slot_scales[i] *
    keys[slot_classes[i]]`, its value `values[slot_classes[i]]`. A token that is its own class has scale 1 and its own
    key. Tokens that were evicted have no slot: a slot with a zero key would still take part of the softmax.

    With rope_mode "baked", slots need no rotation; with "pre", the keys carry none, and attention rotates each slot to
    its own position.

    slot_scales: `[slots]` fp32. slot_classes: `[slots]` int32, the class's index within its head. slot_positions:
    `[slots]` int32, ascending within a head. slot_offsets: head h owns slots `slot_offsets[h]` to
    `slot_offsets[h + 1]`.
    """

    kind: ClassVar[str] = "merged"

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
        """Slots of each head."""
        return [end - start for start, end in zip(self.slot_offsets, self.slot_offsets[1:], strict=False)]

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

    def select(self, chosen: Tensor) -> Merged:
        """The classes that `chosen` `[entries]` bool marks, and their slots. For records that are not quantized."""
        slot_heads = torch.repeat_interleave(
            torch.arange(self.kv_heads, device=chosen.device), torch.tensor(self.slot_lengths, device=chosen.device)
        )
        starts = torch.tensor(self.offsets[:-1], device=chosen.device)
        rows = starts[slot_heads] + self.slot_classes  # each slot's class as a row of `keys`
        slots = chosen[rows]
        selected = self.selected(chosen)
        # A class's new index within its head: the chosen rows before it, minus those before its head.
        before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
        classes = before[rows] - before[starts][slot_heads]
        return Merged(
            **selected,
            slot_scales=self.slot_scales[slots],
            slot_classes=classes[slots].to(torch.int32),
            slot_positions=self.slot_positions[slots],
            slot_offsets=offsets_of(torch.bincount(slot_heads[slots], minlength=self.kv_heads).tolist()),
        )

    @property
    def tokens(self) -> tuple[Tensor, list[int]]:
        return self.slot_positions, self.slot_lengths

    def placed(self, first: int) -> Merged:
        return replace(super().placed(first), slot_positions=self.slot_positions + first)

    def own_cut(self, first: int, last: int) -> dict[str, Any]:
        slots = slice(self.slot_offsets[first], self.slot_offsets[last])
        cut = {name: getattr(self, name)[slots].clone() for name in _SLOTS}
        return cut | {"slot_offsets": offsets_of(self.slot_lengths[first:last])}

    @staticmethod
    def own_joined(records: Sequence[Any]) -> dict[str, Any]:
        joined = {name: torch.cat([getattr(record, name) for record in records]) for name in _SLOTS}
        return joined | {"slot_offsets": offsets_of([n for record in records for n in record.slot_lengths])}

    def _tensors(self) -> tuple[str, ...]:
        return (*super()._tensors(), *_SLOTS)


def _slot_block(
    heads: Sequence[tuple[HeadView, tuple[Tensor, Tensor, Tensor]]], rotate: Rotate, head: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots of a head, expanded from their classes and rotated to their own positions."""
    view, (scales, classes, positions) = heads[head]
    chosen = classes[start:stop]
    values = view.values[chosen]
    keys = view.keys[chosen].float() * scales[start:stop, None]
    return rotate(keys, positions[start:stop].long()).to(values.dtype), values
