"""Summaries of outcomes: intervals, cells, rows, the Pareto front and the tables."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from kvshelf_bench.measure import clustered_wilson, wilson
from kvshelf_bench.quality.grid import Cell, Row, Variant
from kvshelf_bench.quality.outcome import Outcome
from kvshelf_bench.quality.summary import Summary, pareto
from kvshelf_bench.quality.tables import quality_tables

PROSE = Cell(1024, "multikey", "prose")
FULL = Row(Variant("full"), 0.0)
KEYDIFF = Row(Variant("keydiff"), 0.5)


def outcome(*exact: int, stored_bytes: int = 1000, refused: str | None = None) -> Outcome:
    partial = tuple(map(float, exact))
    return Outcome("key", refused, exact, partial, 100, stored_bytes, prefill_s=1.0, compress_s=0.1)


def test_questions_of_one_document_count_for_less_than_documents():
    alone = [(1, 1)] * 30 + [(0, 1)] * 10
    assert clustered_wilson(alone) == pytest.approx(wilson(30, 40), abs=0.005)
    together = [(4, 4)] * 30 + [(0, 4)] * 10  # the four answers of a document stand or fall together
    assert clustered_wilson(together) == pytest.approx(wilson(30, 40), abs=0.005)
    spread = [(3, 4)] * 40  # all documents alike: never narrower than independent questions
    assert clustered_wilson(spread) == pytest.approx(wilson(120, 160))
    assert clustered_wilson([(4, 4)] * 25) == wilson(100, 100)
    assert clustered_wilson([(3, 4)]) == wilson(0.75, 1)


def test_a_cell_is_the_mean_of_its_questions_and_able_with_the_baseline():
    other = Cell(1024, "vt", "prose")
    found = [(FULL, PROSE, outcome(1, 1, 1, 1)), (KEYDIFF, PROSE, outcome(1, 1, 0, 0, stored_bytes=500))]
    found += [(KEYDIFF, PROSE, outcome(1, 1, 1, 0, stored_bytes=700))]
    found += [(FULL, other, outcome(1, 0, 0, 0)), (KEYDIFF, other, outcome(1, 1, 1, 1))]
    summary = Summary.of([PROSE, other], [FULL, KEYDIFF], found, 20)
    entry = summary.entries[KEYDIFF, PROSE]
    assert (entry.documents, entry.questions, entry.exact, entry.bytes_per_token) == (2, 8, 0.625, 6.0)
    assert entry.compress_share == pytest.approx(0.1)
    assert summary.able(PROSE)
    assert not summary.able(other)
    assert summary.common() == [PROSE]
    assert summary.overall(KEYDIFF).exact == 0.625


def test_losses_are_differences_on_the_same_documents():
    other = Cell(1024, "digits64", "prose")
    full = [(1, 1), (1, 0), (0, 0), (1, 1)]  # the third document is lost to both, so it says nothing of keydiff
    kept = [(1, 0), (1, 0), (0, 0), (1, 1)]
    found = (
        [(FULL, PROSE, outcome(1, 1))] * 9 + [(KEYDIFF, PROSE, outcome(1, 1))] * 8 + [(KEYDIFF, PROSE, outcome(0, 0))]
    )
    found += [(FULL, other, outcome(*exact)) for exact in full] + [(KEYDIFF, other, outcome(*exact)) for exact in kept]
    summary = Summary.of([PROSE, other], [FULL, KEYDIFF], found, 20)
    entry = summary.entries[KEYDIFF, other]
    assert (entry.lost, entry.lost_error) == (0.125, pytest.approx(0.125))  # of 0.5, 0, 0, 0
    assert (summary.entries[FULL, other].lost, summary.entries[FULL, other].lost_error) == (0, 0)
    entry = summary.entries[KEYDIFF, PROSE]
    assert (entry.lost, entry.lost_error) == (pytest.approx(1 / 9), pytest.approx(1 / 9))
    overall = summary.overall(KEYDIFF)  # over the one cell that the model can answer
    assert (overall.lost, overall.lost_error) == (entry.lost, entry.lost_error)


def test_tokens_that_a_policy_runs_behind_the_document_are_paid_by_the_policy():
    kvzip = Row(Variant("kvzip"), 0.5)
    slow = [replace(outcome(1), probe_tokens=200, prefill_s=seconds) for seconds in (3.0, 4.0)]
    found = [(FULL, PROSE, outcome(1)), (FULL, PROSE, outcome(1)), *((kvzip, PROSE, one) for one in slow)]
    found += [(KEYDIFF, PROSE, replace(outcome(1), prefill_s=2.0))]  # a slow moment of the machine, not of KeyDiff
    summary = Summary.of([PROSE], [FULL, KEYDIFF, kvzip], found, 20)
    assert summary.entries[kvzip, PROSE].compress_share == pytest.approx(2.5 + 0.1)
    assert summary.entries[KEYDIFF, PROSE].compress_share == pytest.approx(0.05)


def test_a_refused_document_refuses_its_cell_and_the_mean_of_its_row():
    found = [(FULL, PROSE, outcome(1)), (FULL, PROSE, outcome(1))]
    found += [(KEYDIFF, PROSE, outcome(1)), (KEYDIFF, PROSE, outcome(refused="no room"))]
    summary = Summary.of([PROSE], [FULL, KEYDIFF], found, 20)
    assert summary.entries[KEYDIFF, PROSE].refused == "no room"
    assert summary.overall(KEYDIFF) is None
    assert summary.refusals() == {"no room": [(KEYDIFF, PROSE)]}


def test_tables_fit_the_terminal_and_show_every_row_once_and_codecs_apart():
    cells = [Cell(1024, "multikey", haystack) for haystack in ("filler", "prose", "dense")]
    cells += [Cell(tokens, "digits64", "prose") for tokens in (1024, 2048, 4096)]
    encoded = Row(KEYDIFF.variant, KEYDIFF.removed, "int4")
    found = [(row, cell, outcome(1, 1, 1, 1)) for row in (FULL, KEYDIFF) for cell in cells]
    found += [(encoded, cells[0], outcome(1, 1, 1, 0))]
    console = Console(width=120, record=True, file=StringIO())
    tables = quality_tables(Summary.of(cells, [FULL, KEYDIFF, encoded], found, 20), "title")
    for table in tables:
        console.print(table)
    text = console.export_text()
    assert [len(table.columns) for table in tables] == [7 + 5, 7 + 1, 7 + 1]
    assert [table.row_count for table in tables] == [2, 2, 2]
    assert text.count("int4") == 1
    assert "75 (" in text
    assert text.count("10  50%") == 6, "of the 20 bytes a token in 16 bits"
    assert "…" not in text


def test_the_front_holds_what_no_other_point_beats():
    points = [(100, 0.5), (200, 0.4), (200, 0.8), (300, 0.8), (400, 0.9), (100, 0.2)]
    assert pareto(points) == [(100, 0.5), (200, 0.8), (400, 0.9)]
