"""H2O: against its formula written out in loops, and what it promises to keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import LayerView, build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from kvshelf.samples.tasks import make_document
from tests.amounts import few


def view(tokens, *, kv_heads=2, group=2, dim=8, protected=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(kv_heads, tokens, dim, generator=generator) for _ in range(2))
    queries = 2 * torch.randn(kv_heads * group, tokens, dim, generator=generator)
    return LayerView(0, keys, values, queries, dim**-0.5, DocumentView(range(tokens), protected))


def column_sums(layer):
    """sum_{i >= j} A_ij of each query head, one number at a time: lists `[q_heads][N]`."""
    sums = []
    group = len(layer.queries) // layer.kv_heads
    for head, queries in enumerate(layer.queries.double()):
        keys = layer.keys[head // group].double()
        sums.append([0.0] * layer.num_tokens)
        for i in range(layer.num_tokens):
            weights = [math.exp(layer.scaling * float(queries[i] @ keys[j])) for j in range(i + 1)]
            for j in range(i + 1):
                sums[head][j] += weights[j] / sum(weights)
    return sums


def naive(layer, budget, recent, normalize):
    """The kept positions of each KV head."""
    columns, kept = column_sums(layer), []
    group, end = len(columns) // layer.kv_heads, layer.num_tokens
    for head in range(layer.kv_heads):
        members = columns[head * group : (head + 1) * group]
        scores = [sum(column[j] for column in members) / group for j in range(end)]
        if normalize == "rows":
            scores = [score / (end - j) for j, score in enumerate(scores)]
        always = {*range(layer.protected_prefix), *range(end - recent, end)}
        heavy = sorted((j for j in range(end) if j not in always), key=lambda j: (-scores[j], j))
        kept.append(sorted([*always, *heavy[: budget - len(always)]]))
    return kept


@pytest.mark.parametrize("normalize", ["none", "rows"])
@pytest.mark.parametrize("seed", range(6))
def test_keeps_what_the_formula_says(seed, normalize):
    layer = view(60 + seed, protected=seed % 3, group=1 + seed % 3, seed=seed)
    budget, recent = 20 + seed, 3 * seed
    record = build("h2o", {"recent": recent, "normalize": normalize}).reduce(layer, LayerBudget.uniform(2, budget))
    assert [head.tolist() for head in record.positions] == naive(layer, budget, recent, normalize)


def test_dividing_by_the_rows_frees_late_tokens_from_their_handicap():
    """With equal keys row i gives each of its i + 1 tokens 1 / (i + 1): token 0 gets the harmonic number of 200, the
    last one 1 / 200, from one row."""
    layer = view(200)
    layer.keys[:] = 1
    harmonic = sum(1 / (i + 1) for i in range(200))
    for normalize, first, last in (("none", harmonic, 1 / 200), ("rows", harmonic / 200, 1 / 200)):
        scores = build("h2o", {"normalize": normalize}).score(layer)
        assert scores[:, 0].tolist() == pytest.approx([first] * 2, rel=1e-5)
        assert scores[:, -1].tolist() == pytest.approx([last] * 2, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(10, 200), share=st.floats(0.1, 0.95), protected=st.integers(0, 3), seed=st.integers(0, 99))
def test_half_of_the_budget_is_recent_by_default(tokens, share, protected, seed):
    layer, budget = view(tokens, protected=protected, seed=seed), max(protected + 4, int(tokens * share))
    policy = build("h2o", {}).fitted(layer.document, Budget(budget, 1 - budget / tokens), frozenset())
    assert policy.recent == min(budget // 2, budget - protected)
    record = policy.reduce(layer, LayerBudget.uniform(2, budget))
    scores = policy.score(layer)
    for head, positions in enumerate(record.positions):
        kept = torch.zeros(tokens, dtype=torch.bool)
        kept[positions.long()] = True
        assert int(kept.sum()) == budget
        assert bool(kept[tokens - policy.recent :].all())
        # Of the others each kept one is at least as heavy as each that went.
        free = torch.arange(tokens)[protected : tokens - policy.recent]
        heavy, gone = scores[head, free[kept[free]]], scores[head, free[~kept[free]]]
        assert not len(heavy) or not len(gone) or float(heavy.min()) >= float(gone.max())


def test_recent_tokens_that_do_not_fit_are_refused(llama):
    given = {"recent": 351}
    with pytest.raises(PolicyUnsupported, match=r"recent is 351.*room for 350") as refused:
        llama.engine.prepare(llama.ids, policy="h2o", budget_tokens=350, policy_params=given)
    assert refused.value.param == "policy_params.recent"
    job = llama.engine.prepare(llama.ids, policy="h2o", budget_tokens=350)
    assert job.identity.policy_params == {"recent": 175, "normalize": "none", "every": 1}


def test_sampled_rows_score_as_if_they_stood_for_those_before_them():
    layer = view(60, seed=3)
    scores = build("h2o", {"every": 7}).score(layer)
    expected = torch.zeros(4, 60, dtype=torch.float64)
    for head, queries in enumerate(layer.queries.double()):
        for i in range(59, -1, -7):
            logits = layer.scaling * layer.keys[head // 2, : i + 1].double() @ queries[i]
            expected[head, : i + 1] += 7 * logits.softmax(dim=0)
    assert torch.allclose(scores.double(), expected.view(2, 2, 60).mean(dim=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "documented"),
    few(1, [({}, 0.67), ({"recent": 0}, 0.49)]),
)
def test_what_every_eighth_row_keeps_of_what_all_rows_keep(params, documented):
    """The figures of the policy's docstring: parts of the entries, the mean over layers and heads."""
    tiny = Engine.load("kvshelf-tiny")
    document = make_document("multikey", "prose", 4096, 20_261_120, tiny.text.count_tokens)
    kept = [
        [
            set(positions.tolist())
            for record in tiny.compress(
                document.text, policy="h2o", compression_ratio=0.75, every=every, **params
            ).layers
            for positions in record.positions
        ]
        for every in (1, 8)
    ]
    shares = [len(all_rows & sampled) / len(all_rows) for all_rows, sampled in zip(*kept, strict=True)]
    assert sum(shares) / len(shares) == pytest.approx(documented, abs=0.03)
