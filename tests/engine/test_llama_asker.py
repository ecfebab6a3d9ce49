"""What llama.cpp does not have is refused before any work. What it answers is tested where llama-cpp-python is."""

from __future__ import annotations

import pytest

from kvshelf.api import JointQuery, Query, Select, SuffixOptions
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.llama.engine import LlamaAsker
from kvshelf.errors import PolicyUnsupported
from tests.engine.asking import ids

PART, SUFFIX, GREEDY = Select(method="quest"), SuffixOptions(policy="lagkv"), Sampling(max_tokens=1)
TWO = {"cache_ids": ["a", "b"], "prompt": "?"}


@pytest.fixture
def asker(llama) -> LlamaAsker:
    engine = llama.engine
    return LlamaAsker(engine.passes, engine.encoder, engine.preparer, engine.attachments)


@pytest.fixture
def documents(llama):
    return [llama.engine.attach(llama.engine.compress(llama.ids[n : n + 50], policy="full")) for n in (0, 50)]


@pytest.mark.parametrize(
    ("query", "caches", "param", "message"),
    [
        (JointQuery(**TWO, route="likelihood"), 2, "route", "not have the route likelihood; leave route out, or ask"),
        (JointQuery(**TWO, route="attention", suffix=SUFFIX), 2, "route", "not have the route attention; leave"),
        (JointQuery(**TWO), 2, "cache_ids", "not have several caches together; ask one, or ask a service"),
        (JointQuery(**TWO, route="nearest", select=PART), 2, "select", "not have a part of a cache; leave select out"),
        (Query(prompt="?", suffix=SUFFIX), 1, "suffix", "not have answers that drop entries; leave suffix out"),
    ],
)
def test_a_question_is_refused_by_the_field_to_leave_out(asker, query, caches, param, message):
    with pytest.raises(
        PolicyUnsupported, match=f"^llama.cpp answers from one cache, and .*: it does {message}"
    ) as told:
        asker.require_asked(query, caches)
    assert told.value.param == param


def test_one_cache_and_the_nearest_of_several_are_asked(asker):
    asker.require_asked(Query(prompt="?"), 1)
    asker.require_asked(JointQuery(**TWO, route="nearest"), 2)


def test_calls_refuse_all_that_the_table_says(asker, documents, llama):
    one, joined = documents[0], llama.engine.joined(documents)
    calls = {
        "several": lambda: asker.start(joined, ids(4), GREEDY),
        "part": lambda: asker.selection(one, PART, 4),
        "suffix": lambda: asker.reducer(SUFFIX, 4, one),
        "passages": lambda: asker.start(one, ids(4), GREEDY, passages=True),
        "likelihood": lambda: asker.start(one, ids(4), GREEDY, likelihood=True),
        "routes": lambda: asker.narrowing("attention", documents, ids(4)),
    }
    assert {*calls, "route"} == {*LlamaAsker.lacks}
    for name, call in calls.items():
        what, param = LlamaAsker.lacks[name]
        with pytest.raises(PolicyUnsupported, match=f"not have {what};") as told:
            call()
        assert told.value.param == param
    assert asker.selection(one, None, 4) is None
    assert not asker.start(one, ids(4), GREEDY).finished


def test_kvshelfs_own_engine_lacks_none_of_it(llama, documents):
    asker, joined = llama.engine.asker, llama.engine.joined(documents)
    asker.require_asked(JointQuery(**TWO, suffix=SUFFIX), 2)
    assert not asker.start(joined, ids(4), GREEDY, passages=False, likelihood=False).finished
    assert asker.narrowing("attention", documents, ids(4)).readings
