"""ChunkKV: whole chunks, as many as kvpress counts, against loops. test_oracles.py has kvpress's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.views import observed, pooled_mean, random_layer


def fitted(num_tokens, ratio, protected=0, **params):
    budget = Budget.resolve(num_tokens, compression_ratio=ratio, budget_tokens=None)
    return build("chunkkv", params).fitted(
        DocumentView(range(num_tokens), protected), budget, frozenset(params)
    ), budget


def kept(layer, ratio, **params):
    policy, budget = fitted(layer.num_tokens, ratio, layer.protected_prefix, **params)
    record = policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget.tokens))
    return [head.tolist() for head in record.positions]


def naive(layer, ratio, window, kernel, chunk):
    """Chunks by their mean score, those that touch what is protected first; whole ones until they are enough."""
    weights = pooled_mean(observed(layer, window).unflatten(0, (layer.kv_heads, -1)).mean(dim=(1, 2)), kernel).sum(
        dim=0
    )
    columns, chunks = (
        len(weights),
        [range(i, min(i + chunk, layer.num_tokens)) for i in range(0, layer.num_tokens, chunk)],
    )

    def rank(tokens):
        if tokens[0] < layer.protected_prefix or tokens[-1] >= columns:
            return -math.inf
        return -sum(float(weights[j]) for j in tokens) / len(tokens)

    count = max(1, math.floor(len(chunks) * (1 - ratio) + 1e-9))
    return sorted(j for tokens in sorted(chunks, key=rank)[:count] for j in tokens)


@pytest.mark.parametrize("case", [{}, {"protected": 3, "group": 4}, {"probes": (3,)}, {"probes": (9, 6)}], ids=str)
@pytest.mark.parametrize("tokens", [140, 147])
@pytest.mark.parametrize(("ratio", "kernel", "chunk"), [(0.5, 5, 20), (0.3, 1, 7), (0.75, 3, 10)])
def test_keeps_the_best_chunks(case, tokens, ratio, kernel, chunk):
    layer = random_layer(tokens, kv_heads=3, **case)
    expected = naive(layer, ratio, 6, kernel, chunk)
    assert kept(layer, ratio, window=6, kernel=kernel, chunk=chunk) == [expected] * 3


@pytest.mark.parametrize("reuse", [2, 3])
def test_layers_keep_the_chunks_of_the_first_of_them(oracle, reuse):
    """Of a document with a shorter chunk at its end, which the first layers drop or keep."""
    options = {"policy": "chunkkv", "compression_ratio": 0.6, "chunk": 10, "window": 8}
    alone = oracle.engine.compress(oracle.ids[:174], **options)
    together = oracle.engine.compress(oracle.ids[:174], reuse=reuse, **options)
    assert len(alone.layers) > 2
    kept = [[head.tolist() for head in record.positions] for record in alone.layers]
    assert [[head.tolist() for head in record.positions] for record in together.layers] == [
        kept[index - index % reuse] for index in range(len(kept))
    ]
    assert kept[0] != kept[1]


def test_no_layer_reuses_chunks_of_a_stored_cache(oracle):
    """Place 7 of one layer may be another token than place 7 of the next."""
    cache = oracle.engine.compress(oracle.ids[:174], policy="full")
    with pytest.raises(InvalidRequest, match="takes no reuse: layers of a stored cache may hold different tokens"):
        oracle.engine.answer(cache, [5, 6, 7], select="policy:chunkkv", select_tokens=60, select_params={"reuse": 2})


def test_the_remainder_competes_by_its_own_mean():
    """Its 6 tokens against chunks of 20; judged like a whole chunk it would always lose."""
    wins = 0
    for seed in range(8):
        layer = random_layer(146, probes=(6,), seed=seed)
        first, second = kept(layer, 0.5, window=6, kernel=1)
        assert first == second == naive(layer, 0.5, 6, 1, 20)
        wins += 145 in first
    assert wins, "or nothing was shown"


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(20, 400), ratio=st.floats(0.05, 0.95), chunk=st.integers(1, 30), protected=st.integers(0, 9))
def test_counts_chunks_as_kvpress_does(tokens, ratio, chunk, protected):
    layer = random_layer(tokens, protected=protected)
    try:
        first, second = kept(layer, ratio, chunk=chunk)
    except PolicyUnsupported:
        return  # the test below says when
    chunks = math.ceil(tokens / chunk)
    assert first == second
    for number in {j // chunk for j in first}:
        assert set(range(number * chunk, min(tokens, (number + 1) * chunk))) <= set(first), "whole chunks"
    assert len({j // chunk for j in first}) == max(1, math.floor(chunks * (1 - ratio) + 1e-9))
    budget = tokens * (1 - ratio)
    assert budget - 2 * chunk < len(first) < budget + chunk + 1, "the granularity that the docstring states"


def test_the_share_is_the_request_s_not_that_of_its_rounded_budget():
    """Half of 20 chunks are 10, though half of 399 tokens are 199, which hold only 9.97."""
    assert len({j // 20 for j in kept(random_layer(399), 0.5)[0]}) == 10
    assert 20 * (1 - 0.9) < 2
    assert len({j // 20 for j in kept(random_layer(400), 0.9, window=5)[0]}) == 2


def test_defaults_shrink_until_the_budget_holds_what_must_stay():
    for tokens, ratio, protected in [(12, 0.5, 2), (40, 0.9, 0), (100, 0.9, 6), (700, 0.9375, 4), (2000, 0.97, 50)]:
        policy, budget = fitted(tokens, ratio, protected)
        layer = random_layer(tokens, protected=protected)
        positions = policy.reduce(layer, LayerBudget.uniform(2, budget.tokens)).positions[0].tolist()
        assert policy.chunk <= budget.tokens
        assert set(range(protected)) | set(range(tokens - policy.window, tokens)) <= set(positions)


@pytest.mark.parametrize(("chunk", "most"), [(80, 50), (60, 50), (300, 50)])
def test_a_chunk_too_large_for_the_budget_is_refused_with_the_largest_that_fits(chunk, most):
    with pytest.raises(PolicyUnsupported, match=rf"chunk is {chunk}.*at most {most}") as refused:
        fitted(200, 0.75, chunk=chunk)
    assert refused.value.param == "policy_params.chunk"
    assert fitted(200, 0.75, chunk=most)[0].chunk == most
