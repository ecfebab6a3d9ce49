"""Caches whose heads keep different numbers of entries: every KV head of a request has a page table of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvshelf.integrations.vllm.ragged.pages import stand_ins
from kvshelf.integrations.vllm.request import is_ragged
from kvshelf.store.manifest import Manifest
from tests.integrations_vllm.conftest import Serving, document

PAGE = 128
QUESTION = document(0).questions[0].text
WAYS: list[dict[str, Any]] = [
    {"policy": policy, "compression_ratio": ratio}
    for policy in ("kvzip", "kvcues", "kvzip_gate", "ada")
    for ratio in (0.5, 0.75)
]


def made(serving: Serving, number: int, **how: Any) -> Manifest:
    cache = serving.put(document(number).text, **({"policy": "kvzip", "compression_ratio": 0.75} | how))
    assert is_ragged(cache)
    return cache


@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(map(str, how.values())))
def test_the_answers_are_those_of_kvshelf(serving: Serving, how: dict[str, Any]) -> None:
    """4 documents, 4 questions each, all asked at once: 16 answers of 12 tokens, 128 of all policies."""
    asked = [(made(serving, number, **how), each.text) for number in range(4) for each in document(number).questions]
    outputs = serving.ask(*(serving.request(*each) for each in asked))
    for (cache, question), output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == serving.own(cache, question), (cache.id, question)
        assert output.num_cached_tokens == stand_ins(cache.kept_tokens, PAGE)


def test_one_question_many_times(serving: Serving) -> None:
    """In one step, in later ones and as answers of one request: only pages with full head pages are shared, though all
    tokens are the same."""
    cache = made(serving, 5)
    own = serving.own(cache, QUESTION, tokens=PAGE + 12)
    for _ in range(2):
        outputs = serving.ask(
            *[serving.request(cache, QUESTION)] * 3, n=2, temperature=1, top_k=1, max_tokens=PAGE + 12
        )
        assert [list(each.token_ids) for output in outputs for each in output.outputs] == [own] * 6


def test_beside_caches_with_one_length_and_prompts_of_vllms_own(serving: Serving) -> None:
    plain, half = (
        serving.put(document(6).text, policy="full"),
        serving.put(document(6).text, policy="keydiff", compression_ratio=0.5),
    )
    ragged = made(serving, 6), made(serving, 6, policy="cake")
    asked = [(cache, each.text) for cache in (*ragged, plain, half) for each in document(6).questions]
    ids = serving.engine.encode_query(serving.store.get(plain.id), QUESTION)
    alone = serving.ask(({"prompt_token_ids": ids}, {}))
    *outputs, own = serving.ask(*(serving.request(*each) for each in asked), ({"prompt_token_ids": ids}, {}))
    assert own.outputs[0].token_ids == alone[0].outputs[0].token_ids
    for (cache, question), output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == serving.own(cache, question), (cache.policy, question)


def test_another_question_needs_no_blob(serving: Serving) -> None:
    cache = made(serving, 7)
    own = serving.own(cache, document(7).questions[1].text)
    serving.ask(serving.request(cache, QUESTION))
    serving.blob(cache).unlink()
    (output,) = serving.ask(serving.request(cache, document(7).questions[1].text))
    assert list(output.outputs[0].token_ids) == own


def test_a_cache_made_again_is_read_again(serving: Serving) -> None:
    """Under the same id, with other entries, as another machine may make it."""
    cache = made(serving, 8)
    serving.ask(serving.request(cache, QUESTION))
    stored, other = (
        serving.store.get(cache.id),
        serving.engine.compress(document(8).text, policy="kvcues", compression_ratio=0.75),
    )
    serving.store.delete(cache.id)
    again = serving.store.put(replace(stored, layers=other.layers))
    assert again.id == cache.id
    (output,) = serving.ask(serving.request(again, QUESTION))
    assert list(output.outputs[0].token_ids) == serving.own(again, QUESTION)
    assert again.blob_digest != cache.blob_digest


@pytest.mark.parametrize("codec", ["int4", "klt"])
def test_codecs(serving: Serving, codec: str) -> None:
    cache = made(serving, 9, codec=codec)
    (output,) = serving.ask(serving.request(cache, QUESTION))
    assert list(output.outputs[0].token_ids) == serving.own(cache, QUESTION)


def test_a_cache_that_was_extended(serving: Serving) -> None:
    stored = serving.store.get(made(serving, 10).id)
    cache = serving.store.put(serving.engine.extend(stored, document(11).text, compression_ratio=0.5))
    assert is_ragged(cache)
    for question in document(11).questions:
        (output,) = serving.ask(serving.request(cache, question.text))
        assert list(output.outputs[0].token_ids) == serving.own(cache, question.text)
