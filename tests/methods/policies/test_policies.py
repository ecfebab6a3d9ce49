"""What holds for every policy, and what each refuses."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvshelf.artifact.records import Kept
from kvshelf.errors import DocumentTooShort, InvalidRequest, KvshelfError, PolicyUnsupported
from kvshelf.methods.catalog import catalog
from kvshelf.methods.method import LARGEST, Needs, parameter_fields, parameter_types
from kvshelf.methods.policies import POLICIES, LayerView, build
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.view import DocumentView, Probed
from kvshelf.model.calibration import Calibration, Origin
from kvshelf.model.rope import Rope
from kvshelf.model.source import bundled_folder
from kvshelf.model.text import TextFormat
from tests.amounts import amount
from tests.methods.policies.gates import with_gates

REDUCING = [name for name, policy in POLICIES.items() if policy.takes_budget]


def view(tokens, *, kv_heads=2, group=2, dim=8, protected=0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    make = lambda heads: torch.randn(tokens, heads, dim, generator=generator).to(dtype).transpose(0, 1)  # noqa: E731
    source = DocumentView(range(tokens), protected, text=bundled_text(), calibration=calibration(kv_heads * group))
    source = replace(source, surprisals=torch.rand(tokens, generator=torch.Generator().manual_seed(seed)))
    rope, module = attention(kv_heads * group, dim)
    return LayerView(
        0, make(kv_heads), make(kv_heads), make(kv_heads * group), dim**-0.5, source, rope=rope, module=module
    )


@functools.cache
def bundled_text():
    return TextFormat(AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")))


@functools.cache
def attention(heads, dim, dtype=torch.float32):
    """The RoPE and an attention module of a random model."""
    config = LlamaConfig(
        hidden_size=heads * dim, num_attention_heads=heads, num_hidden_layers=1, intermediate_size=8, vocab_size=8
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    return Rope.of(model), model.model.layers[0].self_attn


@functools.cache
def calibration(query_heads):
    """Of a model of one layer whose heads are better the later they come."""
    origin = Origin(model="random", documents=1, tokens=1, answered=1, compression_ratio=0.5)
    scores = tuple(head / query_heads for head in range(query_heads))
    return Calibration(weights="none", head_scores=(scores,), layer_errors=(1.0,), origin=origin)


def fitted(name, layer, budget, **params):
    """The policy as an engine would fit it."""
    layer = with_gates(name, layer)
    return build(name, params).fitted(layer.document, Budget(budget, 1 - budget / layer.num_tokens), frozenset(params))


def probed(policy, layer):
    """The layer with random states for every pass that the policy asks for."""
    generator = torch.Generator().manual_seed(layer.num_tokens)

    def make(like, rows):
        return torch.randn(like.shape[0], rows, like.shape[2], generator=generator).to(like.dtype)

    rows = [len(probe.token_ids) for probe in policy.probe_passes(layer.document)]
    states = (layer.queries, layer.keys, layer.values)
    return replace(layer, probes=tuple(Probed(*(make(like, count) for like in states)) for count in rows))


def reduced(name, layer, budget, **params):
    policy, layer = fitted(name, layer, budget, **params), with_gates(name, layer)
    return policy, reduced_by(policy, layer, budget)


def reduced_by(policy, layer, budget):
    """As the engine reduces a cache of this one layer."""
    layer = probed(policy, layer)
    notes = {0: policy.noted(layer)}
    record = policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
    return policy.finished({0: record}, notes, Budget(budget, 1 - budget / layer.num_tokens))[0]


def of_one_token(record, head):
    """Which entries of a head are tokens as they were: all but the classes of several."""
    if isinstance(record, Kept):
        return torch.ones(record.lengths[head], dtype=torch.bool)
    classes = record.slot_classes[slice(*record.slot_offsets[head : head + 2])]
    return torch.bincount(classes.long()) == 1


TOKENS_AS_THEY_WERE = {"cam": {"probability": 0.0}, **{name: {"store": "slots"} for name in ("d2o", "kvmerger")}}
"""Parameters with which an entry says whether it is one token as it was."""


@pytest.mark.parametrize("name", REDUCING)
@settings(max_examples=amount(15, 40), deadline=None)
@given(tokens=st.integers(8, 400), share=st.floats(0.05, 0.99), protected=st.integers(0, 3), seed=st.integers(0, 99))
def test_what_holds_for_every_policy(name, tokens, share, protected, seed):
    budget = max(protected + 4, int(tokens * share))
    if budget >= tokens:
        return
    layer = view(tokens, protected=protected, seed=seed)
    try:
        policy, record = reduced(name, layer, budget, **TOKENS_AS_THEY_WERE.get(name, {}))
    except PolicyUnsupported:
        # Only these two, and only where sink and two partitions of the smallest lag do not fit.
        assert name in ("lagkv", "localkv")
        assert budget < protected + 4 + 2 * 2
        return
    lengths = [len(head) for head in record.positions]
    if policy.exact:
        assert sum(lengths) == budget * layer.kv_heads, "the kept total is exact"
    if not policy.budgets_heads and getattr(type(policy), "counts", ScoringPolicy.counts) is ScoringPolicy.counts:
        assert lengths == [budget] * layer.kv_heads
    if policy.prunes:
        return  # the keys are other ones
    for head, (keys, values) in enumerate(record.heads()):
        positions = record.positions[head].long()
        assert torch.equal(positions, positions.unique()), "ascending, none twice"
        assert positions[:protected].tolist() == list(range(protected)), "the template's tokens stay"
        unchanged = of_one_token(record, head)
        assert torch.equal(keys[unchanged], layer.keys[head, positions[unchanged]])
        assert torch.equal(values[unchanged], layer.values[head, positions[unchanged]])
    assert record.importance is not None, "codecs of mixed precision need it"
    again = reduced_by(policy, with_gates(name, layer), budget)
    assert torch.equal(again.keys, record.keys)
    assert torch.equal(again.entry_positions, record.entry_positions)
    # What is recorded as used gives the same policy again.
    assert build(name, policy.parameters()) == policy


@pytest.mark.parametrize("name", REDUCING)
def test_scores_are_fp32_whatever_the_dtype(name):
    """In bf16 hundreds of scores would tie and positions would decide."""
    exact = view(300, seed=3)
    rounded = replace(
        exact,
        keys=exact.keys.bfloat16(),
        values=exact.values.bfloat16(),
        queries=exact.queries.bfloat16(),
        module=attention(4, 8, torch.bfloat16)[1],
    )
    in_fp32 = replace(exact, keys=rounded.keys.float(), values=rounded.values.float(), queries=rounded.queries.float())
    kept = [set(reduced(name, layer, 100)[1].positions[0].tolist()) for layer in (rounded, in_fp32)]
    # Some multiply in the model's dtype, one of them by rounded weights; the others see equal numbers.
    least = {"snapkv": 95, "kvzip": 95, "fair": 95, "kvcues": 95, "defensivekv": 90, "layer_defensivekv": 90}.get(
        name, 100
    )
    assert len(kept[0] & kept[1]) >= least / 100 * len(kept[1])  # the first of heads that share may keep less than 100


@pytest.mark.parametrize("name", REDUCING)
def test_a_view_is_not_modified(name):
    layer = view(200)
    before = layer.keys.clone(), layer.values.clone(), layer.queries.clone()
    reduced(name, layer, 50)
    assert all(torch.equal(a, b) for a, b in zip(before, (layer.keys, layer.values, layer.queries), strict=True))


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"kvdirect"}))  # see test_projection.py
def test_a_budget_of_everything_keeps_everything(llama, name):
    options = {"compression_ratio": 0.0} if POLICIES[name].takes_budget else {}
    cache = llama.engine.compress(llama.ids[:90], policy=name, **options)
    assert all(head.tolist() == list(range(90)) for record in cache.layers for head in record.positions)
    assert cache.identity.compression_ratio == 0
    full = llama.engine.compress(llama.ids[:90], policy="full")
    for ours, whole in zip(cache.layers, full.layers, strict=True):
        (keys, values, _), (of_full, values_of_full, _) = ours.dense(), whole.dense()
        pruned = (keys == 0) & POLICIES[name].prunes
        assert torch.equal(keys, of_full.masked_fill(pruned, 0))
        assert torch.equal(values, values_of_full)


def test_a_policy_sees_the_queries_only_if_it_says_so(llama):
    """What `needs` says is what the prefill must hand over; a policy that reads more fails at once."""

    class Undeclared(POLICIES["snapkv"]):
        needs = Needs.NOTHING

    job = llama.engine.prepare(llama.ids, policy="snapkv")
    with pytest.raises(AssertionError, match="observes"):
        llama.engine.run(replace(job, policy=Undeclared()))


def test_streaming_llm_keeps_sinks_and_the_most_recent():
    _, record = reduced("streaming_llm", view(20), 7, sink=3)
    assert record.positions[0].tolist() == [0, 1, 2, 16, 17, 18, 19]


def test_ragged_budgets_are_kept_per_head():
    layer = view(120)
    for name in REDUCING:
        policy = fitted(name, layer, 30)
        counts = getattr(type(policy), "counts", ScoringPolicy.counts)
        if counts is not ScoringPolicy.counts or policy.budgets_heads or policy.phase == "after":
            continue  # it shares the budgets out anew
        record = policy.reduce(probed(policy, with_gates(name, layer)), LayerBudget((30, 61)))
        assert [len(head) for head in record.positions] == [30, 61]


def test_snapkv_keeps_what_the_window_attends_to():
    """A key that the window's queries point at wins over 300 random ones."""
    layer = view(300, group=1)
    for head in range(2):
        layer.keys[head, 77] = 30 * layer.queries[head, -16:].mean(dim=0)
    _, record = reduced("snapkv", layer, 20, window=16, kernel=1)
    assert all(77 in head.tolist() for head in record.positions)


def test_keydiff_keeps_the_odd_key():
    layer = view(200)
    layer.keys[:] = torch.ones(8) + 0.01 * layer.keys
    layer.keys[:, 123] = -torch.ones(8)
    _, record = reduced("keydiff", layer, 4)
    assert all(123 in head.tolist() for head in record.positions)


@pytest.mark.parametrize("tokens", [300, 301, 363])
def test_lagkv_gives_the_remainder_to_the_earliest_partitions(tokens):
    _, record = reduced("lagkv", view(tokens), 150, sink=4, lag=32)
    tail = 32 + (tokens - 4) % 32
    partitions = (tokens - 4 - tail) // 32
    counts = torch.bincount((record.positions[0].long()[4:-tail] - 4) // 32, minlength=partitions)
    assert int(counts.sum()) == 150 - 4 - tail
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)
    assert int(counts.max() - counts.min()) <= 1


def test_lagkv_of_a_longer_document_keeps_the_same_of_earlier_partitions():
    """Streaming: what a partition keeps depends on nothing after its successor, at equal shares."""
    long = view(4 + 32 * 12)
    early = slice(4 + 32 * 6)
    short = LayerView(
        0, long.keys[:, early], long.values[:, early], long.queries, long.scaling, DocumentView(range(196))
    )
    share = 10
    _, kept_long = reduced("lagkv", long, 4 + 11 * share + 32, sink=4, lag=32)
    _, kept_short = reduced("lagkv", short, 4 + 5 * share + 32, sink=4, lag=32)
    for ours, prefix in zip(kept_long.positions, kept_short.positions, strict=True):
        assert ours[: 4 + 5 * share].tolist() == prefix[: 4 + 5 * share].tolist()


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("keydiff", {"window": 3}, "window"),
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"window": True}, "window"),
        ("snapkv", {"window": 64.0}, "window"),
        ("snapkv", {"kernel": 4}, "odd"),
        ("snapkv", {"pooling": "sum"}, "'avg', 'max'"),
        ("lagkv", {"lag": "128"}, "lag"),
        ("lagkv", {"lag": 1}, "from 2"),
        ("streaming_llm", {"sink": -1}, "from 0"),
        ("nope", {}, "keydiff"),
    ],
)
def test_bad_parameters_are_refused_by_name(name, params, named):
    with pytest.raises(InvalidRequest, match=named) as refused:
        build(name, params)
    assert refused.value.param == "policy" if name == "nope" else f"policy_params.{next(iter(params))}"


@pytest.mark.parametrize(
    ("policy", "params", "named"),
    [
        ("streaming_llm", {"sink": 300}, "sink is 300"),
        ("snapkv", {"window": 351}, "window is 351"),
        ("lagkv", {"lag": 256}, "lag 256"),
        ("lagkv", {"sink": 349}, "349"),
    ],
)
def test_given_parameters_the_budget_cannot_hold_are_refused(llama, policy, params, named):
    budget = 299 if policy == "streaming_llm" else 350
    with pytest.raises(PolicyUnsupported, match=named):
        llama.engine.prepare(llama.ids, policy=policy, budget_tokens=budget, policy_params=params)


def test_defaults_shrink_to_a_short_document_and_are_recorded(llama):
    job = llama.engine.prepare(llama.ids[:60], policy="snapkv", compression_ratio=0.5)
    assert job.identity.policy_params == {"window": 15, "probe": None, "kernel": 5, "pooling": "avg"}
    job = llama.engine.prepare(llama.ids[:60], policy="lagkv", compression_ratio=0.5)
    assert job.identity.policy_params.items() >= {"sink": 4, "lag": 16, "prefill": "whole"}.items()


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.0, 2, float("nan"), "0.5", True])
def test_ratios_outside_the_range_are_refused(llama, ratio):
    with pytest.raises(InvalidRequest, match="compression_ratio"):
        llama.engine.prepare(llama.ids, compression_ratio=ratio)


@pytest.mark.parametrize("tokens", [0, -3, 2.5, "7", True])
def test_bad_budgets_are_refused(llama, tokens):
    with pytest.raises(InvalidRequest, match="budget_tokens"):
        llama.engine.prepare(llama.ids, budget_tokens=tokens)


def test_ratio_and_budget_together_are_refused(llama):
    with pytest.raises(InvalidRequest, match="one of them"):
        llama.engine.prepare(llama.ids, compression_ratio=0.5, budget_tokens=3)


def test_full_takes_no_budget(llama):
    for budget in ({"compression_ratio": 0.5}, {"budget_tokens": 700}, {"compression_ratio": 0.0}):
        with pytest.raises(InvalidRequest, match="keeps everything"):
            llama.engine.prepare(llama.ids, policy="full", **budget)
    assert llama.engine.prepare(llama.ids, policy="full").identity.compression_ratio == 0


def test_a_budget_of_nothing_is_refused(llama):
    with pytest.raises(DocumentTooShort, match="leaves nothing"):
        llama.engine.prepare(llama.ids[:3], compression_ratio=0.9)


@pytest.mark.parametrize(
    ("tokens", "ratio", "kept"), [(1000, 0.9, 100), (700, 0.75, 175), (700, 0.3, 490), (7, 0.5, 3), (9, 0.0, 9)]
)
def test_the_budget_is_the_floor_of_what_was_meant(tokens, ratio, kept):
    assert Budget.resolve(tokens, compression_ratio=ratio, budget_tokens=None).tokens == kept


def test_the_catalog_describes_every_policy():
    infos = {info.name: info for info in catalog()}
    listed = {name for name in infos if not name.startswith("press:")}  # those are there where kvpress is
    assert listed == set(POLICIES) >= {"full", "streaming_llm", "snapkv", "lagkv", "keydiff"}
    assert infos["snapkv"].parameters["kernel"].odd
    assert infos["lagkv"].parameters["lag"].default == 128
    assert all(infos[name].summary.endswith(".") for name in listed)


@pytest.mark.parametrize("name", POLICIES)
def test_one_policy_one_short_file(name):
    source = Path(inspect.getfile(POLICIES[name]))
    assert source.stem == name
    assert len(source.read_text().splitlines()) <= 150


NUMBERS = [
    (name, parameter.name)
    for name, policy in POLICIES.items()
    for parameter in parameter_fields(policy)
    if {int, float} & set(parameter_types(policy)[parameter.name])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameter"), NUMBERS)
def test_a_number_however_large_is_used_or_refused_by_name(tiny, name, parameter):
    """`kernel: 2**31 + 1` and `every: 10**18` were errors of torch."""
    for value in (LARGEST, LARGEST - 1, 255):
        with suppress(KvshelfError):
            tiny.compress("The access code of the amber falcon is 482913. " * 8, policy=name, **{parameter: value})
    for value in (LARGEST + 1, -LARGEST - 1, 10**18, 10**5000, 1e300):
        with pytest.raises(InvalidRequest, match=f"parameter '{parameter}' of policy '{name}' is beyond"):
            build(name, {parameter: value})


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if issubclass(policy, KeepsScores)])
def test_numbers_that_answers_go_on_with_are_counted_beside_the_entries(name):
    policy = build(name, {})
    kept = replace(policy, keep_scores=True)
    assert kept.stored_beside == policy.stored_beside | {"columns": len(policy.column_names)}
    assert "columns" not in policy.stored_beside


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_may_be_given(name):
    policy = build(name, {})
    assert build(name, policy.parameters()) == policy


def test_layers_that_share_a_budget_keep_different_numbers():
    built = [build(name, {}) for name, policy in POLICIES.items() if issubclass(policy, ScoringPolicy)]
    shared = [policy for policy in built if policy.sharing is not None]
    assert len(shared) > 2
    assert all(policy.ragged for policy in shared)
