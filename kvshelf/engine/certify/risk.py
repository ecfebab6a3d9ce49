"""Conformal risk control (Angelopoulos et al., 2024, arXiv 2208.02814): how far documents may be compressed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final

from kvshelf.errors import InvalidRequest

_PERMUTATIONS: Final = 999


@dataclass(frozen=True)
class KeptLevel:
    """A document at one level. figure: the divergence that the cache was measured to have; lower is closer to the full
    cache. loss: the share of the document's questions that it loses."""

    nbytes: int
    figure: float
    loss: float


@dataclass(frozen=True)
class Graded:
    """A document at all levels. whole: its uncompressed bytes. whole_loss: the full cache's, 0 as the reference."""

    levels: Sequence[KeptLevel]
    whole: int
    whole_loss: float = 0.0

    def at(self, limit: float) -> KeptLevel:
        """What is kept of it under a limit."""
        below = [level for level in self.levels if level.figure < limit]
        return min(below, key=lambda level: level.nbytes, default=KeptLevel(self.whole, 0.0, self.whole_loss))

    def steps(self) -> Iterator[tuple[float, float]]:
        """The figures above which the document loses more at worst than below, each with how much."""
        smallest, worst = math.inf, self.whole_loss
        for level in sorted(self.levels, key=lambda one: (one.figure, one.nbytes)):
            if level.figure == math.inf or level.nbytes >= smallest:
                continue
            smallest = level.nbytes
            if level.loss > worst:
                yield level.figure, level.loss - worst
                worst = level.loss


def least_documents(alpha: float) -> int:
    """Documents without any loss that show a bound of alpha."""
    return math.ceil(1 / alpha - 1e-9) - 1


def require_bound(documents: int, alpha: float, group: str = "") -> None:
    """Raises `InvalidRequest` for an alpha that is no share, and where so many documents can show no such bound."""
    if not 0 < alpha < 1:
        raise InvalidRequest(f"alpha is {alpha!r}; it is the share of answers that may differ, as 0.05", param="alpha")
    if documents < (least := least_documents(alpha)):
        of_group = f" with {group}" if group else ""
        raise InvalidRequest(
            f"a bound of {alpha:g} needs questions about {least} documents{of_group} at least, and there are "
            f"{documents}; give more, or a larger alpha",
            param="alpha",
        )


def largest_limit(documents: Sequence[Graded], alpha: float) -> float:
    """The largest limit under which the next document loses at most alpha on average: infinite where the smallest level
    of each does. Raises `InvalidRequest` where no limit does, which says how many documents are needed.

    Under a limit a document is kept at its smallest level with a figure below it, or whole. Losses are made monotone: a
    document loses what it loses at worst under any limit below. Of documents that are exchangeable with the next one,
    the largest limit with (sum of losses + 1) / (documents + 1) <= alpha has an expected loss of at most alpha on the
    next document, whatever the distribution.
    """
    require_bound(len(documents), alpha)
    most = alpha * (len(documents) + 1) - 1 + 1e-9
    lost = sum(document.whole_loss for document in documents)
    if lost > most:
        raise InvalidRequest(
            f"the full cache itself loses {lost / len(documents):.3f} of the answers, and alpha is {alpha:g} of "
            f"{len(documents)} documents; take questions that the model can answer, or full's answers as the reference",
            param="alpha",
        )
    steps = sorted(step for document in documents for step in document.steps())
    for limit, more in steps:
        lost += more
        if lost > most:
            return limit
    return math.inf


def pooled_limit(documents: Sequence[Graded], alpha: float) -> int | None:
    """As `largest_limit`, of one level for all documents: the place of the last one that keeps the bound, from the
    largest to the smallest by mean bytes; None: all documents stay whole. The way without a figure."""
    most = alpha * (len(documents) + 1) - 1 + 1e-9
    worst = [document.whole_loss for document in documents]
    places = range(len(documents[0].levels))
    kept = None
    for place in sorted(
        places, key=lambda at: -fmean(document.levels[at].nbytes / document.whole for document in documents)
    ):
        worst = [max(loss, document.levels[place].loss) for loss, document in zip(worst, documents, strict=True)]
        if sum(worst) > most:
            return kept
        kept = place
    return kept


def shift(values: Sequence[float]) -> float:
    """How likely values in random order shift along it as much as these do (p): a trend, two halves, a block of another
    kind. Of the ranks' deviations from their mean, the largest partial sum, against those of permutations."""
    order = sorted(set(values))
    ranks = [order.index(value) for value in values]
    mean, rng = fmean(ranks), random.Random(0)
    deviations = [rank - mean for rank in ranks]
    own, as_large = _largest_sum(deviations), 0
    for _ in range(_PERMUTATIONS):
        rng.shuffle(deviations)
        as_large += _largest_sum(deviations) >= own - 1e-9
    return (1 + as_large) / (1 + _PERMUTATIONS)


def _largest_sum(values: Sequence[float]) -> float:
    return max(map(abs, accumulate(values)))
