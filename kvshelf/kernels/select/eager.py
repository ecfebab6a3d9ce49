"""Top-k per row by its threshold, and the copy of whole rows by one index: see `kvshelf.kernels.select`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueuedCounts:
    """The entries that each head keeps, where the device computes the numbers and nobody waits for them. counts: of
    each head, `[heads]` int64 on the device. total: their sum, which the host knows."""

    counts: Tensor
    total: int

    @cached_property
    def heads(self) -> Tensor:
        """The head of each entry, `[total]` int64, in the order in which entries are packed."""
        heads = torch.arange(len(self.counts), device=self.counts.device)
        return heads.repeat_interleave(self.counts, output_size=self.total)

    def known(self) -> list[int]:
        """The counts. Waits for the device."""
        counts: list[int] = self.counts.tolist()
        return counts


Counts = Sequence[int] | QueuedCounts


def total_of(counts: Counts) -> int:
    """Entries of all heads."""
    return counts.total if isinstance(counts, QueuedCounts) else sum(counts)


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """Finds only the least score that is kept, and counts the ties with it: a stable sort of the whole row takes three
    times as long."""
    ranked = scores.nan_to_num(torch.inf, torch.inf, torch.inf).masked_fill_(protected, -torch.inf)
    num_protected = int(protected.sum())
    places = [count - num_protected for count in counts]
    free = torch.tensor(places, device=scores.device).unsqueeze(1)  # how many are to be chosen
    last = max(1, *places)
    if len(set(places)) == 1:  # then topk need not sort, which halves the time
        least = ranked.topk(last, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    else:
        least = ranked.topk(last, dim=1).values.gather(1, (free - 1).clamp_min(0))
    above, tied = ranked > least, ranked == least
    room = free - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1) <= room)) | protected


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    heads, positions = mask.nonzero().unbind(dim=1)
    return rows_at(keys, heads, positions), rows_at(values, heads, positions), positions.to(torch.int32)


def importance_of(scores: Tensor, protected: Tensor) -> Tensor:
    """`scores` `[..., N]` fp32, infinite where `protected` `[N]` is set, NaN where a score is not finite."""
    difference = scores - scores  # 0, or NaN for what is not finite
    return difference.add_(scores).masked_fill_(protected, torch.inf)


def of_entries(numbers: Tensor, positions: Tensor, counts: Counts) -> Tensor:
    """`numbers` `[kv_heads, N]` at packed entries, `[entries]`. Read by index: a mask would wait for the device."""
    if isinstance(counts, QueuedCounts):
        return numbers[counts.heads, positions.long()]
    if len(set(counts)) == 1:
        return numbers.gather(1, positions.view(len(counts), -1).long()).flatten()
    heads = torch.split(positions.long(), list(counts))
    return torch.cat([row.index_select(0, kept) for row, kept in zip(numbers, heads, strict=True)])


def rows_at(states: Tensor, heads: Tensor, positions: Tensor) -> Tensor:
    """`states[heads, positions]`: `[entries, D]` of `[kv_heads, N, D]`.

    Where the states are made of whole rows, head-major or token-major, or a slice of such, their memory is a matrix
    `[*, D]` and one `index_select` copies its rows. Indexing both dimensions takes twice as long; an index for
    `torch.gather` is D times the size of the positions, and every element takes a look-up.
    """
    by_head, by_token, _ = states.stride()
    width = states.shape[2]
    if not states.numel() or by_head % width or by_token % width:
        return states[heads, positions]
    by_head, by_token = by_head // width, by_token // width
    last = (states.shape[0] - 1) * by_head + (states.shape[1] - 1) * by_token
    matrix = states.as_strided((last + 1, width), (width, 1))
    return matrix.index_select(0, heads * by_head + positions * by_token)
