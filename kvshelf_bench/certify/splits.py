"""Splits of graded documents: some certify, the others are kept under that bound."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from kvshelf.api import Quality
from kvshelf.engine.certify.certificate import figure_of, graded
from kvshelf.engine.certify.grading import GradedDocument
from kvshelf.engine.certify.risk import Graded, KeptLevel, largest_limit, pooled_limit
from kvshelf.errors import InvalidRequest

_CERTIFYING: Final = 2 / 3


def _missed(quality: Quality | None) -> float:
    return math.inf if quality is None or quality.agreement is None else 1 - quality.agreement


def _low(quality: Quality | None) -> float:
    return math.inf if quality is None or quality.low is None else 1 - quality.low


FIGURES: Final[dict[str, Callable[[Quality | None], float]]] = {"kl": figure_of, "agreement": _missed, "low": _low}
"""What tells how far a cache is from the full one; certificates have the first."""

LEARNT: Final = "kl, learnt"
"""The loss that documents of the same way and a like `kl` had, by isotonic regression on a third of those that certify;
the others show the bound."""

KNOWN: Final = "the loss itself"
"""What no cache can know: how few bytes a perfect figure would take."""

ORDERS: Final = (*FIGURES, LEARNT, KNOWN)


@dataclass(frozen=True)
class SplitResult:
    """Over all splits. refused: those without a bound. loss, share: mean loss of the documents that did not certify,
    and their bytes, of full caches in 16 bits; None where all were refused. pooled: the same with one level for all."""

    alpha: float
    order: str
    refused: int
    loss: float | None = None
    share: float = 0.0
    pooled_loss: float = 0.0
    pooled_share: float = 0.0


def outcomes(documents: Sequence[GradedDocument], alphas: Sequence[float], splits: int) -> Iterator[SplitResult]:
    for alpha in alphas:
        for order in ORDERS:
            yield _outcome(documents, alpha, order, splits)


def _outcome(documents: Sequence[GradedDocument], alpha: float, order: str, splits: int) -> SplitResult:
    figure = FIGURES.get(order, figure_of)
    graded_documents = [graded(document, figure) for document in documents]
    if order == KNOWN:
        graded_documents = [_with_figures(document, lambda _, level: level.loss) for document in graded_documents]
    count = int(len(graded_documents) * _CERTIFYING)
    rows = []
    for seed in range(splits):
        mixed = random.Random(seed).sample(graded_documents, len(graded_documents))
        known, others = mixed[:count], mixed[count:]
        try:
            rows.append((*_certify_each(known, others, alpha, order), *_certify_pooled(known, others, alpha)))
        except InvalidRequest:
            continue
    refused = splits - len(rows)
    return SplitResult(alpha, order, refused, *(map(fmean, zip(*rows, strict=True)) if rows else ()))


def _certify_each(known: Sequence[Graded], others: Sequence[Graded], alpha: float, order: str) -> tuple[float, float]:
    if order == LEARNT:
        third = len(known) // 3
        curves = [
            _isotonic([document.levels[way] for document in known[:third]]) for way in range(len(known[0].levels))
        ]
        known = known[third:]

        def learnt(way: int, level: KeptLevel) -> float:
            return level.figure if level.figure < 0 else _at(curves[way], level.figure)

        known, others = ([_with_figures(document, learnt) for document in some] for some in (known, others))
    limit = largest_limit(known, alpha)
    return _result([document.at(limit) for document in others], others)


def _certify_pooled(known: Sequence[Graded], others: Sequence[Graded], alpha: float) -> tuple[float, float]:
    level = pooled_limit(known, alpha)
    whole = [KeptLevel(document.whole, 0.0, document.whole_loss) for document in others]
    return _result(whole if level is None else [document.levels[level] for document in others], others)


def _result(kept: Sequence[KeptLevel], documents: Sequence[Graded]) -> tuple[float, float]:
    share = sum(one.nbytes for one in kept) / sum(document.whole for document in documents)
    return fmean(one.loss for one in kept), share


Curve = Sequence[tuple[float, float]]
"""Figures and the losses from there on, both rising."""


def _isotonic(levels: Sequence[KeptLevel]) -> Curve:
    """By pooling adjacent violators."""
    blocks: list[tuple[float, int, float]] = []  # loss, documents, first figure
    for level in sorted((level for level in levels if level.figure < math.inf), key=lambda one: one.figure):
        block = (level.loss, 1, level.figure)
        while blocks and blocks[-1][0] >= block[0]:
            loss, count, first = blocks.pop()
            block = ((loss * count + block[0] * block[1]) / (count + block[1]), count + block[1], first)
        blocks.append(block)
    return [(first, loss) for loss, _, first in blocks]


def _with_figures(document: Graded, figure: Callable[[int, KeptLevel], float]) -> Graded:
    """The document with another figure for the level of each way."""
    levels = [KeptLevel(level.nbytes, figure(way, level), level.loss) for way, level in enumerate(document.levels)]
    return Graded(levels, document.whole, document.whole_loss)


def _at(curve: Curve, figure: float) -> float:
    """The loss at a figure, and a little of the figure, which tells apart those on one step."""
    if figure == math.inf:
        return math.inf
    return max((loss for first, loss in curve if first <= figure), default=0.0) + 1e-3 * figure
