"""KVMerger: runs of similar neighbours become one entry each (Wang et al., 2024, arXiv 2407.08454)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.artifact.records import Kept, Merged
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of, select
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget, LayerBudget, WholeLayers, fitted_sink
from kvshelf.methods.policies.merging import MergePlan
from kvshelf.methods.policies.view import DocumentView, LayerView

_TINY = 1e-30


@dataclass(frozen=True)
class KVMerger(Policy):
    """A reconstruction from the paper's abstract and notes on it: merge neighbours whose keys point the same way, and
    drop nothing. Heavy hitters, first and recent tokens stay as they are, and between them each run of tokens becomes
    one entry, until the budget holds.

    A token joins the run of the next one if the cosine of their keys is large enough. By default the budget decides
    for each head: of all pairs of neighbours that may merge, the N - B most similar do. With `threshold`, the paper's
    epsilon of 0.75, pairs with a larger cosine do. The keys of each head then decide how many entries stay, as in the
    paper, so a budget is refused; `heavy` and `recent` are parts of the document, and the identity's budget is all of
    it, the most that can stay. A run stands at its pivot, the token with the largest sum of its attention column.
    Key and value are means with weights exp(-d^2 / (2 s^2)), d the distance of a token's key from the pivot's, and s
    `sigma`, or `width` times the root mean square of d over the run. `value_sum` multiplies the value by the run's
    length (eq. 7). `store="slots"` gives each token of a run its own share of the softmax.

    The paper's form is `threshold=0.75,value_sum=true,first=2,last=1` with `sigma=5`, the best of its ablation.
    Departures: its eq. 4 makes s of the weights that s is for, which defines nothing; it reports a mean of 5. By a
    budget, the others pay for whole layers, and heavy hitters leave room for the runs between them. Notes on the paper
    differ; here neighbours are compared with each other, not with a run's first.
    """

    name: ClassVar[str] = "kvmerger"
    source: ClassVar[str] = "KVMerger, arXiv 2407.08454"
    advice: ClassVar[str] = "to see what merging neighbours is worth: little where each token says something else."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.SUMS
    merges: ClassVar[bool] = True

    heavy: float = parameter(0.25, "part of the budget, or of the document, for heavy hitters", minimum=0, maximum=1)
    recent: float = parameter(0.25, "part of the budget, or of the document, for the last tokens", minimum=0, maximum=1)
    sink: int = parameter(4, "first tokens that stay as they are", minimum=0)
    width: float = parameter(1.0, "width of the Gaussian; near 0 the pivot alone counts", minimum=0.001)
    sigma: float | None = parameter(None, "the same in numbers of a key; null: by width", minimum=0.001, added=True)
    value_sum: bool = parameter(False, "multiply a run's value by its length")
    store: str = parameter("means", "one token an entry, or a slot for each token of a run", choices=("means", "slots"))
    first: int = parameter(0, "first layers that stay whole", minimum=0)
    last: int = parameter(0, "last layers that stay whole", minimum=0)
    threshold: float | None = parameter(
        None, "cosine above which neighbours merge; null: as the budget decides", minimum=-1, maximum=1, added=True
    )

    @property
    def sizes_itself(self) -> bool:
        return self.threshold is not None

    @property
    def ragged(self) -> bool:
        return not self.exact or self.first + self.last > 0

    def has_work(self, budget: Budget, num_tokens: int) -> bool:
        return self.threshold is not None or super().has_work(budget, num_tokens)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        count = WholeLayers(self.first, self.last).fewest(
            document.num_layers, document.num_tokens, budget.tokens, 2, "first" if self.first else "last"
        )
        room = max(0, count - int(self.recent * count) - 1)
        policy = replace(self, sink=fitted_sink(self.sink, count, room=room, requested="sink" in given))
        always = max(policy.sink, document.protected_prefix)
        if self._heavy(count, always) < 0:
            raise PolicyUnsupported(
                f"{always} first and {int(self.recent * count)} recent tokens stay as they are, and leave no entry "
                f"for the others in a budget of {count} per KV head; lower sink or recent, or raise the budget",
                param="policy_params.recent",
            )
        return policy

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept | Merged:
        budget = WholeLayers(self.first, self.last).of_layer(layer.place, layer.num_layers, layer.num_tokens, budget)
        columns, _ = layer.column_sums()  # [q_heads, N]
        scores = layer.grouped(columns).mean(dim=1)
        plan, apart = self._plan(layer, scores, budget)
        weights = self._weights(layer.keys.float(), plan).clamp_min(_TINY)
        keys, values = plan.means(layer.keys, weights), plan.means(layer.values, weights)
        if self.value_sum:
            values = (values * plan.sizes.unsqueeze(1)).to(values.dtype)
        make = plan.as_merged if self.store == "slots" else plan.as_kept
        return make(keys, values, importance_of(scores, apart))

    def _heavy(self, count: int, always: int) -> int:
        """How many heavy hitters a head keeps. Each may part a run in two, for which a budget needs room."""
        room = count - always - int(self.recent * count) - 1
        return min(int(self.heavy * count), room if self.threshold is not None else room // 2)

    def _plan(self, layer: LayerView, scores: Tensor, budget: LayerBudget) -> tuple[MergePlan, Tensor]:
        """Runs of the tokens of each head, and the tokens `[N]` that stay as they are in every head."""
        always = max(self.sink, layer.protected_prefix)
        recent = int(self.recent * min(budget.per_head))
        apart = (layer.positions < always) | (layer.positions >= layer.num_tokens - recent)
        hitters = [min(layer.num_tokens, always + recent) + self._heavy(count, always) for count in budget.per_head]
        single = select(scores, apart, hitters)
        cosines = F.cosine_similarity(layer.keys[:, 1:].float(), layer.keys[:, :-1].float(), dim=2)
        pairs = cosines.masked_fill(single[:, 1:] | single[:, :-1], -2.0)  # [kv_heads, N - 1]
        if self.threshold is None:
            joined = select(pairs, torch.zeros_like(single[0, 1:]), [layer.num_tokens - n for n in budget.per_head])
        else:  # none of a layer that stays whole
            whole = not self.first <= layer.place < layer.num_layers - self.last
            joined = pairs > (torch.inf if whole else self.threshold)
        runs = F.pad((~joined).cumsum(dim=1), (1, 0))  # [kv_heads, N]: the run of each token
        return MergePlan.of_all(_pivots(scores, runs), runs, budget.per_head if self.exact else None), apart

    def _weights(self, keys: Tensor, plan: MergePlan) -> Tensor:
        """The Gaussian weight of each token in its run, `[kv_heads, N]` fp32. keys: `[kv_heads, N, D]`."""
        pivots = keys[plan.entries][plan.owners].view_as(keys)  # nothing is evicted, so every token is a member
        squares = (keys - pivots).square().sum(dim=2)
        if self.sigma is not None:
            return (-squares / (2 * self.sigma**2)).exp()
        mean = plan.totals(squares) / plan.sizes
        return (-squares / (2 * self.width**2 * mean[plan.owners].view_as(squares)).clamp_min(_TINY)).exp()


def _pivots(scores: Tensor, runs: Tensor) -> Tensor:
    """The token with the largest score of each run, of equal ones the first: `[kv_heads, N]` bool. NaN is the largest
    score, so that its entry stays and shows it."""
    scores = scores.nan_to_num(nan=torch.inf)
    best = scores.new_full(scores.shape, -torch.inf).scatter_reduce(1, runs, scores, "amax")
    ties = scores == best.gather(1, runs)
    count = ties.cumsum(dim=1)  # of ties so far, of all runs
    before = torch.full_like(runs, scores.shape[1]).scatter_reduce(1, runs, count.where(ties, scores.shape[1]), "amin")
    return ties & (count == before.gather(1, runs))
