"""DuoAttention: which heads keep the whole document, and what the others keep."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from tests.methods.policies.test_headkv import TEXT, views


def positions(scores, kv_heads, tokens, mean, sink, recent, protected=0):
    """Kept positions by layer and head."""
    policy = build("duo_attention", {"sink": sink, "recent": recent})
    return [
        [head.tolist() for head in policy.reduce(layer, LayerBudget.uniform(kv_heads, mean)).positions]
        for layer in views(tokens, scores, kv_heads, protected)
    ]


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 4), (1, 7)])
@pytest.mark.parametrize("mean", [13, 30, 60, 99, 100])
def test_the_heads_that_retrieve_most_keep_all_and_the_others_stream(kv_heads, group, mean):
    tokens, sink, recent, layers = 100, 3, 10, 4
    generator = torch.Generator().manual_seed(mean)
    scores = tuple(tuple(torch.rand(kv_heads * group, generator=generator).tolist()) for _ in range(layers))
    kept = [head for layer in positions(scores, kv_heads, tokens, mean, sink, recent) for head in layer]
    retrieving = [max(of[h * group : (h + 1) * group]) for of in scores for h in range(kv_heads)]
    whole = [len(head) == tokens for head in kept]
    assert sum(whole) == len(kept) * (mean - sink - recent) // (tokens - sink - recent)
    assert min((s for s, full in zip(retrieving, whole, strict=True) if full), default=1) >= max(
        (s for s, full in zip(retrieving, whole, strict=True) if not full), default=0
    )
    assert sum(map(len, kept)) == mean * len(kept)
    streaming = [head for head, full in zip(kept, whole, strict=True) if not full]
    assert all(head == [*range(sink), *range(tokens - len(head) + sink, tokens)] for head in streaming)
    lengths = {len(head) for head in streaming}
    assert not lengths or (min(lengths) >= sink + recent and max(lengths) - min(lengths) <= 1)


def test_tokens_of_the_template_are_sinks():
    kept = positions(((1.0, 0.0),), 2, 60, 40, 2, 5, protected=6)
    assert kept[0][0] == [*range(60)]
    assert kept[0][1][:6] == [*range(6)]


def test_on_a_model_the_total_is_the_budget(tiny):
    job = tiny.prepare(TEXT, policy="duo_attention", compression_ratio=0.5)
    lengths = [[len(head) for head in record.positions] for record in tiny.run(job).cache.layers]
    assert sum(map(sum, lengths)) == job.budget.tokens * sum(map(len, lengths))
    assert job.document.num_tokens in chain(*lengths)
    assert job.identity.policy_params["calibration"] == job.document.calibration.digest


def test_more_streamed_tokens_than_the_budget_are_refused_and_defaults_shrink(tiny):
    with pytest.raises(PolicyUnsupported, match="recent is 9000, and the budget of"):
        tiny.prepare(TEXT, policy="duo_attention", policy_params={"recent": 9000})
    with pytest.raises(PolicyUnsupported, match="sink is 500, and the budget of"):
        tiny.prepare(TEXT, policy="duo_attention", policy_params={"sink": 500})
    small = tiny.prepare(TEXT, policy="duo_attention", compression_ratio=0.9)
    assert small.policy.sink + small.policy.recent <= small.budget.tokens // 2 + 1
    whole = next(views(400, ((0.5, 0.5),), 2)).document
    assert build("duo_attention", {}).fitted(whole, Budget.full(2000), frozenset()).parameters()["recent"] == 256
