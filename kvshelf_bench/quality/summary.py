"""The quality table as numbers: cells and rows from the outcomes of single documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Any

from kvshelf_bench.measure import clustered_wilson
from kvshelf_bench.quality.grid import PLAIN, Cell, Row
from kvshelf_bench.quality.outcome import Outcome

ABLE = 0.9
"""Least share of exact answers from the full cache at which a cell says something about a policy."""


@dataclass(frozen=True)
class Entry:
    """One row in one cell. Shares lie between 0 and 1; `low` and `high` bound `exact` (95 %, see `clustered_wilson`:
    documents are the independent units). `compress_share` is the time that the policy adds to a prefill that keeps
    everything, over that prefill: the policy's time over the prefill it ran in, or, for a policy that runs more tokens
    than the document's, its whole time beyond the baseline in the same cell.

    `lost`: the baseline's share of exact answers minus this one, over the same documents; `lost_error`: its standard
    error, from the differences of single documents. 0 says that no document differed, not that none ever will.
    `read_share`: entries that a token of an answer reads, of those stored.

    `refused`: why a document was refused. The entry is then empty, because the remaining documents are not the set of
    documents of the other rows.
    """

    documents: int
    questions: int
    exact: float
    low: float
    high: float
    partial: float
    bytes_per_token: float
    prefill_s: float
    compress_share: float
    lost: float
    lost_error: float
    read_share: float = 1.0
    refused: str | None = None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> Entry:
        refused = [outcome.refused for outcome in outcomes if outcome.refused is not None]
        if refused:
            return cls(len(outcomes), 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, refused=refused[0])
        exact = [hit for outcome in outcomes for hit in outcome.exact]
        low, high = clustered_wilson([(sum(outcome.exact), len(outcome.exact)) for outcome in outcomes])
        lost, lost_error = _lost(outcomes, baseline)
        return cls(
            documents=len(outcomes),
            questions=len(exact),
            exact=fmean(exact),
            low=low,
            high=high,
            partial=fmean(part for outcome in outcomes for part in outcome.partial),
            bytes_per_token=fmean(outcome.stored_bytes / outcome.document_tokens for outcome in outcomes),
            prefill_s=fmean(outcome.prefill_s for outcome in outcomes),
            compress_share=_added(outcomes, baseline),
            lost=lost,
            lost_error=lost_error,
            read_share=fmean(outcome.read_share for outcome in outcomes),
        )


@dataclass(frozen=True)
class Overall:
    """A row over the common cells: those that all rows were measured in and the model can answer.

    `exact` is the mean of the cells' shares; the others are means of the cells' means, and `lost_error` is the standard
    error of such a mean.
    """

    exact: float
    bytes_per_token: float
    compress_share: float
    lost: float
    lost_error: float
    read_share: float


@dataclass(frozen=True)
class Summary:
    """The whole table. Cells and rows are in the order of the grid. `full_16bit`: bytes of the model's full cache per
    document token in 16-bit numbers, the base of every factor."""

    cells: list[Cell]
    rows: list[Row]
    entries: Mapping[tuple[Row, Cell], Entry]
    full_16bit: int

    @classmethod
    def of(
        cls,
        cells: Iterable[Cell],
        rows: Iterable[Row],
        outcomes: Iterable[tuple[Row, Cell, Outcome]],
        full_16bit: int,
    ) -> Summary:
        """`outcomes` in the order of the documents."""
        grouped: dict[tuple[Row, Cell], list[Outcome]] = defaultdict(list)
        for row, cell, outcome in outcomes:
            grouped[row, cell].append(outcome)
        baseline = {cell: of_cell for (row, cell), of_cell in grouped.items() if row == PLAIN}
        entries = {place: Entry.of(of_place, baseline.get(place[1], ())) for place, of_place in grouped.items()}
        return cls(sorted(cells), list(rows), entries, full_16bit)

    def able(self, cell: Cell) -> bool:
        """Whether the model itself answers this cell, from the full cache, at least `ABLE` of the time."""
        entry = self.entries.get((PLAIN, cell))
        return entry is not None and entry.refused is None and entry.exact >= ABLE

    def common(self) -> list[Cell]:
        """The common cells, which `Overall` is the mean of."""
        everywhere = (cell for cell in self.cells if all((row, cell) in self.entries for row in self.rows))
        return [cell for cell in everywhere if self.able(cell)]

    def overall(self, row: Row) -> Overall | None:
        """None if the row was refused in a common cell, or there is no common cell."""
        entries = [self.entries[row, cell] for cell in self.common()]
        if not entries or any(entry.refused is not None for entry in entries):
            return None
        names = ("exact", "bytes_per_token", "compress_share", "lost", "read_share")
        means = {name: fmean(getattr(entry, name) for entry in entries) for name in names}
        return Overall(**means, lost_error=hypot(*(entry.lost_error for entry in entries)) / len(entries))

    def refusals(self) -> dict[str, list[tuple[Row, Cell]]]:
        places: dict[str, list[tuple[Row, Cell]]] = defaultdict(list)
        for place, entry in self.entries.items():
            if entry.refused is not None:
                places[entry.refused].append(place)
        return dict(places)

    def to_dict(self) -> dict[str, Any]:
        """JSON types: the cells with what the model can do, and every row with its entries."""
        common = self.common()
        cells = [
            asdict(cell) | {"name": cell.label, "able": self.able(cell), "common": cell in common}
            for cell in self.cells
        ]
        rows = [self._row_dict(row) for row in self.rows]
        return {"full_16bit": self.full_16bit, "cells": cells, "rows": rows}

    def _row_dict(self, row: Row) -> dict[str, Any]:
        overall = self.overall(row)
        measured = [cell for cell in self.cells if (row, cell) in self.entries]
        return row.to_dict() | {
            "overall": None if overall is None else asdict(overall),
            "cells": {cell.label: asdict(self.entries[row, cell]) for cell in measured},
        }


def _added(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    """See `Entry.compress_share`. Within one prefill if possible: two differ by more than most policies take."""
    compress_s, prefill_s = (fmean(getattr(one, name) for one in outcomes) for name in ("compress_s", "prefill_s"))
    plain = [outcome.prefill_s for outcome in baseline if outcome.refused is None]
    if not plain or not any(outcome.probe_tokens for outcome in outcomes):
        return compress_s / prefill_s
    return (compress_s + max(prefill_s - fmean(plain), 0.0)) / fmean(plain)


def _lost(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> tuple[float, float]:
    """See `Entry.lost`. Both in the order of the documents, of which the baseline has all."""
    if not baseline or any(outcome.refused is not None for outcome in baseline):
        return 0.0, 0.0
    lost = [fmean(full.exact) - fmean(one.exact) for full, one in zip(baseline, outcomes, strict=False)]
    return fmean(lost), stdev(lost) / sqrt(len(lost)) if len(lost) > 1 else 0.0


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (bytes, score) that no other point beats: fewer bytes and no lower score. Ascending in both."""
    front: list[tuple[float, float]] = []
    for size, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((size, score))
    return front
