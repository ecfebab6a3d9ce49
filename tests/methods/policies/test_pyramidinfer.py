"""PyramidInfer against loops of its definition: how much each layer keeps, and which tokens of those that the layer
before kept."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.amounts import amount
from tests.methods.policies.shaped import SHAPES, random_ids, seen_by, shaped_model
from tests.views import best, random_layer


def shares_by_hand(total, num_layers, decay, most):
    """How `total` entries are shared by layers that keep at most `most`: each layer hands on a part of what it has, and
    where a layer would have too many, it has the most and the others share the rest alike."""
    parts = [Fraction(1)]
    for layer in range(num_layers - 1):
        ratio = decay + (1 - decay) * (1 + math.cos(math.pi * layer / num_layers)) / 2
        parts.append(Fraction(float(parts[-1]) * ratio))
    shares, open_layers, left = {}, dict(enumerate(parts)), Fraction(total)
    while open_layers:
        level = left / sum(open_layers.values())
        over = [layer for layer, part in open_layers.items() if level * part >= most]
        if not over:
            shares |= {layer: level * part for layer, part in open_layers.items()}
            break
        for layer in over:
            del open_layers[layer]
            shares[layer], left = Fraction(most), left - most
    whole = [math.floor(shares[layer]) for layer in range(num_layers)]
    by_rest = sorted(range(num_layers), key=lambda layer: (whole[layer] - shares[layer], layer))
    for layer in by_rest[: total - sum(whole)]:
        whole[layer] += 1
    return whole


def scores_by_hand(layer, rows, last_weight, candidates):
    """Of each candidate the weighted average of what the last rows give it, over all heads, one softmax at a time."""
    tokens, heads = layer.num_tokens, len(layer.all_queries)
    scores, weights = dict.fromkeys(candidates, 0.0), 0.0
    for row in range(tokens - rows, tokens):
        weight = 1.0 if rows == 1 else 1 + (last_weight - 1) * (row - tokens + rows) / (rows - 1)
        weights += weight
        visible = [token for token in candidates if token <= row]
        for head in range(heads):
            keys = layer.keys[head * layer.kv_heads // heads, visible].double()
            attention = torch.softmax(layer.scaling * keys @ layer.all_queries[head, row].double(), 0)
            for token, part in zip(visible, attention.tolist(), strict=True):
                scores[token] += weight * part / heads
    return {token: score / weights for token, score in scores.items()}


def kept_by_hand(layers, policy, mean, protected=0):
    """The tokens that each layer keeps."""
    tokens = layers[0].num_tokens
    rows = max(1, round(policy.recent * tokens))
    always = {*range(max(policy.sink, protected)), *range(tokens - rows, tokens)}
    total = (mean - len(always)) * len(layers)
    shares = shares_by_hand(total, len(layers), policy.decay, tokens - len(always))
    kept, candidates = [], list(range(tokens))
    for layer, share in zip(layers, shares, strict=True):
        scores = scores_by_hand(layer, rows, policy.last_weight, candidates)
        all_scores = [scores.get(token, -math.inf) for token in range(tokens)]
        candidates = best(all_scores, always, len(always) + share)
        kept.append(candidates)
    return kept


def fitted(tokens, mean, protected=0, **params):
    policy = build("pyramidinfer", params)
    return policy.fitted(DocumentView(range(tokens), protected), Budget(mean, 1 - mean / tokens), frozenset(params))


def reduced(policy, layers, mean):
    """As an engine reduces them, one after the other."""
    kept, before = [], None
    for layer in layers:
        record = policy.reduce(replace(layer, before=before), LayerBudget.uniform(layer.kv_heads, mean))
        first = record.positions[0]
        assert all(torch.equal(first, head) for head in record.positions)
        before = torch.zeros(layer.num_tokens, dtype=torch.bool)
        before[first.long()] = True
        kept.append(first.tolist())
    return kept


@pytest.mark.parametrize(
    ("tokens", "mean", "protected", "params"),
    [
        (60, 30, 0, {}),
        (60, 30, 6, {"recent": 0.1}),
        (90, 20, 2, {"decay": 0.5, "sink": 0}),
        (90, 70, 0, {"decay": 0.2}),
        (150, 100, 0, {"recent": 0.6, "last_weight": 3.0}),  # more rows than are weighed at a time
        (40, 9, 1, {"recent": 0.01, "last_weight": 0.0}),
        (40, 20, 0, {"decay": 0.0, "last_weight": 1.0}),
    ],
)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_each_layer_keeps_the_best_of_what_the_layer_before_keeps(tokens, mean, protected, params, group):
    policy = fitted(tokens, mean, protected, **params)
    layers = [
        random_layer(tokens, index=i, num_layers=4, group=group, protected=protected, hidden=56) for i in range(4)
    ]
    kept = reduced(policy, layers, mean)
    assert kept == kept_by_hand(layers, policy, mean, protected)
    assert all({*later} <= {*earlier} for earlier, later in pairwise(kept))


@pytest.mark.parametrize(("kind", "group"), SHAPES)
@pytest.mark.parametrize("params", [{}, {"decay": 0.3, "recent": 0.1}])
def test_a_models_layers_are_reduced_in_turn(kind, group, params):
    engine = Engine(shaped_model(kind, group), name="m")
    job = engine.prepare(random_ids(120), policy="pyramidinfer", compression_ratio=0.5, policy_params=params)
    layers, kept = seen_by(engine, job)
    assert kept == [[tokens] * 2 for tokens in kept_by_hand(layers, job.policy, 60)]
    assert [layer.before is None for layer in layers] == [True, False, False, False, False]
    assert sum(len(heads[0]) for heads in kept) == 5 * 60


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_a_budget_of_everything_is_the_full_cache(kind, group):
    engine, document = Engine(shaped_model(kind, group), name="m"), random_ids(70)
    full, cache = (
        engine.compress(document, policy=name, **size)
        for name, size in (("full", {}), ("pyramidinfer", {"compression_ratio": 0.0}))
    )
    for ours, whole in zip(cache.layers, full.layers, strict=True):
        assert torch.equal(ours.keys, whole.keys)
        assert torch.equal(ours.values, whole.values)


@settings(deadline=None, max_examples=amount(100, 400))
@given(
    data=st.data(),
    tokens=st.integers(12, 200),
    num_layers=st.integers(1, 9),
    decay=st.floats(0, 1),
    protected=st.integers(0, 3),
)
def test_shares_fall_and_add_up(data, tokens, num_layers, decay, protected):
    mean = data.draw(st.integers(protected + 5, tokens - 1))
    policy = fitted(tokens, mean, protected, decay=decay)
    layers = [
        random_layer(tokens, index=i, num_layers=num_layers, dim=2, protected=protected) for i in range(num_layers)
    ]
    always = policy.protected(layers[0])
    counts = [policy.counts(layer, LayerBudget.uniform(2, mean)) for layer in layers]
    assert all(len({*of_layer}) == 1 for of_layer in counts)
    shares = [of_layer[0] for of_layer in counts]
    assert sum(shares) == mean * num_layers
    assert shares == sorted(shares, reverse=True)
    assert int(always.sum()) <= shares[-1]
    assert shares[0] <= tokens
    expected = shares_by_hand((mean - int(always.sum())) * num_layers, num_layers, decay, tokens - int(always.sum()))
    assert shares == [int(always.sum()) + share for share in expected]


def test_later_rows_count_more():
    """Of two tokens, each of which half of the rows attend to, the one that the later rows do stays."""
    layer = random_layer(40, kv_heads=1, group=1)
    layer.keys[0, 10], layer.keys[0, 11] = 0, 0
    layer.keys[0, 10, 0], layer.keys[0, 11, 1] = 40, 40
    layer.queries[:] = 0
    layer.queries[0, 32:36, 0], layer.queries[0, 36:, 1] = 1, 1
    scores = {weight: fitted(40, 20, recent=0.2, last_weight=weight).score(layer)[0] for weight in (1.0, 1.2, 0.5)}
    assert scores[1.0][10] == pytest.approx(float(scores[1.0][11]), rel=1e-3)
    assert scores[1.2][10] < scores[1.2][11]
    assert scores[0.5][10] > scores[0.5][11]


def test_nothing_that_was_dropped_takes_part_in_the_softmax():
    """Without the token that takes all attention, the others have it."""
    layer = random_layer(40)
    layer.keys[:, 7] = 0
    layer.queries[:, :, 0] = 9.0
    layer.keys[:, 7, 0] = 90.0
    policy = fitted(40, 20, recent=0.2)
    before = torch.ones(40, dtype=torch.bool)
    before[7] = False
    whole, without = policy.score(layer)[0], policy.score(replace(layer, before=before))[0]
    assert whole[7] > 0.99
    assert without[7] < 0
    assert float(without[without > 0].sum()) == pytest.approx(1, abs=1e-5)


def test_a_default_of_recent_tokens_shrinks_and_a_given_one_is_refused(llama):
    job = llama.engine.prepare(llama.ids, policy="pyramidinfer", compression_ratio=0.875)  # 87 of 700
    assert round(job.policy.recent * 700) == 43
    assert build("pyramidinfer", job.identity.policy_params) == job.policy
    with pytest.raises(PolicyUnsupported, match=r"recent 0.2 is 140 of 700 tokens.*room for 83") as refused:
        llama.engine.prepare(llama.ids, policy="pyramidinfer", compression_ratio=0.875, policy_params={"recent": 0.2})
    assert refused.value.param == "policy_params.recent"
    with pytest.raises(PolicyUnsupported, match="sink is 87") as refused:
        llama.engine.prepare(llama.ids, policy="pyramidinfer", compression_ratio=0.875, policy_params={"sink": 87})
    assert refused.value.param == "policy_params.sink"


@pytest.mark.parametrize(
    ("name", "value"),
    [("recent", -0.1), ("recent", 1.5), ("last_weight", -1.0), ("decay", 1.01), ("sink", -1), ("window", 3)],
)
def test_bad_parameters_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name) as refused:
        build("pyramidinfer", {name: value})
    assert refused.value.param == f"policy_params.{name}"


def test_only_a_policy_that_says_so_is_told_of_the_layer_before(llama):
    job = llama.engine.prepare(llama.ids, policy="snapkv")
    assert Needs.BEFORE not in job.policy.needs
    assert all(layer.before is None for layer in seen_by(llama.engine, job)[0])


def test_it_gives_no_scores_by_themselves(llama):
    job = llama.engine.prepare(llama.ids, policy="pyramidinfer")
    with pytest.raises(InvalidRequest, match="gives no scores"):
        llama.engine.compressor.scores(job)
