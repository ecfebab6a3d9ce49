"""Which of several documents answer: by the likelihood of the question behind each, and by its attention."""

from __future__ import annotations

import random

import pytest
import torch

from kvshelf.api import Usage
from kvshelf.api.answers import Answer
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.passages import Narrowing
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from kvshelf_bench.quality.retrieval import counter
from tests.amounts import amount
from tests.engine.asking import ids
from tests.model.test_rope import random_model

ROUTES = ("likelihood", "attention")


def reading(*, likelihood: float | None = None, sources: tuple[float, ...] = (1.0,)) -> Answer:
    usage = Usage(cache_read_tokens=9, read_tokens=9, prefill_tokens=5, completion_tokens=1, suffix_tokens=6)
    return Answer("", [1], "length", usage, sources=sources, likelihood=likelihood)


@pytest.mark.parametrize("length", [2, 5, 127, 128, 129, 300])
def test_the_likelihood_is_that_of_a_whole_pass(llama, length):
    """Also where the question is read in several steps, and beside other answers."""
    document, question = llama.ids[:150], ids(length, 3)
    engine = llama.engine
    cache = engine.compress(document, policy="full")
    row = engine.asker.reading([engine.attach(cache)], [0], question)
    other = engine.start(cache, ids(4, 9), Sampling(max_tokens=9))
    batch = engine.asker.batch()
    while not row.finished:
        batch.step([row, other])
    with torch.no_grad():
        logits = llama.model(torch.tensor([[*document, *question]])).logits[0].double().log_softmax(-1)
    places = range(len(document), len(document) + length - 1)
    wanted = sum(logits[place, question[place + 1 - len(document)]].item() for place in places)
    assert row.answer().likelihood == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert other.token_ids


def test_only_a_reading_of_one_document_tells_a_likelihood(llama):
    engine = llama.engine
    documents = [engine.attach(engine.compress(llama.ids[n : n + 50], policy="full")) for n in (0, 50)]
    assert engine.answer(engine.compress(llama.ids[:50], policy="full"), ids(5)).likelihood is None
    both = engine.asker.reading(documents, [0, 1], ids(5))
    engine.asker.batch().step([both])
    assert both.answer().likelihood is None


def test_by_likelihood_the_two_likeliest_answer_or_one_that_is_far_likelier():
    for nats, places in (((-9.0, -5.0, -5.5), [1, 2]), ((-9.0, -5.0, -6.0), [1]), ((-3.0, -900.0, -3.1), [0, 2])):
        narrowing = Narrowing("likelihood", 3)
        assert narrowing.readings == [[0], [1], [2]]
        narrowing.take([reading(likelihood=each) for each in nats])
        assert (narrowing.places, narrowing.readings) == (places, [])


def test_by_attention_an_eighth_is_read_again_until_two_are_left():
    narrowing = Narrowing("attention", 32)
    shares = tuple(n / 496 for n in range(32))
    read = []
    while readings := narrowing.readings:
        read.append(readings)
        (places,) = readings
        narrowing.take([reading(sources=tuple(shares[place] for place in places))])
    assert read == [[list(range(32))], [[28, 29, 30, 31]], [[30, 31]]]
    assert narrowing.places == [30, 31]
    pair = Narrowing("attention", 2)
    pair.take([reading(sources=(0.7, 0.3))])
    assert pair.places == [0]


def test_usage_counts_the_readings_too():
    narrowing = Narrowing("likelihood", 2)
    narrowing.take([reading(likelihood=-1.0), reading(likelihood=-1.0)])
    usage = reading().usage
    counted = narrowing.counted(usage)
    assert counted == usage.model_copy(update={"prefill_tokens": 15})
    assert (
        narrowing.counted(usage.model_copy(update={"prefill_token_equivalents": 2.0})).prefill_token_equivalents is None
    )


@pytest.mark.parametrize("route", ROUTES)
def test_the_answer_is_that_of_the_documents_that_a_route_chooses(llama, route):
    engine = llama.engine
    caches = [engine.compress(llama.ids[n * 40 : n * 40 + 90], policy="full") for n in range(5)]
    answer = engine.answer(caches, ids(9), max_new_tokens=6, route=route)
    read = [place for place, share in enumerate(answer.sources) if share > 0]
    assert len(read) in (1, 2)
    assert sum(answer.sources) == pytest.approx(1)
    alone = engine.answer([caches[place] for place in read], ids(9), max_new_tokens=6)
    assert answer.token_ids == alone.token_ids
    assert answer.usage.cache_read_tokens == alone.usage.cache_read_tokens
    readings = 5 if route == "likelihood" else 2
    assert answer.usage.prefill_tokens == alone.usage.prefill_tokens * (readings + 1)


def test_attention_finds_among_many_documents_what_the_question_about_all_loses(tiny):
    """kvshelf-tiny copies, and is no language model: likelihoods tell it nothing. Among 32 documents of 512 tokens it
    answers 66 % of questions about all, and 94 % by this route (docs/internals/answers.md)."""
    documents = [make_document("multikey", "prose", 400, 5000 + n, counter(tiny)) for n in range(amount(12, 32))]
    caches = [tiny.compress(document.text, policy="full").encoded("int4") for document in documents]
    rng = random.Random(0)
    cases = [rng.choice(documents[rng.randrange(len(documents))].questions) for _ in range(amount(12, 48))]
    right = dict.fromkeys((None, "attention"), 0)
    for route in right:
        for question in cases:
            answer = tiny.answer(caches, question.text, max_new_tokens=14, route=route)
            right[route] += answer.text.strip() == question.answer
    assert right["attention"] >= 0.85 * len(cases)
    assert right["attention"] > right[None]


@pytest.mark.parametrize(("route", "param"), [("farthest", "route"), ("likelihood", "route"), ("attention", "route")])
def test_a_route_is_one_of_several_and_chooses_among_several(llama, route, param):
    cache = llama.engine.compress(llama.ids[:60], policy="full")
    with pytest.raises(InvalidRequest) as refused:
        llama.engine.answer([cache], ids(5), route=route)
    assert refused.value.param == param


@pytest.mark.parametrize("route", ROUTES)
def test_documents_that_cannot_join_have_no_route(route):
    engine = Engine(random_model("mistral", sliding_window=24), name="m")
    caches = [engine.compress([7, 8, 9, seed] * 12, policy="full") for seed in (11, 12)]
    with pytest.raises(PolicyUnsupported, match="a sliding window"):
        engine.answer(caches, [5, 6], route=route)
