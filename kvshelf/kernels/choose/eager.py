"""The choice by torch's own operations, all heads at once and without waiting for the device: see
`kvshelf.kernels.choose`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshelf.kernels.choose import Choice, Chosen, Units, better_half


def choose(queries: Tensor, choice: Choice) -> None:
    heads = len(choice.units[0].counts)
    members = queries.float().view(heads, -1, queries.shape[1])  # [kv_heads, group, D]
    if choice.columns is not None:
        members = members.gather(2, choice.columns.unsqueeze(1).expand(-1, members.shape[1], -1))
    sizes = torch.cat([_by_head(units.sizes, units) for units in choice.units], dim=1)
    if choice.basis is not None:
        margins = _margins(members, choice, choice.basis, sizes > 0)
        critical = ((_ranked(margins) >= -choice.alpha) & (sizes > 0)).sum() // heads
        rows = _allot(margins, sizes, torch.zeros_like(sizes, dtype=torch.bool), choice, critical)
    else:
        scores = torch.cat([_scores(members, units, choice) for units in choice.units], dim=1)  # [kv_heads, U]
        forced = torch.cat([_by_head(units.forced, units) for units in choice.units], dim=1) & choice.force
        within = torch.cat([_within(members, units, choice) for units in choice.units], dim=1)
        rows = _allot(scores, torch.where(within | forced, sizes, 0), forced, choice)
    parts = torch.split(rows, [max(units.counts) for units in choice.units], dim=1)
    for units, chosen, part in zip(choice.units, choice.chosen, parts, strict=True):
        _fill(chosen, units, part)


def _by_head(table: Tensor, units: Units) -> Tensor:
    """`[units, ...]` as `[kv_heads, most units of a head, ...]`, with zeros where a head has fewer."""
    if len(set(units.counts)) == 1:
        return table.view(len(units.counts), units.counts[0], *table.shape[1:])
    return pad_sequence(list(torch.split(table, list(units.counts))), batch_first=True)


def _scores(members: Tensor, units: Units, choice: Choice) -> Tensor:
    """`[kv_heads, units]` for queries `[kv_heads, group, W]`."""
    scores = torch.matmul(_table(units.low, units), members.transpose(1, 2))
    if units.span is not None:
        feature = choice.linear * members + choice.relu * members.clamp_min(0)
        scores += units.scale * torch.matmul(_table(units.span, units), feature.transpose(1, 2))
    return scores.amax(2) if choice.group == "max" else scores.mean(2)


def _margins(members: Tensor, choice: Choice, basis: Tensor, exists: Tensor) -> Tensor:
    """The distance of each unit's guess from the largest guess of a query, for the query of the group with the smallest
    distance: `[kv_heads, units]`, at most 0; -inf where a head has no such unit."""
    queries = torch.einsum("hgd,hgdw->hgw", members, basis)
    tables = (_table(units.low, units).reshape(len(queries), -1, *queries.shape[1:]) for units in choice.units)
    guesses = torch.cat([torch.einsum("hugw,hgw->hug", table, queries) for table in tables], dim=1)
    guesses = guesses.masked_fill(~exists.unsqueeze(2), -torch.inf)
    largest = guesses.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1, keepdim=True)
    return (guesses - largest).amax(2).masked_fill(~exists, -torch.inf)


def _table(table: Tensor, units: Units) -> Tensor:
    """Summaries `[kv_heads, units, W]` fp32."""
    return _by_head(table.T.contiguous() if units.by_column else table, units).float()


def _within(members: Tensor, units: Units, choice: Choice) -> Tensor:
    """Which units are of the better half of their parents, `[kv_heads, units]` bool."""
    most = max(units.counts)
    if units.parents is None:
        return torch.ones(len(units.counts), most, dtype=torch.bool, device=members.device)
    counts = torch.tensor([better_half(count) for count in units.parents.counts], device=members.device)
    order = _order(_scores(members, units.parents, choice), _by_head(units.parents.sizes, units.parents) > 0)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(order.shape[1], device=members.device) < counts.unsqueeze(1))
    return kept.repeat_interleave(units.children, dim=1)[:, :most]


def _ranked(scores: Tensor) -> Tensor:
    """The scores, with infinity for those that are not finite, so that they rank first."""
    return scores.nan_to_num(torch.inf, torch.inf, torch.inf)


def _order(scores: Tensor, exists: Tensor) -> Tensor:
    """The numbers of units by descending score, equal ones in order; those that a head lacks come last."""
    ranked = _ranked(scores).masked_fill(~exists, -torch.inf)
    return ranked.argsort(dim=1, descending=True, stable=True)


def _allot(scores: Tensor, sizes: Tensor, forced: Tensor, choice: Choice, critical: Tensor | None = None) -> Tensor:
    """How many rows of each unit are read, `[kv_heads, units]`: all, none, or the first ones where a unit is cut.
    critical: most rows of a KV head, which reads one at least."""
    free = torch.where(forced, 0, sizes)
    order = _order(scores, free > 0)
    budget = choice.budget if critical is None else critical.clamp(1, choice.budget)
    room = budget - (sizes - free).sum(1, keepdim=True)
    of_free = free.gather(1, order)
    before = of_free.cumsum(1) - of_free
    rows = torch.minimum(of_free, (room - before).clamp_min(0))
    if not choice.cut:
        rows = torch.where((rows < of_free).cumsum(1) > 0, 0, rows)  # and what ranks below the first one left out
    return torch.where(forced, sizes, torch.zeros_like(sizes).scatter_(1, order, rows))


def _fill(chosen: Chosen, units: Units, counts: Tensor) -> None:
    """Write the numbers of the first `counts` rows of each unit, ascending. What stands behind the last is not read."""
    ends = counts.cumsum(1)  # [kv_heads, units]
    starts = _by_head(units.ends.long() - units.sizes, units) - (ends - counts)
    places = torch.arange(chosen.rows.shape[1], device=counts.device).expand(len(counts), -1).contiguous()
    unit = torch.searchsorted(ends, places, right=True).clamp_max_(max(ends.shape[1] - 1, 0))
    chosen.rows.copy_(places + starts.gather(1, unit))
    chosen.counts.copy_(ends[:, -1])
