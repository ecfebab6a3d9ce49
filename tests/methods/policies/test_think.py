"""ThinK: channels against kvpress and against its formula in lists, what is lost, and what it can be built around."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.heads import cut, joined
from kvshelf.artifact.records import Kept, Parts, Pruned, parts_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention.eager import attend_prefix
from kvshelf.kernels.prefix_attention.prefixes import LogitRules
from kvshelf.methods.method import Needs, parameter_fields
from kvshelf.methods.policies import POLICIES, build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.think import Think
from kvshelf.store.url import open_store
from tests.views import random_layer

FACTS = load_file(Path(__file__).parents[2] / "oracles" / "kvpress_think.safetensors")
BASES = {"keydiff": {}, "kvzip": {}, "snapkv": {}, "ada": {}, "cake": {}, "full": {"compression_ratio": 0.0}}


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("kvshelf-tiny")


@pytest.fixture(scope="module")
def document() -> str:
    return " ".join(f"The code of room {i} is {i * 7919 % 1000}." for i in range(40))


def logits_after(engine, cache, question):
    with engine.attached(cache) as past, torch.no_grad():
        return engine.model(torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0]


def channels_in_lists(layer, share, rows):
    """Of each KV head the channels that stay, by the formula, a number at a time in fp64."""
    dim, tokens = layer.keys.shape[2], layer.num_tokens
    group = len(layer.all_queries) // layer.kv_heads
    channels = []
    for head in range(layer.kv_heads):
        scores = []
        for c in range(dim):
            seen = []
            for q in range(head * group, (head + 1) * group):
                ends = [layer.all_queries[q, -min(rows, tokens) :]] if not layer.probes else []
                ends += [probed.queries[q, -rows:] for probed in layer.probes]
                seen += [float(row[c]) ** 2 for end in ends for row in end]
            of_keys = [float(key[c]) ** 2 for key in layer.keys[head]]
            scores.append(sum(seen) / len(seen) * sum(of_keys) / len(of_keys))
        least = sorted(range(dim), key=lambda c: scores[c])[: int(dim * share)]
        channels.append(sorted(set(range(dim)) - set(least)))
    return channels


@pytest.mark.parametrize("share", [0.4, 0.75])
def test_logits_are_those_of_kvpress(oracle, share):
    """Zeros in the channels that ThinKPress chooses, of every token of the document; relative to the largest logit."""
    cache = oracle.engine.compress(
        oracle.ids, policy="think", base="full", compression_ratio=0.0, channels=share, whole_keys=0
    )
    assert all(isinstance(layer, Pruned) for layer in cache.layers)
    expected = FACTS[f"{oracle.architecture}/{share}"]
    ours = logits_after(oracle.engine, cache, FACTS[f"{oracle.architecture}/question"].tolist())
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    whole = oracle.engine.compress(oracle.ids, policy="full")
    without = logits_after(oracle.engine, whole, FACTS[f"{oracle.architecture}/question"].tolist())
    assert (without - expected).abs().max() > 0.1 * expected.abs().max(), "the channels matter to these logits"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.sampled_from([0.0, 0.3, 0.4, 0.9]), st.integers(1, 40), st.integers(0, 999), st.data())
def test_channels_are_those_of_the_formula(tokens, share, rows, seed, data):
    probes = data.draw(st.sampled_from([(), (40,), (41, 47)]))
    layer = random_layer(tokens, dim=10, group=3, probes=probes, seed=seed)
    noted = Think(channels=share, channel_rows=rows).noted(layer)
    assert noted.channels.tolist() == channels_in_lists(layer, share, rows)


def test_a_short_pass_is_joined_by_the_documents_own_rows():
    """As the observation window of policies that judge by it."""
    layer = random_layer(50, dim=10, probes=(4,), seed=3)
    own = layer.all_queries[:, -28:]
    rows = torch.cat([own, layer.probes[0].queries], dim=1)
    assert rows.shape[1] == 32
    scores = layer.grouped(rows.square()).mean(dim=(1, 2)) * layer.keys.square().mean(dim=1)
    expected = scores.topk(6).indices.sort().values
    assert Think().noted(layer).channels.tolist() == expected.tolist()


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 9), max_size=4), st.integers(0, 999))
def test_channels_of_zeros_go_first(zeros, seed):
    layer = random_layer(40, dim=10, seed=seed)
    chosen = sorted(zeros)
    layer.keys[:, :, chosen[::2]] = 0
    layer.queries[:, :, chosen[1::2]] = 0
    kept = Think().noted(layer).channels
    assert all(not zeros & set(head) for head in kept.tolist())


def pruned_layer(layer, budget, **params):
    think = replace(Think(**params), inner=POLICIES["snapkv"](window=4))
    record = think.chooser.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
    (pruned,) = think.finished({0: record}, {0: think.noted(layer)}, Budget.full(layer.num_tokens)).values()
    return record, pruned


@settings(max_examples=30, deadline=None)
@given(st.integers(33, 60), st.integers(8, 32), st.integers(0, 70), st.integers(0, 999))
def test_logits_lose_the_channels_removed_and_nothing_else(tokens, budget, whole_keys, seed):
    layer = random_layer(tokens, dim=10, seed=seed)
    base, pruned = pruned_layer(layer, budget, whole_keys=whole_keys)
    assert [p.tolist() for p in pruned.positions] == [p.tolist() for p in base.positions]
    queries = torch.randn(layer.kv_heads, 3, 10, dtype=torch.float64)
    channels = Think().noted(layer).channels.tolist()
    for head, (keys, values, _) in enumerate(zip(*pruned.dense(), strict=True)):
        (whole, own_values), places = base.heads()[head], base.positions[head]
        gone = sorted(set(range(10)) - set(channels[head]))
        lost = queries[head][:, gone] @ whole.double()[:, gone].T  # [3, entries]
        lost[:, places >= tokens - whole_keys] = 0
        torch.testing.assert_close(queries[head] @ keys.double().T, queries[head] @ whole.double().T - lost)
        assert torch.equal(values, own_values)


def test_attention_is_that_of_whole_keys_without_these_products():
    """The scale stays that of ten channels."""
    layer = random_layer(50, dim=10, group=2, seed=4)
    _, pruned = pruned_layer(layer, 30, whole_keys=0)
    assert isinstance(pruned, Pruned)
    (prefix,) = pruned.prefixes()
    rows = torch.randn(1, 2, 6, 10)
    out, lse = attend_prefix(rows, prefix, LogitRules(10**-0.5))
    keys, values, _ = pruned.dense()
    logits = 10**-0.5 * rows[0].double() @ keys.double().transpose(1, 2)
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[0].double(), logits.softmax(-1) @ values.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_without_channels_to_remove_it_is_the_base(tiny, document, base):
    options = BASES[base]
    taken = {} if base == "full" else options
    plain = tiny.compress(document, policy=base, **taken)
    for params in ({"channels": 0.0}, {"whole_keys": 10_000}):
        same = tiny.compress(document, policy="think", base=base, **options, **params)
        for ours, expected in zip(same.layers, plain.layers, strict=True):
            assert type(ours) is type(expected)
            assert torch.equal(ours.keys, expected.keys)
            assert torch.equal(ours.values, expected.values)
            assert torch.equal(ours.entry_positions, expected.entry_positions)
            assert ours.offsets == expected.offsets


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "int2", "mixed"])
@pytest.mark.parametrize("base", BASES)
def test_around_each_base_an_engine_answers_from_fewer_bytes(tiny, document, base, codec, tmp_path):
    options = BASES[base]
    plain = tiny.compress(document, policy=base, **({} if base == "full" else options))
    made = tiny.compress(document, policy="think", base=base, **options)
    assert [[p.tolist() for p in layer.positions] for layer in made.layers] == [
        [p.tolist() for p in layer.positions] for layer in plain.layers
    ]
    for layer in made.layers:
        body, last = parts_of(layer)
        assert (type(body), type(last)) == (Pruned, Kept)
        assert body.channels.shape == (2, 64 - 25)
        assert all((head < plain.num_tokens - 32).all() for head in body.positions)
        assert all((head >= plain.num_tokens - 32).all() for head in last.positions)
    cache = made.encoded(codec)
    with open_store(f"disk://{tmp_path}/shelf") as store:
        stored = store.get(store.put(cache).id)
    assert stored.to_bytes() == cache.to_bytes()
    assert len(cache.to_bytes()) < len(plain.encoded(codec).to_bytes())
    question = "What is the code of room 17?"
    answers = [tiny.answer(copy, question, max_new_tokens=6).token_ids for copy in (cache, stored)]
    assert answers[0] == answers[1]
    if base in ("kvzip", "full") and codec in ("none", "int8"):
        assert (
            tiny.answer(cache, question, max_new_tokens=6).text == tiny.answer(plain, question, max_new_tokens=6).text
        )


def test_an_answer_in_a_batch_is_the_one_alone(tiny, document):
    caches = [
        tiny.compress(document, policy="think", base=base, **BASES[base]).encoded(codec)
        for base, codec in (("keydiff", "none"), ("kvzip", "int4"), ("ada", "int2"), ("full", "int8"))
    ]
    caches.append(tiny.compress(document, policy="full"))
    questions = [(cache, f"What is the code of room {room}?") for cache in caches for room in (3, 11, 29)]

    def run(generations):
        batch = tiny.batch()
        while left := [generation for generation in generations if not generation.finished]:
            batch.step(left)
        return [generation.answer().token_ids for generation in generations]

    started = [
        [tiny.start(tiny.attach(c), tiny.encode_query(c, q), Sampling(6)) for c, q in questions] for _ in range(2)
    ]
    assert run(started[0]) == [run([one])[0] for one in started[1]]


def test_what_is_appended_is_pruned_by_itself(tiny, document):
    parent = tiny.compress(document, policy="think").encoded("int4")
    more = " ".join(f"The colour of hall {i} is {'red' if i % 3 else 'blue'}." for i in range(40))
    grown = parent
    for _ in range(3):
        grown = tiny.extend(grown, more)
    assert CompressedCache.from_bytes(grown.to_bytes()).to_bytes() == grown.to_bytes()
    for old, new in zip(parent.layers, grown.layers, strict=True):
        bodies = [part for part in parts_of(new) if isinstance(part, Pruned)]
        assert len(bodies) >= 4
        assert torch.equal(bodies[0].keys.codes, parts_of(old)[0].keys.codes), "the parent's stay"
        assert len({tuple(body.channels.flatten().tolist()) for body in bodies}) > 1
    assert tiny.answer(grown, "What is the code of room 17?", max_new_tokens=4).usage.cache_read_tokens == (
        grown.num_tokens
    )


def test_heads_are_cut_and_joined(tiny, document):
    """As processes that share a model do."""
    for layer in tiny.compress(document, policy="think", base="ada").layers:
        again = joined([cut(layer, 0, 1), cut(layer, 1, 2)])
        assert isinstance(again, Parts)
        for ours, expected in zip(again.parts, layer.parts, strict=True):
            assert type(ours) is type(expected)
            assert torch.equal(ours.keys, expected.keys)
            assert ours.offsets == expected.offsets
        assert torch.equal(again.parts[0].channels, layer.parts[0].channels)


def test_where_the_base_keeps_none_of_the_last_tokens_or_no_others(tiny, document):
    """Both parts are there all the same, and an empty one changes no answer."""
    cache = tiny.compress(document, policy="think")
    kinds = set()
    for layer in cache.layers:
        body, last = layer.parts
        for part in (body, last):
            none = part.select(torch.zeros(part.entries, dtype=torch.bool))
            kinds.add(type(none))
            other = last if part is body else body
            empty = replace(cache, layers=tuple(Parts((none, other)) for _ in cache.layers))
            alone = replace(cache, layers=tuple(other for _ in cache.layers))
            for codec in ("none", "int4"):
                answers = [
                    tiny.answer(cache.encoded(codec), "Which?", max_new_tokens=4).token_ids for cache in (empty, alone)
                ]
                assert answers[0] == answers[1]
                data = empty.encoded(codec).to_bytes()
                assert CompressedCache.from_bytes(data).to_bytes() == data
    assert kinds == {Pruned, Kept}


def test_parameters_of_both_stand_side_by_side():
    think = build("think", {"base": "snapkv", "channels": 0.5, "window": 9, "probe": "Why?"})
    assert think.inner == build("snapkv", {"window": 9, "probe": "Why?"})
    own = {"base": "snapkv", "channels": 0.5, "channel_rows": 32, "whole_keys": 32}
    assert think.parameters() == own | think.inner.parameters()
    for base in Think.bases(POLICIES):
        made = build("think", {"base": base})
        assert build("think", made.parameters()) == made
        assert made.needs == made.inner.needs | Needs.QUERIES
        assert not own.keys() - {"base"} & {f.name for f in parameter_fields(POLICIES[base])}
    assert set(POLICIES) - set(Think.bases(POLICIES)) == {
        *("arkv", "cam", "d2o", "ems", "fair", "infllm", "kvdirect", "kvmerger", "mikv", "think")
    }


def test_a_new_version_of_the_base_is_a_new_policy():
    class Newer(POLICIES["keydiff"]):
        version = POLICIES["keydiff"].version + 1

    assert Think(inner=Newer()).revision != Think().revision


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"base": "ems"}, "base", "a policy that keeps tokens as they are"),
        ({"base": "infllm"}, "base", "makes no index"),
        ({"base": "think"}, "base", "'think'"),
        ({"base": "nothing"}, "base", "one of full, ada"),
        ({"base": "lagkv", "prefill": "chunked"}, "prefill", "take prefill=whole"),
        ({"base": "kvzip", "across": "layer", "prefill": "chunked"}, "prefill", "take prefill=whole"),
        ({"channels": 1.0}, "channels", "0.9"),
        ({"channels": -0.1}, "channels", "0"),
        ({"whole_keys": -1}, "whole_keys", "0"),
        ({"channel_rows": 0}, "channel_rows", "1"),
        ({"window": 9}, "window", "keydiff"),
    ],
)
def test_bad_parameters_are_refused_by_name(llama, params, param, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        llama.engine.prepare(llama.ids, policy="think", policy_params=params)
    assert refused.value.param == f"policy_params.{param}"


@pytest.mark.parametrize(
    ("params", "ratio", "message"),
    [
        ({"base": "full"}, 0.5, "'full' keeps every entry"),
        ({"base": "streaming_llm", "positions": "cache"}, 0.5, "rotates keys to their places in the cache"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_prefill(llama, params, ratio, message):
    with pytest.raises(PolicyUnsupported, match=message):
        llama.engine.prepare(llama.ids, policy="think", policy_params=params, compression_ratio=ratio)


def test_codec_klt_is_refused_before_the_prefill_and_after(tiny, document):
    with pytest.raises(InvalidRequest, match="whole keys") as refused:
        tiny.compressor.level(tiny.prepare(document, policy="think"), "klt")
    assert refused.value.param == "codec"
    with pytest.raises(InvalidRequest, match="whole keys"):
        tiny.encoded(tiny.compress(document, policy="think"), "klt")


@pytest.mark.parametrize("select", ["quest", "sage", "mpcache", "policy:snapkv"])
def test_selectors_refuse_pruned_keys_before_the_answer(tiny, document, select):
    cache = tiny.compress(document, policy="think")
    with pytest.raises(PolicyUnsupported, match="have lost channels") as refused:
        tiny.answer(cache, "What is the code of room 17?", select=select, select_tokens=128)
    assert refused.value.param == "select.method"


def test_a_whole_budget_prunes_and_is_not_the_full_cache(tiny, document):
    job = tiny.prepare(document, policy="think", policy_params={"base": "kvzip"}, compression_ratio=0.0)
    assert job.passes == ()
    assert not tiny.compressor.level(job).keeps_all
    cache = tiny.run(job).cache
    assert cache.kept_tokens == cache.num_tokens
    assert all(isinstance(parts_of(layer)[0], Pruned) for layer in cache.layers)


def test_entries_of_another_kind_of_an_installed_base_are_refused():
    layer = random_layer(40)
    think, record = Think(), POLICIES["full"]().reduce(layer, LayerBudget.uniform(2, 40))
    with pytest.raises(PolicyUnsupported, match="without their rotation"):
        think.finished({0: replace(record, rope_mode="pre")}, {0: think.noted(layer)}, Budget.full(40))


def test_channels_are_packed_by_head():
    layer = random_layer(40, kv_heads=3, dim=10, seed=2)
    record, pruned = pruned_layer(layer, 20, whole_keys=0)
    for head, (start, end) in enumerate(pairwise(pruned.offsets)):
        whole = record.heads()[head][0]
        assert torch.equal(pruned.keys[start:end], whole[:, pruned.channels[head].long()])
