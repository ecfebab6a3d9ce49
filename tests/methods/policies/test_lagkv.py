"""LagKV and LocalKV: the formulas, equation 12, and the same choice whole, recursively and while the document comes in.

By chance two choices of a few among dozens agree once in thousands at the very least, for every partition and head.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.prefill.chunked import ChunkedLayer
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView, LayerView
from tests.amounts import amount

NAMES = ("lagkv", "localkv")


def random_states(heads, tokens, dim, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, tokens, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    return keys, values


def one_shot(policy, keys, values, budget, protected=0):
    layer = LayerView(0, keys, values, None, 1.0, DocumentView(range(keys.shape[1]), protected))
    return policy.reduce(layer, LayerBudget.uniform(keys.shape[0], budget))


def streamed(policy, keys, values, budget, chunks, protected=0):
    """The product's cache layer, fed chunk by chunk as a prefill feeds it."""
    source = DocumentView(range(keys.shape[1]), protected)
    layer = ChunkedLayer(policy.absorber(source, Budget(budget, 0.5)))
    lengths = []
    for some_keys, some_values in zip(keys.split(chunks, 1), values.split(chunks, 1), strict=True):
        layer.update(some_keys[None], some_values[None])
        layer.absorb()
        lengths.append(layer._length)
    return layer.record(), lengths


@st.composite
def documents(draw, shortest=2):
    """Heads, sink, lag, tokens, entries kept of each partition (not always evenly), and how the document comes in."""
    heads, sink, lag = draw(st.integers(1, 3)), draw(st.integers(0, 20)), draw(st.integers(shortest, 40))
    partitions, remainder = draw(st.integers(2, 9)), draw(st.integers(0, lag - 1))
    tokens = sink + partitions * lag + remainder
    whole = tokens - (partitions - 1) * lag
    budget = whole + draw(st.integers(0, (partitions - 1) * lag - 1))
    cuts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=12)))
    chunks = [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]
    return heads, sink, lag, tokens, budget, chunks


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=amount(50, 150), deadline=None)
@given(documents(), st.integers(0, 999), st.sampled_from([torch.float32, torch.bfloat16]))
def test_streaming_keeps_what_one_shot_keeps(name, document, seed, dtype):
    heads, sink, lag, tokens, budget, chunks = document
    policy = build(name, {"sink": sink, "lag": lag, "prefill": "chunked"})
    keys, values = random_states(heads, tokens, 5, seed, dtype)
    expected = one_shot(policy, keys, values, budget)
    for cut in (chunks, policy.absorber(DocumentView(range(tokens)), Budget(budget, 0.5)).chunks):
        record, lengths = streamed(policy, keys, values, budget, cut)
        assert torch.equal(record.entry_positions, expected.entry_positions)
        assert torch.equal(record.keys, expected.keys)
        assert torch.equal(record.values, expected.values)
        assert torch.allclose(record.importance, expected.importance, atol=1e-6)
        assert record.offsets == expected.offsets
        assert max(lengths) < 2 * lag, "after a forward pass less than two partitions are whole"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(documents(shortest=3), st.integers(0, 999))
def test_one_shot_is_the_recursion_of_the_paper(name, document, seed):
    """Literally: while two partitions are uncompressed, compress the first; what was compressed is never looked at.

    Of two tokens in their own scale each channel has a 0 and a 1, so that both stand out alike: rounding decides.
    """
    heads, sink, lag, tokens, budget, _ = document
    keys, values = random_states(heads, tokens, 5, seed)
    record = one_shot(build(name, {"sink": sink, "lag": lag}), keys, values, budget)
    whole = tokens - ((tokens - sink) // lag - 1) * lag
    share, left = divmod(budget - whole, (tokens - sink) // lag - 1)
    for head, positions in enumerate(record.positions):
        kept, start, index = list(range(sink)), sink, 0
        while tokens - start >= 2 * lag:
            scores = naive_scores(name, keys[head], values[head], start, lag)
            best = sorted(range(lag), key=lambda token, scores=scores: (-scores[token], token))[
                : share + (index < left)
            ]
            kept += [start + token for token in sorted(best)]
            start, index = start + lag, index + 1
        assert positions.tolist() == kept + list(range(start, tokens))


def naive_scores(name, keys, values, start, lag):
    """Equations 7 to 11 (14 and 15 for LocalKV) for one partition of one head, a number at a time in fp64."""
    total = [0.0] * lag
    scale_from = start + lag if name == "lagkv" else start
    for states in (keys.double(), values.double()):
        own, scale = states[start : start + lag].tolist(), states[scale_from : scale_from + lag].tolist()
        low = [min(column) for column in zip(*scale, strict=True)]
        high = [max(column) for column in zip(*scale, strict=True)]
        spreads = []
        for token in own:
            normalized = [(x - a) / (b - a) for x, a, b in zip(token, low, high, strict=True)]
            mean = sum(normalized) / len(normalized)
            spreads.append(math.sqrt(sum((x - mean) ** 2 for x in normalized) / (len(normalized) - 1)))
        weights = [math.exp(spread) for spread in spreads]
        total = [t + weight / sum(weights) for t, weight in zip(total, weights, strict=True)]
    return total


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(
    sink=st.integers(0, 20), lag=st.integers(2, 40), partitions=st.integers(2, 9), share=st.integers(1, 39),
    remainder=st.integers(0, 39), seed=st.integers(0, 99),
)  # fmt: skip
def test_equation_12(name, sink, lag, partitions, share, remainder, seed):
    """L_R = S + r L (floor((N - S) / L) - 1) + L + (N - S) mod L, and every reduced partition keeps r L."""
    share, remainder = min(share, lag - 1), remainder % lag
    tokens = sink + partitions * lag + remainder
    kept = sink + share * ((tokens - sink) // lag - 1) + lag + (tokens - sink) % lag
    keys, values = random_states(2, tokens, 4, seed)
    record = one_shot(build(name, {"sink": sink, "lag": lag}), keys, values, kept)
    for positions in record.positions:
        assert len(positions) == kept
        judged = positions[(positions >= sink) & (positions < sink + (partitions - 1) * lag)].long()
        assert torch.bincount((judged - sink) // lag).tolist() == [share] * (partitions - 1)
        assert {*range(sink), *range(tokens - lag - remainder, tokens)} <= set(positions.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_the_template_counts_as_sink(name):
    keys, values = random_states(2, 300, 6, 0)
    policy = build(name, {"sink": 4, "lag": 32, "prefill": "chunked"})
    whole = one_shot(policy, keys, values, 150, protected=11)
    assert torch.equal(streamed(policy, keys, values, 150, [300], protected=11)[0].keys, whole.keys)
    assert all(head[:11].tolist() == list(range(11)) for head in whole.positions)


def test_the_two_differ_in_whose_scale_they_judge():
    """A token far out in a wide partition that precedes a narrow one: unusual in the next one's scale only if its
    neighbours are not."""
    keys, values = random_states(2, 300, 6, 0)
    kept = [one_shot(build(name, {"lag": 32}), keys, values, 150).positions[0].tolist() for name in NAMES]
    assert kept[0] != kept[1]
    assert naive_scores("lagkv", keys[0], values[0], 4, 32) != naive_scores("localkv", keys[0], values[0], 4, 32)


def test_the_norms_of_keys_judge_in_the_same_frame():
    """Equation 16: of each reduced partition the shortest keys stay."""
    keys, values = random_states(2, 300, 6, 0)
    record = one_shot(build("lagkv", {"lag": 32, "score": "l2"}), keys, values, 150)
    partitions = (300 - 4) // 32 - 1
    share, left = divmod(150 - (300 - partitions * 32), partitions)
    for head, positions in enumerate(record.positions):
        norms = [math.sqrt(sum(x * x for x in token)) for token in keys[head].double().tolist()]
        for p in range(partitions):
            inside = range(4 + p * 32, 4 + (p + 1) * 32)
            shortest = sorted(inside, key=lambda j, norms=norms: (norms[j], j))[: share + (p < left)]
            assert [j for j in positions.tolist() if j in inside] == sorted(shortest)


def test_score_local_is_policy_localkv():
    keys, values = random_states(2, 300, 6, 0)
    ours = one_shot(build("lagkv", {"lag": 32, "score": "local"}), keys, values, 150)
    assert torch.equal(ours.entry_positions, one_shot(build("localkv", {"lag": 32}), keys, values, 150).entry_positions)


def test_values_count_as_much_as_their_weight():
    """With weight 0 the values change nothing, and a large weight leaves the keys without a say."""
    keys, values = random_states(2, 300, 6, 0)
    others, _ = random_states(2, 300, 6, 1)

    def chosen(weight, keys, values):
        return one_shot(build("lagkv", {"lag": 32, "value_weight": weight}), keys, values, 150).entry_positions

    assert torch.equal(chosen(0, keys, values), chosen(0, keys, others))
    assert not torch.equal(chosen(1, keys, values), chosen(1, keys, others))
    assert torch.equal(chosen(1e6, keys, values), chosen(1e6, others, values))


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(2, 6), skip=st.integers(1, 3), share=st.floats(0.3, 0.9))
def test_layers_that_stay_whole_are_paid_for_by_the_others(layers, skip, share):
    tokens, lag = 200, 8
    mean = int(tokens * share)
    policy = build("lagkv", {"sink": 4, "lag": lag, "skip_layers": skip})
    document = DocumentView(range(tokens), num_layers=layers)
    fits = (
        layers > skip and (mean * layers - skip * tokens) // (layers - skip) >= tokens - ((tokens - 4) // lag - 1) * lag
    )
    if not fits:
        with pytest.raises(PolicyUnsupported, match="stay whole"):
            policy.fitted(document, Budget(mean, 1 - share), frozenset({"lag", "skip_layers", "sink"}))
        return
    policy = policy.fitted(document, Budget(mean, 1 - share), frozenset({"lag", "skip_layers", "sink"}))
    kept = []
    for place in range(layers):
        keys, values = random_states(1, tokens, 4, place)
        layer = LayerView(place, keys, values, None, 1.0, document, num_layers=layers, place=place)
        kept.append(policy.reduce(layer, LayerBudget.uniform(1, mean)).entries)
    assert kept[:skip] == [tokens] * skip
    assert sum(kept) == mean * layers
    assert max(kept[skip:]) - min(kept[skip:]) <= 1


@pytest.mark.parametrize(
    ("params", "param", "named"),
    [
        ({"skip_layers": 2}, "skip_layers", "2 of 3 layers stay whole.* leaves 0 .*skip_layers or compression_ratio"),
        ({"skip_layers": 3}, "skip_layers", "3 of 3 layers"),
        ({"skip_layers": 1, "prefill": "chunked"}, "skip_layers", "all layers alike"),
        ({"score": "l2", "value_weight": 0.5}, "value_weight", "keys alone"),
    ],
)
def test_what_does_not_go_together_is_refused(params, param, named):
    policy = build("lagkv", params)
    with pytest.raises(PolicyUnsupported, match=named) as refused:
        policy.fitted(DocumentView(range(300), num_layers=3), Budget(150, 0.5), frozenset(params))
    assert refused.value.param == f"policy_params.{param}"


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_channel_does_not_poison_the_choice(name):
    keys, values = random_states(2, 300, 6, 0)
    keys[..., 2] = 1.5
    values[..., 0] = 0.0
    record = one_shot(build(name, {"lag": 32}), keys, values, 150)
    assert [len(head) for head in record.positions] == [150, 150]
    assert not record.importance.isnan().any()


def naive_kept(keys, values, *, sink, lag, r, by_norm):
    """Equations 7 to 12 and 16 in fp64 loops: the positions that one head keeps."""
    tokens = len(keys)
    partitions = (tokens - sink) // lag
    kept = [*range(sink)]
    for part in range(partitions):
        own = [*range(sink + part * lag, sink + (part + 1) * lag)]
        if part == partitions - 1:
            kept += own
            continue
        scores = torch.zeros(lag).double()
        for states in [keys] if by_norm else [keys, values]:
            rows, following = states[own].double(), states[[i + lag for i in own]].double()
            if by_norm:
                scores -= rows.norm(dim=1)
                continue
            low, high = following.min(dim=0).values, following.max(dim=0).values
            scores += ((rows - low) / (high - low)).std(dim=1).softmax(dim=0)
        ranked = sorted(range(lag), key=lambda i: (-float(scores[i]), i))
        kept += sorted(own[i] for i in ranked[: int(r * lag + 1e-9)])
    return [*kept, *range(sink + partitions * lag, tokens)]


@pytest.mark.parametrize("score", ["lag", "l2"])
@pytest.mark.parametrize(
    ("tokens", "lag", "r"), [(1040, 512, 1 / 6), (600, 64, 0.25), (300, 100, 0.29), (150, 128, 0.5)]
)
def test_a_retention_stands_in_place_of_a_budget(score, tokens, lag, r):
    """Also where the mean over layers is no integer: N = 1040, L = 512 and r = 1/6 with two of four layers whole."""
    skip = 2 if score == "l2" else 0
    policy = build("lagkv", {"sink": 16, "lag": lag, "r": r, "score": score, "skip_layers": skip})
    document = DocumentView(range(tokens), num_layers=4)
    budget = policy.own_budget(document)
    policy = policy.fitted(document, budget, frozenset({"r"}))
    total = 0
    for place in range(4):
        keys, values = random_states(2, tokens, 8, place)
        layer = LayerView(place, keys, values, None, 1.0, document, num_layers=4, place=place)
        record = policy.reduce(layer, LayerBudget.uniform(2, budget.tokens))
        for head, positions in enumerate(record.positions):
            naive = naive_kept(keys[head], values[head], sink=16, lag=lag, r=r, by_norm=score == "l2")
            assert positions.tolist() == ([*range(tokens)] if place < skip else naive)
        total += len(record.positions[0])
    assert budget.tokens == total // 4


@pytest.mark.parametrize("r", [0, -0.5, 1.01, "half"])
def test_a_retention_outside_0_to_1_is_refused_by_name(r):
    with pytest.raises(InvalidRequest, match="'r'") as refused:
        build("lagkv", {"r": r})
    assert refused.value.param == "policy_params.r"


@pytest.mark.parametrize("prefill", ["whole", "chunked"])
def test_a_retention_is_taken_by_an_engine_and_a_size_beside_it_is_refused(llama, prefill):
    engine, document = llama.engine, [5 + i % 90 for i in range(300)]
    params = {"r": 0.25, "lag": 32, "sink": 4, "prefill": prefill}
    cache = engine.compress(document, policy="lagkv", **params)
    same = engine.compress(document, policy="lagkv", **{**params, "r": None}, budget_tokens=300 - 8 * 24)
    for ours, theirs in zip(cache.layers, same.layers, strict=True):
        assert torch.equal(ours.entry_positions, theirs.entry_positions)
    whole, full = (engine.compress(document, policy=p, **q) for p, q in [("lagkv", {"r": 1.0}), ("full", {})])
    for ours, theirs in zip(whole.layers, full.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    with pytest.raises(InvalidRequest, match="takes no budget_tokens"):
        engine.prepare(document, policy="lagkv", policy_params=params, budget_tokens=100)


def test_a_parameter_that_was_added_is_in_an_identity_only_where_it_is_used() -> None:
    assert "r" not in build("lagkv", {}).parameters()
    assert build("lagkv", {"r": 0.5}).parameters()["r"] == 0.5
    assert not {"score", "similarity"} & build("ems", {}).parameters().keys()
    assert build("ems", {"score": "global"}).parameters()["score"] == "global"
