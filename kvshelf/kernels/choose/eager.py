"""The choice by torch's own operations, all heads at once and without waiting for the device: see
`kvshelf.kernels.choose`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshelf.kernels.choose import Choice, Chosen, Units, better_half


def choose(queries: Tensor, choice: Choice) -> None:
    """See `kvshelf.kernels.choose.choose`."""
    heads = len(choice.units[0].counts)
    asked = queries.float().view(heads, -1, queries.shape[1])  # [kv_heads, group, D]
    if choice.columns is not None:
        asked = asked.gather(2, choice.columns.unsqueeze(1).expand(-1, asked.shape[1], -1))
    sizes = torch.cat([_by_head(units.sizes, units) for units in choice.units], dim=1)
    if choice.basis is not None:
        margins = _margins(asked, choice, choice.basis, sizes > 0)
        critical = ((_ranked(margins) >= -choice.alpha) & (sizes > 0)).sum() // heads
        return _write(choice, _taken(margins, sizes, torch.zeros_like(sizes, dtype=torch.bool), choice, critical))
    scores = torch.cat([_scores(asked, units, choice) for units in choice.units], dim=1)  # [kv_heads, U]
    forced = torch.cat([_by_head(units.forced, units) for units in choice.units], dim=1) & choice.force
    within = torch.cat([_within(asked, units, choice) for units in choice.units], dim=1)
    return _write(choice, _taken(scores, torch.where(within | forced, sizes, 0), forced, choice))


def _write(choice: Choice, taken: Tensor) -> None:
    """taken: rows of each unit, `[kv_heads, units]`."""
    parts = torch.split(taken, [max(units.counts) for units in choice.units], dim=1)
    for units, chosen, own in zip(choice.units, choice.chosen, parts, strict=True):
        _fill(chosen, units, own)


def _by_head(table: Tensor, units: Units) -> Tensor:
    """`[units, ...]` as `[kv_heads, most units of a head, ...]`, with zeros where a head has fewer."""
    if len(set(units.counts)) == 1:
        return table.view(len(units.counts), units.counts[0], *table.shape[1:])
    return pad_sequence(list(torch.split(table, list(units.counts))), batch_first=True)


def _scores(asked: Tensor, units: Units, choice: Choice) -> Tensor:
    """`[kv_heads, units]` for queries `[kv_heads, group, W]`."""
    scores = torch.matmul(_table(units.low, units), asked.transpose(1, 2))
    if units.span is not None:
        feature = choice.linear * asked + choice.relu * asked.clamp_min(0)
        scores += units.scale * torch.matmul(_table(units.span, units), feature.transpose(1, 2))
    return scores.amax(2) if choice.group == "max" else scores.mean(2)


def _margins(asked: Tensor, choice: Choice, basis: Tensor, there: Tensor) -> Tensor:
    """How far the guesses of units are below the largest of a query, for the one that they fit best, `[kv_heads,
    units]`; negative infinity where a head has no such unit."""
    queries = torch.einsum("hgd,hgdw->hgw", asked, basis)
    tables = (_table(units.low, units).reshape(len(queries), -1, *queries.shape[1:]) for units in choice.units)
    guesses = torch.cat([torch.einsum("hugw,hgw->hug", table, queries) for table in tables], dim=1)
    guesses = guesses.masked_fill(~there.unsqueeze(2), -torch.inf)
    largest = guesses.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1, keepdim=True)
    return (guesses - largest).amax(2).masked_fill(~there, -torch.inf)


def _table(table: Tensor, units: Units) -> Tensor:
    """Summaries `[kv_heads, units, W]` fp32."""
    return _by_head(table.T.contiguous() if units.by_column else table, units).float()


def _within(asked: Tensor, units: Units, choice: Choice) -> Tensor:
    """Which units are of the better half of their parents, `[kv_heads, units]` bool."""
    most = max(units.counts)
    if units.parents is None:
        return torch.ones(len(units.counts), most, dtype=torch.bool, device=asked.device)
    counts = torch.tensor([better_half(count) for count in units.parents.counts], device=asked.device)
    order = _order(_scores(asked, units.parents, choice), _by_head(units.parents.sizes, units.parents) > 0)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept.scatter_(1, order, torch.arange(order.shape[1], device=asked.device) < counts.unsqueeze(1))
    return kept.repeat_interleave(units.children, dim=1)[:, :most]


def _ranked(scores: Tensor) -> Tensor:
    """With those first that are no numbers."""
    return scores.nan_to_num(torch.inf, torch.inf, torch.inf)


def _order(scores: Tensor, there: Tensor) -> Tensor:
    """The numbers of units by descending score, those that a head has not at the end. Equal ones in order."""
    ranked = _ranked(scores).masked_fill(~there, -torch.inf)
    return ranked.argsort(dim=1, descending=True, stable=True)


def _taken(scores: Tensor, sizes: Tensor, forced: Tensor, choice: Choice, critical: Tensor | None = None) -> Tensor:
    """How many rows of each unit are read, `[kv_heads, units]`: all, none, or the first ones of one that is cut.
    critical: a KV head reads at most so many rows, and at least one."""
    free = torch.where(forced, 0, sizes)
    order = _order(scores, free > 0)
    budget = choice.budget if critical is None else critical.clamp(1, choice.budget)
    left = budget - (sizes - free).sum(1, keepdim=True)
    of_free = free.gather(1, order)
    before = of_free.cumsum(1) - of_free
    taken = torch.minimum(of_free, (left - before).clamp_min(0))
    if not choice.cut:
        taken = torch.where((taken < of_free).cumsum(1) > 0, 0, taken)  # and what ranks below the first one left out
    return torch.where(forced, sizes, torch.zeros_like(sizes).scatter_(1, order, taken))


def _fill(chosen: Chosen, units: Units, taken: Tensor) -> None:
    """Write the rows of units' first `taken` rows, ascending. Behind the last one stand some other rows."""
    ends = taken.cumsum(1)  # [kv_heads, units]
    starts = _by_head(units.ends.long() - units.sizes, units) - (ends - taken)
    places = torch.arange(chosen.rows.shape[1], device=taken.device).expand(len(taken), -1).contiguous()
    unit = torch.searchsorted(ends, places, right=True).clamp_max_(max(ends.shape[1] - 1, 0))
    chosen.rows.copy_(places + starts.gather(1, unit))
    chosen.counts.copy_(ends[:, -1])
