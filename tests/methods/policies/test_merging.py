"""D2O and KVMerger against their formulas in loops over lists, and every invariant of both."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact.records import Kept, Merged
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.merging import MergePlan
from kvshelf.methods.policies.view import DocumentView, LayerView
from tests.amounts import amount

KV_HEADS, DIM = 2, 6


def view(tokens, *, group=2, protected=0, seed=0, place=0, num_layers=1, peaked=1.0):
    """A layer whose neighbours look alike, as those of a text do."""
    generator = torch.Generator().manual_seed(100 * seed + place)

    def walk(heads):
        steps = torch.randn(heads, tokens, DIM, generator=generator)
        return torch.randn(heads, 1, DIM, generator=generator) + 0.5 * steps.cumsum(dim=1)

    document = DocumentView(range(tokens), protected, num_layers=num_layers, group=group)
    queries = peaked * torch.randn(KV_HEADS * group, tokens, DIM, generator=generator)
    return LayerView(
        place, walk(KV_HEADS), walk(KV_HEADS), queries, DIM**-0.5, document, num_layers=num_layers, place=place
    )


def reduced(name, layers, mean, **params):
    """The records of all layers, as the engine reduces them."""
    tokens = layers[0].num_tokens
    budget = Budget(mean, 1 - mean / tokens)
    policy = build(name, params).fitted(layers[0].document, budget, frozenset(params))
    notes, records = {}, {}
    for layer in layers:
        notes[layer.layer_idx] = policy.noted(layer)
        records[layer.layer_idx] = policy.reduce(layer, LayerBudget.uniform(KV_HEADS, mean))
    return policy, list(policy.finished(records, notes, budget).values())


def columns(layer):
    """The sums of the attention columns of each query head, in fp64: `q_heads` lists of N."""
    of_heads = []
    group = len(layer.queries) // KV_HEADS
    for head, queries in enumerate(layer.queries.double()):
        keys, sums = layer.keys[head // group].double(), [0.0] * layer.num_tokens
        for i, query in enumerate(queries):
            for j, weight in enumerate((layer.scaling * keys[: i + 1] @ query).softmax(0).tolist()):
                sums[j] += weight
        of_heads.append(sums)
    return of_heads


def scores_of(layer):
    group, sums = len(layer.queries) // KV_HEADS, columns(layer)
    return [
        [sum(sums[h * group + g][j] for g in range(group)) / group for j in range(layer.num_tokens)]
        for h in range(KV_HEADS)
    ]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def mean(rows, weights, over=None):
    total = sum(weights) if over is None else over
    return [sum(w * row[c] for w, row in zip(weights, rows, strict=True)) / total for c in range(len(rows[0]))]


# D2O


def claim(layer):
    variances = []
    for sums in columns(layer):
        average = sum(sums) / len(sums)
        variances.append(sum((x - average) ** 2 for x in sums) / (len(sums) - 1))
    low, high = min(variances), max(variances)
    return math.exp(-sum((v - low) / (high - low + 1e-6) for v in variances) / len(variances))


def naive_d2o(layer, count, *, sink=4, recent=0.5, tau=None, form="paper"):
    """position -> (key, value, members) for each head, in fp64."""
    scores, tokens = scores_of(layer), layer.num_tokens
    always = max(sink, layer.protected_prefix)
    last = min(int(recent * count), count - always)
    keys, values = layer.keys.double().tolist(), layer.values.double().tolist()
    kept, nearest = [], []
    for h in range(KV_HEADS):
        forced = {*range(always), *range(tokens - last, tokens)}
        ranked = sorted((j for j in range(tokens) if j not in forced), key=lambda j: (-scores[h][j], j))
        kept.append(sorted({*forced, *ranked[: count - len(forced)]}))
        of_head = {}
        for j in set(range(tokens)) - set(kept[h]):
            of_head[j] = max((cosine(keys[h][j], keys[h][c]), -c) for c in kept[h])
        nearest.append(of_head)
    every = [u for of_head in nearest for u, _ in of_head.values()]
    tau = (sum(every) / len(every) if every else 0.0) if tau is None else tau
    out = []
    for h in range(KV_HEADS):
        classes = {c: [c] for c in kept[h]}
        for j, (_, c) in sorted(nearest[h].items()):
            dropping = [of_head[j][0] for of_head in nearest if j in of_head]
            if sum(dropping) / len(dropping) >= tau:
                classes[-c].append(j)
        entries = {}
        for c, members in classes.items():
            weights = [1.0 if j == c else nearest[h][j][0] for j in members]
            if form == "paper":
                weights = [math.exp(w) for w in weights]
            over = len(members) if form == "code" else None
            entries[c] = (
                mean([keys[h][j] for j in members], weights, over),
                mean([values[h][j] for j in members], weights, over),
                sorted(members),
            )
        out.append(entries)
    return out


def assert_is(record, expected):
    for head, entries in enumerate(expected):
        positions = record.positions[head].tolist()
        assert positions == sorted(entries)
        keys, values = (states[head] for states in record.plain_heads())
        for row, position in enumerate(positions):
            key, value, members = entries[position]
            assert keys[row].tolist() == pytest.approx(key, rel=1e-4, abs=1e-5)
            assert values[row].tolist() == pytest.approx(value, rel=1e-4, abs=1e-5)
            if isinstance(record, Merged):
                start, stop = record.slot_offsets[head : head + 2]
                own = record.slot_classes[start:stop] == row
                assert record.slot_positions[start:stop][own].tolist() == members
    if isinstance(record, Merged):
        assert record.slot_scales.eq(1).all()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"form": "code"},
        {"tau": 0.9},
        {"tau": -1.0},
        {"recent": 0.1, "sink": 0},
        {"store": "slots"},
    ],
    ids=str,
)
def test_d2o_is_what_its_formulas_say(group, params):
    # Peaked: else the first tokens have the largest sums, and stay whether they are protected or not.
    layer = view(60, group=group, protected=2, seed=group, peaked=4.0)
    _, (record,) = reduced("d2o", [layer], 20, **params)
    assert isinstance(record, Merged if params.get("store") == "slots" else Kept)
    assert_is(record, naive_d2o(layer, 20, **{k: v for k, v in params.items() if k != "store"}))


def test_the_layers_of_d2o_share_a_budget_by_how_evenly_they_attend():
    layers = [view(80, place=i, num_layers=4, peaked=3.0**i) for i in range(4)]
    policy, records = reduced("d2o", layers, 30, sink=0)
    claims = [claim(layer) for layer in layers]
    counts = [record.lengths[0] for record in records]
    assert sum(counts) == 4 * 30
    assert counts == pytest.approx([120 * c / sum(claims) for c in claims], abs=1)
    assert len(set(counts)) > 1
    assert policy.phase == "after"
    for layer, count, record in zip(layers, counts, records, strict=True):
        assert_is(record, naive_d2o(layer, count, sink=0))


@settings(max_examples=amount(15, 60), deadline=None)
@given(share=st.floats(0.3, 0.95), first=st.integers(0, 2), last=st.integers(0, 1), seed=st.integers(0, 99))
def test_whole_layers_of_d2o_are_paid_for_by_the_others(share, first, last, seed):
    layers, mean = [view(40, place=i, num_layers=5, seed=seed) for i in range(5)], int(40 * share)
    if (5 * mean - 40 * (first + last)) // (5 - first - last) < 5:
        with pytest.raises(PolicyUnsupported, match=r"layers stay whole|sink is 4"):
            reduced("d2o", layers, mean, first=first, last=last, sink=4)
        return
    _, records = reduced("d2o", layers, mean, first=first, last=last, sink=4)
    counts = [record.lengths[0] for record in records]
    assert counts[:first] == [40] * first
    assert counts[5 - last :] == [40] * last
    assert sum(counts) == 5 * mean


def test_without_merging_d2o_is_h2o():
    layer = view(60)
    _, (ours,) = reduced("d2o", [layer], 20, tau=1.1, sink=0, recent=0.5)
    _, (theirs,) = reduced("h2o", [layer], 20, recent=10)
    assert torch.equal(ours.entry_positions, theirs.entry_positions)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("name", ["d2o", "kvmerger"])
@pytest.mark.parametrize("store", ["means", "slots"])
def test_what_is_equal_merges_to_itself(name, store):
    """Equal keys, and values that are the same everywhere: weights add up to 1."""
    layer = view(60)
    layer.keys[:] = torch.randn(KV_HEADS, 1, DIM, generator=torch.Generator().manual_seed(5))
    layer.values[:] = 2.5
    _, (record,) = reduced(name, [layer], 20, store=store)
    keys, values = (torch.stack(heads) for heads in record.plain_heads())
    assert torch.allclose(keys, layer.keys[:, :20], rtol=1e-5)
    assert torch.allclose(values, torch.tensor(2.5), rtol=1e-6)


def test_the_authors_code_shrinks_keys():
    layer = view(60)
    layer.keys[:] = layer.keys[:, :1]
    layer.keys[:, 30:] += 0.4 * torch.randn(KV_HEADS, 30, DIM, generator=torch.Generator().manual_seed(5))
    (_, (paper,)), (_, (code,)) = (reduced("d2o", [layer], 20, form=form, tau=-1.0) for form in ("paper", "code"))
    assert code.keys.norm() < paper.keys.norm()


# KVMerger


def naive_kvmerger(
    layer, count, *, heavy=0.25, recent=0.25, sink=4, width=1.0, sigma=None, value_sum=False, threshold=None
):
    scores, tokens = scores_of(layer), layer.num_tokens
    always, last = max(sink, layer.protected_prefix), int(recent * count)
    forced = {*range(always), *range(tokens - last, tokens)}
    left = count - always - last - 1
    hitters = min(int(heavy * count), left // 2 if threshold is None else left)
    keys, values = layer.keys.double().tolist(), layer.values.double().tolist()
    out = []
    for h in range(KV_HEADS):
        ranked = sorted((j for j in range(tokens) if j not in forced), key=lambda j: (-scores[h][j], j))
        single = forced | set(ranked[:hitters])
        pairs = [j for j in range(1, tokens) if j not in single and j - 1 not in single]
        cosines = {j: cosine(keys[h][j], keys[h][j - 1]) for j in pairs}
        alike = sorted(pairs, key=lambda j: (-cosines[j], j))[: tokens - count]
        if threshold is not None:
            alike = [j for j in pairs if cosines[j] > threshold]
        runs = []
        for j in range(tokens):
            if j in alike:
                runs[-1].append(j)
            else:
                runs.append([j])
        entries = {}
        for run in runs:
            pivot = min(run, key=lambda j: (-scores[h][j], j))
            squares = [sum((a - b) ** 2 for a, b in zip(keys[h][j], keys[h][pivot], strict=True)) for j in run]
            spread = sum(squares) / len(run)
            variance = sigma**2 if sigma else width**2 * spread
            weights = [1.0 if not s else math.exp(-s / (2 * variance)) for s in squares]
            value = mean([values[h][j] for j in run], weights)
            entries[pivot] = (
                mean([keys[h][j] for j in run], weights),
                [len(run) * x for x in value] if value_sum else value,
                run,
            )
        out.append(entries)
    return out


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"heavy": 0.0, "recent": 0.0, "sink": 0},
        {"heavy": 1.0},
        {"width": 0.3},
        {"sigma": 2.5},
        {"value_sum": True},
        {"store": "slots"},
    ],
    ids=str,
)
def test_kvmerger_is_what_its_formulas_say(group, params):
    # Peaked: else the first tokens are the heavy hitters, whose neighbours are not alike anyway.
    layer = view(60, group=group, protected=2, seed=group, peaked=4.0)
    _, (record,) = reduced("kvmerger", [layer], 24, **params)
    assert isinstance(record, Merged if params.get("store") == "slots" else Kept)
    assert_is(record, naive_kvmerger(layer, 24, **{k: v for k, v in params.items() if k != "store"}))


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"heavy": 0.0, "recent": 0.1},
        {"store": "slots"},
        {"heavy": 1.0},
        {"heavy": 0.12, "recent": 0.17, "sigma": 5.0, "value_sum": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.75, 0.95])
def test_kvmerger_by_a_threshold_merges_the_neighbours_above_it(group, params, threshold):
    """The paper's epsilon: as many entries stay as there are runs, in each head its own number."""
    layer = view(60, group=group, protected=2, seed=group)
    policy = build("kvmerger", {"threshold": threshold, **params})
    budget = policy.own_budget(layer.document)
    fitted = policy.fitted(layer.document, budget, frozenset({"threshold", *params}))
    record = fitted.reduce(layer, LayerBudget.uniform(KV_HEADS, budget.tokens))
    own = {k: v for k, v in params.items() if k != "store"}
    assert_is(record, naive_kvmerger(layer, 60, threshold=threshold, **own))
    assert params.get("heavy") == 1.0 or record.entries < 60 * KV_HEADS


def test_a_threshold_takes_no_budget_and_leaves_whole_layers_alone(llama):
    params = {"threshold": -1.0, "heavy": 0.0, "recent": 0.1, "first": 1, "last": 1}
    for size in ({"budget_tokens": 100}, {"compression_ratio": 0.5}):
        with pytest.raises(InvalidRequest, match="has its size from its parameters") as refused:
            llama.engine.prepare(llama.ids, policy="kvmerger", policy_params=params, **size)
        assert refused.value.param in size
    document = llama.ids[:200]
    cache, full = (
        llama.engine.compress(document, policy=name, **of) for name, of in (("kvmerger", params), ("full", {}))
    )
    lengths = [set(record.lengths) for record in cache.layers]
    assert lengths[0] == lengths[-1] == {200}
    assert all(own == {4 + 1 + 20} for own in lengths[1:-1]), "first tokens, one run, and recent ones"
    assert len(lengths) > 2
    nothing = llama.engine.compress(document, policy="kvmerger", threshold=1.0)
    for ours, theirs in zip(nothing.layers, full.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@settings(max_examples=amount(20, 100), deadline=None)
@given(
    tokens=st.integers(20, 120),
    share=st.floats(0.1, 1),
    heavy=st.floats(0, 1),
    recent=st.floats(0, 0.7),
    seed=st.integers(0, 99),
)
def test_kvmerger_drops_nothing_and_keeps_the_budget(tokens, share, heavy, recent, seed):
    """Every token is in the run of one entry, and runs are of neighbours."""
    count = max(6, int(tokens * share))
    layer = view(tokens, seed=seed)
    _, (record,) = reduced("kvmerger", [layer], count, heavy=heavy, recent=recent, store="slots")
    assert record.lengths == [count] * KV_HEADS
    for head in range(KV_HEADS):
        start, stop = record.slot_offsets[head : head + 2]
        assert record.slot_positions[start:stop].tolist() == list(range(tokens))
        assert record.slot_classes[start:stop].diff().unique().tolist() in ([0, 1], [1], [0])


def test_near_width_0_the_pivot_alone_counts():
    layer = view(60)
    _, (record,) = reduced("kvmerger", [layer], 24, width=0.001)
    for head, positions in enumerate(record.positions):
        assert torch.equal(record.plain_heads()[0][head], layer.keys[head, positions.long()])


def test_the_choice_of_a_layer_depends_on_no_other():
    alone, among = view(60, place=1, num_layers=1), view(60, place=1, num_layers=3)
    _, (first,) = reduced("kvmerger", [alone], 24)
    _, records = reduced("kvmerger", [view(60, place=0, num_layers=3), among, view(60, place=2, num_layers=3)], 24)
    assert torch.equal(records[1].keys, first.keys)


def test_a_slot_for_each_token_gives_a_class_the_mass_of_all_of_them():
    """Three tokens of one key, and a fourth: as means they are two tokens alike, as slots three keep three parts."""
    kept = torch.tensor([[True, False, False, True]])
    plan = MergePlan.joining(kept, ~kept, torch.zeros(1, 4, dtype=torch.int64))
    keys = torch.zeros(1, 4, 2)
    values = torch.tensor([[[1.0], [1.0], [1.0], [5.0]]])
    weights = torch.ones(1, 4)
    of_classes = plan.means(keys, weights), plan.means(values, weights), torch.zeros(1, 4)
    as_slots, as_means = plan.as_merged(*of_classes), plan.as_kept(*of_classes)
    assert as_slots.slots == 4
    assert as_means.entries == 2
    assert as_slots.slot_classes.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "params", "mean", "param", "named"),
    [
        ("d2o", {"first": 2, "last": 1}, 20, "first", "3 of 4 layers stay whole"),
        ("d2o", {"sink": 20}, 20, "sink", "sink is 20"),
        ("kvmerger", {"last": 4}, 20, "last", "4 of 4 layers"),
        ("kvmerger", {"recent": 1.0}, 20, "recent", "leave no entry"),
        ("kvmerger", {"sink": 17}, 20, "sink", "sink is 17"),
    ],
)
def test_what_a_budget_has_no_room_for_is_refused(name, params, mean, param, named):
    document = DocumentView(range(60), num_layers=4)
    with pytest.raises(PolicyUnsupported, match=named) as refused:
        build(name, params).fitted(document, Budget(mean, 0.5), frozenset(params))
    assert refused.value.param == f"policy_params.{param}"


@pytest.mark.parametrize("name", ["d2o", "kvmerger"])
@pytest.mark.parametrize("store", ["means", "slots"])
@pytest.mark.parametrize("codec", ["none", "int4", "mixed"])
def test_a_merged_cache_is_stored_and_answers(tiny, name, store, codec):
    text = "The access code of the amber falcon is 482913. " + "The harbour was quiet that morning. " * 40
    cache = tiny.encoded(tiny.compress(text, policy=name, compression_ratio=0.5, store=store), codec)
    again = type(cache).from_bytes(cache.to_bytes())
    question = "What is the access code of the amber falcon?"
    answers = [tiny.answer(stored, question, max_new_tokens=8).text for stored in (cache, again)]
    assert answers[0] == answers[1]
    assert cache.kept_tokens <= cache.num_tokens // 2
