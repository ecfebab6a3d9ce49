"""SentenceKV against its two phases in loops."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.source import bundled_folder
from kvshelf.model.text import TextFormat
from tests.views import best, observed, random_layer

WINDOW, SINK = 6, 5


@functools.cache
def text():
    return TextFormat(AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")))


def written_layer(tokens, every, *, seed=0, **case):
    """A random layer of a document of words, a comma after every 4 of them and a full stop after every `every`."""
    word, comma, stop = (text().encode(part)[0] for part in (" the", ",", "."))
    ids = [stop if j % every == every - 1 else comma if j % 4 == 3 else word for j in range(tokens)]
    layer = random_layer(tokens, seed=seed, **case)
    return replace(layer, document=DocumentView(ids, layer.protected_prefix, text=text()))


def kept(layer, budget, **params):
    policy = build("sentencekv", {"window": WINDOW, "sink": SINK, **params})
    return [head.tolist() for head in policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget)).positions]


def token_stage(layer, head, count, kernel):
    """Positions of the best by attention, the greatest over neighbours, and what always stays."""
    group = layer.all_queries.shape[0] // layer.kv_heads
    weights = observed(layer, WINDOW)[head * group : (head + 1) * group].mean(dim=(0, 1)).tolist()
    half = kernel // 2
    pooled = [max(weights[max(0, j - half) : j + half + 1]) for j in range(len(weights))]
    always = {*range(max(SINK, layer.protected_prefix)), *range(len(weights), layer.num_tokens)}
    return best(pooled + [0.0] * (layer.num_tokens - len(weights)), always, count), always


def mean_query(layer, head):
    """Mean query of the observing rows, fp64."""
    group = layer.all_queries.shape[0] // layer.kv_heads
    shortest = min((probed.queries.shape[1] for probed in layer.probes), default=0)
    tail = max(0, WINDOW - shortest)
    heads = range(head * group, (head + 1) * group)
    rows = [layer.all_queries[h, j] for h in heads for j in range(layer.num_tokens - tail, layer.num_tokens)]
    rows += [row for h in heads for probed in layer.probes for row in probed.queries[h, -WINDOW:]]
    return torch.stack(rows).double().mean(dim=0)


def naive(layer, head, budget, every, factor, kernel):
    alive, always = token_stage(layer, head, min(int(factor * budget), layer.num_tokens), kernel)
    sentences = {}
    for j in alive:
        sentences.setdefault(j // every, []).append(j)
    query = mean_query(layer, head)

    def relevance(tokens):
        return float(layer.keys[head, tokens].double().mean(dim=0) @ query)

    ranked = sorted(sentences.values(), key=relevance, reverse=True)
    in_order = [j for tokens in ranked for j in tokens if j not in always]
    return sorted([*always, *in_order[: budget - len(always)]])


@pytest.mark.parametrize(
    "case", [{}, {"protected": 8, "group": 4}, {"probes": (3,), "protected": 1}, {"probes": (9, 12)}], ids=str
)
@pytest.mark.parametrize(("factor", "budget", "every"), [(3.0, 40, 11), (1.5, 60, 19), (5.0, 50, 7)])
def test_keeps_what_the_two_phases_say(case, factor, budget, every):
    layer = written_layer(210, every, seed=budget, **case)
    tokens = kept(layer, budget, semantic_factor=factor, kernel=5)
    assert tokens == [naive(layer, head, budget, every, factor, 5) for head in range(layer.kv_heads)]


def test_without_a_surplus_it_is_the_token_stage():
    """`semantic_factor=1`, the default: no sentence can be preferred, for everything that survives is kept."""
    layer = written_layer(210, 11)
    assert (
        kept(layer, 40)
        == kept(layer, 40, semantic_factor=1.0)
        == [token_stage(layer, head, 40, 7)[0] for head in range(2)]
    )


def test_sentences_stay_together_in_order():
    """The survivors of a sentence are all kept or all gone, but for the last sentence taken: its first ones stay."""
    layer = written_layer(400, 10)
    for head, positions in enumerate(kept(layer, 60, semantic_factor=3.0)):
        survivors, always = token_stage(layer, head, 180, 7)
        cut = 0
        for number in range(40):
            own = [j for j in survivors if j // 10 == number and j not in always]
            stays = [j for j in own if j in positions]
            assert stays == own[: len(stays)]
            cut += 0 < len(stays) < len(own)
        assert cut <= 1


def test_defaults_make_room_for_each_other_and_given_values_are_refused():
    def fitted(budget, protected, **params):
        return build("sentencekv", params).fitted(
            DocumentView(range(400), protected), Budget(budget, 0.5), frozenset(params)
        )

    for budget, protected in [(4, 0), (9, 5), (30, 3), (64, 60), (300, 10)]:
        policy = fitted(budget, protected)
        assert max(policy.sink, protected) + policy.window <= budget
    assert (fitted(300, 10).sink, fitted(300, 10).window) == (32, 32)
    assert (fitted(100, 0, sink=90).sink, fitted(100, 0, sink=90).window) == (90, 10)
    assert (fitted(100, 0, window=95).sink, fitted(100, 0, window=95).window) == (5, 95)
    for params in ({"sink": 100}, {"sink": 60, "window": 50}):
        with pytest.raises(PolicyUnsupported, match="sink is") as refused:
            fitted(100, 0, **params)
        assert refused.value.param == "policy_params.sink"
