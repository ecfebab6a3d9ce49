"""Top-k per row by its threshold, and the copy of whole rows by one index: see `kvshelf.kernels.select`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """See `kvshelf.kernels.select.select`. Only the least score that is kept is looked for, and ties with it are
    counted: a stable sort of the whole row takes three times as long."""
    ranked = scores.masked_fill(~scores.isfinite(), torch.inf).masked_fill_(protected, -torch.inf)
    wanted = torch.tensor(counts, device=scores.device).unsqueeze(1) - protected.sum()  # [rows, 1]
    best = ranked.topk(max(1, *counts), dim=1).values  # more than are wanted, where some are protected
    least = best.gather(1, (wanted - 1).clamp_min(0))
    above, tied = ranked > least, ranked == least
    left = wanted - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1) <= left)) | protected


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    """See `kvshelf.kernels.select.pack`."""
    heads, positions = mask.nonzero().unbind(dim=1)
    return rows_at(keys, heads, positions), rows_at(values, heads, positions), positions.to(torch.int32)


def rows_at(states: Tensor, heads: Tensor, positions: Tensor) -> Tensor:
    """`states[heads, positions]`: `[entries, D]` of `[kv_heads, N, D]`.

    Where the states are made of whole rows, head-major or token-major, or a slice of such, their memory is a matrix
    `[*, D]` and one `index_select` copies its rows. Indexing both dimensions takes twice as long; an index for
    `torch.gather` is D times the size of the positions, and every element is looked up by itself.
    """
    by_head, by_token, _ = states.stride()
    width = states.shape[2]
    if not states.numel() or by_head % width or by_token % width:
        return states[heads, positions]
    by_head, by_token = by_head // width, by_token // width
    last = (states.shape[0] - 1) * by_head + (states.shape[1] - 1) * by_token
    matrix = states.as_strided((last + 1, width), (width, 1))
    return matrix.index_select(0, heads * by_head + positions * by_token)
