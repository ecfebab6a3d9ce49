"""EMS while decoding: evict by global and local attention, and merge into what is kept (arXiv 2412.08521)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.ems import combined
from kvshelf.methods.policies.merging import MergePlan, nearest
from kvshelf.methods.suffixes.base import (
    Columns,
    PeriodicPolicy,
    Reduction,
    SlotTable,
    Suffix,
    WholeCachePolicy,
    best,
    numbers_of,
)


@dataclass(frozen=True)
class EMS(WholeCachePolicy, PeriodicPolicy):
    """Keep the last `window` tokens and the best class centers; a center that falls out merges into the one most like
    it, with all tokens of its class.

    A token that leaves the window becomes a center. The score of a token is that of policy `ems` (eq. 2): max(s_glo *
    mean(s_loc) / mean(s_glo), s_loc), where s_glo sums all weights that it received from tokens of the answer, and
    s_loc those of the last `window` to 2 * `window` tokens: two sums, of which the older is dropped after every
    `window` tokens. The centers with the lowest scores go. One that has cos(k) * cos(v) of at least `tau` with a
    remaining center joins the nearest of these (eq. 5), and the tokens of its class are of that class from then on: its
    key gets the mean direction and the center's length, its value the mean, both weighted by the scores of all tokens.
    The others are dropped with their classes. Tokens that share an entry are attended to with keys of their own length,
    as those of a stored cache, and have sums of their own. With the entries they are `gamma` times the budget at most:
    beyond that the table loses those with the lowest scores.

    Under scope "cache" all classes of the document compete and take members, with the sums that its rows left each of
    its tokens (policy `ems` with `keep_scores`).

    Departures: scores are not pooled over neighbours, because stored entries have none; means over a GQA group; keys
    are merged with their rotation; the question's rows add nothing; a reduction after every 32nd token, not after each,
    unless `every` is 1. The paper does not say which element its table loses, nor by what a merged class weighs: here
    by the sum of its tokens' scores.
    """

    name: ClassVar[str] = "ems"
    source: ClassVar[str] = "EMS, arXiv 2412.08521"
    advice: ClassVar[str] = "where many tokens of an answer nearly repeat each other."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"all": 0.0, "past": 0.0, "current": 0.0}
    carried: ClassVar[frozenset[str]] = frozenset({"all", "past"})
    slotted: ClassVar[bool] = True

    window: int = parameter(32, "last tokens always kept, and tokens of a local sum", minimum=1)
    tau: float = parameter(0.6, "least similarity at which entries merge; above 1 none do", minimum=0)
    gamma: float = parameter(4.0, "most tokens that entries stand for, as a multiple of the budget", minimum=1)

    @property
    def least(self) -> int:
        return self.window

    def most_slots(self, budget: int) -> int:
        return int(self.gamma * budget) - budget

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        means = weights.mean(1)
        columns["all"] += means
        columns["current"] += means
        if answered % self.window == 0:
            columns["past"].copy_(columns["current"])
            columns["current"].zero_()

    def reduce(self, suffix: Suffix) -> Reduction:
        slots = suffix.slots or SlotTable.none(suffix.columns)
        columns = {name: torch.cat([column, slots.columns[name]], 1) for name, column in suffix.columns.items()}
        scores = self._scores(columns)
        of_entries, of_slots = scores[:, : suffix.stored], scores[:, suffix.stored :]
        stays = best(suffix, of_entries, self.window)
        centers = stays.clone()
        centers[:, : suffix.protected] = centers[:, suffix.stored - self.window :] = False
        similarity, targets = nearest(suffix.keys, suffix.values, ~stays, stays, centers)
        plan = MergePlan.joining(stays, similarity >= self.tau, targets)
        weights = of_entries.scatter_add(1, slots.owners.clamp_min(0), of_slots.masked_fill(~slots.there, 0.0))
        keys, values, scales = combined(suffix.keys, suffix.values, weights, plan)
        kept = numbers_of(stays)
        longer = torch.ones_like(of_entries).index_put_(plan.members, scales)
        joined = SlotTable(  # tokens that lose their entries, and tokens of slots
            torch.cat([plan.classes.masked_fill(stays, -1), slots.of_owners(plan.classes).where(slots.there, -1)], 1),
            torch.cat([longer, slots.of_owners(longer) * slots.scales], 1),
            columns,
        )
        return Reduction(
            kept,
            keys.view(*kept.shape, -1).to(suffix.keys.dtype),
            values.view(*kept.shape, -1),
            slots=joined.best(scores, self.most_slots(suffix.budget)),
        )

    def _scores(self, columns: Columns) -> Tensor:
        everywhere, local = columns["all"], columns["past"] + columns["current"]
        ratio = local.sum(1, keepdim=True) / everywhere.sum(1, keepdim=True)
        return torch.maximum(everywhere * ratio.nan_to_num(nan=0.0), local)  # 0 / 0: the document took all attention
