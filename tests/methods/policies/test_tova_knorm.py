"""TOVA and the key norm against their formulas, in loops."""

from __future__ import annotations

import math

import pytest

from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import LayerBudget
from tests.views import best, observed, random_layer


@pytest.mark.parametrize("case", [{"protected": 2}, {"group": 4}, {"probes": (4,)}, {"probes": (1, 6)}], ids=str)
def test_tova_keeps_what_the_last_row_attends_to_in_the_mean_of_all_heads(case):
    layer = random_layer(80, kv_heads=3, **case)
    record = build("tova", {}).reduce(layer, LayerBudget.uniform(3, 25))
    means = observed(layer, 1).mean(dim=(0, 1)).tolist()
    always = set(range(layer.protected_prefix)) | set(range(len(means), 80))
    assert bool(layer.probes) == (len(means) == 80), "the last token stays only where it is the one that observes"
    expected = best(means + [0.0] * (80 - len(means)), always, 25)
    assert [head.tolist() for head in record.positions] == [expected] * 3


def test_knorm_keeps_the_shortest_keys_of_each_head():
    layer = random_layer(80, protected=2)
    record = build("knorm", {}).reduce(layer, LayerBudget((25, 30)))
    for keys, positions, count in zip(layer.keys.tolist(), record.positions, (25, 30), strict=True):
        lengths = [-math.sqrt(sum(x * x for x in key)) for key in keys]
        assert positions.tolist() == best(lengths, {0, 1}, count)
