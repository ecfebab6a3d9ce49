"""H2O: heavy hitters and the most recent tokens (Zhang et al., 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvshelf.workers.policies.base import Observes, ScoringPolicy, parameter
from kvshelf.workers.policies.budgets import Budget
from kvshelf.workers.policies.parameters import require_held
from kvshelf.workers.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class H2O(ScoringPolicy):
    """Keep the heavy hitters, which all of the document's queries together attend to most, and the most recent tokens.

    The score of token j is the sum of its attention column, sum_{i >= j} A_ij (section 4 of the paper), the exact one:
    it takes a second pass over queries and keys. Early tokens are seen by more rows than late ones; `normalize="rows"`
    divides by their number, N - j. The document is scored once, as a whole, and then cut, as the authors' code that
    really drops entries does; their other code lets each token compete only with those that survived before it.
    Departures: the mean over a GQA group, so that KV heads are not repeated; the chat template's tokens stay; no
    eviction while decoding, because what is stored is never changed. The split between the two kinds is ours where
    `recent` is not given, for the paper leaves it open: half of the budget each.

    Ours too: `every` above 1 sums that part of the rows, for that part of the work. With every eighth row and a quarter
    kept, 67 % of the entries are those that all rows keep, 49 % with `recent` 0 (kvshelf-tiny, a document of 4k
    tokens): rows that are skipped take along what they alone attend to.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    advice: ClassVar[str] = "as the baseline of eviction by attention; it favours early tokens."
    observes: ClassVar[Observes] = Observes.QUERIES

    recent: int | None = parameter(None, "last tokens always kept; null: half of the budget", minimum=0)
    normalize: str = parameter("none", "divide a column's sum by its rows, or not", choices=("none", "rows"))
    every: int = parameter(1, "sum every n-th row only, an estimate for 1 / n of the work", minimum=1)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        largest = budget.tokens - document.protected_prefix
        if self.recent is None:
            return replace(self, recent=min(budget.tokens // 2, largest))
        require_held("recent", self.recent, largest, budget.tokens)
        return self

    def score(self, layer: LayerView) -> Tensor:
        total, _ = layer.column_sums(every=self.every)  # [q_heads, N]
        scores = layer.grouped(total).mean(dim=1)
        if self.normalize == "rows":
            scores = scores / (layer.num_tokens - layer.positions)
        return scores

    def protected(self, layer: LayerView) -> Tensor:
        assert self.recent is not None, "resolved by `fitted`, for it depends on the budget"
        return super().protected(layer) | (layer.positions >= layer.num_tokens - self.recent)
