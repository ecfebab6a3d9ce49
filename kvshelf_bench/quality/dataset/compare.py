"""Two runs side by side, on the questions that both asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from kvshelf_bench.measure import clustered_mean
from kvshelf_bench.quality.dataset.tables import points

Scores = dict[str, dict[tuple[str, int], float]]
"""By document, of each question by its text and how often it was asked before."""


@dataclass(frozen=True)
class Compared:
    """One way of both runs, on the questions that both asked. change: this run's score less the other's, with half of
    its 95 % interval. bytes: of a document. A way that only one run has, or no common question: `questions` is 0."""

    way: str
    questions: int
    score: float
    other: float
    change: float
    change_error: float
    bytes: float
    other_bytes: float


def compare(report: Mapping[str, Any], other: Mapping[str, Any]) -> list[Compared]:
    """The ways of both reports, in the order of the first; those of one alone have no question."""
    ours, theirs = _ways(report), _ways(other)
    return [_compared(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])]


def compare_table(rows: list[Compared], title: str) -> Table:
    """One row a way."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold", max_width=40)
    for name in ("questions", "score", "before", "change", "kB", "before"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if not row.questions:
            table.add_row(row.way, "0", "not in both")
            continue
        scores = f"{100 * row.score:.1f}", f"{100 * row.other:.1f}", points(row.change, row.change_error)
        table.add_row(
            row.way, f"{row.questions}", *scores, f"{row.bytes / 1000:,.0f}", f"{row.other_bytes / 1000:,.0f}"
        )
    return table


def _ways(report: Mapping[str, Any]) -> dict[str, tuple[Scores, float]]:
    asked = {one["id"]: [question["text"] for question in one["questions"]] for one in report["documents"]}
    return {way["way"]: (_scores(way["outcomes"], asked), way["bytes"]) for way in report["ways"]}


def _scores(outcomes: list[dict[str, Any]], asked: Mapping[str, list[str]]) -> Scores:
    scores: Scores = {}
    for outcome in outcomes:
        texts = asked[outcome["id"]]
        keys = [(text, texts[:at].count(text)) for at, text in enumerate(texts)]
        scores[outcome["id"]] = dict(zip(keys, outcome["scores"], strict=False))  # a refused document has none
    return scores


def _compared(name: str, ours: tuple[Scores, float] | None, theirs: tuple[Scores, float] | None) -> Compared:
    nothing = Compared(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if ours is None or theirs is None:
        return nothing
    pairs = [
        [(score, before[key]) for key, score in found.items() if key in before]
        for document, found in ours[0].items()
        if (before := theirs[0].get(document))
    ]
    pairs = [both for both in pairs if both]
    if not pairs:
        return nothing
    change, error = clustered_mean([[score - was for score, was in both] for both in pairs])
    flat = [pair for both in pairs for pair in both]
    score, other = fmean(score for score, _ in flat), fmean(was for _, was in flat)
    return Compared(name, len(flat), score, other, change, error, ours[1], theirs[1])
