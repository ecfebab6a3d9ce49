"""Choose the entries to keep, and pack them; `keep_best` does both at once.

Memory is their limit: they do hardly any arithmetic. `select` must read rows * N fp32 and N flags and write
rows * N flags; `pack` must read kv_heads * N flags, and read and write each kept key, value and position once. Share of
the limit on a GPU: not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.select.eager import Counts, QueuedCounts, importance_of, of_entries, total_of

__all__ = ["Counts", "QueuedCounts", "importance_of", "keep_best", "of_entries", "pack", "select", "total_of"]


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """Select the entries to keep: all protected ones, then the best of the rest.

    scores: `[rows, N]` fp32, higher is kept. protected: `[N]` bool. counts: entries to keep per row, protected ones
    included, each at least the number of protected and at most N. Among equal scores the smaller position wins
    (`torch.topk` leaves that open, and devices differ in it). A score that is not finite, -inf too, ranks above all
    finite ones, so that its entry is kept and a check of the kept scores finds it. Returns a mask `[rows, N]` bool.
    Raises `InvalidTensor` for other shapes.
    """
    _require_scores(scores, protected, counts)
    if scores.numel() == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask: Tensor = implementation("select", scores.device).select(scores, protected, counts)
    return mask


def pack(
    keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The entries where `mask` is set, head after head, in ascending position.

    keys: `[kv_heads, N, D]` and values: `[kv_heads, N, Dv]`, any strides as long as the last dimension is contiguous.
    mask: `[kv_heads, N]` bool. counts: how many are set in each head, if the caller knows; without them this waits for
    the device. They must be right: on CUDA they are not checked. Returns keys `[entries, D]`, values `[entries, Dv]`,
    positions `[entries]` int32, all contiguous, and the counts. Raises `InvalidTensor` for other shapes, and for wrong
    counts on the CPU.
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
    if counts is None or mask.device.type == "cpu":
        lengths = mask.sum(dim=1).tolist()
        right = counts is None or list(counts) == lengths
        require(right, "pack", f"counts are {list(counts or ())}, and {lengths} entries of the mask are set", mask=mask)
    else:
        lengths = list(counts)
    packed = implementation("select", keys.device).pack(keys, values, mask, lengths)
    return (*packed, lengths)


def keep_best(
    keys: Tensor, values: Tensor, scores: Tensor, protected: Tensor, counts: Counts
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The entries that `select` chooses, as `pack` packs them, and the importance of each.

    The arguments are those of `select` and `pack`: keys `[kv_heads, N, D]`, values `[kv_heads, N, Dv]`, scores
    `[kv_heads, N]` fp32, protected `[N]` bool, counts one a head; `QueuedCounts` for Triton's form alone. Returns keys
    `[entries, D]`, values `[entries, Dv]`, positions `[entries]` int32 and importance `[entries]` fp32: `importance_of`
    of each kept entry. Raises `InvalidTensor` as they do, and on the CPU for counts below the number of protected;
    nothing checks `QueuedCounts`.
    """
    if isinstance(counts, QueuedCounts):
        form = implementation("select", keys.device)
        packed = form.pack(keys, values, form.select(scores, protected, counts), counts)
        return (*packed, of_entries(importance_of(scores, protected), packed[2], counts))
    at_once = getattr(implementation("select", keys.device), "keep_best", None)
    if at_once is None or keys.numel() == 0 or values.numel() == 0:
        mask = select(scores, protected, counts)
        packed_keys, packed_values, positions, lengths = pack(keys, values, mask, counts)
        return packed_keys, packed_values, positions, of_entries(importance_of(scores, protected), positions, lengths)
    _require_scores(scores, protected, counts)
    require_states("keep_best", {"keys": 3, "values": 3}, keys=keys, values=values)
    require(
        keys.shape[:2] == values.shape[:2] == scores.shape and scores.device == keys.device,
        "keep_best",
        "keys must be [kv_heads, N, D], values [kv_heads, N, Dv] and scores [kv_heads, N], on one device",
        keys=keys,
        values=values,
        scores=scores,
    )
    kept: tuple[Tensor, Tensor, Tensor, Tensor] | None = at_once(keys, values, scores, protected, counts)
    require(kept is not None, "keep_best", f"counts are {list(counts)}, fewer than are protected", protected=protected)
    assert kept is not None
    return kept


def _require_scores(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> None:
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
