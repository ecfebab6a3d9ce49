"""The quality table for a terminal of 120 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.table import Table

from kvshelf_bench.quality.grid import BASELINE, PLAIN, Cell, Row, length_label
from kvshelf_bench.quality.summary import ABLE, Entry, Overall, Summary

_CELLS_A_TABLE = 5


def quality_tables(summary: Summary, title: str) -> list[Table]:
    """Rows are policies, columns cells: plain, under codecs and read by selectors, as the width allows; then
    refusals."""
    reasons = {reason: number for number, reason in enumerate(summary.refusals(), 1)}
    whole = [row for row in summary.rows if row.select is None]
    encoded = {row.kept for row in whole if row.codec != "none"}
    plain_rows = [row for row in whole if row.codec == "none"]
    encoded_rows = [row for row in whole if row.kept in encoded]
    selected_rows = [row for row in summary.rows if row.select is not None]
    tables = [_table(summary, plain_rows, cells, title, reasons) for cells in _columns(summary, plain_rows)]
    if encoded_rows:
        under = f"{title}, under codecs"
        only = [row for row in encoded_rows if row.codec != "none"]
        tables += [_table(summary, encoded_rows, cells, under, reasons) for cells in _columns(summary, only)]
    if selected_rows:
        read = f"{title}, read by selectors"
        tables += [_table(summary, selected_rows, cells, read, reasons) for cells in _columns(summary, selected_rows)]
    return tables + ([_refusals(summary, reasons)] if reasons else [])


def notes(summary: Summary) -> str:
    text = (
        "Cells: exact answers in % (95 % interval over questions, documents being the independent units). "
        "B/token: bytes of the stored blob per document token, and their share of the "
        f"{summary.full_16bit:,} bytes of the full cache in 16 bits. time: what compression adds to a plain prefill. "
        "mean: over the cells marked +, which all rows have. lost: points against the full cache on the same documents "
        "(95 % interval of the difference)."
    )
    if any(not summary.able(cell) for cell in summary.cells):
        text += f" Grey: the model itself answers under {ABLE:.0%} there, so the cell says nothing about a policy."
    return text


def row_name(row: Row) -> str:
    """The policy, whether plain transformers answered, and the selector, alone where all entries are stored."""
    if row.select is not None and row.variant.label == BASELINE:
        return row.select.label
    return row.variant.label + (" exported" if row.exported else "") + (f" {row.select.label}" if row.select else "")


def read_label(row: Row) -> str:
    """The part of a document's tokens that an answer's token may read; empty where it reads all."""
    return f"1/{round(1 / row.select.share)}" if row.select is not None else ""


def removed_label(row: Row) -> str:
    """The share removed in percent, or the entries kept; empty for a policy that removes nothing."""
    if row.budget is not None:
        return f"to {row.budget}"
    return f"{row.removed * 100:g} %" if row.variant.takes_budget else ""


def _columns(summary: Summary, rows: Sequence[Row]) -> list[tuple[Cell, ...]]:
    """The cells of each table: cells with the same rows share tables; tables with the most rows come first."""
    groups: dict[tuple[Row, ...], list[Cell]] = {}
    for cell in summary.cells:
        groups.setdefault(tuple(row for row in rows if (row, cell) in summary.entries), []).append(cell)
    return [
        tuple(groups[measured][first : first + _CELLS_A_TABLE])
        for measured in sorted(filter(None, groups), key=len, reverse=True)
        for first in range(0, len(groups[measured]), _CELLS_A_TABLE)
    ]


def bare_table(title: str) -> Table:
    """A table without lines."""
    return Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=None, header_style="bold")


def _table(summary: Summary, rows: Sequence[Row], cells: Sequence[Cell], title: str, reasons: dict[str, int]) -> Table:
    table = bare_table(title)
    shown = [row for row in rows if any((row, cell) in summary.entries for cell in cells)]
    labels = {"policy": row_name, "removed": removed_label, "codec": lambda row: row.codec, "read": read_label}
    labels = {name: label for name, label in labels.items() if any(map(label, shown))}
    for name in labels:
        table.add_column(name, overflow="fold", max_width=26)
    for name in ("B/token", "time", "mean", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    common = summary.common()
    for cell in cells:
        heading = f"{cell.task}\n{cell.haystack}\n{length_label(cell.tokens)}{'+' if cell in common else ''}"
        table.add_column(heading, justify="right", no_wrap=True, style=None if summary.able(cell) else "bright_black")
    for row, after in pairwise([*shown, None]):
        assert row is not None
        entries = [summary.entries.get((row, cell)) for cell in cells]
        last = after is not None and after.variant != row.variant
        head = [label(row) for label in labels.values()] + _head(summary, row, entries)
        table.add_row(*head, *(_cell(entry, reasons) for entry in entries), end_section=last)
    return table


def _head(summary: Summary, row: Row, entries: Sequence[Entry | None]) -> list[str]:
    """Bytes and time over the cells of this table, the mean over the whole row."""
    measured = [entry for entry in entries if entry is not None and entry.refused is None]
    overall = summary.overall(row)
    size = fmean(entry.bytes_per_token for entry in measured) if measured else 0.0
    stored = f"{size:,.0f} {size / summary.full_16bit:4.0%}" if measured else ""
    share = f"{fmean(entry.compress_share for entry in measured):.1%}" if measured else ""
    mean = [f"{overall.exact:.1%}", _lost(row, overall)] if overall else ["", ""]
    return [stored, share, *mean]


def _lost(row: Row, overall: Overall) -> str:
    return "" if row == PLAIN else f"{100 * overall.lost:.1f}±{196 * overall.lost_error:.1f}"


def _cell(entry: Entry | None, reasons: dict[str, int]) -> str:
    if entry is None:
        return ""
    if entry.refused is not None:
        return f"refused {reasons[entry.refused]}"
    return f"{100 * entry.exact:.0f} ({100 * entry.low:.0f}-{100 * entry.high:.0f})"


def _refusals(summary: Summary, reasons: dict[str, int]) -> Table:
    table = Table("refused", "reason", "where", box=None, title_justify="left", header_style="bold")
    for reason, places in summary.refusals().items():
        where = {
            f"{row_name(row)} {row.select.share if row.select else row.removed:g} {row.codec}" for row, _ in places
        }
        shown = sorted(where)
        table.add_row(f"{reasons[reason]}", reason, ", ".join(shown[:4]) + (" ..." if len(shown) > 4 else ""))
    return table
