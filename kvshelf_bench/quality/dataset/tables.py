"""The tables of a dataset for a terminal of 120 columns, and two runs side by side on the questions that both asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from kvshelf_bench.measure import clustered_mean
from kvshelf_bench.quality.dataset.summary import DatasetSummary, WayScore
from kvshelf_bench.quality.tables import bare_table

_NOTES: Final = (
    "score: the mean over all questions in %, with its 95 % interval (documents being the independent units). to full: "
    "points beside the full cache on the same questions, and half of the interval of that difference. lost/won: "
    "questions that the full cache has right and this one not, and the reverse. first: answers that begin with the "
    "full cache's first token. agree: the figure of the caches, the mean over documents. kB, B/token: bytes of the "
    "stored blob of a document and of its token, and their share of the {full:,} bytes of the full cache in 16 bits. "
    "Seconds are means of a document: prefill with policy and codec, asking all questions."
)
_TASKS_A_TABLE: Final = 8


def notes(summary: DatasetSummary) -> str:
    return _NOTES.format(full=summary.full_16bit)


def dataset_tables(summary: DatasetSummary, title: str) -> list[Table]:
    """One row a way; the scores of tasks below, where there are several, and refusals."""
    table = bare_table(title)
    table.add_column("way", overflow="fold", max_width=30)
    for name in ("score", "95 %", "to full", "lost/won", "first", "agree", "kB", "B/token", "16 bits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prefill", "asking"):
        table.add_column(f"{name}, s", justify="right")
    for way in summary.ways:
        table.add_row(*_cells(way, summary.full_16bit))
    return [table, *_tasks(summary), *_refusals(summary)]


def points(value: float | None, half: float | None) -> str:
    """A difference in points, with half of its interval."""
    if value is None:
        return ""
    return f"{100 * value:+.1f}" + ("" if half is None or isinf(half) else f"±{100 * half:.1f}")


def _cells(way: WayScore, full_16bit: int) -> list[str]:
    plain = way.change is None
    return [
        *(way.name, f"{100 * way.score:.1f}", f"{100 * way.low:.0f}-{100 * way.high:.0f}"),
        *(points(way.change, way.change_error), "" if plain else f"{way.lost}/{way.won}"),
        "" if plain or way.first_tokens is None else f"{way.first_tokens:.0%}",
        "" if way.agreement is None else f"{way.agreement:.3f}",
        *(f"{way.bytes / 1000:,.0f}", f"{way.bytes_per_token:,.0f}", f"{way.bytes_per_token / full_16bit:.0%}"),
        *(f"{one:.1f}" for one in (way.prefill_s, way.answer_s)),
    ]


def _tasks(summary: DatasetSummary) -> list[Table]:
    names = summary.tasks
    if len(names) < 2:
        return []
    tables = []
    for first in range(0, len(names), _TASKS_A_TABLE):
        table, shown = bare_table("scores by task"), names[first : first + _TASKS_A_TABLE]
        table.add_column("way", overflow="fold", max_width=30)
        for name in shown:
            table.add_column(name or "without task", justify="right", overflow="fold", max_width=14)
        for way in summary.ways:
            table.add_row(way.name, *(f"{100 * way.tasks[name]:.1f}" if name in way.tasks else "" for name in shown))
        tables.append(table)
    return tables


def _refusals(summary: DatasetSummary) -> list[Table]:
    table = Table("refused", "documents", "reason", box=None, title_justify="left", header_style="bold")
    for way in summary.ways:
        reasons: dict[str, list[str]] = {}
        for document, reason in way.refused.items():
            reasons.setdefault(reason, []).append(document)
        for reason, documents in reasons.items():
            shown = ", ".join(documents[:3]) + (f" and {len(documents) - 3} more" if len(documents) > 3 else "")
            table.add_row(way.name, shown, reason)
    return [table] if table.rows else []


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
    ways, earlier = _ways(report), _ways(other)
    return [_compared(name, ways.get(name), earlier.get(name)) for name in dict.fromkeys([*ways, *earlier])]


def compare_table(rows: list[Compared], title: str) -> Table:
    table = bare_table(title)
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
    texts = {one["id"]: [question["text"] for question in one["questions"]] for one in report["documents"]}
    return {way["way"]: (_scores(way["outcomes"], texts), way["bytes"]) for way in report["ways"]}


def _scores(outcomes: list[dict[str, Any]], texts_of: Mapping[str, list[str]]) -> Scores:
    scores: Scores = {}
    for outcome in outcomes:
        texts = texts_of[outcome["id"]]
        keys = [(text, texts[:at].count(text)) for at, text in enumerate(texts)]
        scores[outcome["id"]] = dict(zip(keys, outcome["scores"], strict=False))  # a refused document has none
    return scores


def _compared(name: str, way: tuple[Scores, float] | None, earlier: tuple[Scores, float] | None) -> Compared:
    nothing = Compared(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if way is None or earlier is None:
        return nothing
    pairs_of = [
        [(score, before[key]) for key, score in after.items() if key in before]
        for document, after in way[0].items()
        if (before := earlier[0].get(document))
    ]
    pairs_of = [pairs for pairs in pairs_of if pairs]
    if not pairs_of:
        return nothing
    change, error = clustered_mean([[after - before for after, before in pairs] for pairs in pairs_of])
    flat = [pair for pairs in pairs_of for pair in pairs]
    score, other = (fmean(scores) for scores in zip(*flat, strict=True))
    return Compared(name, len(flat), score, other, change, error, way[1], earlier[1])
