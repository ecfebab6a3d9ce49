"""CAKE: preference and indicator against their formulas. tests/methods/policies/test_cascade.py has the cascade."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies import build
from tests.views import best, observed, pooled_mean, random_layer

CASES = [
    {"group": 1},
    {"group": 3, "protected": 3},
    {"probes": (9,), "protected": 1},
    {"probes": (3, 5)},
    {"kv_heads": 3, "dim": 4},
]


def naive_preference(weights, tau1, tau2):
    entropy = sum(-a * math.log(a) for a in weights.flatten().tolist() if a > 0)
    variance = 0.0
    for head in weights.tolist():
        for column in zip(*head, strict=True):
            mean = sum(column) / len(column)
            variance += sum((a - mean) ** 2 for a in column) / (len(column) - 1)
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (1.6, 0.4)])
def test_the_preference_is_that_of_the_formula(case, tau1, tau2):
    layer = random_layer(60, **case)
    policy = build("cake", {"window": 4, "tau1": tau1, "tau2": tau2})
    assert policy.weight(layer) == pytest.approx(naive_preference(observed(layer, 4), tau1, tau2), rel=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gamma", [0.0, 200.0])
def test_the_indicator_is_that_of_the_formula(case, gamma):
    layer = random_layer(60, **case)
    weights = observed(layer, 4)
    indicator = pooled_mean(weights.mean(dim=1) + gamma * weights.var(dim=1), 3)  # per query head, pooled, then group
    indicator = indicator.unflatten(0, (layer.kv_heads, -1)).mean(dim=1)
    scores = build("cake", {"window": 4, "kernel": 3, "gamma": gamma}).score(layer)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[:, : indicator.shape[1]], indicator.float(), rtol=1e-4, atol=1e-7)
    assert not scores[:, indicator.shape[1] :].any(), "the tail is protected"


def test_bursts_count():
    """A token that one row of the window needs much, beside one that all rows need a little."""
    layer = random_layer(60, kv_heads=1, group=1)
    layer.keys[0, 20] = 4 * layer.queries[0, -1]
    steady = build("cake", {"window": 8, "kernel": 1, "gamma": 0.0}).score(layer)[0, 20]
    burst = build("cake", {"window": 8, "kernel": 1}).score(layer)[0, 20]
    assert burst > 10 * steady


def test_a_window_of_one_row_has_no_variance():
    layer = random_layer(60)
    policy = build("cake", {"window": 1, "kernel": 1})
    assert policy.weight(layer) == 0, "all layers alike"
    mean = observed(layer, 1).unflatten(0, (2, -1)).mean(dim=(1, 2))
    torch.testing.assert_close(policy.score(layer)[:, :-1], mean.float())


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.875])
def test_layers_that_spread_out_and_shift_get_more(oracle, ratio):
    """The cache of a real model: the total exact, shares in the order of the preferences, heads of a layer alike."""
    weights = {}

    class Watched(type(build("cake", {}))):
        def weight(self, layer):
            weights[layer.layer_idx] = super().weight(layer)
            return weights[layer.layer_idx]

    job = oracle.engine.prepare(oracle.ids, policy="cake", compression_ratio=ratio, policy_params={"tau2": 0.2})
    cache = oracle.engine.run(replace(job, policy=Watched(**job.policy.parameters()))).cache
    shares = [record.entries // record.kv_heads for record in cache.layers]
    assert all(
        len(head) == share for record, share in zip(cache.layers, shares, strict=True) for head in record.positions
    )
    assert sum(shares) == job.budget.tokens * len(shares)
    assert sorted(range(len(shares)), key=lambda i: (-shares[i], -weights[i])) == sorted(
        weights, key=lambda i: -weights[i]
    )
    assert len(set(shares)) > 1
    spread = [weights[i] / sum(weights.values()) * (job.budget.tokens - 32) * len(shares) for i in range(len(shares))]
    if max(spread) < len(oracle.ids) - 32:
        assert all(abs(share - 32 - part) < 1 for share, part in zip(shares, spread, strict=True))


def test_within_a_layer_the_best_by_the_indicator_stay(llama):
    layer = random_layer(70, protected=2)
    policy = build("cake", {"window": 4})
    importance = policy.importance(layer)
    assert torch.isposinf(importance[0]).nonzero().flatten().tolist() == [0, 1, 66, 67, 68, 69]
    cache = llama.engine.compress(llama.ids, policy="cake", compression_ratio=0.5)
    for record in cache.layers:
        for positions, ranks in zip(record.positions, torch.split(record.importance, record.lengths), strict=True):
            assert torch.isposinf(ranks).nonzero().flatten().tolist() == list(range(len(ranks) - 32, len(ranks)))
            assert positions[-32:].tolist() == list(range(668, 700))
    scores = [0.0, 3.0, 1.0, 3.0, 2.0]
    assert best(scores, {0}, 3) == [0, 1, 3], "the oracle of the other tests"


def test_cascade_and_what_is_refused():
    assert build("cake", {}).phase == "cascade"
    for name, value in {"gamma": -1.0, "tau1": 0.0, "kernel": 4}.items():
        with pytest.raises(InvalidRequest) as refused:
            build("cake", {name: value})
        assert refused.value.param == f"policy_params.{name}"
