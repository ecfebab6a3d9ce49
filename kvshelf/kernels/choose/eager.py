"""The choice by torch's own operations, a KV head at a time: see `kvshelf.kernels.choose`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.choose import Choice, Units, better_half


def choose(queries: Tensor, choice: Choice) -> None:
    """See `kvshelf.kernels.choose.choose`."""
    heads = len(choice.units[0].counts)
    grouped = queries.float().view(heads, -1, queries.shape[1])  # [kv_heads, group, D]
    for head in range(heads):
        own = grouped[head] if choice.columns is None else grouped[head][:, choice.columns[head]]
        scores = torch.cat([_scores(own, units, head, choice) for units in choice.units])
        within = torch.cat([_within(own, units, head, choice) for units in choice.units])
        sizes = torch.cat([units.sizes[_of(units, head)] for units in choice.units])
        forced = torch.cat([units.forced[_of(units, head)] for units in choice.units]) & choice.force
        taken = _taken(scores, torch.where(within | forced, sizes, 0), forced, choice)
        parts = torch.split(taken, [units.counts[head] for units in choice.units])
        for units, chosen, rows in zip(choice.units, choice.chosen, parts, strict=True):
            found = _rows(units, head, rows)
            chosen.rows[head, : len(found)] = found
            chosen.counts[head] = len(found)


def _of(units: Units, head: int) -> slice:
    return slice(units.begins[head], units.begins[head + 1])


def _scores(queries: Tensor, units: Units, head: int, choice: Choice) -> Tensor:
    """`[units]` of a head, for queries `[group, W]`."""
    scores = _table(units.low, units, head) @ queries.T
    if units.span is not None:
        feature = choice.linear * queries + choice.relu * queries.clamp_min(0)
        scores += units.scale * (_table(units.span, units, head) @ feature.T)
    return scores.amax(1) if choice.group == "max" else scores.mean(1)


def _within(queries: Tensor, units: Units, head: int, choice: Choice) -> Tensor:
    """Which units of a head are of the better half of their parents, `[units]` bool."""
    if units.parents is None:
        return torch.ones(units.counts[head], dtype=torch.bool, device=queries.device)
    scores = _scores(queries, units.parents, head, choice).nan_to_num(torch.inf, torch.inf, torch.inf)
    best = scores.argsort(descending=True, stable=True)[: better_half(units.parents.counts[head])]
    kept = torch.zeros(len(scores), dtype=torch.bool, device=scores.device).index_fill_(0, best, True)
    return kept.repeat_interleave(units.children)[: units.counts[head]]


def _table(table: Tensor, units: Units, head: int) -> Tensor:
    """The summaries of a head, `[units, W]` fp32."""
    return (table.T if units.by_column else table)[_of(units, head)].float()


def _taken(scores: Tensor, sizes: Tensor, forced: Tensor, choice: Choice) -> Tensor:
    """How many rows of each unit are read, `[units]`: all, none, or the first ones of one that is cut."""
    ranked = scores.nan_to_num(torch.inf, torch.inf, torch.inf).masked_fill(forced, -torch.inf)
    order = ranked.argsort(descending=True, stable=True)
    left = choice.budget - int(sizes[forced].sum())
    of_free = torch.where(forced, 0, sizes)[order]
    before = of_free.cumsum(0) - of_free
    room = (left - before).clamp_min(0)
    taken = torch.minimum(of_free, room)
    if not choice.cut:
        taken = torch.where((taken < of_free).cumsum(0) > 0, 0, taken)  # and what ranks below the first one left out
    return torch.where(forced, sizes, torch.zeros_like(sizes).index_copy_(0, order, taken))


def _rows(units: Units, head: int, taken: Tensor) -> Tensor:
    """The rows of a head, ascending, of its units' first `taken` rows."""
    starts = units.ends[_of(units, head)].long() - units.sizes[_of(units, head)]
    first = (starts - (taken.cumsum(0) - taken)).repeat_interleave(taken)
    return (first + torch.arange(len(first), device=first.device)).to(torch.int32)
