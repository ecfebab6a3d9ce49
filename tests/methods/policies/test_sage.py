"""SAGE-KV: the identity of its shares, and what it keeps against the paper's words in loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.views import random_layer

CASES = [
    {"group": 1},
    {"group": 2, "protected": 3},
    {"group": 4, "kv_heads": 1},
    {"group": 3, "protected": 12, "probes": (5,)},
    {"group": 2, "probes": (1, 7, 2)},
]


def products(layer, head):
    """q_h . k_j of the last row, fp64, by tokens: one list for each query head of the KV head."""
    group = layer.all_queries.shape[0] // layer.kv_heads
    products = []
    for query_head in range(head * group, (head + 1) * group):
        rows = [probed.queries[query_head, -1] for probed in layer.probes] or [layer.all_queries[query_head, -1]]
        products.append([max(float(row.double() @ key.double()) for row in rows) for key in layer.keys[head]])
    return products


def naive(layer, head, sinks, chosen, recent, refill):
    logits = products(layer, head)
    evictable = range(sinks, layer.num_tokens - recent)
    union = set()
    for of_one_head in logits:
        union |= set(sorted(evictable, key=lambda j: -of_one_head[j])[:chosen])
    others = sorted(set(evictable) - union, key=lambda j: -max(of_one_head[j] for of_one_head in logits))
    if refill:
        union |= set(others[: len(logits) * chosen - len(union)])
    return sorted({*range(sinks), *union, *range(layer.num_tokens - recent, layer.num_tokens)})


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("union", ["refill", "ragged"])
@pytest.mark.parametrize(("budget", "multiple"), [(17, 1), (40, 1), (40, 3), (100, 4)])
def test_keeps_what_the_paper_says(case, union, budget, multiple):
    layer = random_layer(130, **case, seed=budget)
    policy = build("sage", {"union": union, "multiple": multiple})
    record = policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
    group = layer.all_queries.shape[0] // layer.kv_heads
    shares = policy.shares(budget, group, layer.protected_prefix)
    for head, positions in enumerate(record.positions):
        assert positions.tolist() == naive(layer, head, *shares, refill=union == "refill")


@given(
    budget=st.integers(1, 20_000),
    group=st.integers(1, 16),
    multiple=st.integers(1, 600),
    protected=st.integers(0, 300),
)
def test_the_shares_add_up_to_the_budget(budget, group, multiple, protected):
    """S + G * k + R = B, with the paper's S and k wherever the template takes no more than a quarter."""
    if budget <= protected:
        return
    sinks, chosen, recent = build("sage", {"multiple": multiple}).shares(budget, group, protected)
    assert sinks + group * chosen + recent == budget
    assert sinks == max(budget // 4, protected)
    assert recent >= 1, "the last token stays"
    assert chosen % multiple == 0
    if protected <= budget // 4:
        assert 0 <= budget / (2 * group) - chosen < multiple
    else:
        assert 2 * (budget - sinks) / 3 >= group * chosen


@pytest.mark.parametrize(
    ("group", "multiple", "shares"),
    [(4, 1, (2048, 1024, 2048)), (4, 512, (2048, 1024, 2048)), (7, 512, (2048, 512, 2560))],
)
def test_the_rows_of_the_paper(group, multiple, shares):
    assert build("sage", {"multiple": multiple}).shares(8192, group, 0) == shares


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(20, 200),
    share=st.floats(0.2, 0.9),
    group=st.integers(1, 4),
    agreement=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_union_is_between_one_head_s_choice_and_all(tokens, share, group, agreement, seed):
    """Heads that ask for the same thing leave places empty, or the next best fills them; none is counted twice."""
    budget = int(tokens * share)
    layer = random_layer(tokens, group=group, seed=seed)
    last = layer.queries[:, -1]
    layer.queries[:, -1] = agreement * last[:1] + (1 - agreement) * last
    ragged, refilled = (build("sage", {"union": union}) for union in ("ragged", "refill"))
    assert refilled.exact
    assert not ragged.exact
    sinks, chosen, recent = ragged.shares(budget, group, 0)
    few, all_ = (policy.reduce(layer, LayerBudget.uniform(2, budget)) for policy in (ragged, refilled))
    for union, full in zip(few.positions, all_.positions, strict=True):
        assert chosen <= len(union) - sinks - recent <= group * chosen
        assert len(full) == budget
        assert set(union.tolist()) <= set(full.tolist())
    if agreement == 1:
        assert len(few.positions[0]) == sinks + chosen + recent


def test_logits_so_large_that_every_weight_underflows_still_have_an_order():
    layer = random_layer(60, group=2, kv_heads=1)
    large = replace(layer, queries=layer.queries * 1000)
    budget = LayerBudget.uniform(1, 20)
    policy = build("sage", {})
    assert torch.equal(policy.reduce(large, budget).positions[0], policy.reduce(layer, budget).positions[0])


def test_a_multiple_that_no_head_could_choose_is_refused():
    """Of 100 entries each of two query heads chooses 25. A multiple of 26 would be StreamingLLM under another name."""
    document, budget = DocumentView(range(400), group=2), Budget(100, 0.75)
    build("sage", {"multiple": 25}).fitted(document, budget, frozenset({"multiple"}))
    with pytest.raises(
        PolicyUnsupported, match=r"2 query heads .* choose 25 of .* 100 .* multiple of 26: none"
    ) as refused:
        build("sage", {"multiple": 26}).fitted(document, budget, frozenset({"multiple"}))
    assert refused.value.param == "policy_params.multiple"
    with pytest.raises(PolicyUnsupported, match="none"):
        build("sage", {}).fitted(DocumentView(range(400), group=8), Budget(15, 0.9), frozenset())


def test_a_budget_of_which_no_head_would_choose_is_refused_before_the_prefill(llama):
    group = llama.engine.model.config.num_attention_heads // llama.engine.model.config.num_key_value_heads
    assert group > 1
    with pytest.raises(PolicyUnsupported, match=f"each of the {group} query heads") as refused:
        llama.engine.prepare(llama.ids, policy="sage", budget_tokens=100, policy_params={"multiple": 50})
    assert refused.value.param == "policy_params.multiple"


@given(
    sinks=st.integers(0, 100), chosen=st.integers(1, 100), budget=st.integers(1, 5000), group=st.integers(1, 8),
    protected=st.integers(0, 50),
)  # fmt: skip
def test_the_shares_are_parts_of_the_budget(sinks, chosen, budget, group, protected):
    if sinks + chosen > 100 or budget <= protected:
        return
    policy = build("sage", {"sinks": sinks / 100, "chosen": chosen / 100})
    first, share, recent = policy.shares(budget, group, protected)
    assert first + group * share + recent == budget
    assert first == max(sinks * budget // 100, protected)
    assert recent >= 1
    if protected <= sinks * budget // 100 and sinks + chosen <= 99 and budget >= 100:
        assert share == chosen * budget // (100 * group)


def test_shares_of_more_than_the_budget_are_refused():
    with pytest.raises(PolicyUnsupported, match=r"sinks 0.6 and chosen 0.5.*more than 1") as refused:
        build("sage", {"sinks": 0.6}).fitted(DocumentView(range(400)), Budget(100, 0.75), frozenset())
    assert refused.value.param == "policy_params.chosen"
