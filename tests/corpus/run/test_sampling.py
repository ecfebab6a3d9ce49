"""The rows of a batch that are measured where they do not say."""

from __future__ import annotations

import pytest

from kvshelf.artifact.identity import digest
from kvshelf.corpus.row import CHARS_PER_TOKEN
from kvshelf.corpus.run import caller
from kvshelf.corpus.run.caller import is_measured
from kvshelf.engine.quality import cue_count

ROWS = 4_000


def share(tokens):
    ids = (f"row_{digest('test', str(number))}" for number in range(ROWS))
    return sum(is_measured(row, tokens * CHARS_PER_TOKEN) for row in ids) / ROWS


@pytest.mark.parametrize("tokens", [200, 2_000, 8_000, 20_000])
def test_measuring_the_sample_takes_a_tenth_of_the_prefills(tokens):
    """In tokens that run. The share of 4,000 rows lies within 0.03 of its mean but for one case in 10,000."""
    cost = cue_count("fast", tokens) * caller.CUE_TOKENS / tokens
    assert share(tokens) * cost == pytest.approx(0.1, abs=0.03 * cost)


def test_all_long_documents_are_measured_and_a_batch_that_goes_on_has_the_same_sample():
    assert share(40_000) == 1
    assert is_measured("row_ffffffff", 8_000) is False
    assert is_measured("row_00000001", 8_000) is True
