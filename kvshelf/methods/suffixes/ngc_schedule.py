"""NGC's schedule, without its training: at times drop entries, in blocks, by the last tokens' attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, numbers_of


@dataclass(frozen=True)
class NGCSchedule(PeriodicPolicy):
    """In part, as nothing is learned: every `every` tokens drop a share of the blocks, by the last tokens' attention.

    Behind the question each `block` consecutive stored entries are a block, and the entries behind the last full one
    stay. A block's score is the mean weight that its entries got from the last `queries` tokens. The blocks with the
    lowest scores go: `share` of the entries that are in blocks, rounded down to blocks, and more where the budget
    wants more. Nothing goes while the budget has room for all.

    Only `queries` of the `every` tokens are observed, so it costs less than policies that watch each. NGC itself is a
    model that learns by reinforcement what to forget; nothing is learned here, hence the name. Departures: the budget,
    which the method does not have; the mean over a GQA group. Requests may say `ngc`, too.
    """

    name: ClassVar[str] = "ngc_schedule"
    formerly: ClassVar[str] = "ngc"
    source: ClassVar[str] = "the schedule of NGC (neural garbage collection), after descriptions of the method"
    advice: ClassVar[str] = "where attention should decide at little cost; what it keeps are passages, not tokens."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"sum": 0.0}

    every: int = parameter(256, "tokens of the answer between two reductions", minimum=1)
    share: float = parameter(0.5, "part of the entries in blocks that a reduction drops at least", minimum=0, maximum=1)
    block: int = parameter(32, "consecutive entries that stay or go together", minimum=1)
    queries: int = parameter(5, "last tokens whose attention decides", minimum=1)

    @property
    def least(self) -> int:
        return self.block

    def observes_at(self, answered: int) -> bool:
        return -answered % self.every < self.queries

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        if -answered % self.every == min(self.queries, self.every) - 1:  # the first of the last
            columns["sum"].zero_()
        columns["sum"] += weights.mean(1)

    def reduce(self, suffix: Suffix) -> Reduction:
        heads, blocks = suffix.keys.shape[0], (suffix.stored - suffix.protected) // self.block
        going = max(int(self.share * blocks), ceil((suffix.stored - suffix.budget) / self.block))
        end = suffix.protected + blocks * self.block
        scores = suffix.columns["sum"][:, suffix.protected : end].view(heads, blocks, self.block).mean(2)
        # Stable, so that of equal blocks the older one goes on every device.
        lowest = scores.argsort(dim=1, stable=True)[:, :going]
        goes = torch.zeros(heads, blocks, dtype=torch.bool, device=scores.device).scatter_(1, lowest, True)
        stays = torch.ones(heads, suffix.stored, dtype=torch.bool, device=scores.device)
        stays[:, suffix.protected : end] = ~goes.repeat_interleave(self.block, dim=1)
        return Reduction(numbers_of(stays))
