"""vLLM's answers from stored caches are those of kvshelf's own engine, token for token, in fp32."""

from __future__ import annotations

import random
import threading
from copy import deepcopy
from typing import Any

import pytest

from kvshelf.artifact.opened import arriving
from kvshelf.integrations.vllm.loading import ShelfWorker
from tests.integrations_vllm.conftest import Serving, document

PAGE = 128
QUESTION = document(0).questions[0].text
CODECS = ("none", "int4", "klt")
WAYS: list[dict[str, Any]] = [
    {"policy": "full"},
    {"policy": "full", "codec": "int8"},
    {"policy": "full", "codec": "klt"},
    {"policy": "keydiff", "compression_ratio": 0.5},
    {"policy": "keydiff", "compression_ratio": 0.5, "codec": "int4"},
    {"policy": "snapkv", "compression_ratio": 0.75},
    {"policy": "snapkv", "budget_tokens": 2 * PAGE},
    {"policy": "streaming_llm", "compression_ratio": 0.5, "positions": "cache"},
]


@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(map(str, how.values())))
def test_the_answers_are_those_of_kvshelf(serving: Serving, how: dict[str, Any]) -> None:
    """4 documents, 4 questions each, all asked at once: 16 answers of 12 tokens."""
    made = [(serving.put(each.text, **how), each.questions) for each in map(document, range(4))]
    asked = [(cache, question.text) for cache, questions in made for question in questions]
    outputs = serving.ask(*(serving.request(*each) for each in asked))
    for (cache, question), output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == serving.own(cache, question), (cache.id, question)
        assert output.num_cached_tokens == cache.kept_tokens, "no entry is computed, and none dropped"


def test_ten_caches_at_once(serving: Serving) -> None:
    """10 documents by four policies under three codecs, 5 questions each, mixed in one batch."""
    plain, half, quarter = {"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5}, {"budget_tokens": 300}
    ways: list[dict[str, Any]] = [*({**how, "codec": codec} for how in (plain, half) for codec in CODECS)]
    ways += [{"policy": "snapkv", **quarter, "codec": codec} for codec in ("none", "int4")]
    ways += [{"policy": "streaming_llm", **quarter, "codec": codec} for codec in ("none", "klt")]
    asked = []
    for number, how in enumerate(ways, 30):
        text, questions = document(number).text, [question.text for question in document(number).questions]
        cache = serving.put(text, **how)
        asked += [(cache, question) for question in [*questions, "What is the access code of the amber falcon?"]]
    random.Random(0).shuffle(asked)
    outputs = serving.ask(*(serving.request(*each) for each in asked))
    assert (len({cache.id for cache, _ in asked}), len(outputs)) == (10, 50)
    for (cache, question), output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == serving.own(cache, question), (cache.id, question)


def test_the_documents_above_end_within_a_page(serving: Serving) -> None:
    assert serving.put(document(0).text, policy="full").kept_tokens % PAGE
    assert serving.put(document(0).text, policy="snapkv", budget_tokens=2 * PAGE).kept_tokens % PAGE == 0


def test_the_bundled_model_finds_facts_through_vllm(serving: Serving) -> None:
    """So that equal answers are not equal nonsense."""
    asked = document(7)
    cache = serving.put(asked.text, policy="full")
    outputs = serving.ask(*(serving.request(cache, question.text) for question in asked.questions))
    right = [q.answer in output.outputs[0].text for q, output in zip(asked.questions, outputs, strict=True)]
    assert sum(right) >= 3


def test_another_question_needs_no_blob(serving: Serving) -> None:
    """vLLM shares the full pages, and the worker remembers the rest."""
    cache = serving.put(document(11).text, policy="full")
    own = serving.own(cache, "What is the access code of the amber falcon?")
    serving.ask(serving.request(cache, QUESTION))
    serving.blob(cache).unlink()
    (output,) = serving.ask(serving.request(cache, "What is the access code of the amber falcon?"))
    assert list(output.outputs[0].token_ids) == own


def test_a_layer_is_computed_while_later_ones_are_read(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader holds back all layers but the first until vLLM has that one and goes on."""
    cache = serving.put(document(12).text, policy="full")
    own, gone_on = serving.own(cache, QUESTION), threading.Event()
    read_layer, wait = arriving.read_layer, ShelfWorker.wait

    def read_late(index: int, *args: Any) -> Any:
        assert index == 0 or gone_on.wait(60), "vLLM waits for all layers before it computes the first"
        return read_layer(index, *args)

    def wait_and_go_on(worker: ShelfWorker, name: str) -> None:
        if ".1." in name:
            gone_on.set()
        wait(worker, name)

    monkeypatch.setattr(arriving, "read_layer", read_late)
    monkeypatch.setattr(ShelfWorker, "wait", wait_and_go_on)
    (output,) = serving.ask(serving.request(cache, QUESTION))
    assert list(output.outputs[0].token_ids) == own


def test_no_document_gets_the_pages_of_another_of_its_length(serving: Serving) -> None:
    """All prompts begin with the same stand-ins: the salt keeps them apart."""
    caches = [serving.put(document(number).text, policy="snapkv", budget_tokens=2 * PAGE) for number in (21, 22)]
    said = []
    for cache in caches:
        (output,) = serving.ask(serving.request(cache, QUESTION))
        assert list(output.outputs[0].token_ids) == serving.own(cache, QUESTION)
        said.append(output.outputs[0].token_ids)
    assert said[0] != said[1]


def test_two_answers_from_one_set_of_parameters(serving: Serving) -> None:
    """vLLM in one process shares them with its caller, and they lose their key on the way."""
    cache = serving.put(document(23).text, policy="full")
    prompt, extra = serving.request(cache, QUESTION).offline
    before = deepcopy(extra)
    for _ in range(2):
        (output,) = serving.ask((prompt, extra), n=2, temperature=1, top_k=1)
        assert [list(each.token_ids) for each in output.outputs] == [serving.own(cache, QUESTION)] * 2
    assert extra == before


def test_a_prompt_without_a_cache_is_vllms_own(serving: Serving) -> None:
    ids = serving.engine.encode_query(serving.store.get(serving.put(document(1).text).id), QUESTION)
    (output,) = serving.ask(({"prompt_token_ids": ids}, {}))
    assert output.outputs[0].finish_reason == "length"
    assert output.num_cached_tokens == 0
