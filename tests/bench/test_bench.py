"""The bench commands, at sizes that take seconds."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvshelf.bench.cli import app
from kvshelf.bench.measure import Spread, interleaved, machine, ratios, wilson
from kvshelf.bench.retrieval import measure_cell


def test_every_round_runs_every_variant_and_the_first_does_not_count():
    calls = []

    def variant(name):
        calls.append(name)
        return float(len(calls))

    results = interleaved({"a": lambda: variant("a"), "b": lambda: variant("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert results == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_ratios_are_taken_within_a_round():
    assert ratios([1.0, 10.0, 4.0], [1.0, 5.0, 1.0]) == Spread(2.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (200, 200, 0.9812, 1.0), (5, 10, 0.2366, 0.7634)]
)
def test_the_interval_is_wilsons(hits, trials, low, high):
    """Reference values from the closed formula, worked out by hand."""
    assert wilson(hits, trials) == pytest.approx((low, high), abs=1e-3)


def test_the_machine_is_named():
    assert machine()["processor"]
    assert machine()["cores"] >= 1


def test_retrieval_measures_the_policy_and_not_only_the_model(tiny):
    """Keeping 2 % of a document cannot answer what the whole cache can; chance has one in 10^3 per answer."""
    options = {"documents": 12, "compress": {"policy": "full"}}
    full = measure_cell(tiny, "needle", "filler", 512, **options)
    options["compress"] = {"policy": "streaming_llm", "compression_ratio": 0.98}
    blind = measure_cell(tiny, "needle", "filler", 512, **options)
    assert full.share >= 0.75
    assert blind.share <= 0.25


def test_retrieval_command(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--documents", "2", "--lengths", "300", "--tasks", "needle", "--output", str(report)]
    result = CliRunner().invoke(app, ["retrieval", *arguments])
    assert result.exit_code == 0, result.output
    cells = json.loads(report.read_text())["cells"]
    assert [(cell["haystack"], cell["documents"]) for cell in cells] == [("filler", 2), ("prose", 2)]


def test_speed_command():
    result = CliRunner().invoke(app, ["speed", "--tokens", "512", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = report["first_token"]
    assert [row["policy"] for row in rows] == ["full", "keydiff", "keydiff", "lagkv", "snapkv"]
    assert rows[2]["stored_bytes"] < rows[1]["stored_bytes"] < rows[0]["stored_bytes"]
    assert all(0 < row["prefill_tokens"] < 100 for row in rows)
    assert all(row["share"]["median"] > 0 for row in report["compression"])


@pytest.mark.parametrize("arguments", [["--tasks", "chess"], ["--lengths", "long"], ["--haystacks", "hay"]])
def test_bad_choices_are_refused(arguments):
    assert CliRunner().invoke(app, ["retrieval", *arguments]).exit_code == 2
