"""The slots of a merged prefix by class, eight to a row, so that a class is multiplied once and not once per slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import MergedPrefix

SLOTS_PER_ROW = 8
"""A class of n slots becomes ceil(n / 8) rows. With rows of any length, one large class would hold up its whole tile;
rows of one slot would multiply the class's key and value anew for each."""


@dataclass(frozen=True, eq=False)
class FoldedSlots:
    """Rows of up to eight slots of one class, head after head, on the device of the prefix.

    classes: `[rows]` int32, the class within its head. scales: `[8, rows]` fp32, NaN where a row has fewer slots.
    bounds: `[kv_heads + 1]` int64; head h owns rows `bounds[h]` to `bounds[h + 1]`. Only the device knows the number of
    rows; `most[h]` is an upper bound for head h, and the tensors are unused behind the last row.
    """

    classes: Tensor
    scales: Tensor
    bounds: Tensor
    most: tuple[int, ...]


def fold(prefix: MergedPrefix) -> FoldedSlots:
    """Sort the slots of a prefix by class. Done once for a prefix; slots * 12 bytes, and no device sync."""
    device = prefix.slot_scales.device
    num_slots, num_classes = sum(prefix.slot_lengths), sum(prefix.lengths)
    most = tuple(
        min(classes, slots) + slots // SLOTS_PER_ROW
        for classes, slots in zip(prefix.lengths, prefix.slot_lengths, strict=True)
    )
    class_bounds = torch.tensor((0, *prefix.lengths)).cumsum(0).to(device)
    of_head = class_bounds[:-1].repeat_interleave(
        torch.tensor(prefix.slot_lengths, device=device), output_size=num_slots
    )
    ids, order = (of_head + prefix.slot_classes).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_classes, device=device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    row_ends = ((counts + SLOTS_PER_ROW - 1) // SLOTS_PER_ROW).cumsum(0)
    row_bounds = torch.cat([row_ends.new_zeros(1), row_ends])
    rank = torch.arange(num_slots, device=device) - (ends - counts)[ids]  # among the slots of the class
    rows = row_bounds[ids] + rank // SLOTS_PER_ROW

    scales = torch.full((SLOTS_PER_ROW * sum(most),), torch.nan, device=device)
    scales.index_copy_(0, rank % SLOTS_PER_ROW * sum(most) + rows, prefix.slot_scales[order])
    classes = torch.zeros(sum(most), dtype=torch.int32, device=device)
    classes.scatter_(0, rows, prefix.slot_classes[order])  # the slots of a row all write the same class
    return FoldedSlots(classes, scales.view(SLOTS_PER_ROW, -1), row_bounds[class_bounds], most)
