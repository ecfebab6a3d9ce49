"""Sharing: how heads and layers share a budget."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvshelf.kernels.dispatch import form
from kvshelf.kernels.select import Counts, QueuedCounts
from kvshelf.kernels.transfer import upload_numbers
from kvshelf.methods.policies.budgets import Budget, WholeLayers


@dataclass(frozen=True, eq=False)
class LayerStats:
    """A layer that shares a budget with others. importance: of the candidates of each KV head, fp32, infinite where an
    entry must stay; in any order. weight: of the layer."""

    importance: Sequence[Tensor]
    weight: float = 1.0

    @property
    def protected(self) -> int:
        """Entries of each head that must stay."""
        return int(torch.isposinf(self.importance[0]).sum())

    def on(self, device: torch.device) -> LayerStats:
        """The same on another device."""
        return LayerStats([head.to(device) for head in self.importance], self.weight)

    def best(self, counts: Sequence[int]) -> LayerStats:
        """The best `counts[h]` candidates of each head."""
        heads = zip(self.importance, counts, strict=True)
        return LayerStats([head.sort(descending=True).values[:count] for head, count in heads], self.weight)


class Sharing(ABC):
    """How the layers and heads of a cache share one budget, decided while the layers arrive.

    The share of a head may only shrink when a later layer joins, as evicted entries are gone. Subclasses prove it.
    """

    @abstractmethod
    def counts(self, layers: Sequence[LayerStats], budget: Budget, num_layers: int) -> list[tuple[int, ...]]:
        """Entries of each KV head of these layers, of `num_layers` in all. Those of all layers add up to
        `budget.tokens` times layers times heads."""


def flat_shares(heads: Tensor, total: int, floor: int = 0) -> Counts:
    """As `flat_counts`, with one floor, without a wait where Triton packs. heads: `[heads, N]`, >= `total` entries."""
    # A head with NaN scores leaves others room for their protected entries: Triton's form checks no counts.
    ranked = heads.nan_to_num(torch.finfo(heads.dtype).max, torch.inf, -torch.inf)
    counts = _flat_counts(list(ranked), total, [floor] * len(heads))
    shares = QueuedCounts(counts, total)
    return shares if form(heads.device) == "triton" else shares.known()


def flat_counts(heads: Sequence[Tensor], total: int, floors: Sequence[int]) -> list[int]:
    """Give each head its floor and the rest of `total` to the best entries of all heads together.

    heads: importance of each head's entries, fp32. Returns how many entries each head keeps; they are its best ones,
    of equal ones the first. Ties between heads go to the earlier head. Where `total` exceeds all entries, all stay.
    """
    counts: list[int] = _flat_counts(heads, total, floors).tolist()
    return counts


def _flat_counts(heads: Sequence[Tensor], total: int, floors: Sequence[int]) -> Tensor:
    forced = [min(floor, len(head)) for floor, head in zip(floors, heads, strict=True)]
    rest = [head.sort(descending=True, stable=True).values[floor:] for head, floor in zip(heads, forced, strict=True)]
    owners = torch.cat([torch.full(tail.shape, i, device=tail.device) for i, tail in enumerate(rest)])
    best = torch.cat(rest).sort(descending=True, stable=True).indices[: max(0, total - sum(forced))]
    winners = owners[best]
    return upload_numbers(forced, winners.device).scatter_add_(0, winners, torch.ones_like(winners))


@dataclass(frozen=True)
class GlobalSharing(Sharing):
    """One budget for all layers and heads: the best entries of the cache, and `floor` of an even share of each head.

    Early layers can be cut before later ones are known. The floors of all layers are set aside, so the same number R of
    entries is left to compete at every step. An entry outside the best R of the first layers is outside the best R of
    all, because more layers only add competitors. So the cascade keeps the same as waiting for every layer.
    """

    floor: float = 0.0

    def counts(self, layers: Sequence[LayerStats], budget: Budget, num_layers: int) -> list[tuple[int, ...]]:
        kv_heads = len(layers[0].importance)
        floor = least(self.floor, budget.tokens, layers[0].protected)
        reserved = floor * kv_heads * (num_layers - len(layers))
        heads = [head for layer in layers for head in layer.importance]
        counts = flat_counts(heads, budget.tokens * kv_heads * num_layers - reserved, [floor] * len(heads))
        return [tuple(counts[i : i + kv_heads]) for i in range(0, len(counts), kv_heads)]


@dataclass(frozen=True)
class ProportionalSharing(Sharing):
    """Each layer's share is proportional to its weight, at most the whole document, and equal for its heads.

    The share of layer l is min(cap, level * weight_l), with the one level at which the shares add up to the budget. A
    share can only shrink when a layer joins, because the sum of min(cap, level * weight_l) over the layers does not
    fall when the level rises, nor when a layer joins at the same level. So the level at which the sum meets the budget
    does not rise, and no share does. (Spreading the excess evenly, as CAKE's code does, has no such level: the excess
    of a heavy layer that joins may lift a light one.)

    While layers are missing, shares are rounded up. At the end they are rounded by largest remainders to the exact
    total: down or up, and whole numbers stay. Neither way exceeds an earlier ceiling, since a <= b gives floor(a) <=
    ceil(a) <= ceil(b). Shares are fractions, because a float's error around a whole number would lift a ceiling.
    """

    def counts(self, layers: Sequence[LayerStats], budget: Budget, num_layers: int) -> list[tuple[int, ...]]:
        kept = layers[-1].protected
        cap = len(layers[-1].importance[0]) - kept  # only the last layer to join is sure to be whole
        total = (budget.tokens - kept) * num_layers
        shares = fill([layer.weight for layer in layers], total, cap)
        complete = len(layers) == num_layers
        counts = largest_remainders(shares) if complete else [math.ceil(share) for share in shares]
        return [(kept + count,) * len(layer.importance) for count, layer in zip(counts, layers, strict=True)]


def least(floor: float, tokens: int, protected: int) -> int:
    """Entries that a head keeps whatever its scores: the part `floor` of `tokens`, at least one if `floor` is above 0,
    and at least the protected ones."""
    return max(protected, int(floor * tokens), 1 if floor > 0 else 0)


def by_claims(claims: Sequence[float], whole: WholeLayers, mean: int, always: int, num_tokens: int) -> list[int]:
    """Entries of each KV head of each layer, `mean` on average: `num_tokens` in whole layers, in each other one
    `always` and a share in proportion to its claim."""
    sharing = claims[whole.first : len(claims) - whole.last]
    total = mean * len(claims) - num_tokens * (whole.first + whole.last) - always * len(sharing)
    # A layer whose claim is NaN has NaN scores, for which the engine refuses the cache.
    weights = [claim if math.isfinite(claim) else 1.0 for claim in sharing]
    shares = largest_remainders(fill(weights, total, num_tokens - always))
    return [num_tokens] * whole.first + [always + share for share in shares] + [num_tokens] * whole.last


def fill(weights: Sequence[float], total: int, cap: int) -> list[Fraction]:
    """Exact shares of `total` in proportion to `weights` (finite, not negative), none above `cap`: a share that would
    exceed `cap` becomes `cap`, and the others divide the rest. If `total` is too large for that, all are `cap`."""
    # A weight of zero becomes the smallest number, so that its layer gets the excess of the others.
    exact = [Fraction(max(weight, math.ulp(0.0))) for weight in weights]
    shares = [Fraction(cap)] * len(exact)
    rest, weight = Fraction(total), sum(exact, Fraction(0))
    heaviest_first = sorted(range(len(exact)), key=lambda i: -exact[i])
    for number, i in enumerate(heaviest_first):
        level = rest / weight
        if level * exact[i] < cap:
            for j in heaviest_first[number:]:
                shares[j] = level * exact[j]
            break
        rest, weight = rest - cap, weight - exact[i]
    return shares


def floored(weights: Sequence[float], total: int, floor: int, cap: int) -> list[int]:
    """Share exactly `total`, which must be possible, by `weights`, no share below `floor` or above `cap`."""
    above = list(range(len(weights)))
    while True:
        shares = dict.fromkeys(range(len(weights)), Fraction(floor))
        rest = total - floor * (len(weights) - len(above))
        shares |= zip(above, fill([weights[i] for i in above], rest, cap), strict=True)
        still_above = [i for i in above if shares[i] >= floor]
        if still_above == above:
            return largest_remainders([shares[i] for i in range(len(weights))])
        above = still_above


def largest_remainders(shares: Sequence[Fraction]) -> list[int]:
    """Each share rounded down or up, so that their total, a whole number, stays. The largest fractions are rounded up,
    of equal ones the first. A whole number stays."""
    counts = [math.floor(share) for share in shares]
    missing = int(sum(shares)) - sum(counts)
    for i in sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))[:missing]:
        counts[i] += 1
    return counts
