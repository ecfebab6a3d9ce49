"""`kvshelf bench memory`: peaks of real processes."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest
from kvshelf_bench.cli import app
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.measure import with_peak
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.quality.memory import Answers, compression_peak


def peaks_of_64_mb() -> list[int]:
    """Peaks of calls that hold 64 MB at most. The last one has an allocator that kept 100 MB of earlier work, because
    what is freed below memory in use stays resident."""

    def run() -> torch.Tensor:
        torch.ones(16_000_000)
        return torch.ones(4_000_000)

    run()  # the first call loads parts of torch
    found = [with_peak(torch.device("cpu"), run)[1] for _ in range(2)]  # the first one's peak must be forgotten
    held = [bytearray(b"x" * 100_000) for _ in range(1000)]
    above = held.pop()
    held.clear()
    found.append(with_peak(torch.device("cpu"), lambda: torch.ones(16_000_000))[1])
    del above
    return found


@pytest.mark.slow
def test_the_peak_is_what_was_held_at_once_and_not_what_is_left():
    """In a process of its own, as the bench measures: this one's free memory has any shape."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        found = alone.submit(peaks_of_64_mb).result()
    assert [round(peak / 16e6) for peak in found] == [4, 4, 4]


@pytest.mark.slow
def test_each_policy_has_its_peak_and_refusals_are_rows(tmp_path):
    report = tmp_path / "memory.json"
    arguments = ["memory", "--tokens", "2048", "--policies", "lagkv:lag=4096", "--output", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    full, refused = json.loads(report.read_text())["rows"]
    streaming = asdict(compression_peak(EngineOptions(), 2048, Row.parse("streaming_llm@0.75")))  # here: seconds
    assert (full["policy"], streaming["policy"], refused["policy"]) == ("full", "streaming_llm", "lagkv:lag=4096")
    assert full["tokens"] == streaming["tokens"]
    assert streaming["phase"] == "during"
    assert 1900 < full["tokens"] <= 2048
    # Four layers of 2 KV heads, 64 channels, keys and values, float32, and what finds them: 4,096 bytes and some.
    assert 4096 <= full["cache_bytes"] / full["tokens"] < 4200
    assert streaming["cache_bytes"] == pytest.approx(full["cache_bytes"] / 4, rel=0.01)
    assert full["peak_bytes"] > full["cache_bytes"]
    assert "lag 4096" in refused["refused"]
    assert "refused" in result.output


@pytest.mark.slow
def test_answers_are_measured_behind_what_was_kept():
    """In a process of its own, as the bench measures. Few answers may take no page that it did not have, and by how
    much Linux counts pages late: only of many is it known that they raise its memory."""
    asked = [Answers(questions, tokens) for questions in (1, 8) for tokens in (4, 100)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        row = Row.parse("streaming_llm@64")
        small = alone.submit(compression_peak, EngineOptions(), 1024, row, asked).result()
    assert small.budget == 64
    assert 0 < small.cache_bytes < 64 * 4200
    assert [(one.questions, one.tokens) for one in small.answering] == [(1, 4), (1, 100), (8, 4), (8, 100)]
    *_, most = small.answering
    assert most.token_s > 0
    assert most.peak_bytes > 8 * 64 * 4096, "eight suffixes of more than 64 entries"
    long = compression_peak(EngineOptions(), 512, Row.parse("full"), [Answers(1, 8), Answers(1, 20_000)])
    assert "an answer of 20000" in long.refused, "the model would end it early"


def test_impossible_options_are_refused_before_any_work():
    for arguments, reason in (
        (["--removed", "1.0"], "--removed"),
        (["--removed", "-0.1"], "--removed"),
        (["--policies", "magic"], "magic"),
        (["--ways", "magic@3"], "magic"),
        (["--tokens", "2048,8"], "at least 64"),
        (["--answer-tokens", "8,0"], "--answer-tokens 8,0"),
        (["--questions", "0", "--answer-tokens", "8"], "--questions 0"),
        (["--questions", "8"], "--questions 8: nothing is asked without --answer-tokens"),
    ):
        refused = CliRunner().invoke(app, ["memory", *arguments]).exception
        assert isinstance(refused, InvalidRequest), arguments
        assert reason in refused.message
