"""EMS while decoding: evict by global and local attention, and merge into what is kept (arXiv 2412.08521)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.ems import combined
from kvshelf.methods.policies.merging import MergePlan, nearest
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, best, numbers_of, whole_heads


@dataclass(frozen=True)
class EMS(PeriodicPolicy):
    """In part, as merged entries have no slots: keep the last `window` tokens and the best centers; a center that falls
    out merges into the one most like it.

    A token that leaves the window becomes a center. The score of an entry is that of policy `ems` (eq. 2):
    max(s_glo * mean(s_loc) / mean(s_glo), s_loc), where s_glo sums all weights that it received from tokens of the
    answer, and s_loc those of the last `window` to 2 * `window` tokens: two sums, of which the older is dropped after
    every `window` tokens. The centers with the lowest scores go. One that has cos(k) * cos(v) of at least `tau` with a
    remaining center joins the nearest of these (eq. 5): the key gets the mean direction and the center's length, the
    value the mean, both weighted by scores, and the sums of scores become one. The others are dropped.

    Under scope "cache" every entry of the document competes and takes members, with the sums that its rows left (policy
    `ems` with `merge` false and `keep_scores`).

    Departures: a merged token has no slot of its own, so that its softmax mass is gone: all heads of a layer keep
    equally many entries here; scores are not pooled over neighbours, because stored entries have none; means over a
    GQA group; keys are merged with their rotation; a reduction after every 32nd token, not after each.
    """

    name: ClassVar[str] = "ems"
    source: ClassVar[str] = "EMS, arXiv 2412.08521"
    advice: ClassVar[str] = "where many tokens of an answer nearly repeat each other."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"all": 0.0, "past": 0.0, "current": 0.0}
    carried: ClassVar[frozenset[str]] = frozenset({"all", "past"})

    window: int = parameter(32, "last tokens always kept, and tokens of a local sum", minimum=1)
    tau: float = parameter(0.6, "least similarity at which entries merge; above 1 none do", minimum=0)

    @property
    def least(self) -> int:
        return self.window

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        return whole_heads(positions, self.name)

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        given = weights.mean(1)
        columns["all"] += given
        columns["current"] += given
        if answered % self.window == 0:
            columns["past"].copy_(columns["current"])
            columns["current"].zero_()

    def reduce(self, suffix: Suffix) -> Reduction:
        scores = self._scores(suffix.columns)
        stays = best(suffix, scores, self.window)
        kept = numbers_of(stays)
        centers = stays.clone()
        centers[:, : suffix.protected] = centers[:, suffix.stored - self.window :] = False
        similarity, targets = nearest(suffix.keys, suffix.values, ~stays, stays, centers)
        plan = MergePlan.joining(stays, similarity >= self.tau, targets)
        keys, values, _ = combined(suffix.keys, suffix.values, scores, plan)
        shape = *kept.shape, -1
        return Reduction(
            kept,
            keys.view(shape).to(suffix.keys.dtype),
            values.view(shape),
            {name: _summed(column, plan.classes, kept.shape) for name, column in suffix.columns.items()},
        )

    def _scores(self, columns: Columns) -> Tensor:
        everywhere, local = columns["all"], columns["past"] + columns["current"]
        ratio = local.mean(1, keepdim=True) / everywhere.mean(1, keepdim=True)
        return torch.maximum(everywhere * ratio.nan_to_num(nan=0.0), local)  # 0 / 0: the document took it all


def _summed(column: Tensor, classes: Tensor, shape: torch.Size) -> Tensor:
    """The sums of a column `[kv_heads, S]` over the members of each class: `shape` is `[kv_heads, m]`."""
    there = classes >= 0
    members = torch.where(there, column, 0.0)
    return column.new_zeros(shape).scatter_add_(1, classes.clamp_min(0), members)
