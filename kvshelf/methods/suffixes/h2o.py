"""H2O while decoding: heavy hitters and the most recent tokens (Zhang et al., 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, WholeCachePolicy, best, numbers_of


@dataclass(frozen=True)
class H2O(WholeCachePolicy, PeriodicPolicy):
    """Keep the entries to which all tokens together attended most, and the most recent ones.

    The score of an entry is the running sum of the weights that it received, each a share of the attention to document
    and suffix together: under scope "suffix", what the document takes is no one's. Under scope "cache" every entry of
    the document competes with those of the answer, by the sum that the document's own rows left of it (policy `h2o`
    with `keep_scores`). Heavy hitters and recent entries each get half of what the question leaves, as in the paper's
    experiments. Departures: the question's rows add nothing, as how they are cut into steps depends on other answers;
    the mean over a GQA group; a reduction after every 32nd token, not after each, unless `every` is 1.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    advice: ClassVar[str] = "as the baseline of eviction by attention; it favours early tokens."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"sum": 0.0}
    carried: ClassVar[frozenset[str]] = frozenset({"sum"})

    recent: int | None = parameter(None, "last entries always kept; null: half of what the question leaves", minimum=0)

    @property
    def least(self) -> int:
        return max(1, self.recent or 0)

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        columns["sum"] += weights.mean(1)

    def reduce(self, suffix: Suffix) -> Reduction:
        recent = (suffix.budget - suffix.protected) // 2 if self.recent is None else self.recent
        return Reduction(numbers_of(best(suffix, suffix.columns["sum"], recent)))
