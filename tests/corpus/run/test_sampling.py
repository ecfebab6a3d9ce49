"""The rows of a batch that are measured where they do not say."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvshelf.corpus.run import sampling
from kvshelf.corpus.run.sampling import SHARE, Sample, cue_tokens
from kvshelf.engine.quality import cue_count

REAL = [4_400, 3_600, 2_900, 2_800, 2_600, 2_400, 2_400, 2_300, 2_300, 2_200, 2_100, 2_100, 2_100, 2_000, 1_900, 1_800,
        1_700, 1_700, 1_600, 1_600, 1_500, 1_500, 1_300, 1_100, 1_100, 1_100, 1_100]  # fmt: skip
"""Tokens of 27 documents, of which chance once measured nine."""


def run(rows, *, dearer=1.0, at_work=1, sample=None):
    """Seconds of work and of measuring, and the rows that were measured. dearer: a token of a cue beside one of a
    document. at_work: rows that have begun and not ended."""
    sample, worked_s, probed_s, measured, open_rows = sample or Sample(), 0.0, 0.0, [], []
    for number, tokens in enumerate(rows):
        probe_s = cue_tokens(tokens) * dearer / 500 if sample.begins(tokens) else 0.0
        measured += [number] * bool(probe_s)
        worked_s, probed_s = worked_s + tokens / 500, probed_s + probe_s
        open_rows.append((tokens, tokens / 500, probe_s))
        if len(open_rows) >= at_work:
            sample.ended(*open_rows.pop(0))
    return worked_s, probed_s, measured


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_work", [1, 32])
def test_measuring_takes_a_tenth_of_the_work_at_most_whatever_the_order(seed, at_work):
    rows = random.Random(seed).sample(REAL, len(REAL))
    worked_s, probed_s, _ = run(rows, at_work=at_work)
    assert 0.05 < probed_s / worked_s <= SHARE


@pytest.mark.parametrize("dearer", [0.2, 3.0])
def test_where_cues_are_dearer_than_their_tokens_fewer_rows_are_measured(dearer):
    """Where calls of a few tokens are slow, or a tenant's figure has more cues."""
    rows = REAL * 8
    worked_s, probed_s, measured = run(rows, dearer=dearer, at_work=4)
    assert 0.08 < probed_s / worked_s <= SHARE
    assert (len(measured) < len(run(rows)[2])) == (dearer > 1)


def test_rows_that_were_there_before_or_failed_pay_for_no_measuring():
    sample = Sample()
    for tokens in REAL * 4:
        sample.begins(tokens)
        sample.ended(tokens, 0.0, 0.0)
    assert not sample.begins(2_000)


def test_the_sample_is_spread_over_the_batch_and_over_lengths():
    measured = run([2_000] * 100)[2]
    assert {then - now for now, then in pairwise(measured)} <= {4, 5}
    assert run([40_000] * 20)[2] == list(range(20))
    rows = random.Random(0).choices([1_200, 4_400], k=2_000)  # a fifth of each would cost a tenth
    measured = [rows[number] for number in run(rows)[2]]
    assert measured.count(4_400) / rows.count(4_400) == pytest.approx(0.22, abs=0.04)
    assert measured.count(1_200) / rows.count(1_200) == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("tokens", [200, 2_000, 8_000, 40_000])
def test_cues_are_counted_as_a_fast_figure_asks_them(tokens):
    assert cue_tokens(tokens) == cue_count("fast", tokens) * sampling._CUE
