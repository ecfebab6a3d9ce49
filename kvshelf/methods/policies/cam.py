"""CaM: heavy hitters and recent tokens, to which the values of others go (Zhang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.kernels.select import importance_of, select
from kvshelf.methods.draws import drawn
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.h2o import H2O
from kvshelf.methods.policies.merging import MergePlan
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class CaM(H2O):
    """In part, as the document is reduced once: keep what `h2o` keeps, but let the values of the tokens that go live on
    in the kept ones that follow them.

    A token that goes draws whether it merges, with the probability p = A / (mean A of its heirs), at most 1. Its heirs
    are the next m = `merge` kept tokens behind it, or as many as there are; A is the mean weight of the rows that see a
    token. If it merges, 1 / m of its value is added to that of each heir. Its key is dropped, the heirs' keys stay, and
    so does their share of the softmax.

    Draws come from a hash of (`seed`, layer, head, position), as those of suffix policy `cam`: the same document gives
    the same cache. Departures: in the paper tokens leave one at a time while the model answers, each judged by the
    attention at its step, and a value may be handed on by an heir that leaves later. Here all leave at once, and heirs
    stay. A is a mean, for of a document's sums later tokens have fewer rows. A GQA group shares the mean of its
    attention, so that KV heads are not repeated. The authors' code looks for infinite probabilities where it should
    look for those that are no numbers; here 0 / 0 is 0.
    """

    name: ClassVar[str] = "cam"
    source: ClassVar[str] = "CaM, ICML 2024 (proceedings.mlr.press/v235/zhang24n)"
    advice: ClassVar[str] = (
        "to see what merging values by their order is worth beside h2o, which keeps the same tokens."
    )
    merges: ClassVar[bool] = True

    merge: int = parameter(32, "kept tokens that share the value of one that goes", minimum=1)
    probability: float | None = parameter(
        None, "with which a token that goes merges; null: by the attention it received", minimum=0, maximum=1
    )
    seed: int = parameter(0, "of the draws", minimum=0)

    @property
    def scorer(self) -> ScoringPolicy | None:
        return None

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        scores, protected = self.score(layer), self.protected(layer)
        kept = select(scores, protected, budget.per_head)
        heirs = kept.cumsum(dim=1)  # where a token goes: the first of its heirs among the kept tokens of its head
        joins = ~kept & self._drawn(layer, scores, kept, heirs)
        plan = MergePlan.joining(kept, joins, heirs)
        shares = torch.where(joins.unsqueeze(2), layer.values.float() / self.merge, 0.0)
        by_head = torch.split(plan.totals(shares), kept.sum(dim=1).tolist())  # of each first heir, `[count, Dv]`
        inherited = torch.cat([_last_sums(totals, self.merge) for totals in by_head])
        values = (layer.values[kept].float() + inherited).to(layer.values.dtype)
        return plan.as_kept(layer.keys[kept], values, importance_of(scores, protected))

    def _drawn(self, layer: LayerView, scores: Tensor, kept: Tensor, heirs: Tensor) -> Tensor:
        """Which tokens merge if they go, `[kv_heads, N]` bool. heirs: the first heir of each, `[kv_heads, N]` int64."""
        attention = scores if self.normalize == "rows" else scores / (layer.num_tokens - layer.positions)
        counts = kept.sum(dim=1, keepdim=True)
        ends = (heirs + self.merge).minimum(counts)
        of_kept = attention.new_zeros(len(kept), int(counts.max()) + 1, dtype=torch.float64)
        of_kept.scatter_add_(1, torch.where(kept, heirs, 0), attention.double().masked_fill(~kept, 0.0))
        sums = of_kept.cumsum(dim=1)  # of the first kept tokens of a head, none at first
        means = (sums.gather(1, ends) - sums.gather(1, heirs)) / (ends - heirs)
        positions = layer.positions.expand(layer.kv_heads, -1)
        joins = drawn(
            self.seed, layer.layer_idx, positions, attention, means.float(), self.probability, layer.first_kv_head
        )
        return joins & (ends > heirs)


def _last_sums(rows: Tensor, count: int) -> Tensor:
    """Of each row of `[n, D]` the sum of it and the `count` - 1 before it, `[n, D]` fp32."""
    sums = F.pad(rows.double().cumsum(dim=0), (0, 0, 1, 0))  # in fp64: a difference of large sums in fp32 is nothing
    starts = (torch.arange(len(rows), device=rows.device) + 1 - count).clamp_min(0)
    return (sums[1:] - sums[starts]).float()
