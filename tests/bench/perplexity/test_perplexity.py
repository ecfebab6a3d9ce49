"""Perplexity behind compressed beginnings and under suffix policies."""

from __future__ import annotations

import json
from math import exp

import pytest
import torch
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.samples.tasks import haystacks
from kvshelf_bench.cli import app
from kvshelf_bench.perplexity.perplexity import Stream, likelihoods, perplexities, windows_of
from kvshelf_bench.quality.grid import Row


@pytest.fixture(scope="module")
def prose(tiny) -> str:
    return " ".join(haystacks(3, 400, tiny.text.count_tokens))


def test_the_likelihoods_are_those_of_one_pass_of_the_model(tiny, prose):
    """Token by token behind the stored cache, and all at once by transformers alone."""
    ids = tiny.text.encode(prose)[:160]
    cache = tiny.compress(ids[:100], policy="full")
    told = likelihoods(tiny, cache, ids[100:])
    with torch.no_grad():
        logits = tiny.model(torch.tensor([ids])).logits[0, 100:-1].float().log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[101:])[:, None])[:, 0]
    assert told == pytest.approx(expected.tolist(), abs=2e-3)


def test_what_is_lost_makes_the_text_less_likely(tiny, prose):
    ids = tiny.text.encode(prose)
    windows = windows_of(ids, 200, 64, 2)
    streams = [Row.parse("full"), Row.parse("streaming_llm@0.9")]
    often, seldom = (Stream.bounded(streams[0], text, 16) for text in ("window:every=1", "window"))
    full, lost, bounded, less = perplexities(tiny, windows, [*map(Stream, streams), often, seldom])
    losses = [-sum(likelihoods(tiny, tiny.compress(a[:-1], policy="full"), [a[-1], *b])) / 64 for a, b in windows]
    assert full.perplexity == pytest.approx(exp(sum(losses) / 2))
    assert (full.over_full, full.low, full.high, full.entries) == (1, 1, 1, 64)
    assert lost.over_full == pytest.approx(lost.perplexity / full.perplexity)
    assert lost.low <= lost.over_full <= lost.high
    assert lost.perplexity != full.perplexity
    assert lost.bytes < 0.2 * full.bytes
    assert (bounded.way, bounded.entries) == ("full + window:every=1@16", 17)
    assert (less.way, less.entries) == ("full + window@16", 47)
    several = (
        ("window", 24, 48, 39),
        ("h2o:every=5", 16, 64, 21),
        ("window:every=7", 60, 64, 64),
        ("window", 512, 40, 40),
    )
    for text, budget, tokens, entries in several:
        assert Stream.bounded(streams[0], text, budget).entries(tokens) == entries, text
    assert len({bounded.perplexity, less.perplexity, full.perplexity}) == 3
    (refused,) = perplexities(tiny, windows, [Stream(Row.parse("lagkv:lag=512"))])
    assert "lag 512" in refused.refused


def test_the_command_and_what_it_refuses(tmp_path, prose):
    text, output = tmp_path / "book.txt", tmp_path / "report.json"
    text.write_text(prose)
    options = ["--context", "128", "--tokens", "8", "--windows", "2", "--output", str(output)]
    arguments = ["perplexity", str(text), "--ways", "keydiff@32", "--suffixes", "window", "--budgets", "8", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    ways = [way["way"] for way in json.loads(output.read_text())["ways"]]
    assert ways == ["full", "keydiff@32", "full + window@8"]
    text.write_text("too short")
    for arguments, reason in (
        ([str(text)], "and a window 1280"),
        ([str(tmp_path / "none")], "cannot be read"),
        ([str(text), "--suffixes", "best"], "best"),
        ([str(text), "--suffixes", "window:often=1"], "often"),
        ([str(text), "--ways", "best"], "best"),
    ):
        result = CliRunner().invoke(app, ["perplexity", *arguments])
        assert isinstance(result.exception, KvshelfError), arguments
        assert reason in result.exception.message
    with pytest.raises(InvalidRequest):
        windows_of([1] * 10, 8, 3, 1)
