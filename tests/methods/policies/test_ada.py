"""Ada-KV: its budgets against kvpress's rule written out, and the base's own behaviour passed on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.catalog import catalog
from kvshelf.methods.method import Needs, parameter_fields
from kvshelf.methods.policies import POLICIES, build
from kvshelf.methods.policies.ada import Ada
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView
from tests.views import observed, pooled_mean, random_layer

OWN = {"base", "floor", "across"}


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("kvshelf-tiny")


@pytest.fixture(scope="module")
def document() -> str:
    return " ".join(f"The code of room {i} is {i * 7919 % 1000}." for i in range(40))


def bases():
    yield from Ada.bases(POLICIES).items()


def kvpress_rule(scores, budget, floor):
    """What kvpress's AdaKVPress leaves: the best int(floor * B) of each head (one at least) are raised above all, then
    the heads * (N - B) lowest of the layer are dropped."""
    heads, tokens = len(scores), len(scores[0])
    safe = max(1, int(budget * floor)) if floor > 0 else 0
    lifted = [list(head) for head in scores]
    for head in lifted:
        for j in sorted(range(tokens), key=lambda j: (-head[j], j))[:safe]:
            head[j] = float("inf")
    # Of equals the later is dropped.
    lowest_first = sorted((lifted[h][j], -h, -j) for h in range(heads) for j in range(tokens))
    dropped = {(-h, -j) for _, h, j in lowest_first[: heads * (tokens - budget)]}
    return [[j for j in range(tokens) if (h, j) not in dropped] for h in range(heads)]


def snapkv_scores(layer, window, kernel):
    """As kvpress pads them: the window gets more than any other token."""
    scores = pooled_mean(observed(layer, window).unflatten(0, (layer.kv_heads, -1)).mean(dim=(1, 2)), kernel)
    padding = torch.full((layer.kv_heads, layer.num_tokens - scores.shape[1]), float(scores.max() + 1))
    return torch.cat([scores, padding], dim=1).tolist()


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(20, 50),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    kv_heads=st.integers(1, 4),
    probe=st.sampled_from([(), (9,)]),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_a_layer_keeps_what_kvpress_rule_keeps(tokens, floor, kv_heads, probe, seed, data):
    budget = data.draw(st.integers(5, tokens - 1))
    layer = random_layer(tokens, kv_heads=kv_heads, probes=probe, seed=seed)
    ada = build("ada", {"floor": floor, "window": 4, "kernel": 3})
    record = ada.reduce(layer, LayerBudget.uniform(kv_heads, budget))
    assert [head.tolist() for head in record.positions] == kvpress_rule(snapkv_scores(layer, 4, 3), budget, floor)
    assert record.entries == kv_heads * budget, "exact"


def test_a_floor_of_one_is_the_base_itself_and_of_nothing_a_free_choice(llama):
    alone = llama.engine.compress(llama.ids, policy="snapkv", compression_ratio=0.75)
    even = llama.engine.compress(llama.ids, policy="ada", compression_ratio=0.75, floor=1.0)
    free = llama.engine.compress(llama.ids, policy="ada", compression_ratio=0.75, floor=0.0)
    for a, b, c in zip(alone.layers, even.layers, free.layers, strict=True):
        assert torch.equal(a.entry_positions, b.entry_positions)
        assert torch.equal(a.importance, b.importance)
        assert c.entries == a.entries
        assert not c.uniform


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_across_the_cache_all_heads_share_one_budget(oracle, floor):
    cache = oracle.engine.compress(
        oracle.ids, policy="ada", compression_ratio=0.75, across="cache", floor=floor, window=32
    )
    lengths = [length for record in cache.layers for length in record.lengths]
    assert sum(lengths) == 175 * len(lengths)
    assert min(lengths) >= max(32, int(floor * 175))
    assert len({record.entries for record in cache.layers}) > 1
    assert build("ada", {"across": "cache"}).phase == "cascade"
    assert build("ada", {}).phase == "during"


def test_a_head_may_be_left_with_nothing(llama):
    """Cosines are no base for ada, but the cache that comes of it is whole and can be asked."""
    cache = llama.engine.compress(llama.ids, policy="ada", budget_tokens=1, base="keydiff", floor=0.0, across="cache")
    lengths = [length for record in cache.layers for length in record.lengths]
    assert sum(lengths) == len(lengths)
    assert min(lengths) == 0
    for codec in ("none", "int8"):
        assert type(cache).from_bytes(cache.to_bytes(codec)).kept_tokens == 1
    assert len(llama.engine.answer(cache, llama.ids[:5], max_new_tokens=3).token_ids) == 3


def test_the_heads_of_a_pyramid_share_each_layer_of_it(llama):
    """Ada-PyramidKV, which the paper has too: the layers' totals are pyramidkv's, ragged within."""
    params = {"window": 32, "compression_ratio": 0.5}
    alone = llama.engine.compress(llama.ids, policy="pyramidkv", **params)
    ada = llama.engine.compress(llama.ids, policy="ada", base="pyramidkv", floor=0.0, **params)
    assert [record.entries for record in ada.layers] == [record.entries for record in alone.layers]
    assert len({record.entries for record in ada.layers}) > 1
    assert not all(record.uniform for record in ada.layers)


SHARING = {"epicache", "kvzip", "kvzip_gate", "kvcues"}
"""Bases that share budgets by a parameter `across`, unless ada does."""


def test_the_bases_parameters_stand_beside_adas_own():
    ada = build("ada", {"base": "pyramidkv", "floor": 0.3, "beta": 7, "window": 9, "probe": "Why?"})
    assert ada.inner == build("pyramidkv", {"beta": 7, "window": 9, "probe": "Why?"})
    assert ada.parameters() == {"base": "pyramidkv", "floor": 0.3, "across": "layer"} | ada.inner.parameters()
    for policy in (ada, build("ada", {}), build("ada", {"base": "keydiff", "across": "cache"})):
        assert build("ada", policy.parameters()) == policy
    assert build("ada", {"base": "snapkv"}) == build("ada", {})


@pytest.mark.parametrize(
    ("params", "param", "said"),
    [
        ({"kernel": 4}, "kernel", "odd"),
        ({"beta": 3}, "beta", "policy 'snapkv' has no parameter 'beta'"),
        ({"base": "keydiff", "window": 3}, "window", "policy 'keydiff' has no parameter 'window'"),
        ({"floor": 1.5}, "floor", "from 0 to 1"),
        ({"across": "heads"}, "across", "'layer', 'cache'"),
        ({"base": 3}, "base", "str"),
        ({"base": "nope"}, "base", "snapkv"),
        ({"base": "ada"}, "base", "'ada'"),
        ({"base": "full"}, "base", "'full'"),
        ({"base": "lagkv"}, "base", "'lagkv'"),
        ({"base": "cake"}, "base", "leaves the sharing of budgets to ada"),
        ({"base": "layer_defensivekv"}, "base", "leaves the sharing of budgets to ada"),
        ({"base": "pyramidkv", "across": "cache"}, "across", "'pyramidkv' shares the budget"),
        ({"base": "kvzip", "across": "head"}, "across", "'layer', 'cache'"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(params, param, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        build("ada", params)
    assert refused.value.param == f"policy_params.{param}"


def test_the_base_shrinks_its_defaults_and_refuses_what_was_given(llama):
    job = llama.engine.prepare(llama.ids, policy="ada", budget_tokens=100)
    assert job.identity.policy_params["window"] == 50
    with pytest.raises(PolicyUnsupported, match="window is 101") as refused:
        llama.engine.prepare(llama.ids, policy="ada", budget_tokens=100, policy_params={"window": 101})
    assert refused.value.param == "policy_params.window"
    with pytest.raises(PolicyUnsupported, match="chat template"):
        build("ada", {"base": "keydiff"}).fitted(DocumentView(range(50), 5), Budget(5, 0.9), frozenset())


def test_what_the_base_observes_ada_observes(tiny, document):
    assert build("ada", {"base": "keydiff"}).needs is Needs.NOTHING
    assert build("ada", {"base": "snapkv"}).needs is Needs.QUERIES
    assert not build("ada", {"base": "keydiff"}).takes_questions
    ada = build("ada", {"probe": "What is the code?"})
    source = DocumentView(range(9), suffix=(1, 2), text=tiny.text)
    assert ada.probe_passes(source) == ada.inner.probe_passes(source) != []
    assert ada.probe_text(source) == "What is the code?"
    plain, guided = (
        tiny.compress(document, policy="ada", compression_ratio=0.75, expected_questions=questions)
        for questions in ([], ["What is the code of room 17?"])
    )
    assert plain.identity.probe
    assert any(
        not torch.equal(a.entry_positions, b.entry_positions) for a, b in zip(plain.layers, guided.layers, strict=True)
    )


def test_a_new_version_of_the_base_is_a_new_policy(llama):
    class Newer(POLICIES["snapkv"]):
        version = POLICIES["snapkv"].version + 1

    assert Ada(inner=Newer()).revision != Ada().revision
    job = llama.engine.prepare(llama.ids, policy="ada")
    assert job.identity.policy_version == Ada().revision != llama.engine.prepare(llama.ids).identity.policy_version


@pytest.mark.parametrize("name", [name for name, _ in bases()])
def test_every_base_has_heads_that_choose_for_themselves(tiny, document, name):
    """And a share that differs: else budgets per head would mean nothing, and `shared_by_heads` should say so."""
    own = {"across": "head"} if name in SHARING else {}
    alone = tiny.compress(document, policy=name, compression_ratio=0.75, **own)
    assert any(not torch.equal(record.positions[0], record.positions[1]) for record in alone.layers)
    ada = tiny.compress(document, policy="ada", base=name, compression_ratio=0.75)
    assert [record.entries for record in ada.layers] == [record.entries for record in alone.layers]
    assert not all(record.uniform for record in ada.layers)
    assert ada.identity.policy_params.items() >= {"base": name, "across": "layer"}.items()


def test_bases_and_ada_share_no_parameter_name():
    assert {"snapkv", "keydiff", "pyramidkv"} <= dict(bases()).keys()
    for name, cls in bases():
        assert issubclass(cls, ScoringPolicy)
        shared = OWN & {f.name for f in parameter_fields(cls)}
        assert shared == ({"across"} if name in SHARING else set()), name


@pytest.mark.parametrize("across", ["layer", "cache"])
def test_ada_shares_in_place_of_a_base_that_shares_budgets_itself(tiny, document, across):
    ada = build("ada", {"base": "kvcues", "every": 9, "across": across})
    assert ada.inner == build("kvcues", {"every": 9, "across": "head"})
    assert ada.parameters()["across"] == across
    assert build("ada", ada.parameters()) == ada
    cache = tiny.compress(document, policy="ada", base="kvcues", across=across, compression_ratio=0.75)
    entries = [record.entries for record in cache.layers]
    assert (len(set(entries)) == 1) == (across == "layer")


def test_the_catalog_shows_adas_own_parameters():
    info = next(info for info in catalog() if info.name == "ada")
    assert set(info.parameters) == OWN
    assert info.parameters["base"].default == "snapkv"
