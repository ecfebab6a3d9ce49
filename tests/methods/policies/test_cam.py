"""CaM against loops of its definition: what is kept, who draws, and whose value goes to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.amounts import few
from tests.by_hand import drawn
from tests.methods.policies.shaped import SHAPES, random_ids, seen_by, shaped_model
from tests.views import best, random_layer


def mean(numbers):
    return sum(numbers) / len(numbers)


def sums_by_hand(layer, kv_head):
    """Of each token the sum of its attention column, the mean over the group, one softmax at a time."""
    tokens, group = layer.num_tokens, len(layer.all_queries) // layer.kv_heads
    keys, sums = layer.keys[kv_head].double(), [0.0] * tokens
    for head in range(kv_head * group, (kv_head + 1) * group):
        for row in range(tokens):
            attention = torch.softmax(layer.scaling * keys[: row + 1] @ layer.all_queries[head, row].double(), 0)
            for token, weight in enumerate(attention.tolist()):
                sums[token] += weight / group
    return sums


def by_hand(layer, policy, budget):
    """Of each head the kept positions, their values in fp64, and how many tokens merged."""
    heads, tokens = [], layer.num_tokens
    always = {*range(layer.protected_prefix), *range(tokens - policy.recent, tokens)}
    for head in range(layer.kv_heads):
        sums = sums_by_hand(layer, head)
        of_row = [sums[token] / (tokens - token) for token in range(tokens)]
        kept = best(of_row if policy.normalize == "rows" else sums, always, budget)
        values, merged = {token: layer.values[head, token].double() for token in kept}, 0
        for token in sorted({*range(tokens)} - {*kept}):
            heirs = [later for later in kept if later > token][: policy.merge]
            if not heirs:
                continue
            chance = policy.probability
            if chance is None:
                chance = min(1.0, of_row[token] / mean([of_row[heir] for heir in heirs]))
            if drawn(policy.seed, layer.layer_idx, head, token) >= chance:
                continue
            merged += 1
            for heir in heirs:
                values[heir] = values[heir] + layer.values[head, token].double() / policy.merge
        heads.append((kept, torch.stack([values[token] for token in kept]), merged))
    return heads


def require_alike(record, expected):
    """Positions, and values to the accuracy of sums in fp32."""
    assert [positions.tolist() for positions in record.positions] == [kept for kept, _, _ in expected]
    for (_, ours), (_, theirs, _) in zip(record.heads(), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def fitted(tokens, budget, protected=0, **params):
    policy = build("cam", params)
    return policy.fitted(DocumentView(range(tokens), protected), Budget(budget, 1 - budget / tokens), frozenset(params))


def reduced(layer, budget, **params):
    policy = fitted(layer.num_tokens, budget, layer.protected_prefix, **params)
    return policy, policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))


@pytest.mark.parametrize(
    ("tokens", "budget", "protected", "params"),
    [
        (60, 30, 0, {}),
        (60, 30, 5, {"merge": 3, "seed": 7}),
        (90, 20, 2, {"merge": 1, "recent": 2}),
        (90, 20, 0, {"merge": 5, "recent": 0}),  # late tokens have few heirs, or none
        (50, 10, 1, {"merge": 200, "normalize": "rows"}),
        (50, 25, 0, {"merge": 4, "probability": 1.0}),
        (50, 25, 0, {"merge": 4, "probability": 0.3, "recent": 5}),
    ],
)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_values_go_where_the_definition_sends_them(tokens, budget, protected, params, group):
    layer = random_layer(tokens, index=2, group=group, protected=protected, hidden=56)
    policy, record = reduced(layer, budget, **params)
    expected = by_hand(layer, policy, budget)
    require_alike(record, expected)
    assert all(0 < merged <= tokens - budget for _, _, merged in expected)


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_a_models_layers_are_those_of_the_definition(kind, group):
    engine = Engine(shaped_model(kind, group), name="m")
    job = engine.prepare(random_ids(120), policy="cam", compression_ratio=0.5, policy_params={"merge": 6})
    layers, _ = seen_by(engine, job)
    for layer, record in zip(layers, engine.run(job).cache.layers, strict=True):
        require_alike(record, by_hand(layer, job.policy, 60))


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_a_budget_of_everything_is_the_full_cache(kind, group):
    engine, document = Engine(shaped_model(kind, group), name="m"), random_ids(70)
    full, cache = (
        engine.compress(document, policy=name, **size)
        for name, size in (("full", {}), ("cam", {"compression_ratio": 0.0}))
    )
    for ours, whole in zip(cache.layers, full.layers, strict=True):
        assert torch.equal(ours.keys, whole.keys)
        assert torch.equal(ours.values, whole.values)
    layer = random_layer(40)
    _, record = reduced(layer, 40, recent=20)
    assert torch.equal(record.values, layer.values.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_tokens_and_keys_of_h2o_and_with_probability_none_its_values(dtype):
    layer = random_layer(80)
    layer = replace(layer, **{name: getattr(layer, name).to(dtype) for name in ("keys", "values", "queries")})
    h2o = build("h2o", {"recent": 10}).reduce(layer, LayerBudget((30, 21)))
    for probability in (None, 0.0):
        policy = build("cam", {"recent": 10, "probability": probability})
        record = policy.reduce(layer, LayerBudget((30, 21)))
        assert record.values.dtype == dtype
        for name in ("keys", "entries_at", "offsets", "importance"):
            ours, theirs = getattr(record, name), getattr(h2o, name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert torch.equal(record.values, h2o.values) == (probability == 0)


def test_with_certainty_no_value_is_lost():
    """Where the recent tokens are at least as many as the heirs, each value goes to all of them."""
    layer = random_layer(400)
    for merge in (1, 8, 32):
        _, record = reduced(layer, 64, merge=merge, probability=1.0)
        for head, (_, values) in enumerate(record.heads()):
            total = layer.values[head].double().sum(dim=0)
            torch.testing.assert_close(values.double().sum(dim=0), total, rtol=1e-5, atol=1e-4)


def test_heads_of_another_process_draw_as_they_do_in_one():
    class Second:
        rank, size = 1, 2

        def gathered(self, _):
            raise AssertionError("it decides head by head")

    layer = random_layer(60)
    half = replace(layer, keys=layer.keys[1:], values=layer.values[1:], queries=layer.queries[2:], ranks=Second())
    (_, whole), (_, part) = reduced(layer, 30), reduced(half, 30)
    assert torch.equal(part.values, list(whole.heads())[1][1])


def test_the_same_seed_gives_the_same_cache_and_another_one_another(llama):
    caches = {
        seed: [llama.engine.compress(llama.ids[:200], policy="cam", compression_ratio=0.5, **params) for _ in range(2)]
        for seed, params in ((0, {}), (1, {"seed": 1}))
    }
    assert all(first.to_bytes() == again.to_bytes() for first, again in caches.values())
    (first, _), (other, _) = caches.values()
    assert first.identity.policy_params["seed"] == 0
    assert first.identity != other.identity
    assert torch.equal(first.layers[0].keys, other.layers[0].keys)
    assert not torch.equal(first.layers[0].values, other.layers[0].values)


@pytest.mark.parametrize("codec", few(2, ["none", "int8", "int4", "int2", "mixed", "klt"]))
def test_a_merged_cache_is_stored_and_answers(codec):
    engine = Engine.load("kvshelf-tiny", device="cpu")
    text = "The access code of the amber falcon is 482913. " + "The harbour was quiet that morning. " * 40
    cache = engine.encoded(engine.compress(text, policy="cam", compression_ratio=0.5), codec)
    again = type(cache).from_bytes(cache.to_bytes())
    question = "What is the access code of the amber falcon?"
    assert engine.answer(again, question).text == engine.answer(cache, question).text
    assert cache.kept_tokens == cache.num_tokens // 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("merge", 0), ("merge", 1.5), ("probability", -0.1), ("probability", 1.01), ("seed", -1)),
        *(("recent", -1), ("normalize", "mean"), ("every", 0), ("window", 3)),
    ],
)
def test_bad_parameters_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name) as refused:
        build("cam", {name: value})
    assert refused.value.param == f"policy_params.{name}"


def test_more_recent_tokens_than_the_budget_holds_are_refused():
    with pytest.raises(PolicyUnsupported, match="recent is 31") as refused:
        fitted(60, 30, recent=31)
    assert refused.value.param == "policy_params.recent"


def test_it_gives_no_scores_by_themselves(llama):
    job = llama.engine.prepare(llama.ids, policy="cam")
    with pytest.raises(InvalidRequest, match="gives no scores"):
        llama.engine.compressor.scores(job)
