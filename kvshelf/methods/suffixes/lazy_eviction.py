"""LazyEviction: tokens that come back at intervals wait for their next use (arXiv 2506.15969)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.suffixes.base import Columns, Reduction, Suffix, WholeCachePolicy, best, numbers_of

_NONE = 1e-5
"""Added to an interval: an entry that was used once has interval 0."""


@dataclass(frozen=True)
class LazyEviction(WholeCachePolicy):
    """Keep the last `window` tokens, and the entries whose next use is likeliest by the gaps between their uses so far.

    A token uses an entry that gets at least `alpha` of its attention. Of each entry the policy notes the last use and
    the largest gap between two uses, the maximum recurrence interval MRI, 0 before the first. A token of the prompt
    counts as used when the answer begins, one of the answer by the token before it. After every `window` tokens the
    entries with the largest H1 + H2 stay, of equal ones the older:

        H1 = 2 sigmoid(-1 - (now - last use) / MRI),  H2 = 2 sigmoid(1 - MRI), or 0 where MRI is 0.

    An entry that has been idle for less than its MRI keeps a high H1, and one that is used often a high H2; one that
    was never used has neither. These are the formulas of the authors' code (`model/kv_utils.py` of
    Halo-949/LazyEviction, a copy of which WeianMao/triattention has). Under scope "cache" every entry of the document
    competes with those of the answer, as in the paper.

    Departures: of a GQA group the largest weight counts, where the authors give each query head a cache of its own.
    """

    name: ClassVar[str] = "lazy_eviction"
    source: ClassVar[str] = "LazyEviction, arXiv 2506.15969, and the authors' code"
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

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:
        last, gap = columns["last"], columns["gap"]
        now = positions[:, -1:].float()
        first_use = torch.maximum(positions - 1, now - answered)  # the prompt's last token stands at now - answered
        last.copy_(torch.where(last < 0, first_use, last))
        used = weights.amax(1) >= self.alpha
        gap.copy_(torch.where(used, torch.maximum(gap, now - last), gap))
        last.copy_(torch.where(used, now, last))

    def reduce(self, suffix: Suffix) -> Reduction:
        interval = suffix.columns["gap"].double()
        idle = suffix.tokens - 1 - suffix.columns["last"]
        soon = 2 * torch.sigmoid(-1 - idle / (interval + _NONE))
        often = torch.where(interval > 0, 2 * torch.sigmoid(1 - interval), 0)
        # In fp64, and then by rank: in fp32 the sum loses the H1 of an entry that has been idle for 17 MRIs.
        ranks = (soon + often).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return Reduction(numbers_of(best(suffix, -ranks.float(), self.window)))
