"""Which of several documents answer: by the likelihood of the question behind each, and by its attention."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from kvshelf.api import Usage
from kvshelf.api.answers import Answer
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.passages import Narrowing
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheUnusable, InvalidRequest, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from kvshelf_bench.quality.retrieval import counter
from tests.amounts import amount
from tests.engine.asking import ids
from tests.model.test_rope import random_model

ROUTES = ("likelihood", "attention")


def reading(*, likelihood: float | None = None, sources: tuple[float, ...] = (1.0,)) -> Answer:
    usage = Usage(cache_read_tokens=9, read_tokens=9, prefill_tokens=5, completion_tokens=1, suffix_tokens=6)
    return Answer("", [1], "length", usage, sources=sources, likelihood=likelihood)


def likelihood(model, document: list[int], question: list[int]) -> float:
    """Of a question behind a document, by one pass of the model over both."""
    with torch.no_grad():
        logits = model(torch.tensor([[*document, *question]])).logits[0].double().log_softmax(-1)
    places = range(len(document), len(document) + len(question) - 1)
    return sum(logits[place, question[place + 1 - len(document)]].item() for place in places)


@pytest.mark.parametrize("length", [2, 5, 127, 128, 129, 300])
def test_the_likelihood_is_that_of_a_whole_pass(llama, length):
    """Also where the question is read in several steps, and beside another answer."""
    document, question = llama.ids[:150], ids(length, 3)
    engine = llama.engine
    attachment = engine.attach(engine.compress(document, policy="full"))
    row = engine.asker.start(attachment, question, Sampling(max_tokens=1), likelihood=True)
    other = engine.start(attachment, ids(4, 9), Sampling(max_tokens=9))
    batch = engine.batch()
    while not row.finished:
        batch.step([row, other])
    assert row.answer().likelihood == pytest.approx(likelihood(llama.model, document, question), rel=1e-4, abs=1e-4)
    assert other.token_ids
    assert engine.asker.read([attachment], [0], question).likelihood == row.answer().likelihood


def test_only_a_reading_of_one_document_tells_a_likelihood(llama):
    engine = llama.engine
    caches = [engine.compress(llama.ids[n : n + 50], policy="full") for n in (0, 50)]
    assert engine.answer(caches[0], ids(5)).likelihood is None
    assert engine.asker.read(list(map(engine.attach, caches)), [0, 1], ids(5)).likelihood is None


def test_by_likelihood_those_documents_answer_behind_which_the_question_is_likeliest(llama):
    """Beside likelihoods of whole passes. Not every question's best document is the same one: else any would do."""
    documents = [ids(80, seed) for seed in range(6)]
    caches = [llama.engine.compress(document, policy="full") for document in documents]
    firsts = set()
    for seed in range(6):
        question = ids(12, 100 + seed)
        nats = [likelihood(llama.model, document, question) for document in documents]
        answer = llama.engine.answer(caches, question, max_new_tokens=2, route="likelihood")
        read = {place for place, share in enumerate(answer.sources) if share > 0}
        best = sorted(range(6), key=lambda place: -nats[place])[:2]
        share = 1 / (1 + math.exp(nats[best[1]] - nats[best[0]]))
        assert read == set(best if share <= 2 / 3 else best[:1])
        firsts.add(best[0])
    assert len(firsts) > 1


def test_logits_that_are_no_numbers_choose_nothing(llama):
    engine = llama.engine
    caches = [engine.compress(llama.ids[:50], policy="full"), engine.compress(llama.ids[50:90], policy="full")]
    values = caches[1].layers[0].values
    values[:] = math.nan
    with pytest.raises(CacheUnusable, match="not numbers"):
        engine.answer(caches, ids(5), route="likelihood")


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
    """They cost, and so the shelf saves that much less."""
    costs = {"prefill_token_equivalents": 7.0, "prefill_token_equivalents_saved": 100.0}
    paid = replace(reading(likelihood=-1.0), usage=reading().usage.model_copy(update=costs))
    narrowing = Narrowing("likelihood", 2)
    narrowing.take([paid, paid])
    wanted = {"prefill_tokens": 15, "prefill_token_equivalents": 21.0, "prefill_token_equivalents_saved": 86.0}
    assert narrowing.counted(paid.usage) == paid.usage.model_copy(update=wanted)
    unmeasured = Narrowing("likelihood", 2)
    unmeasured.take([reading(likelihood=-1.0), reading(likelihood=-1.0)])
    assert unmeasured.counted(paid.usage).prefill_token_equivalents is None


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
    answers 66 % of questions about all, and 98 % by this route (docs/internals/answers.md)."""
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


def test_a_route_is_one_of_several_and_chooses_among_several(llama):
    caches = [llama.engine.compress(llama.ids[n : n + 60], policy="full") for n in (0, 60)]
    for route, of, question, words in (
        ("farthest", caches, ids(5), "must be one of likelihood, attention, nearest"),
        ("likelihood", caches[:1], ids(5), "several caches"),
        ("attention", [], ids(5), "several caches"),
        ("likelihood", caches, ids(1), "one token"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            llama.engine.answer(of, question, route=route)
        assert refused.value.param == "route"


def test_a_route_goes_with_a_selector_and_with_what_an_answer_tells(tiny):
    documents = [make_document("multikey", "prose", 400, 5000 + n, counter(tiny)) for n in range(3)]
    caches = [tiny.compress(document.text, policy="full") for document in documents]
    question = documents[1].questions[0]
    options = {"max_new_tokens": 14, "select": "quest", "select_tokens": 200, "logprobs": 1}
    answer = tiny.answer(caches, question.text, route="attention", **options)
    assert answer.text.strip() == question.answer
    assert answer.sources[1] > 0.3
    assert answer.usage.read_tokens <= 200
    assert answer.logprobs


@pytest.mark.parametrize("route", ROUTES)
def test_documents_that_cannot_join_have_no_route(route):
    engine = Engine(random_model("mistral", sliding_window=24), name="m")
    caches = [engine.compress([7, 8, 9, seed] * 12, policy="full") for seed in (11, 12)]
    with pytest.raises(PolicyUnsupported, match="a sliding window"):
        engine.answer(caches, [5, 6], route=route)
