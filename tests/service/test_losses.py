"""The line that says what a cache may have lost."""

from __future__ import annotations

import pytest

from kvshelf import open_store
from kvshelf.service.losses import warnings_of
from kvshelf.store.manifest import Judgement
from tests.qualities import quality_of

TEXT = "The harbour master keeps the tide tables in a green book. " * 20


@pytest.fixture
def stored(tiny, tmp_path):
    """The warnings of the document's cache, kept in some way and with some agreement."""
    with open_store(f"disk://{tmp_path / 'shelf'}") as store:

        def put(codec="none", agreement=None, **how):
            quality = None if agreement is None else quality_of(agreement)
            cache = tiny.compress(TEXT, **how)
            return warnings_of(store.put(cache, codec=codec, judged=Judgement(quality=quality)))

        yield put


def test_a_cache_that_keeps_everything_is_warned_of_for_its_figure_alone(stored):
    assert stored(policy="full") == []
    assert stored(policy="full", codec="int8", agreement=0.9) == []
    (line,) = stored(policy="full", codec="int2", agreement=0.64)
    assert line.startswith("about 36% of what the document decides is answered otherwise than by the full cache")
    assert "under codec int8, the default, lost 1 of 46 right answers on 27 real documents, at 59% of 16 bits" in line


def test_a_policy_that_removes_entries_says_what_it_cost_whatever_its_figure(stored):
    (line,) = stored(policy="keydiff", compression_ratio=0.25, agreement=1.0)
    assert "keydiff removed 25% of the entries; with half removed SmolLM2-135M lost 15 of 28 right answers" in line
    (line,) = stored(policy="tova", compression_ratio=0.5)
    assert "nobody measured what tova costs on real documents: with half removed SmolLM2-135M lost from 2 of 19" in line
    assert "(kvcues) to 15 of 28 right answers on 16 real documents (keydiff)" in line
    assert "\n" not in line
