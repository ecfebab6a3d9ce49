"""The naive form: each score in fp64, Python's sort, one row at a time."""

from __future__ import annotations

import math

from torch import Tensor

from kvshelf.kernels.choose import Choice, Units, better_half


def choose(queries: Tensor, choice: Choice) -> None:
    """See `kvshelf.kernels.choose.choose`."""
    heads = len(choice.units[0].counts)
    grouped, budget = queries.double().view(heads, -1, queries.shape[1]), choice.budget
    if choice.basis is not None:
        scores = [-unit[0] for head in range(heads) for unit in _units(grouped[head], choice, head)]
        budget = max(1, min(budget, sum(score >= -choice.alpha for score in scores) // heads))
    for head in range(heads):
        units = _units(grouped[head], choice, head)
        left = budget - sum(end - start for _, _, start, end, forced in units if forced)
        rows: list[list[int]] = [[] for _ in choice.units]
        for _, part, start, end, forced in sorted(units, key=lambda unit: (not unit[4], unit[0])):
            size = end - start if forced or left >= end - start or not choice.cut else max(0, left)
            if not forced and size > left:
                break
            rows[part] += range(start, start + size)
            left -= 0 if forced else size
        for chosen, own in zip(choice.chosen, rows, strict=True):
            for n, row in enumerate(sorted(own)):
                chosen.rows[head, n] = row
            chosen.counts[head] = len(own)


def _units(queries: Tensor, choice: Choice, head: int) -> list[tuple[float, int, int, int, bool]]:
    """(what it is sorted by, prefix, first row, end, forced) of each unit of a head."""
    if choice.basis is not None:
        return _margins(queries, choice, head)
    entries = []
    for part, units in enumerate(choice.units):
        start, parents = 0, _better(queries, choice, units, head)
        for u in range(units.begins[head], units.begins[head + 1]):
            forced = choice.force and bool(units.forced[u])
            if not forced and (u - units.begins[head]) // units.children not in parents:
                start = int(units.ends[u])
                continue
            score = _score(queries, choice, units, u, head)
            end = int(units.ends[u])
            entries.append((-score if math.isfinite(score) else -math.inf, part, start, end, forced))
            start = end
    return entries


def _margins(queries: Tensor, choice: Choice, head: int) -> list[tuple[float, int, int, int, bool]]:
    """As `_units`, of guesses."""
    best: dict[tuple[int, int], float] = {}
    for g, query in enumerate(queries):
        own = query @ choice.basis[head, g].double()
        guesses = {
            (part, u): float(units.low[g * len(own) : (g + 1) * len(own), u].double() @ own)
            for part, units in enumerate(choice.units)
            for u in range(units.begins[head], units.begins[head + 1])
        }
        for unit, guess in guesses.items():
            best[unit] = max(best.get(unit, -math.inf), guess - max(guesses.values()))
    entries = []
    for (part, u), margin in best.items():
        units = choice.units[part]
        start = 0 if u == units.begins[head] else int(units.ends[u - 1])
        entries.append((-margin, part, start, int(units.ends[u]), False))
    return entries


def _better(queries: Tensor, choice: Choice, units: Units, head: int) -> list[int]:
    """The parents of whose units a query may choose, counted within the head; without parents each unit is its own."""
    if units.parents is None:
        return list(range(units.counts[head]))
    begin, count = units.parents.begins[head], units.parents.counts[head]
    scores = [_score(queries, choice, units.parents, begin + n, head) for n in range(count)]
    ranked = sorted(range(count), key=lambda n: -scores[n] if math.isfinite(scores[n]) else -math.inf)
    return ranked[: better_half(count)]


def _score(queries: Tensor, choice: Choice, units: Units, unit: int, head: int) -> float:
    scores: list[float] = []
    for query in queries:
        own = query if choice.columns is None else query[choice.columns[head]]
        score = (_summary(units.low, units, unit) @ own).item()
        if units.span is not None:
            feature = choice.linear * own + choice.relu * own.clamp_min(0)
            score += units.scale * (_summary(units.span, units, unit) @ feature).item()
        scores.append(score)
    if not all(map(math.isfinite, scores)):
        return math.nan
    return max(scores) if choice.group == "max" else sum(scores) / len(scores)


def _summary(table: Tensor, units: Units, unit: int) -> Tensor:
    return (table[:, unit] if units.by_column else table[unit]).double()
