"""Top-k per row with an explicit tie rule, and the gather of the chosen entries into packed storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """Which entries to keep: all protected ones, then the best of the rest.

    scores: `[rows, N]` fp32, higher is kept. protected: `[N]` bool. counts: entries to keep per row, protected ones
    included, each at least the number of protected and at most N. Equal scores are decided for the smaller position
    (`torch.topk` leaves that open and decides differently on each device). Returns a mask `[rows, N]` bool.
    """
    free = (~protected).nonzero().squeeze(1)  # [F]
    # A stable descending sort keeps equal scores in ascending position.
    best_first = free[scores[:, free].sort(dim=1, descending=True, stable=True).indices]  # [rows, F]
    wanted = torch.tensor(counts, device=scores.device).unsqueeze(1) - (protected.shape[0] - free.shape[0])
    chosen = torch.arange(free.shape[0], device=scores.device) < wanted  # [rows, F]
    return protected.repeat(scores.shape[0], 1).scatter_(1, best_first, chosen)


def gather(states: Tensor, mask: Tensor) -> Tensor:
    """The entries of `states` where `mask` is set, head after head, in ascending position.

    states: `[kv_heads, N, D]`, any strides as long as D is contiguous. mask: `[kv_heads, N]` bool. Returns `[entries,
    D]`, contiguous. Each row is copied once, straight into place (an expanded index for `torch.gather` would be D times
    the size of the positions).
    """
    lengths = mask.sum(dim=1).tolist()
    packed = states.new_empty(sum(lengths), states.shape[-1])
    for head_states, head_mask, out in zip(states, mask, torch.split(packed, lengths), strict=True):
        torch.index_select(head_states, 0, head_mask.nonzero().squeeze(1), out=out)
    return packed
