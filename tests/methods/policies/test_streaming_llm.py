"""StreamingLLM: which entries, and where they stand."""

from __future__ import annotations

import copy

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import build
from tests.by_hand import Prefix, frequencies, logits_after, turned

TOKENS, KEPT, QUESTION = 400, 90, 20


def relative_error(ours, expected):
    return float((ours.double() - expected).abs().max() / expected.abs().max())


def compressed(oracle, **params):
    return oracle.engine.compress(oracle.ids[:TOKENS], policy="streaming_llm", budget_tokens=KEPT, **params)


@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_sinks_and_the_most_recent_stay(llama, positions):
    cache = compressed(llama, sink=7, positions=positions)
    expected = [*range(7), *range(TOKENS - KEPT + 7, TOKENS)]
    assert all(head.tolist() == expected for record in cache.layers for head in record.positions)


def test_keys_in_the_cache_are_turned_by_hand(oracle):
    absolute, cached = compressed(oracle), compressed(oracle, positions="cache")
    inv_freq = frequencies(oracle.model)
    for before, after in zip(absolute.layers, cached.layers, strict=True):
        assert torch.equal(before.values, after.values)
        for (keys, _), (moved, _), positions in zip(before.heads(), after.heads(), before.positions, strict=True):
            by_hand = turned(keys, torch.arange(KEPT) - positions, inv_freq)
            assert relative_error(moved, by_hand) < 1e-5
            assert torch.equal(moved[:4], keys[:4]) or relative_error(moved[:4], keys[:4].double()) < 1e-6


def test_a_question_continues_where_the_cache_ends(oracle):
    """Equal to a softmax over the kept keys alone, moved by hand: the middle is not there and leaves no gap."""
    document, question = oracle.ids[:TOKENS], oracle.ids[TOKENS : TOKENS + QUESTION]
    full = oracle.engine.compress(document, policy="full")
    cached = CompressedCache.from_bytes(compressed(oracle, positions="cache").to_bytes())
    assert (cached.next_position, cached.num_tokens) == (KEPT, TOKENS)
    with oracle.engine.attached(cached) as past, torch.no_grad():
        assert past.get_seq_length() == KEPT
        ours = oracle.model(torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0]
    by_hand = Prefix.kept(full, cached, slots_by=frequencies(oracle.model))
    assert relative_error(ours, logits_after(oracle.model, by_hand, question, KEPT)) < 1e-4
    elsewhere = logits_after(oracle.model, by_hand, question, TOKENS)
    assert relative_error(ours, elsewhere) > 1e-2, "the distance to the question matters"


def test_absolute_positions_leave_the_gap(oracle):
    document, question = oracle.ids[:TOKENS], oracle.ids[TOKENS : TOKENS + QUESTION]
    full, cache = oracle.engine.compress(document, policy="full"), compressed(oracle)
    assert cache.next_position == TOKENS
    with oracle.engine.attached(cache) as past, torch.no_grad():
        ours = oracle.model(torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0]
    assert relative_error(ours, logits_after(oracle.model, Prefix.kept(full, cache), question, TOKENS)) < 1e-4


def test_a_budget_of_everything_counts_alike_either_way(llama):
    caches = [
        llama.engine.compress(llama.ids[:60], policy="streaming_llm", compression_ratio=0.0, positions=positions)
        for positions in ("absolute", "cache")
    ]
    assert [cache.next_position for cache in caches] == [60, 60]
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(*[cache.layers for cache in caches], strict=True))


def test_the_rotation_is_observed_only_where_it_is_undone():
    assert build("streaming_llm", {}).needs == Needs.NOTHING
    assert build("streaming_llm", {"positions": "cache"}).needs == Needs.ROPE


def test_a_rotation_that_depends_on_the_length_is_refused_before_any_work(llama):
    model = copy.deepcopy(llama.model)
    model.base_model.rotary_emb.rope_type = "dynamic"
    engine = Engine(model)
    options = {"policy": "streaming_llm", "budget_tokens": KEPT}
    with pytest.raises(PolicyUnsupported, match="changes with the length") as refused:
        engine.prepare(llama.ids, **options, policy_params={"positions": "cache"})
    assert refused.value.param == "policy"
    engine.prepare(llama.ids, **options)


def test_unknown_positions_are_refused():
    with pytest.raises(InvalidRequest, match="'absolute', 'cache'") as refused:
        build("streaming_llm", {"positions": "relative"})
    assert refused.value.param == "policy_params.positions"
