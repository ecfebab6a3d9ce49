"""H2O: heavy hitters and the most recent tokens (Zhang et al., 2023, arXiv 2306.14048)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, require_room
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class H2O(KeepsScores, ScoringPolicy):
    """Keep the heavy hitters, to which all of the document's queries together attend most, and the most recent tokens.

    The score of token j is the exact sum of its attention column, sum_{i >= j} A_ij (section 4 of the paper), which
    takes a second pass over queries and keys. More rows see early tokens than late ones; `normalize="rows"` divides by
    their number, N - j. The document is scored once, as a whole, and then cut, like the authors' code that really drops
    entries. Their other code lets each token compete only with earlier survivors. While the model answers, suffix
    policy `h2o` goes on with the sums, which the cache has with `keep_scores`. Departures: the mean over a GQA group,
    so that KV heads are not repeated; the chat template's tokens stay. The paper leaves the split between the two kinds
    open; without `recent`, kvshelf gives each half of the budget.

    kvshelf adds `every`: n above 1 sums every n-th row, for 1 / n of the work. With every eighth row and a quarter
    kept, 67 % of the entries are those that all rows keep, 49 % with `recent` 0 (kvshelf-tiny, a document of 4k
    tokens): entries that only skipped rows attend to are lost. Selector `policy:h2o` sums the attention of the
    question's rows alone, as a stored cache has no queries of the document.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    advice: ClassVar[str] = "as the baseline of eviction by attention; it favours early tokens."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.SUMS
    selects: ClassVar[bool] = True
    column_names: ClassVar[tuple[str, ...]] = ("sum",)
    required: ClassVar[Mapping[str, Any]] = {"normalize": "none", "every": 1}
    settled: ClassVar[Mapping[str, str]] = {
        **KeepsScores.settled,
        "normalize": "every row of a question sees all entries",
        "every": "all rows of the question are summed",
    }

    recent: int | None = parameter(None, "last tokens always kept; null: half of the budget", minimum=0)
    normalize: str = parameter("none", "divide a column's sum by its rows, or not", choices=("none", "rows"))
    every: int = parameter(1, "sum every n-th row only, an estimate for 1 / n of the work", minimum=1)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        largest = budget.tokens - document.protected_prefix
        if self.recent is None:
            return replace(self, recent=min(budget.tokens // 2, largest))
        require_room("recent", self.recent, largest, budget.tokens)
        return self

    def score(self, layer: LayerView) -> Tensor:
        total, _ = layer.column_sums(every=self.every)  # [q_heads, N]
        scores = layer.grouped(total).mean(dim=1)
        if self.normalize == "rows":
            scores = scores / (layer.num_tokens - layer.positions)
        return scores

    def columns(self, layer: LayerView, scores: Tensor) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {"sum": scores} if self.keep_scores else {}

    def protected(self, layer: LayerView) -> Tensor:
        assert self.recent is not None, "resolved by `fitted`, for it depends on the budget"
        return super().protected(layer) | (layer.positions >= layer.num_tokens - self.recent)
