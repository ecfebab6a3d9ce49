"""Choose the entries to keep, and pack them.

Both are bound by memory and do no arithmetic to speak of. `select` must read rows * N fp32 and N flags and write
rows * N flags; `pack` must read kv_heads * N flags, and read and write each kept key, value and position once. Share of
the limit on a GPU: not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation

__all__ = ["pack", "select"]


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """Which entries to keep: all protected ones, then the best of the rest.

    scores: `[rows, N]` fp32, higher is kept. protected: `[N]` bool. counts: entries to keep per row, protected ones
    included, each at least the number of protected and at most N. Equal scores are decided for the smaller position
    (`torch.topk` leaves that open and decides differently on each device). A score that is not finite counts as higher
    than any that is, -inf too, so that it is kept and seen by whoever looks at the scores of what was kept. Returns a
    mask `[rows, N]` bool. Raises `InvalidTensor` for other shapes.
    """
    require(
        scores.dim() == 2
        and scores.dtype == torch.float32
        and protected.dtype == torch.bool
        and protected.shape == scores.shape[1:]
        and protected.device == scores.device
        and len(counts) == scores.shape[0]
        and all(0 <= count <= scores.shape[1] for count in counts),
        "select",
        f"scores must be [rows, N] float32, protected [N] bool on the same device, and counts from 0 to N, one a row "
        f"(given {len(counts)} from {min(counts, default=0)} to {max(counts, default=0)})",
        scores=scores,
        protected=protected,
    )
    if scores.numel() == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask: Tensor = implementation("select", scores.device).select(scores, protected, counts)
    return mask


def pack(
    keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The entries where `mask` is set, head after head, in ascending position.

    keys: `[kv_heads, N, D]` and values: `[kv_heads, N, Dv]`, any strides as long as the last dimension is contiguous.
    mask: `[kv_heads, N]` bool. counts: how many are set in each head, as a policy knows who chose them; without them
    the device is waited for. They must be right: on CUDA nobody looks. Returns keys `[entries, D]`, values `[entries,
    Dv]`, positions `[entries]` int32, all contiguous, and the counts. Raises `InvalidTensor` for other shapes, and for
    wrong counts on the CPU.
    """
    require_states("pack", {"keys": 3, "values": 3}, keys=keys, values=values)
    require(
        keys.shape[:2] == values.shape[:2] == mask.shape and mask.dtype == torch.bool and mask.device == keys.device,
        "pack",
        "keys must be [kv_heads, N, D], values [kv_heads, N, Dv] and mask [kv_heads, N] bool, on one device",
        keys=keys,
        values=values,
        mask=mask,
    )
    form = implementation("select", keys.device)
    if counts is None or mask.device.type == "cpu":
        lengths = form.count(mask)
        given = lengths if counts is None else list(counts)
        require(given == lengths, "pack", f"counts are {given}, and {lengths} entries of the mask are set", mask=mask)
    else:
        lengths = list(counts)
    packed = form.pack(keys, values, mask, lengths)
    return (*packed, lengths)
