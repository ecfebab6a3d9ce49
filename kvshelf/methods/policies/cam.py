"""CaM: heavy hitters and recent tokens, to which the values of others go (Zhang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.packed import marked
from kvshelf.artifact.records import Kept
from kvshelf.kernels.select import importance_of, of_entries, select
from kvshelf.methods.draws import drawn
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import ScoringPolicy, keep
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.h2o import H2O
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class CaM(H2O):
    """In part, as the document is reduced once: keep what `h2o` keeps, and add the values of the tokens that go to the
    kept ones behind them.

    A leaving token merges with the probability p = A / (mean A of its heirs), at most 1. Its heirs are the next m =
    `merge` kept tokens behind it, or as many as there are; A is the mean weight of the rows that see a token. If it
    merges, 1 / m of its value is added to that of each heir. Its key is dropped; its heirs keep their
    keys, and so their shares of the softmax.

    Draws come from a hash of (`seed`, layer, head, position), as those of suffix policy `cam`: the same document gives
    the same cache. Departures: in the paper tokens leave one at a time while the model answers, each judged by the
    attention at its step, and an heir that leaves later hands the value on. Here all leave at once, and heirs stay. A
    is a mean, because fewer rows see later tokens. A GQA group shares the mean of its attention, so that KV heads are
    not repeated. The authors' code looks for infinite probabilities where it should look for NaN; here 0 / 0 is 0.
    """

    name: ClassVar[str] = "cam"
    source: ClassVar[str] = "CaM, ICML 2024 (proceedings.mlr.press/v235/zhang24n)"
    advice: ClassVar[str] = "as a baseline: it keeps the tokens of h2o, and kvshelf-tiny answers less from them."
    merges: ClassVar[bool] = True
    selects: ClassVar[bool] = False

    merge: int = parameter(32, "kept tokens that share the value of one that goes", minimum=1)
    probability: float | None = parameter(None, "of a merge; null: by the attention received", minimum=0, maximum=1)
    seed: int = parameter(0, "of the draws", minimum=0)

    @property
    def scorer(self) -> ScoringPolicy | None:
        return None

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        scores, protected = self.score(layer), self.protected(layer)
        kept = select(scores, protected, budget.per_head)
        joins = ~kept & self._drawn(layer, scores, kept)
        record = keep(layer, kept, importance_of(scores, protected), budget.per_head)
        heads = zip(layer.values, joins, kept, record.heads(), strict=True)
        values = torch.cat(
            [
                rows.float() + self._inherited(states, merges, stays, len(rows))
                for states, merges, stays, (_, rows) in heads
            ]
        )
        columns = {
            name: of_entries(numbers, record.entry_positions, record.lengths)
            for name, numbers in self.columns(layer, scores).items()
        }
        return replace(record, values=values.to(layer.values.dtype), columns=columns)

    def _drawn(self, layer: LayerView, scores: Tensor, kept: Tensor) -> Tensor:
        """Which tokens merge if they leave: `[kv_heads, N]` bool."""
        attention = scores if self.normalize == "rows" else scores / (layer.num_tokens - layer.positions)
        # The number of kept tokens up to each token, and up to the last heir of each leaving one.
        before = kept.cumsum(dim=1)
        ends = (before + self.merge).minimum(before[:, -1:])
        of_kept = attention.new_zeros(len(kept), layer.num_tokens + 1, dtype=torch.float64)
        of_kept.scatter_add_(1, torch.where(kept, before, 0), attention.double().masked_fill(~kept, 0.0))
        sums = of_kept.cumsum(dim=1)
        means = ((sums.gather(1, ends) - sums.gather(1, before)) / (ends - before)).float()
        positions, first = layer.positions.expand(layer.kv_heads, -1), layer.first_kv_head
        joins = drawn(self.seed, layer.layer_idx, positions, attention, means, self.probability, first)
        return joins & (ends > before)

    def _inherited(self, values: Tensor, joins: Tensor, kept: Tensor, count: int) -> Tensor:
        """What each of the `count` kept tokens of a head inherits, `[count, Dv]` fp32: the shares of the merging tokens
        between it and the m-th kept token before it. values: `[N, Dv]`; joins, kept: `[N]` bool."""
        shares = torch.where(joins.unsqueeze(1), values, 0.0).double() / self.merge
        sums, at = shares.cumsum(dim=0), marked(kept, count)  # in fp64, as their differences are small
        inherited = sums[at]
        inherited[self.merge :] -= sums[at[: -self.merge]]
        return inherited.float()
