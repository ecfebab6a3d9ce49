"""DefensiveKV and Layer-DefensiveKV, against the two stages written out in loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.defensivekv import projected_norms
from kvshelf.methods.policies.view import output_weight
from tests.views import observed, pooled_mean, random_layer

CASES = [
    {"group": 1},
    {"group": 3, "protected": 3},
    {"probes": (9,), "protected": 1},
    {"probes": (3, 5)},
    {"kv_heads": 1},
    {"kv_heads": 3, "dim": 4},
]
BOTH = ["defensivekv", "layer_defensivekv"]


def naive_norms(layer):
    """||W_o^h v_j||_1 with the slice of W_o that multiplies head h's output, mean over the group."""
    weight = layer.module.o_proj.weight.double()  # [hidden, q_heads * Dv]
    dim, group = layer.values.shape[-1], len(layer.queries) // layer.kv_heads
    norms = torch.zeros(layer.kv_heads, layer.num_tokens, dtype=torch.float64)
    for head in range(len(layer.queries)):
        for j in range(layer.num_tokens):
            value = layer.values[head // group, j].double()
            norms[head // group, j] += (weight[:, head * dim : (head + 1) * dim] @ value).abs().sum() / group
    return norms


def naive_scores(layer, window, kernel):
    """Risk times cost of each judged token, `[kv_heads][columns]`."""
    weights = observed(layer, window)
    pooled = pooled_mean(weights, kernel)
    group = len(weights) // layer.kv_heads
    risks = []
    for head in range(layer.kv_heads):
        worst = [0.0] * weights.shape[-1]
        for q_head in range(head * group, (head + 1) * group):
            for row, smooth in zip(weights[q_head].tolist(), pooled[q_head].tolist(), strict=True):
                for j, a in enumerate(smooth):
                    worst[j] = max(worst[j], a * sum(row) / sum(smooth))
        mean = sum(worst) / len(worst)
        risks.append([max(risk, mean) for risk in worst])
    norms = naive_norms(layer)
    return [
        [risk * float(norms[head, j] / norms[:, j].sum()) for j, risk in enumerate(head_risks)]
        for head, head_risks in enumerate(risks)
    ]


def naive_secured(layer, window, mass, most):
    """Per head: tokens by the mean weight, until at most 1 - mass of the judged attention is missing."""
    means = observed(layer, window).unflatten(0, (layer.kv_heads, -1)).mean(dim=(1, 2)).tolist()
    secured = []
    for mean in means:
        chosen = set()
        for j in sorted(range(len(mean)), key=lambda j: (-mean[j], j)):
            if sum(a for i, a in enumerate(mean) if i not in chosen) <= 1 - mass or len(chosen) == most:
                break
            chosen.add(j)
        secured.append(chosen)
    return secured


def naive(layer, budget, window, kernel, mass):
    """The kept positions per head: protected, secured, then the best of all heads together."""
    scores = naive_scores(layer, window, kernel)
    columns, heads = len(scores[0]), range(layer.kv_heads)
    most = budget - window - layer.protected_prefix
    always = {*range(layer.protected_prefix), *range(columns, layer.num_tokens)}
    secured = naive_secured(layer, window, mass, most)
    kept = {(head, j) for head in heads for j in always | secured[head]}
    rest = sorted((-scores[head][j], head, j) for head in heads for j in range(columns) if (head, j) not in kept)
    kept |= {entry[1:] for entry in rest[: budget * layer.kv_heads - len(kept)]}
    return [sorted(j for h, j in kept if h == head) for head in heads]


def fitted(name, layer, budget, **params):
    ratio = 1 - budget / layer.num_tokens
    return build(name, params).fitted(layer.document, Budget(budget, ratio), frozenset(params))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("mass", "budget"), [(0.9, 20), (0.9, 45), (0.3, 30), (0.0, 30)])
def test_keeps_what_the_two_stages_say(case, mass, budget):
    for seed in range(3):
        layer = random_layer(60, seed=seed, **case)
        policy = fitted("defensivekv", layer, budget, window=4, kernel=3, mass=mass)
        record = policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
        assert [head.tolist() for head in record.positions] == naive(layer, budget, 4, 3, mass)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_risk_times_cost_and_secured_ones_are_above_all(case):
    layer = random_layer(60, **case)
    scores = build("defensivekv", {"window": 4, "kernel": 3, "mass": 0.5}).score(layer)
    expected = torch.tensor(naive_scores(layer, 4, 3))
    raised = torch.zeros_like(expected)
    for head, chosen in enumerate(naive_secured(layer, 4, 0.5, 60)):
        assert chosen
        raised[head, sorted(chosen)] = 2.0
    torch.testing.assert_close(scores[:, : expected.shape[1]], expected + raised, rtol=1e-4, atol=1e-6)
    assert expected.max() <= 1


@pytest.mark.parametrize("tokens", [5, 1024, 2500])
def test_norms_are_those_of_the_projected_values_whatever_the_blocks(tokens):
    layer = random_layer(tokens, group=3, hidden=12)
    torch.testing.assert_close(projected_norms(layer), naive_norms(layer).float(), rtol=1e-4, atol=1e-4)


def test_projecting_holds_no_more_than_a_block():
    """The largest product ever made: 1,024 tokens by one group's outputs, of N x q_heads x hidden."""
    sizes = []

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
                sizes.append(out.numel())
            return out

    layer = random_layer(5000, group=2, hidden=64)
    object.__setattr__(layer, "values", layer.values.as_subclass(Counting))
    projected_norms(layer)
    assert sum(sizes) == 5000 * 4 * 64, "every product was seen"
    assert max(sizes) == 1024 * 2 * 64


@settings(deadline=None, max_examples=60)
@given(data=st.data(), tokens=st.integers(12, 60), protected=st.integers(0, 3), seed=st.integers(0, 99))
def test_what_is_secured_fits_whatever_the_budget(data, tokens, protected, seed):
    """So neither window, template nor any secured token of any head is ever given up for another's score."""
    budget = data.draw(st.integers(protected + 4, tokens - 1))
    layer = random_layer(tokens, protected=protected, seed=seed)
    policy = fitted("defensivekv", layer, budget)
    record = policy.reduce(layer, LayerBudget.uniform(2, budget))
    assert sum(len(head) for head in record.positions) == 2 * budget
    scores = policy.importance(layer)
    for head, row in zip(record.positions, scores, strict=True):
        assert set((row >= 2).nonzero().flatten().tolist()) <= set(head.tolist())
        assert set(range(protected)) <= set(head.tolist())
    assert build("defensivekv", policy.parameters()) == policy


def test_the_loss_that_securing_allows_is_what_it_says():
    layer = random_layer(200, group=1)
    policy = build("defensivekv", {"window": 16, "mass": 0.8})
    judged = observed(layer, 16).mean(dim=1)  # [kv_heads, columns]
    for head, row in enumerate(policy.score(layer)[:, :184] >= 2):
        assert float(judged[head][~row].sum()) <= 0.2
        least = judged[head][row].min()
        assert float(judged[head][~row].sum() + least) > 0.2, "not one more than it takes"


def test_the_worst_row_counts_and_not_the_mean():
    """Fifteen rows look at twenty tokens alike, one row needs token 30 more than any row needs those."""
    layer = random_layer(120, kv_heads=1, group=1)
    layer.keys.zero_()
    layer.queries.zero_()
    layer.keys[0, 40:60, 1] = 6
    layer.keys[0, 30, 0] = 2.2
    layer.queries[0, -16:, 1] = 5
    layer.queries[0, -3, :2] = torch.tensor([5.0, 0.0])
    kept = {}
    for name, params in {"snapkv": {}, "defensivekv": {"mass": 0.0}}.items():
        policy = fitted(name, layer, 36, window=16, kernel=1, **params)
        kept[name] = policy.reduce(layer, LayerBudget((36,))).positions[0].tolist()
    assert kept["snapkv"] == [*range(40, 60), *range(104, 120)]
    assert kept["defensivekv"] == [30, *range(40, 59), *range(104, 120)]


@pytest.mark.parametrize("name", BOTH)
def test_what_is_refused(llama, name):
    with pytest.raises(PolicyUnsupported, match="leaves 68") as refused:
        llama.engine.prepare(llama.ids, policy=name, budget_tokens=100, policy_params={"secured": 69})
    assert refused.value.param == "policy_params.secured"
    for parameter, value in {"mass": 1.1, "kernel": 2, "secured": -1}.items():
        with pytest.raises(InvalidRequest) as bad:
            build(name, {parameter: value})
        assert bad.value.param == f"policy_params.{parameter}"
    job = llama.engine.prepare(llama.ids, policy=name, budget_tokens=100)
    assert job.identity.policy_params["secured"] == 68


@pytest.mark.parametrize("name", BOTH)
def test_a_model_without_readable_output_projections_is_refused_before_the_prefill(oracle, name):
    engine = Engine(oracle.model)
    attention = oracle.model.base_model.layers[1].self_attn
    projection = attention.o_proj
    try:
        attention.o_proj = nn.Identity()
        with pytest.raises(PolicyUnsupported, match="o_proj") as refused:
            engine.prepare(oracle.ids, policy=name)
    finally:
        attention.o_proj = projection
    assert refused.value.param == "policy"
    engine.prepare(oracle.ids, policy=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_packed_weights_are_none_that_can_be_read(dtype):
    layer = random_layer(8)
    assert output_weight(layer.module) is layer.module.o_proj.weight
    layer.module.o_proj.weight = nn.Parameter(layer.module.o_proj.weight.to(dtype), requires_grad=False)
    assert output_weight(layer.module) is None


@pytest.mark.parametrize("ratio", [0.5, 0.875])
def test_all_layers_together_keep_the_best_of_the_cache(oracle, ratio):
    """Ragged over layers and heads, the total exact, nothing kept that is worse than something dropped elsewhere.
    (These models look at everything a little: with the default mass, what is secured would fill every head's share.)"""
    assert build("layer_defensivekv", {}).phase == "cascade"
    cache = oracle.engine.compress(oracle.ids, policy="layer_defensivekv", compression_ratio=ratio, mass=0.1)
    alone = oracle.engine.compress(oracle.ids, policy="defensivekv", compression_ratio=ratio, mass=0.1)
    budget = cache.identity.budget_tokens
    heads = sum(record.kv_heads for record in cache.layers)
    assert sum(record.entries for record in cache.layers) == budget * heads
    assert len({record.entries for record in cache.layers}) > 1
    assert [record.entries for record in alone.layers] == [budget * record.kv_heads for record in alone.layers]
    worst = min(float(record.importance.min()) for record in cache.layers)
    # What the layer alone kept and the cache did not was worse than everything the cache kept.
    lost = 0
    for record, other in zip(cache.layers, alone.layers, strict=True):
        ranks = torch.split(other.importance, other.lengths)
        for kept, positions, values in zip(record.positions, other.positions, ranks, strict=True):
            gone = ~torch.isin(positions, kept)
            lost += int(gone.sum())
            assert all(float(value) <= worst for value in values[gone])
    assert lost > 0
    assert math.isinf(max(float(record.importance.max()) for record in cache.layers))
