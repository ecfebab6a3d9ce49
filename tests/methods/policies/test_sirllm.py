"""SirLLM against a loop of its definition: the tokens to which the model gave the least probability."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import DocumentView, LayerView
from tests.methods.policies.shaped import SHAPES, random_ids, shaped_model
from tests.views import best


def entropies_by_hand(model, ids):
    """-log p of each token by the model in fp64, read token by token; the first has the largest of the others."""
    model = model.double()
    entropies = []
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for place in range(1, len(ids)):
        row = logits[place - 1].tolist()
        top = max(row)
        entropies.append(top + math.log(sum(math.exp(one - top) for one in row)) - row[ids[place]])
    return [max(entropies), *entropies]


@pytest.mark.parametrize(("kind", "group"), SHAPES)
@pytest.mark.parametrize(("params", "ratio"), [({}, 0.5), ({"sink": 0}, 0.75), ({"sink": 2, "recent": 9}, 0.8)])
def test_the_most_surprising_tokens_stay_in_every_head_of_every_layer(kind, group, params, ratio):
    document = random_ids(90)
    cache = Engine(shaped_model(kind, group), name="m").compress(
        document, policy="sirllm", compression_ratio=ratio, **params
    )
    entropies = entropies_by_hand(shaped_model(kind, group), document)
    always = {*range(params.get("sink", 4)), *range(90 - params.get("recent", 0), 90)}
    expected = best(entropies, always, int(90 * (1 - ratio) + 1e-9))
    for record in cache.layers:
        assert [positions.tolist() for positions in record.positions] == [expected] * 2


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_a_budget_of_everything_is_the_full_cache(kind, group):
    engine, document = Engine(shaped_model(kind, group), name="m"), random_ids(70)
    full, cache = (
        engine.compress(document, policy=name, **size)
        for name, size in (("full", {}), ("sirllm", {"compression_ratio": 0.0}))
    )
    for ours, whole in zip(cache.layers, full.layers, strict=True):
        assert torch.equal(ours.keys, whole.keys)
        assert torch.equal(ours.values, whole.values)


def test_equal_ones_by_the_smaller_position():
    surprisals = torch.tensor([3.0, 1.0, 2.0, 1.0, 5.0, 1.0, 0.0, 4.0])
    states = torch.randn(2, 8, 4)
    layer = LayerView(0, states, states, None, 1.0, DocumentView(range(8), 1, surprisals=surprisals))
    record = build("sirllm", {"sink": 0, "recent": 1}).reduce(layer, LayerBudget.uniform(2, 5))
    assert [positions.tolist() for positions in record.positions] == [[0, 1, 2, 4, 7]] * 2


def test_what_is_refused(llama):
    for name, value in {"sink": -1, "recent": -1, "decay": 0.7}.items():
        with pytest.raises(InvalidRequest, match=name) as refused:
            build("sirllm", {name: value})
        assert refused.value.param == f"policy_params.{name}"
    for params in ({"recent": 97}, {"sink": 101}):
        with pytest.raises(PolicyUnsupported, match="room for") as refused:
            llama.engine.prepare(llama.ids, policy="sirllm", budget_tokens=100, policy_params=params)
        assert refused.value.param == f"policy_params.{next(iter(params))}"
