"""PyramidKV: the budget per layer, and SnapKV's choice within it. test_oracles.py has the golden sets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.views import best, observed, pooled_mean, random_layer


def naive_share(tokens, mean, layer, num_layers, window, beta):
    """kvpress's `get_layer_budget`, from its description: a line from the first layer to the last around the mean."""
    last = mean / beta
    first = 2 * mean - last
    if first >= tokens - window:
        first, last = tokens - window, 2 * mean - (tokens - window)
    if not tokens >= first >= last >= window:
        return mean
    return round(first - layer * (first - last) / (num_layers - 1))


def authors_share(tokens, mean, layer, num_layers, window, beta):
    """The authors' loop, from its description: the window is not shared out, and everything is rounded down."""
    rest = mean - window
    if tokens < 2 * rest:
        return mean
    last = rest // beta
    first = 2 * rest - last
    if first >= tokens - window:
        first, last = tokens - window, 2 * rest - (tokens - window)
    return first - layer * ((first - last) // (num_layers - 1)) + window


def fitted(mean, tokens, protected=0, given=(), **params):
    policy = build("pyramidkv", params)
    return policy.fitted(DocumentView(range(tokens), protected), Budget(mean, 0.5), frozenset(given) | {"window"})


def share(policy, layer, mean):
    counts = policy.counts(layer, None, policy.protected(layer), LayerBudget.uniform(layer.kv_heads, mean))
    assert len(set(counts)) == 1
    return counts[0]


@settings(deadline=None, max_examples=100)
@given(data=st.data(), tokens=st.integers(40, 120), num_layers=st.integers(2, 9), window=st.integers(1, 20))
def test_shares_fall_in_a_line_and_are_kvpress_shares(data, tokens, num_layers, window):
    mean, beta = data.draw(st.integers(window, tokens - 1)), data.draw(st.integers(1, 30))
    policy = fitted(mean, tokens, window=window, beta=beta)
    layers = [random_layer(tokens, index=i, num_layers=num_layers, dim=2) for i in range(num_layers)]
    shares = [share(policy, layer, mean) for layer in layers]
    assert shares == [naive_share(tokens, mean, i, num_layers, window, beta) for i in range(num_layers)]
    assert shares == sorted(shares, reverse=True)
    assert all(window <= count <= tokens for count in shares)
    assert abs(sum(shares) - mean * num_layers) <= num_layers / 2, "half an entry a layer is what rounding may cost"


@settings(deadline=None, max_examples=100)
@given(data=st.data(), tokens=st.integers(40, 120), num_layers=st.integers(2, 9), window=st.integers(1, 20))
def test_the_authors_share_out_what_the_windows_leave(data, tokens, num_layers, window):
    mean, beta = data.draw(st.integers(window, tokens - 1)), data.draw(st.integers(1, 30))
    policy = fitted(mean, tokens, window=window, beta=beta, form="authors")
    layers = [random_layer(tokens, index=i, num_layers=num_layers, dim=2) for i in range(num_layers)]
    shares = [share(policy, layer, mean) for layer in layers]
    if policy.beta == 1:
        assert shares == [mean] * num_layers
        assert (
            beta == 1
            or tokens < 2 * (mean - window)
            or min(shares) < authors_share(tokens, mean, 0, num_layers, window, beta)
        )
    else:
        assert shares == [authors_share(tokens, mean, i, num_layers, window, beta) for i in range(num_layers)]
    assert all(window <= count <= tokens for count in shares)
    assert 0 <= sum(shares) - mean * num_layers <= num_layers * (num_layers - 1) / 2


def test_a_short_document_has_a_pyramid_in_the_authors_form_alone():
    """1,400 tokens, three quarters removed: the last of four layers would get 17 entries and has a window of 64. The
    parameters as used say that there is no pyramid."""
    flat, pyramid = fitted(350, 1400, window=64), fitted(350, 1400, window=64, form="authors")
    layers = [random_layer(1400, index=i, num_layers=4, dim=2) for i in range(4)]
    assert [share(flat, layer, 350) for layer in layers] == [350] * 4
    assert flat.parameters()["beta"] == 1
    assert [share(pyramid, layer, 350) for layer in layers] == [622, 441, 260, 79]
    assert pyramid.parameters()["beta"] == 20


def test_a_given_beta_that_builds_no_pyramid_is_refused():
    with pytest.raises(PolicyUnsupported, match=r"beta 20.*17.5 of a mean budget of 350.*no pyramid") as refused:
        fitted(350, 1400, window=64, beta=20, given={"beta"})
    assert refused.value.param == "policy_params.beta"


def test_a_steep_pyramid():
    """100 on average, the last layer a twentieth, in steps of 47.5; Python rounds halves to the even."""
    policy = build("pyramidkv", {"window": 4})
    assert [share(policy, random_layer(400, index=i, num_layers=5), 100) for i in range(5)] == [195, 148, 100, 52, 5]


def test_no_layer_gets_more_than_the_document_without_its_window():
    """A first layer of 82.5 among 100 tokens is 80, and the last one gets what that leaves: 30 and not 27.5."""
    policy = build("pyramidkv", {"window": 20, "beta": 2})
    assert [share(policy, random_layer(100, index=i, num_layers=3), 55) for i in range(3)] == [80, 55, 30]


def test_the_last_layer_holds_what_is_protected_or_all_are_alike():
    layers = [random_layer(400, index=i, num_layers=5, protected=2) for i in range(5)]
    policy = fitted(100, 400, protected=2, window=4)
    assert [share(policy, layer, 100) for layer in layers] == [100] * 5, "a last layer of 5 cannot hold 4 + 2"
    policy = fitted(120, 400, protected=2, window=4)
    assert [share(policy, layer, 120) for layer in layers] == [234, 177, 120, 63, 6]
    assert share(policy, random_layer(400), 100) == 100, "one layer has nobody to take from"


@pytest.mark.parametrize(("probes", "protected"), [((), 0), ((), 3), ((9,), 2), ((3, 5), 0)])
def test_keeps_what_the_formula_says(probes, protected):
    window, mean = 4, 40
    policy = build("pyramidkv", {"window": window, "kernel": 3, "beta": 5})
    for index in range(3):
        layer = random_layer(90, index=index, num_layers=3, protected=protected, probes=probes)
        record = policy.reduce(layer, LayerBudget.uniform(2, mean))
        scores = pooled_mean(observed(layer, window).unflatten(0, (2, -1)).mean(dim=(1, 2)), 3)  # [kv_heads, columns]
        columns = scores.shape[1]
        always = {*range(protected), *range(columns, 90)}
        count = naive_share(90, mean, index, 3, window, 5)
        expected = [best([*head, *[0.0] * (90 - columns)], always, count) for head in scores.tolist()]
        assert [head.tolist() for head in record.positions] == expected


def test_what_is_refused(llama):
    with pytest.raises(InvalidRequest, match="from 1") as refused:
        build("pyramidkv", {"beta": 0})
    assert refused.value.param == "policy_params.beta"
    with pytest.raises(PolicyUnsupported, match="window is 200") as refused:
        llama.engine.prepare(llama.ids, policy="pyramidkv", budget_tokens=100, policy_params={"window": 200})
    assert refused.value.param == "policy_params.window"
