"""LazyEviction: tokens that come back at intervals wait for their next use (arXiv 2506.15969)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.suffixes.base import Columns, Reduction, Suffix, SuffixPolicy, best, numbers_of


@dataclass(frozen=True)
class LazyEviction(SuffixPolicy):
    """A reconstruction, as no public code says how its two scores join: keep the last `window` tokens, and the entries
    whose next use is likeliest by the gaps between their uses so far.

    A token uses an entry that gets at least `alpha` of its attention. Of each entry the policy notes the last use and
    the largest gap between two uses, the maximum recurrence interval MRI. After every `window` tokens the entries with
    the highest H1 + H2 stay:

        H1 = 2 sigmoid(-(now - last use) / MRI),  H2 = 2 sigmoid(-1 / MRI).

    An entry that has been idle for less than it once was keeps a high H1, and one that recurs late a high H2. An entry
    that was never used since it was made counts as used then, with an MRI of 1.

    Departures: of a GQA group the largest weight counts; how H1 and H2 combine is kvshelf's reading, because there was
    no public code to compare with.
    """

    name: ClassVar[str] = "lazy_eviction"
    source: ClassVar[str] = "LazyEviction, arXiv 2506.15969"
    advice: ClassVar[str] = "for long chains of thought, which come back to what they said."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"last": -1.0, "gap": 0.0}

    window: int = parameter(175, "last tokens always kept, and tokens between two reductions", minimum=1)
    alpha: float = parameter(1e-4, "least share of a token's attention that is a use", minimum=0, maximum=1)

    @property
    def interval(self) -> int:
        return self.window

    @property
    def least(self) -> int:
        return self.window

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        last, gap = columns["last"], columns["gap"]
        last.copy_(torch.where(last < 0, positions, last))
        now = positions[:, -1:].float()
        used = weights.amax(1) >= self.alpha
        gap.copy_(torch.where(used, torch.maximum(gap, now - last), gap))
        last.copy_(torch.where(used, now, last))

    def reduce(self, suffix: Suffix) -> Reduction:
        interval = suffix.columns["gap"].clamp_min(1).double()
        idle = suffix.tokens - 1 - suffix.columns["last"]
        # In fp64, and then by rank: in fp32 the H1 of what has been idle for 17 MRIs is lost in the sum.
        scores = 2 * torch.sigmoid(-idle / interval) + 2 * torch.sigmoid(-1 / interval)
        ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return Reduction(numbers_of(best(suffix, -ranks.float(), self.window)))
