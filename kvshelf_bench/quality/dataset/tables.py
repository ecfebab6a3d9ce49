"""The table of a dataset for a terminal of 120 columns."""

from __future__ import annotations

from typing import Final

from rich.table import Table

from kvshelf_bench.quality.dataset.summary import PLAIN, DatasetSummary, Way
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.quality.tables import read_label, removed_label, row_name

_NOTES: Final = (
    "right: answers that contain a right one, with the 95 % interval of their share (documents being the independent "
    "units). lost, won: questions that the full cache has right and this one not, and the reverse. agreement: the "
    "figure of the caches and its lower bound, means over documents. B/token: bytes of the stored blob per document "
    "token, and their share of the {full:,} bytes of the full cache in 16 bits. Seconds are means of a document: "
    "prefill with policy and codec, measuring the figure, asking all questions at once."
)


def notes(summary: DatasetSummary) -> str:
    """How to read the table."""
    return _NOTES.format(full=summary.full_16bit)


def way_label(row: Row) -> str:
    """A row in one line."""
    read = f" {row.select.label} {read_label(row)}" if row.select is not None else ""
    return row.label + read


def dataset_tables(summary: DatasetSummary, title: str) -> list[Table]:
    """One row a way; refusals below."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold", max_width=26)
    for name in ("removed", "codec", "right", "95 %", "lost", "won", "agreement", "low", "B/token", "of 16 bits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prefill", "measuring", "asking"):
        table.add_column(f"{name}, s", justify="right")
    for way in summary.ways:
        table.add_row(*_cells(way, summary.full_16bit))
    return [table, *_refusals(summary)]


def _cells(way: Way, full_16bit: int) -> list[str]:
    name = " ".join(filter(None, (row_name(way.row), read_label(way.row))))
    changed = ["", ""] if way.row == PLAIN else [str(way.lost), str(way.won)]
    seconds = [f"{one:.1f}" for one in (way.prefill_s, way.quality_s, way.answer_s)]
    return [
        *(name, removed_label(way.row), way.row.codec),
        *(f"{way.right} of {way.questions}", f"{100 * way.low:.0f}-{100 * way.high:.0f}", *changed),
        *("" if one is None else f"{one:.3f}" for one in (way.agreement, way.agreement_low)),
        *(f"{way.bytes_per_token:,.0f}", f"{way.bytes_per_token / full_16bit:.0%}", *seconds),
    ]


def _refusals(summary: DatasetSummary) -> list[Table]:
    table = Table("refused", "documents", "reason", box=None, title_justify="left", header_style="bold")
    for way in summary.ways:
        reasons: dict[str, list[str]] = {}
        for document, reason in way.refused.items():
            reasons.setdefault(reason, []).append(document)
        for reason, documents in reasons.items():
            shown = ", ".join(documents[:3]) + (f" and {len(documents) - 3} more" if len(documents) > 3 else "")
            table.add_row(way_label(way.row), shown, reason)
    return [table] if table.rows else []
