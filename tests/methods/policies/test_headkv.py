"""HeadKV: budgets against the formula in exact fractions, and the choice of each head against SnapKV's."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain

import pytest
import torch

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies import LayerView, build
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.calibration import Calibration, Origin

ORIGIN = Origin(model="made up", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
TEXT = "The clerk kept a note of every parcel that came in by the night train. " * 24


def views(tokens, scores, kv_heads, protected=0, seed=0):
    """Layers of random states under a calibration with these scores of query heads."""
    generator = torch.Generator().manual_seed(seed)
    errors = (1 / len(scores),) * len(scores)
    calibration = Calibration(weights="w", head_scores=scores, layer_errors=errors, origin=ORIGIN)
    document = DocumentView(range(tokens), protected, calibration=calibration)
    shapes = ((kv_heads, tokens, 8), (kv_heads, tokens, 8), (len(scores[0]), tokens, 8))
    for layer in range(len(scores)):
        keys, values, queries = (torch.randn(shape, generator=generator) for shape in shapes)
        yield LayerView(layer, keys, values, queries, 8**-0.5, document, num_layers=len(scores), place=layer)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 4), (1, 7)])
@pytest.mark.parametrize("beta", [1.0, 1.2, 3.0])
def test_heads_get_what_the_formula_says_and_keep_what_snapkv_keeps(kv_heads, group, beta):
    generator = torch.Generator().manual_seed(group)
    layers, tokens, mean, window, protected = 3, 120, 40, 8, 3
    scores = tuple(tuple(torch.rand(kv_heads * group, generator=generator).tolist()) for _ in range(layers))
    best = [[max(of[h * group : (h + 1) * group]) for h in range(kv_heads)] for of in scores]
    total, heads = sum(Fraction(score) for of in best for score in of), layers * kv_heads
    free = mean - window - protected
    even = free - int(free / beta)
    kept = 0
    for layer in views(tokens, scores, kv_heads, protected, seed=group):
        policy = build("headkv", {"window": window, "beta": beta})
        positions = policy.reduce(layer, LayerBudget.uniform(kv_heads, mean)).positions
        for head, own in enumerate(positions):
            wanted = window + protected + even + (free - even) * heads * Fraction(best[layer.layer_idx][head]) / total
            assert wanted < tokens, "no head is full, so the formula holds as it stands"
            assert abs(len(own) - wanted) < 1
            alone = build("snapkv", {"window": window}).reduce(layer, LayerBudget.uniform(kv_heads, len(own)))
            assert own.tolist() == alone.positions[head].tolist()
            kept += len(own)
    assert kept == mean * heads


def test_what_a_full_head_cannot_hold_goes_to_the_others():
    scores = ((1.0, 0.0), (0.0, 0.0))
    counts = [
        [
            len(head)
            for head in build("headkv", {"window": 4, "beta": 1}).reduce(layer, LayerBudget.uniform(2, 30)).positions
        ]
        for layer in views(50, scores, 2)
    ]
    assert counts[0][0] == 50
    assert sum(map(sum, counts)) == 120
    assert max(counts[0][1], *counts[1]) - min(counts[0][1], *counts[1]) <= 1


def test_on_a_model_the_total_is_the_budget_and_its_identity_has_the_calibration(tiny):
    job = tiny.prepare(TEXT, policy="headkv", compression_ratio=0.75)
    cache = tiny.run(job).cache
    lengths = [[len(head) for head in record.positions] for record in cache.layers]
    assert sum(map(sum, lengths)) == job.budget.tokens * sum(map(len, lengths))
    assert len({*chain(*lengths)}) > 2
    assert job.identity.policy_params["calibration"] == job.document.calibration.digest


def test_beta_below_one_is_refused():
    with pytest.raises(InvalidRequest, match="beta"):
        build("headkv", {"beta": 0.9})
