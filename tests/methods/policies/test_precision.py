"""MiKV and ARKV: who has more bits, against the formulas in lists, and what holds whatever the scores are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact import heads
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.encoding import encode
from kvshelf.artifact.records import Parts, parts_of
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.sharing import LayerStats
from tests.amounts import amount
from tests.views import observed, pooled_mean, random_layer

TEXT = "The access code of the amber falcon is 482913. " + "The harbour was quiet that morning. " * 40


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("kvshelf-tiny", device="cpu")


def reduced(name, layers, mean, **params):
    tokens = layers[0].num_tokens
    budget = Budget(mean, 1 - mean / tokens)
    policy = build(name, params).fitted(layers[0].document, budget, frozenset(params))
    notes, records = {}, {}
    for layer in layers:
        notes[layer.layer_idx] = policy.noted(layer)
        records[layer.layer_idx] = policy.chooser.reduce(layer, LayerBudget.uniform(layer.kv_heads, mean))
    return policy, list(policy.finished(records, notes, budget).values())


def high_positions(record, codec="mixed:high=none,low=int2,share=policy,group=8"):
    """Positions of each head in the record of more bits."""
    precise = [set() for _ in range(record.kv_heads)]
    for part in parts_of(encode(Codec.parse(codec), record)):
        if not isinstance(part.keys, QuantizedRows) or part.keys.bits == 8:
            precise = [head | set(positions.tolist()) for head, positions in zip(precise, part.positions, strict=True)]
    return precise


# MiKV


@settings(max_examples=amount(20, 80), deadline=None)
@given(high=st.floats(0.1, 1), tokens=st.integers(30, 90), protected=st.integers(0, 3), seed=st.integers(0, 99))
def test_what_the_base_would_keep_has_more_bits(high, tokens, protected, seed):
    layer = random_layer(tokens, protected=protected, seed=seed)
    policy, (record,) = reduced("mikv", [layer], tokens, high=high, base="h2o")
    assert record.lengths == [tokens] * layer.kv_heads, "nothing is evicted"
    count = max(int(high * tokens + 1e-9), protected + 1)
    kept = policy.inner.reduce(layer, LayerBudget.uniform(layer.kv_heads, count))
    assert high_positions(record) == [set(head.tolist()) for head in kept.positions]


def step_of(numbers, bits):
    """The distance of two codes of a group, with room for the rounding of its least number and step to bf16."""
    least, most = min(numbers), max(numbers)
    return (most - least + max(abs(least), abs(most)) * 2**-7) / (2**bits - 1) * (1 + 2**-7)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_what_is_not_important_has_fewer_bits_and_nothing_is_lost(group, bits):
    """Every entry, in loops: whole where the base would keep it, else within half a step of its group: of 8 tokens of a
    key's channel, of 8 channels of a value."""
    layer = random_layer(43, group=group, seed=bits)
    policy, (record,) = reduced("mikv", [layer], 43, high=0.4, base="h2o")
    important = [set(head.tolist()) for head in policy.inner.reduce(layer, LayerBudget.uniform(2, 17)).positions]
    stored = encode(Codec.parse(f"mixed:high=none,low=int{bits},share=policy,group=8"), record)
    rows = {}
    for part in parts_of(stored):
        keys, values = part.plain_heads()
        for head, positions in enumerate(part.positions):
            for row, at in enumerate(positions.tolist()):
                rows[head, at] = keys[head][row].tolist(), values[head][row].tolist()
    assert len(rows) == 2 * 43
    for head in range(2):
        low = [at for at in range(43) if at not in important[head]]
        for at in important[head]:
            assert rows[head, at] == (layer.keys[head, at].tolist(), layer.values[head, at].tolist())
        keys, values = layer.keys[head].double().tolist(), layer.values[head].double().tolist()
        for first in range(0, len(low), 8):
            tokens = low[first : first + 8]
            for channel in range(len(keys[0])):
                step = step_of([keys[at][channel] for at in tokens], bits)
                for at in tokens:
                    assert abs(rows[head, at][0][channel] - keys[at][channel]) <= step / 2
        for at in low:
            for first in range(0, len(values[at]), 8):
                step = step_of(values[at][first : first + 8], bits)
                for channel in range(first, min(first + 8, len(values[at]))):
                    assert abs(rows[head, at][1][channel] - values[at][channel]) <= step / 2


def test_a_factor_of_a_channel_changes_codes_by_rounding_alone():
    """Why there is no balancer: it matters where a token's channels share a step. Powers of two are exact; of other
    factors, scales and zeros are rounded to bf16, and the mean error stays."""
    generator = torch.Generator().manual_seed(3)
    keys, drawn = torch.randn(2 * 40, 16, generator=generator), 0.1 + 4 * torch.rand(16, generator=generator)
    for bits in (2, 3, 4):
        plain, exact, rounded = (
            QuantizedRows.quantize(keys * factors, [40, 40], bits=bits, group=8, axis="tokens")
            for factors in (torch.ones(16), 2.0 ** torch.arange(-8, 8), drawn)
        )
        assert torch.equal(plain.codes, exact.codes)
        assert (plain.codes != rounded.codes).float().mean() < 0.05
        errors = [
            float((rows.dequantize() / factors - keys).abs().mean())
            for rows, factors in ((plain, 1.0), (rounded, drawn))
        ]
        assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_layers_that_share_a_budget_share_the_precise_entries():
    layers = [random_layer(60, index=i, num_layers=3, seed=4) for i in range(3)]
    layers = [replace(layer, queries=layer.queries * 2.0**i) for i, layer in enumerate(layers)]
    policy, records = reduced("mikv", layers, 60, high=0.3, base="cake", window=4)
    stats = [LayerStats(list(policy.inner.importance(layer)), policy.inner.weight(layer)) for layer in layers]
    counts = policy.inner.sharing.counts(stats, Budget(18, 0.7), 3)
    assert [record.precise for record in records] == counts
    assert sum(map(sum, counts)) == 18 * 3 * 2
    assert len({n for layer in counts for n in layer}) > 1


@pytest.mark.parametrize("codec", ["int2", "int3", "int4"])
def test_the_most_important_token_has_more_bits_whatever_the_codec(codec):
    layer = random_layer(50, seed=1)
    _, (record,) = reduced("mikv", [layer], 50, high=0.1, base="keydiff")
    expected = high_positions(record)
    for high in ("none", "int8"):
        assert high_positions(record, f"mixed:high={high},low={codec},share=policy,group=8") == expected
    for head, importance in enumerate(record.importance.view(2, 50)):
        assert int(importance.argmax()) in expected[head]


@pytest.mark.parametrize("high", [0.0, 1.0])
def test_all_or_nothing_is_the_codec_alone(high):
    """With all entries in `high`, the record of that codec; with one, all others in `low`."""
    layer = random_layer(64, seed=2)
    _, (record,) = reduced("mikv", [layer], 64, high=high, base="keydiff")
    mixed = encode(Codec.parse("mixed:high=int8,low=int4,share=policy,group=8"), record)
    if high:
        plain = encode(Codec.parse("int8:group=8,residual=0"), record)
        assert torch.equal(mixed.keys.codes, plain.keys.codes)
        assert torch.equal(mixed.values.codes, plain.values.codes)
    else:
        assert [part.lengths for part in parts_of(mixed)] == [[1, 1], [63, 63]]


def test_more_bits_for_some_answer_and_are_stored(tiny):
    """Bytes between those of both codecs, and the same answers from the stored blob."""
    cache = tiny.compress(TEXT, policy="mikv", base="keydiff", high=0.25)
    assert cache.kept_tokens == cache.num_tokens
    sizes = {codec: len(tiny.encoded(cache, codec).to_bytes()) for codec in ("int8:residual=0", "int2:residual=0")}
    mixed = tiny.encoded(cache, "mixed:share=policy")
    data = mixed.to_bytes()
    assert sizes["int2:residual=0"] < len(data) < sizes["int8:residual=0"]
    question = "What is the access code of the amber falcon?"
    assert tiny.answer(type(cache).from_bytes(data), question).text == tiny.answer(mixed, question).text
    assert all(part.precise is None for layer in mixed.layers for part in parts_of(layer))


def test_kvzip_lets_all_heads_share(tiny):
    cache = tiny.compress(TEXT, policy="mikv", base="kvzip", high=0.25)
    counts = [n for layer in cache.layers for n in layer.precise]
    assert sum(counts) == int(0.25 * cache.num_tokens) * len(counts)
    assert len(set(counts)) > 1
    assert all(layer.uniform for layer in cache.layers)


def test_a_number_as_share_ranks_by_the_base(tiny):
    """Under `full` the most recent entries would have more bits."""
    codec = "mixed:share=0.25"
    of_mikv, of_full = (tiny.encoded(tiny.compress(TEXT, policy=policy), codec) for policy in ("mikv", "full"))
    assert isinstance(of_mikv.layers[0], Parts)
    assert not torch.equal(of_mikv.layers[0].parts[0].entry_positions, of_full.layers[0].parts[0].entry_positions)
    assert of_full.identity.cache_id != of_mikv.identity.cache_id


@pytest.mark.parametrize("policy", ["keydiff", "full", "snapkv"])
def test_a_policy_that_says_no_shares_is_refused_before_the_prefill(tiny, policy):
    job = tiny.prepare(TEXT, policy=policy)
    with pytest.raises(InvalidRequest, match=f"{policy}.*no such number.*mikv or arkv") as refused:
        tiny.compressor.level(job, "mixed:share=policy")
    assert refused.value.param == "codec"


@pytest.mark.parametrize(
    ("params", "param", "named"),
    [
        ({"base": "sage"}, "base", "a policy that scores tokens.*h2o"),
        ({"base": "pyramidkv"}, "base", "gives heads equal budgets"),
        ({"base": "ada"}, "base", "'ada'"),
        ({"base": "kvzip", "across": "layer"}, "across", "across=cache or head"),
        ({"base": "kvzip", "prefill": "chunked"}, "prefill", "prefill=whole"),
        ({"high": 1.5}, "high", "from 0 to 1"),
    ],
)
def test_what_it_cannot_be_built_around_is_refused(tiny, params, param, named):
    with pytest.raises(InvalidRequest, match=named) as refused:
        tiny.prepare(TEXT, policy="mikv", policy_params=params)
    assert refused.value.param == f"policy_params.{param}"


def test_a_budget_is_refused(tiny):
    with pytest.raises(InvalidRequest, match="takes no compression_ratio"):
        tiny.prepare(TEXT, policy="mikv", compression_ratio=0.5)


# ARKV


def claim_in_lists(heads, taus):
    """E^(1/t1) * V^(1/t2) * K^(1/t3) of weights of the window, by query head, row and token."""
    entropy = spread = kurtosis = 0.0
    for head in heads:
        for row in head:
            entropy -= sum(a * math.log(a + 1e-10) for a in row)
        for column in zip(*head, strict=True):
            mean = sum(column) / len(column)
            second, fourth = (sum((a - mean) ** power for a in column) for power in (2, 4))
            spread += second / max(1, len(column) - 1)
            kurtosis += fourth / len(column) / max(second / len(column), 1e-8) ** 2
    return entropy ** (1 / taus[0]) * spread ** (1 / taus[1]) * kurtosis ** (1 / taus[2])


@pytest.mark.parametrize("case", [{}, {"protected": 3}, {"probes": (9,)}], ids=str)
@pytest.mark.parametrize("mean", [30, 80])
def test_arkv_is_what_its_formulas_say(case, mean):
    window, taus = 5, (2.0, 1.5, 3.0)
    layers = [random_layer(80, index=i, num_layers=3, seed=mean, **case) for i in range(3)]
    layers = [replace(layer, queries=layer.queries * 1.5**i) for i, layer in enumerate(layers)]
    params = {"window": window, "kernel": 3, **dict(zip(("tau1", "tau2", "tau3"), taus, strict=True))}
    _, records = reduced("arkv", layers, mean, **params)
    claims = [claim_in_lists(observed(layer, window).tolist(), taus) for layer in layers]
    tail = 0 if case.get("probes") else window
    always = case.get("protected", 0) + tail
    for layer, record, claim in zip(layers, records, claims, strict=True):
        assert record.lengths == [mean] * 2
        assert record.precise == (always + round(claim / max(claims) * (mean - always)),) * 2
        weights = observed(layer, window).unflatten(0, (2, -1))  # [kv_heads, group, rows, columns]
        spread = weights.var(dim=2, correction=1)
        scores = pooled_mean((weights.mean(dim=2) + 200 * spread).mean(dim=1), 3)
        for head, high in enumerate(high_positions(record)):
            forced = {*range(case.get("protected", 0)), *range(80 - tail, 80)}
            ranked = sorted((j for j in range(80 - tail) if j not in forced), key=lambda j: -float(scores[head, j]))
            assert high == forced | set(ranked[: record.precise[head] - always])
    assert max(record.precise[0] for record in records) == mean, "the layer with the largest claim has all in many bits"


def test_layers_that_are_alike_have_all_entries_in_many_bits():
    layers = [replace(random_layer(60, seed=1), layer_idx=i, place=i, num_layers=3) for i in range(3)]
    _, records = reduced("arkv", layers, 30)
    assert [record.precise for record in records] == [(30, 30)] * 3


def test_a_budget_of_everything_evicts_nothing_and_still_ranks(tiny):
    cache = tiny.compress(TEXT, policy="arkv", compression_ratio=0.0)
    assert cache.kept_tokens == cache.num_tokens
    counts = [layer.precise[0] for layer in cache.layers]
    assert max(counts) == cache.num_tokens
    assert min(counts) < cache.num_tokens
    mixed = tiny.encoded(cache, "mixed:share=policy")
    states = [sum(part.entries for part in parts_of(layer)) for layer in mixed.layers]
    assert states == [cache.num_tokens * 2] * 4


def test_a_window_of_one_row_has_no_variance_and_all_layers_are_alike():
    layers = [random_layer(60, index=i, num_layers=3, probes=(1,), seed=3) for i in range(3)]
    _, records = reduced("arkv", layers, 30, window=1)
    assert [record.precise for record in records] == [(30, 30)] * 3


def test_heads_are_cut_and_joined_with_what_is_said_of_them():
    """As processes that share a model's heads exchange them."""
    layer = random_layer(60, kv_heads=4, seed=3)
    _, (record,) = reduced("mikv", [layer], 60, high=0.3, base="keydiff")
    record = replace(record, precise=(5, 6, 7, 8))
    halves = [heads.cut(record, first, first + 2) for first in (0, 2)]
    assert [half.precise for half in halves] == [(5, 6), (7, 8)]
    assert heads.joined(halves).precise == record.precise
