"""Prefill token equivalents: the paper's formula, its form in stored bytes, and what the shelf saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshelf.engine.decode.equivalents import INTENSITIES, Equivalents, intensity_of
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.model.layers import LayerKind
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.deployment import ReplicaConfig, ServedReplica
from tests.engine.asking import ids

LAYERS, WIDTH, HEADS = 3, 64, 4
HOI = 40.0
DOCUMENT, QUESTION = 200, 9


def made(kv_heads: int, **config) -> Engine:
    """A random model in 16 bits, as the paper's, of which the intensity is known."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 500}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "eos_token_id": None}
    torch.manual_seed(0)
    engine = Engine(LlamaForCausalLM(LlamaConfig(**shape, **heads, **config)).to(torch.bfloat16).eval())
    engine.equivalents = replace(engine.equivalents, intensity=HOI)
    return engine


@pytest.fixture(scope="module")
def plain() -> Engine:
    """With multi-head attention."""
    return made(HEADS)


def usage(engine: Engine, cache, tokens: int = 12, **options):
    return engine.answer(cache, ids(QUESTION, 3), max_new_tokens=tokens, **options).usage


def by_paper(engine: Engine, prefilled: int, length: int, decoded: int) -> float:
    parameters = sum(each.numel() for each in engine.model.parameters())
    gamma = 2 * LAYERS * WIDTH * HOI / parameters
    return prefilled + gamma * length * decoded


def test_a_full_cache_without_codec_and_with_multi_head_attention_costs_what_the_paper_says(plain):
    found = usage(plain, plain.compress(ids(DOCUMENT, 1), policy="full"))
    assert found.prefill_token_equivalents == pytest.approx(by_paper(plain, QUESTION, DOCUMENT + QUESTION, 12))
    assert found.prefill_token_equivalents_saved == pytest.approx(DOCUMENT)  # what need not be prefilled again


def test_the_cost_is_linear_in_the_answer_s_tokens(plain):
    cache = plain.compress(ids(DOCUMENT, 1), policy="full")
    one, two, three = (usage(plain, cache, tokens).prefill_token_equivalents for tokens in (5, 10, 15))
    assert two - one == pytest.approx(three - two)
    assert one - (two - one) == pytest.approx(QUESTION)  # without an answer: the question, and nothing of the document


def test_a_gqa_group_is_read_once():
    grouped = made(1)
    found = usage(grouped, grouped.compress(ids(DOCUMENT, 1), policy="full"))
    alike = by_paper(grouped, QUESTION, DOCUMENT + QUESTION, 12) - QUESTION
    assert found.prefill_token_equivalents - QUESTION == pytest.approx(alike / HEADS)


def test_what_is_not_stored_and_not_read_costs_nothing(plain):
    full = plain.compress(ids(DOCUMENT, 1), policy="full")
    half = plain.compress(ids(DOCUMENT, 1), policy="keydiff", compression_ratio=0.5)
    found = usage(plain, half)
    assert found.prefill_token_equivalents == pytest.approx(by_paper(plain, QUESTION, DOCUMENT // 2 + QUESTION, 12))
    costs = [found.prefill_token_equivalents + found.prefill_token_equivalents_saved]
    for cache, options in ((full, {}), (full.encoded("int4:group=16,residual=16"), {}), (full, SELECTED)):
        found = usage(plain, cache, **options)
        costs.append(found.prefill_token_equivalents + found.prefill_token_equivalents_saved)
    assert costs == pytest.approx([by_paper(plain, DOCUMENT + QUESTION, DOCUMENT + QUESTION, 12)] * 4)
    coded = plain.attach(full.encoded("int4:group=16,residual=16"))
    stored = usage(plain, full.encoded("int4:group=16,residual=16")).prefill_token_equivalents
    smaller = coded.read_bytes / plain.attach(full).read_bytes
    assert 0.25 < smaller < 0.5
    assert stored == pytest.approx(by_paper(plain, QUESTION, DOCUMENT * smaller + QUESTION, 12))
    selected = usage(plain, full, **SELECTED)
    assert selected.read_tokens < DOCUMENT // 2
    assert selected.prefill_token_equivalents == pytest.approx(
        by_paper(plain, QUESTION, selected.read_tokens + QUESTION, 12)
    )


SELECTED = {"select": "quest", "select_tokens": 64, "select_params": {"page": 8}}


def test_several_documents_count_together(plain):
    caches = [plain.compress(ids(DOCUMENT, seed), policy="full") for seed in (1, 2)]
    found = usage(plain, caches)
    assert found.prefill_token_equivalents == pytest.approx(by_paper(plain, QUESTION, 2 * DOCUMENT + QUESTION, 12))
    assert found.prefill_token_equivalents_saved == pytest.approx(2 * DOCUMENT)


def test_of_a_window_only_its_tokens_count():
    kinds = [LayerKind(), LayerKind(window=50), LayerKind(attends=False)]
    counted = Equivalents(1000, 8, kinds, 1.0)
    assert counted.cost(0, 1, counted._full_bytes(200)) == pytest.approx((200 + 50) * 8 / 2000, rel=0.01)


def test_where_the_device_is_unknown_nothing_is_said(plain, monkeypatch):
    assert intensity_of(torch.device("cpu")) == INTENSITIES["cpu"] > 1
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    assert intensity_of(torch.device("cuda")) == pytest.approx(206, abs=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another one")
    assert intensity_of(torch.device("cuda")) is None
    monkeypatch.setattr(plain, "equivalents", replace(plain.equivalents, intensity=None))
    found = usage(plain, plain.compress(ids(DOCUMENT, 1), policy="full"))
    assert found.prefill_token_equivalents is found.prefill_token_equivalents_saved is None
    assert found.completion_tokens == 12


def test_a_model_that_processes_share_counts_all_of_its_weights(plain):
    shared = Equivalents.of(plain.model, plain.kv_bytes_per_token, plain.kinds, shared=True)
    assert shared.parameters == plain.equivalents.parameters == sum(each.numel() for each in plain.model.parameters())


def test_a_replica_takes_the_intensity_of_its_settings(tiny_folder, tmp_path):
    store = StoreConfig(f"disk://{tmp_path}/home")
    for given, found in ((None, INTENSITIES["cpu"]), (7.0, 7.0)):
        replica = ServedReplica(ReplicaConfig(str(tiny_folder), store, device="cpu", intensity=given))
        assert replica.engine.equivalents.intensity == found
        replica.stop()


def test_an_unfinished_answer_counts_what_ran(plain):
    document = plain.attach(plain.compress(ids(DOCUMENT, 1), policy="full"))
    answer, batch = plain.start(document, ids(QUESTION, 3), Sampling(8)), plain.batch()
    for done in range(3):
        batch.step([answer])
        expected = by_paper(plain, QUESTION, DOCUMENT + QUESTION, done + 1)
        assert answer.usage().prefill_token_equivalents == pytest.approx(expected)
