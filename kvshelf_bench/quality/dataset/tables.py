"""The tables of a dataset for a terminal of 120 columns."""

from __future__ import annotations

from math import isinf
from typing import Final

from rich.table import Table

from kvshelf_bench.quality.dataset.summary import DatasetSummary, Way

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
    """How to read the table."""
    return _NOTES.format(full=summary.full_16bit)


def dataset_tables(summary: DatasetSummary, title: str) -> list[Table]:
    """One row a way; the scores of tasks below, where there are several, and refusals."""
    table = _table(title)
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


def _cells(way: Way, full_16bit: int) -> list[str]:
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
        table, shown = _table("scores by task"), names[first : first + _TASKS_A_TABLE]
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


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
