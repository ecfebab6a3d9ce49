"""EMS: against its formulas written out in loops, and every invariant of the method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept, Merged
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.function import CONTEXT
from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.prefix_attention import LogitRules
from kvshelf.kernels.prefix_attention.eager import attend_prefix
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import LayerView, build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import DocumentView, Probed

KV_HEADS = 2


def view(tokens, *, group=2, dim=8, protected=0, seed=0, probes=(), dtype=torch.float32):
    """A layer whose keys and values have a direction in common, as real ones do: random ones hardly ever merge."""
    generator = torch.Generator().manual_seed(seed)

    def make(heads, rows, shared=0.0):
        return (torch.randn(heads, rows, dim, generator=generator) + shared * torch.ones(dim)).to(dtype)

    queries = make(KV_HEADS * group, tokens)
    probed = tuple(Probed(make(KV_HEADS * group, rows), make(KV_HEADS, rows), make(KV_HEADS, rows)) for rows in probes)
    source = DocumentView(range(tokens), protected)
    return LayerView(0, make(KV_HEADS, tokens, 1), make(KV_HEADS, tokens, 1), queries, dim**-0.5, source, probes=probed)


def reduced(layer, budget, **params):
    policy = build("ems", params).fitted(
        layer.document, Budget(budget, 1 - budget / layer.num_tokens), frozenset(params)
    )
    return policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))


def expanded(record, head, rope=None):
    """Every slot of one head as a token of its own, fp64: positions, keys and values, one by one."""
    start, stop = record.slot_offsets[head : head + 2]
    keys, values, positions = [], [], record.slot_positions[start:stop].tolist()
    for slot in range(start, stop):
        row = record.offsets[head] + int(record.slot_classes[slot])
        keys.append(record.keys[row].double() * float(record.slot_scales[slot]))
        values.append(record.values[row].double())
    keys = torch.stack(keys)
    if record.rope_mode == "pre":
        cos, sin = (table.double() for table in rope.tables(torch.tensor(positions)))
        turned = torch.cat([-keys[:, keys.shape[1] // 2 :], keys[:, : keys.shape[1] // 2]], dim=1)
        keys = keys * cos + turned * sin
    return positions, keys, torch.stack(values)


def attended(queries, keys, values, scale):
    """Attention and log-sum-exp of `[R, D]` queries, fp64."""
    logits = scale * queries.double() @ keys.double().T
    return logits.softmax(dim=1) @ values.double(), logits.logsumexp(dim=1)


# The method, written out


def column_sums(layer, head, window):
    """Of one query head: s_glo, s_loc `[N]` in fp64, and how many columns the means of eq. 2 run over."""
    group, end = len(layer.queries) // KV_HEADS, layer.num_tokens
    keys = layer.keys[head // group].double()
    shortest = min((len(probed.queries[0]) for probed in layer.probes), default=0)
    tail = max(0, window - shortest)
    everywhere, local = torch.zeros(end).double(), torch.zeros(end).double()
    for i in range(end):
        row = (layer.scaling * keys[: i + 1] @ layer.queries[head, i].double()).softmax(dim=0)
        everywhere[: i + 1] += row
        if i >= end - tail:
            local[: i + 1] += row
    for probed in layer.probes:
        own, length = probed.keys[head // group].double(), len(probed.queries[0])
        for t in range(max(0, length - window), length):
            seen = torch.cat([keys, own[: t + 1]])
            local += (layer.scaling * seen @ probed.queries[head, t].double()).softmax(dim=0)[:end]
    judged = end - tail if layer.probes else end
    local[judged:] = 0
    return everywhere, local, judged, tail


def naive_scores(layer, kv_head, window, kernel, by="both"):
    group, end = len(layer.queries) // KV_HEADS, layer.num_tokens
    mean = [0.0] * end
    for head in range(kv_head * group, (kv_head + 1) * group):
        everywhere, local, judged, _ = column_sums(layer, head, window)
        ratio = float(local[:judged].sum() / everywhere[:judged].sum())
        for j in range(end):
            glo, loc = float(everywhere[j]) * ratio, float(local[j])
            mean[j] += {"both": max(glo, loc), "global": glo, "local": loc}[by] / group
    reach = kernel // 2
    return [sum(mean[max(0, j - reach) : j + reach + 1]) / kernel for j in range(end)]


def cosine(a, b):
    return float(a.double() @ b.double()) / math.sqrt(float(a.double() @ a.double()) * float(b.double() @ b.double()))


def naive_classes(layer, kv_head, budget, window, kernel, gamma, tau, score="both", similarity="both"):
    """center position -> positions of its members; and the scores."""
    scores, end = naive_scores(layer, kv_head, window, kernel, score), layer.num_tokens
    *_, tail = column_sums(layer, 0, window)
    always = {*range(layer.protected_prefix), *range(end - tail, end)}
    ranked = sorted((j for j in range(end) if j not in always), key=lambda j: (-scores[j], j))
    important = ranked[: budget - len(always)]
    candidates = ranked[len(important) :][: math.floor((gamma - 1) * budget)]
    classes = {j: [] for j in [*always, *important]}
    keys, values = layer.keys[kv_head], layer.values[kv_head]
    for i in candidates:
        cosines = {j: (cosine(keys[i], keys[j]), cosine(values[i], values[j])) for j in important}
        alike = {j: {"both": k * v, "keys": k, "values": v}[similarity] for j, (k, v) in cosines.items()}
        nearest = max(alike, key=lambda j: (alike[j], -j))
        if alike[nearest] >= tau and (similarity != "both" or cosines[nearest][0] > 0):
            classes[nearest].append(i)
    return classes, scores


@pytest.mark.parametrize("probes", [(), (3,), (9, 12)], ids=["no probe", "short probe", "two questions"])
@pytest.mark.parametrize("seed", range(5))
def test_is_the_method_written_out_in_loops(seed, probes):
    layer = view(90 + seed, group=1 + seed % 3, protected=seed % 3, seed=seed, probes=probes)
    budget, window, kernel, gamma, tau = 24, 6, 3 + 2 * (seed % 3), 2.5, 0.7
    record = reduced(layer, budget, window=window, kernel=kernel, gamma=gamma, tau=tau)
    assert record.slots > record.entries, "nothing merged, so nothing was tested"
    for head in range(KV_HEADS):
        classes, scores = naive_classes(layer, head, budget, window, kernel, gamma, tau)
        assert record.positions[head].tolist() == sorted(classes)
        owner = {i: center for center, members in classes.items() for i in [center, *members]}
        slots = slice(*record.slot_offsets[head : head + 2])
        assert record.slot_positions[slots].tolist() == sorted(owner)
        centers = [sorted(classes)[index] for index in record.slot_classes[slots].tolist()]
        assert centers == [owner[i] for i in sorted(owner)]
        positions, keys, values = expanded(record, head)
        for position, key, value in zip(positions, keys, values, strict=True):
            together = [owner[position], *classes[owner[position]]]
            total = sum(scores[i] for i in together)
            own = layer.keys[head].double()
            direction = sum(scores[i] * own[i] / own[i].norm() for i in together)
            assert torch.allclose(key, own[position].norm() * direction / direction.norm(), atol=1e-5)
            mean = sum(scores[i] * layer.values[head, i].double() for i in together) / total
            assert torch.allclose(value, mean, atol=1e-5)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    "ablation", [{"score": "global"}, {"score": "local"}, {"similarity": "keys"}, {"similarity": "values"}]
)
def test_the_paper_s_ablations_are_those_written_out_in_loops(group, ablation):
    """Tables 4 and 8 of the paper."""
    layer, budget, sizes = view(90, group=group, protected=1, seed=group), 24, {"window": 6, "kernel": 3, "gamma": 2.5}
    record, whole = (reduced(layer, budget, tau=0.7, **sizes, **chosen) for chosen in (ablation, {}))
    for head in range(KV_HEADS):
        classes, _ = naive_classes(layer, head, budget, tau=0.7, **sizes, **ablation)
        assert record.positions[head].tolist() == sorted(classes)
        slots = slice(*record.slot_offsets[head : head + 2])
        owner = {i: center for center, members in classes.items() for i in [center, *members]}
        assert record.slot_positions[slots].tolist() == sorted(owner)
        assert [sorted(classes)[i] for i in record.slot_classes[slots].tolist()] == [owner[i] for i in sorted(owner)]
    assert record.slot_positions.tolist() != whole.slot_positions.tolist(), "the ablation changed nothing"
    everything = reduced(layer, 90, **ablation)
    assert torch.equal(everything.keys, layer.keys.flatten(0, 1))
    assert torch.equal(everything.values, layer.values.flatten(0, 1))


# The invariants


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 300), seed=st.integers(0, 99), data=st.data())
def test_without_a_probe_the_ratio_of_the_means_is_window_over_n(tokens, seed, data):
    """Every row of a softmax sums to 1, so eq. 2 is max(s_glo * w / N, s_loc)."""
    window = data.draw(st.integers(1, tokens))
    layer = view(tokens, group=1, seed=seed)
    everywhere, local = layer.column_sums(window)
    expected = torch.maximum(everywhere * (window / tokens), local)
    scores = build("ems", {"window": window, "kernel": 1}).scores(layer)[0]
    assert torch.allclose(scores, expected, rtol=1e-5, atol=0)


sizes = {"tokens": st.integers(20, 300), "share": st.floats(0.1, 0.9), "seed": st.integers(0, 99)}


@settings(max_examples=40, deadline=None)
@given(**sizes, protected=st.integers(0, 3), off=st.sampled_from([{"tau": 1.01}, {"gamma": 1}]))
def test_above_tau_1_and_at_gamma_1_it_is_pure_eviction(tokens, share, seed, protected, off):
    layer, budget = view(tokens, seed=seed, protected=protected), max(protected + 4, int(share * tokens))
    record, evicted = reduced(layer, budget, **off), reduced(layer, budget, merge=False)
    assert isinstance(record, Merged)
    assert isinstance(evicted, Kept)
    assert torch.equal(record.keys, evicted.keys)
    assert torch.equal(record.values, evicted.values)
    assert torch.equal(record.entry_positions, evicted.entry_positions)
    assert torch.equal(record.slot_positions, record.entry_positions)
    assert torch.equal(record.importance, evicted.importance)
    assert bool((record.slot_scales == 1).all())


@settings(max_examples=60, deadline=None)
@given(**sizes, protected=st.integers(0, 3), gamma=st.floats(1, 6), tau=st.floats(0, 1), probe=st.integers(0, 40))
def test_the_budget_counts_classes_and_gamma_bounds_the_slots(tokens, share, seed, protected, gamma, tau, probe):
    layer = view(tokens, seed=seed, protected=protected, probes=(probe,) if probe else ())
    budget = max(protected + 4, int(share * tokens))
    record = reduced(layer, budget, gamma=gamma, tau=tau)
    evicted = reduced(layer, budget, merge=False)
    assert [head.tolist() for head in record.positions] == [head.tolist() for head in evicted.positions]
    assert record.lengths == [budget] * KV_HEADS, "merging changes nothing about what is kept"
    for head, slots in enumerate(record.slot_lengths):
        assert budget <= slots <= max(budget, gamma * budget)
        own = slice(*record.slot_offsets[head : head + 2])
        positions, classes = record.slot_positions[own].tolist(), record.slot_classes[own].tolist()
        assert positions == sorted(set(positions))
        centers = record.positions[head].tolist()
        assert all(classes[positions.index(center)] == index for index, center in enumerate(centers))
        # Protected tokens are alone in their classes.
        always = [index for index in range(budget) if record.importance[record.offsets[head] + index] == torch.inf]
        assert {*range(protected)} <= {centers[index] for index in always}
        assert all(classes.count(index) == 1 for index in always)
        for index in range(budget):
            if classes.count(index) == 1:
                row = record.offsets[head] + index
                assert torch.equal(record.keys[row], layer.keys[head, centers[index]])
                assert torch.equal(record.values[row], layer.values[head, centers[index]])


def repeated(tokens, distinct, seed, *, rope=None, dim=8):
    """A document of few distinct tokens: equal values, keys of equal direction and different length. With `rope` they
    are equal before it."""
    layer = view(tokens, seed=seed, dim=dim)
    generator = torch.Generator().manual_seed(seed)
    of = torch.randint(distinct, (tokens,), generator=generator)
    keys = torch.randn(KV_HEADS, distinct, dim, generator=generator)[:, of]
    keys *= 0.5 + torch.rand(KV_HEADS, tokens, 1, generator=generator)
    values = torch.randn(KV_HEADS, distinct, dim, generator=generator)[:, of]
    keys = keys if rope is None else rope.rotate(keys, torch.arange(tokens))
    return replace(layer, keys=keys, values=values, rope=rope)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(60, 200),
    distinct=st.integers(2, 5),
    seed=st.integers(0, 99),
    pos=st.sampled_from(["post", "pre"]),
)
def test_a_duplicate_token_merges_losslessly(llama, tokens, distinct, seed, pos):
    """Twice as many tokens take part as are stored, and attention over them is that over the tokens themselves."""
    rope = llama.engine.rope if pos == "pre" else None
    dim = llama.engine.model.config.head_dim
    layer = repeated(tokens, distinct, seed, rope=rope, dim=dim)
    budget = tokens // 2
    record = reduced(layer, budget, window=4, gamma=2, tau=0.999, pos=pos)
    assert record.slots > 1.5 * record.entries
    queries = torch.randn(5, dim, generator=torch.Generator().manual_seed(seed))
    (prefix,) = record.prefixes(rope.rotate if rope else None)
    outs, lses = attend_prefix(queries.expand(1, record.kv_heads, -1, -1), prefix, LogitRules(layer.scaling))
    for head, (out, lse) in enumerate(zip(outs[0], lses[0], strict=True)):
        positions = record.slot_positions[slice(*record.slot_offsets[head : head + 2])].long()
        exact, exact_lse = attended(queries, layer.keys[head, positions], layer.values[head, positions], layer.scaling)
        assert torch.allclose(out.double(), exact, atol=1e-5)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(**sizes, tau=st.floats(0.2, 0.9))
def test_the_zero_class_has_no_mass(tokens, share, seed, tau):
    """Evicted tokens are in no slot, and the softmax is over the slots alone: a zero key would add exp(0)."""
    layer, budget = view(tokens, seed=seed), max(4, int(share * tokens))
    record = reduced(layer, budget, tau=tau)
    queries = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    (prefix,) = record.prefixes()
    outs, lses = attend_prefix(queries.expand(1, record.kv_heads, -1, -1), prefix, LogitRules(layer.scaling))
    for head, (out, lse) in enumerate(zip(outs[0], lses[0], strict=True)):
        positions, keys, values = expanded(record, head)
        assert len(positions) < tokens or budget * 4 >= tokens
        exact, exact_lse = attended(queries, keys, values, layer.scaling)
        assert torch.allclose(out.double(), exact, atol=1e-5)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-5)


def test_merging_is_by_weight():
    """Two tokens of equal direction: the value of their class leans to the one that is attended to more."""
    layer = view(40, group=1, seed=1)
    record = reduced(layer, 10, window=2, kernel=1, tau=0.0)
    policy = build("ems", {"window": 2, "kernel": 1})
    scores = policy.scores(layer)[0]
    pairs = 0
    for head in range(KV_HEADS):
        slots = slice(*record.slot_offsets[head : head + 2])
        positions, classes = record.slot_positions[slots].tolist(), record.slot_classes[slots].tolist()
        for index, center in enumerate(record.positions[head].tolist()):
            members = [p for p, c in zip(positions, classes, strict=True) if c == index and p != center]
            if len(members) == 1:
                pairs += 1
                value = record.values[record.offsets[head] + index]
                first, second = (layer.values[head, p] for p in (center, members[0]))
                weight = float(scores[head, center] / (scores[head, center] + scores[head, members[0]]))
                assert 0.5 <= weight < 1
                assert torch.allclose(value, weight * first + (1 - weight) * second, atol=1e-5)
    assert pairs


def test_keys_that_point_apart_never_merge():
    """Key and value both turned round: the product of the cosines is 1, and the mean direction is nothing."""
    layer = view(60, group=1, seed=2)
    sign = torch.ones(60)
    sign[::2] = -1
    layer.keys[:] = sign[:, None] * layer.keys[:, :1]
    layer.values[:] = sign[:, None] * layer.values[:, :1]
    record = reduced(layer, 20, window=2)
    assert record.slots > record.entries
    for head in range(KV_HEADS):
        positions, keys, values = expanded(record, head)
        assert torch.allclose(keys, layer.keys[head, positions].double(), atol=1e-5)
        assert torch.allclose(values, layer.values[head, positions].double(), atol=1e-5)


def test_scores_that_underflow_still_have_a_mean():
    layer = view(80, seed=4)
    layer.keys[:, :1] = 1000 * layer.queries[:1, 0]  # a sink that takes all of every row that points at it
    layer.queries[:] = layer.queries[:1, :1]
    record = reduced(layer, 20, window=2, tau=0.0)
    assert record.slots > record.entries
    assert all(bool(t.isfinite().all()) for t in (record.keys, record.values, record.slot_scales))


def test_bf16_keeps_its_dtype_and_its_tokens():
    layer = view(200, dtype=torch.bfloat16)
    record, exact = reduced(layer, 60), reduced(view(200), 60)
    assert (record.keys.dtype, record.values.dtype) == (torch.bfloat16, torch.bfloat16)
    assert record.slot_scales.dtype == torch.float32
    shared = [len({*a.tolist()} & {*b.tolist()}) for a, b in zip(record.positions, exact.positions, strict=True)]
    assert min(shared) >= 57


# Through the product


@dataclass
class Recorder:
    """The queries, keys and values of each layer's call, and what its attention gave to o_proj."""

    probe_lengths: tuple[int, ...] = ()
    hides: bool = False
    states: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)

    def after_attention(self, layer):
        self.states.append((layer.queries[0], layer.keys[0], layer.values[0], layer.scaling))

    def hooks(self, model):
        return [
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: self.outputs.append(args[0][0]))
            for layer in model.base_model.layers
        ]


@pytest.mark.parametrize("pos", ["post", "pre"])
def test_attention_of_an_attached_cache_is_that_over_the_expanded_slots(oracle, pos):
    engine, ids = oracle.engine, oracle.ids
    # Random models: few tokens are similar, so anything above 0.1 merges.
    cache = engine.compress(ids[:400], policy="ems", budget_tokens=100, pos=pos, tau=0.1)
    assert all(record.slots > record.entries == 100 * record.kv_heads for record in cache.layers)
    for copy in (cache, CompressedCache.from_bytes(cache.to_bytes())):
        engine.attach(copy)  # the first one measures the model's layers in a forward pass, which the hooks would see
        recorder = Recorder()
        hooks = recorder.hooks(oracle.model)
        with engine.attached(copy) as past, torch.no_grad():
            oracle.model(torch.tensor([ids[400:430]]), **{CACHE_ARGUMENT: past, CONTEXT: recorder})
        for hook in hooks:
            hook.remove()
        for record, states, out in zip(copy.layers, recorder.states, recorder.outputs, strict=True):
            queries, new_keys, new_values, scaling = states
            group = len(queries) // record.kv_heads
            out = out.unflatten(1, (len(queries), -1))  # [T, q_heads, Dv]
            for head in range(len(queries)):
                _, keys, values = expanded(record, head // group, engine.rope)
                for row in (0, 13, 29):
                    seen = torch.cat([keys, new_keys[head // group, : row + 1].double()])
                    own = torch.cat([values, new_values[head // group, : row + 1].double()])
                    query = queries[head, row : row + 1]
                    exact, _ = attended(query, seen, own, scaling)
                    # Logits near 40 are rounded to 4e-6 in fp32. Two roundings of each move the mean of the values by
                    # at most that times their mean distance from it.
                    logits = scaling * query.double() @ seen.T
                    rounding = 2 * torch.finfo(torch.float32).eps * logits.abs().max()
                    tolerance = 1e-5 + 1e-4 * exact.abs() + rounding * (logits.softmax(1) @ (own - exact).abs())
                    assert bool(((out[row, head].double() - exact[0]).abs() <= tolerance[0]).all())


def test_pre_undoes_the_rotation_and_attention_redoes_it(oracle):
    """Above tau 1 nothing merges: both forms are the kept tokens as they were."""
    post, pre = (
        oracle.engine.compress(oracle.ids[:300], policy="ems", budget_tokens=100, tau=1.1, pos=pos)
        for pos in ("post", "pre")
    )
    for ours, theirs in zip(pre.layers, post.layers, strict=True):
        assert (ours.rope_mode, theirs.rope_mode) == ("pre", "baked")
        assert torch.equal(ours.entry_positions, theirs.entry_positions)
        assert not torch.allclose(ours.keys, theirs.keys, atol=1e-2)
        for head in range(ours.kv_heads):
            _, turned, _ = expanded(ours, head, oracle.engine.rope)
            assert torch.allclose(turned, theirs.heads()[head][0].double(), atol=1e-4)


def test_more_is_similar_before_the_rotation(tiny):
    """What the paper says of its "w.o. pos" build, on the bundled model."""
    text = " ".join(f"The ferry to pier {i} leaves at noon and returns at night." for i in range(40))
    slots = {
        pos: sum(record.slots for record in tiny.compress(text, policy="ems", pos=pos).layers)
        for pos in ("post", "pre")
    }
    assert slots["pre"] > slots["post"]


def test_only_pre_needs_a_rotation_that_can_be_undone():
    """RoPE that changes with the length can not be undone from outside; the other forms do not ask for it."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    engine = Engine(LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope)))
    ids = list(range(60))
    with pytest.raises(PolicyUnsupported, match="length of the sequence"):
        engine.prepare(ids, policy="ems", policy_params={"pos": "pre"})
    for params in ({}, {"pos": "pre", "merge": False}):
        cache = engine.run(engine.prepare(ids, policy="ems", policy_params=params)).cache
        assert cache.kept_tokens == 30
    assert build("ems", {}).needs == Needs.QUERIES | Needs.SUMS
    assert build("ems", {"pos": "pre"}).needs == Needs.QUERIES | Needs.SUMS | Needs.ROPE


def test_a_window_that_does_not_fit_is_refused_and_the_default_shrinks(llama):
    with pytest.raises(PolicyUnsupported, match="window is 101") as refused:
        llama.engine.prepare(llama.ids, policy="ems", budget_tokens=100, policy_params={"window": 101})
    assert refused.value.param == "policy_params.window"
    job = llama.engine.prepare(llama.ids, policy="ems", budget_tokens=20)
    assert job.identity.policy_params["window"] == 10
