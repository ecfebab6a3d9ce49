"""`kvshelf bench characterize`: loads, what they measure, and who wins."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf_bench.characterize import load
from kvshelf_bench.characterize.load import (
    MEASURES,
    LoadCell,
    Offer,
    System,
    cells_table,
    characterized,
    require_known,
    winners_table,
)
from kvshelf_bench.cli import app
from kvshelf_bench.engines import EngineOptions, endless_answers
from kvshelf_bench.speed.subject import load_subject

SMALL = Offer([200.0], requests=6, documents=2, tokens=512, answer_tokens=4)
CELL = LoadCell("m", 1000, 4.0, "full", 1.0, 0.1, 0.2, 100.0, 1000, 50.0, 0.9)


def test_arrivals_are_poisson_and_the_same_for_every_way():
    offer = Offer([50.0], requests=4000, documents=3)
    arrivals = list(offer.arrivals(50.0))
    assert arrivals == list(offer.arrivals(50.0)) != list(replace(offer, seed=1).arrivals(50.0))
    due = [at for at, _, _ in arrivals]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    # An exponential distribution: its deviation is its mean, and 1 / e of the gaps are longer than that.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert {document for _, document, _ in arrivals} == {0, 1, 2}


WAYS = [System("full"), System("quest", 0.5), System("infinigen", 0.5), System("h2o", 0.5)]


@pytest.fixture(scope="module")
def cells():
    with load_subject(EngineOptions("kvshelf-tiny", "cpu", "float32", 1)) as subject:
        return {cell.system: cell for cell in characterized(subject, "kvshelf-tiny", WAYS, SMALL)}


@pytest.mark.slow
def test_every_way_is_measured_under_the_same_load(cells):
    assert list(cells) == ["full", "quest", "infinigen", "h2o"]
    for cell in cells.values():
        assert 0 < cell.first_s <= cell.first_p95_s
        assert 0 < cell.tokens_per_s < 1e6
        assert cell.parameters == 1_226_496
        assert 0 <= cell.exact <= 1
    full, quest, infinigen, evicted = cells.values()
    assert full.exact > evicted.exact
    # Two documents of 512 tokens at 697 bytes, whatever answering added; eviction holds half of them.
    assert full.memory_bytes > 2 * 400 * 600
    assert evicted.equivalents < full.equivalents
    assert quest.equivalents < full.equivalents
    assert infinigen.equivalents < full.equivalents


def test_a_question_that_waits_for_the_model_is_late_from_its_arrival():
    """All questions come at once, and two are answered at a time: the last ones wait for most of the others."""
    offer = Offer([1000.0], requests=24, documents=1, tokens=512, answer_tokens=24)
    with load_subject(EngineOptions("random:1", "cpu", "float32", 1)) as subject, endless_answers(subject.engine):
        caches = [subject.engine.compress(subject.tokens(512, seed=1), policy="full")]
        scheduler = Scheduler(subject.engine, SchedulerLimits(max_open=2, max_waiting=24))
        scheduler.start()
        served = load.answered_at(scheduler, subject, caches, System("full"), offer, 1000.0)
        scheduler.stop()
    assert len(served.first_s) == 24
    assert min(served.first_s[-4:]) > 3 * max(served.first_s[:2])
    assert served.ended_s > max(served.first_s)
    assert {len(answer.token_ids) for answer in served.answers} == {24}


def test_unknown_systems_are_refused():
    assert require_known(["full", "h2o"], [0.5, 0.25], 512) == [
        System("full"),
        System("h2o", 0.5),
        System("h2o", 0.25),
    ]
    several = ["lagkv:lag=64", "quest:page=8", "policy:snapkv", "infllm", "read:infllm"]
    ways = require_known(several, [0.5], 512)
    assert [way.selects for way in ways] == [False, True, True, False, True]
    assert ways[0].kept == {"policy": "lagkv", "policy_params": {"lag": 64}, "compression_ratio": 0.5}
    assert [way.kept["policy"] for way in ways[1:]] == ["full", "full", "infllm", "full"]
    with pytest.raises(InvalidRequest, match="chess") as refused:
        require_known(["full", "chess"], [0.5], 512)
    assert refused.value.param == "systems"
    with pytest.raises(InvalidRequest, match=r"0\.125 of 512 tokens") as refused:
        require_known(["quest"], [0.5, 0.125], 512)
    assert refused.value.param == "shares"


def test_the_best_win_and_those_even_with_them():
    quest = replace(CELL, system="quest", share=0.5, first_s=0.05, equivalents=10.0, exact=0.88)
    evicted = replace(CELL, system="h2o", share=0.5, first_s=0.052, memory_bytes=500, exact=0.4)
    won = {measure.title: measure.winners([CELL, quest, evicted]) for measure in MEASURES}
    assert won["first token"] == "quest, h2o: 50 ms"
    assert won["p95"] == "all: 200 ms"
    assert won["memory"] == "h2o: 0.0 MB"
    assert won["PTE"] == "quest: 10"
    assert won["exact"] == "full, quest: 90%"
    unknown = [replace(cell, exact=None) for cell in (CELL, quest)]
    assert MEASURES[-1].winners(unknown) == "-"
    other = replace(quest, share=0.25)
    assert (cells_table([CELL, quest, other]).row_count, winners_table([CELL, quest, other]).row_count) == (3, 2)


@pytest.mark.slow
def test_command(tmp_path):
    report = tmp_path / "report.json"
    small = ["--requests", "4", "--documents", "1", "--tokens", "512", "--answer-tokens", "2", "--rates", "100,200"]
    arguments = ["--models", "random:3", "--shares", "0.5", "--systems", "full,infinigen", *small]
    result = CliRunner().invoke(app, ["characterize", *arguments, "--output", str(report)])
    assert result.exit_code == 0, result.output
    assert "which wins where" in result.output
    found = json.loads(report.read_text())
    assert [(cell["rate"], cell["system"]) for cell in found["cells"]] == [
        (100.0, "full"), (100.0, "infinigen"), (200.0, "full"), (200.0, "infinigen"),
    ]  # fmt: skip
    assert found["offer"]["requests"] == 4
    wrong = CliRunner().invoke(app, ["characterize", "--systems", "chess"])
    assert isinstance(wrong.exception, InvalidRequest)
