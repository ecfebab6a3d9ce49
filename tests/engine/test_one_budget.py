"""Document and answer under one budget (suffix `scope` "cache"): each policy against a loop over lists in fp64, written
from its paper, in which every token runs alone; and that no other answer and nothing that is stored sees any of it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvshelf.artifact.records import entries_from, parts_of
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.suffixes import capacity_for
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.chunked import ChunkedPolicy
from kvshelf.methods.policies.gate_file import Gates, gate_path
from kvshelf.methods.policies.gates.base import GatePolicy
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES
from tests.amounts import few, in_turn
from tests.by_hand import Prefix, frequencies
from tests.engine.asking import ids
from tests.engine.left_by_hand import LeftByHand
from tests.engine.test_suffix_policies import (
    QUESTION,
    ARKVLoop,
    ByHand,
    D2OLoop,
    EMSLoop,
    Entry,
    GatedByHand,
    GlobalLoop,
    H2OLoop,
    LagKVLoop,
    LazyLoop,
    Member,
    TrimKVLoop,
    WindowLoop,
)
from tests.methods.policies.gates import random_gates

DOCUMENT, TOKENS = 120, 70
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
SHAPES = [(model, group) for group in (1, 4, 7) for model in MODELS]


def engine_of(name, group):
    """Two layers of two KV heads, each with so many query heads, with weights that attend to something."""
    config, model = MODELS[name]
    torch.manual_seed(group)
    sizes = {"vocab_size": 512, "hidden_size": 16 * group, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2}
    made = model(config(**sizes, **heads, max_position_embeddings=8192)).eval().requires_grad_(False)
    for layer in made.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.mul_(12)
    engine = Engine(made, name="m")
    engine.facts.endless = True
    return engine


class WholeCache(ByHand):
    """By hand, where behind the question the last entries of the document become entries as the answer's own: behind
    those of a question that stays, before those of one that need not."""

    def __init__(self, model, cache, loop, tails, left=None):
        """tails: of each layer and head, how many. left: likewise, what the document leaves of each token, by name."""
        super().__init__(model, Prefix.spelled_out(cache, frequencies(model)), cache.next_position, loop)
        self.cache, self.tails, self.kept, self.left = cache, tails, [], left
        self.loop = copy.copy(loop)
        reduced = self.loop.reduced
        self.loop.reduced = lambda heads, layer: self.noted(reduced(heads, layer))

    def noted(self, heads):
        self.kept += [[entry.position for entry in entries] for entries in heads]
        return heads

    def logits(self, token):
        if self.ran == QUESTION:
            for layer, record in enumerate(self.cache.layers):
                for head, positions in enumerate(record.positions):
                    begin = len(positions) - self.tails[layer][head]
                    self.copy(layer, head, positions.tolist()[begin:])
        return super().logits(token)

    def copy(self, layer, head, positions):
        visible, entries = self.prefix.visible[layer][head], self.heads[layer][head]
        record, copied = self.cache.layers[layer], {}
        tokens = sorted(token for part in parts_of(record) for token in torch.split(*part.tokens)[head].tolist())
        places = dict(zip(tokens, visible.nonzero()[:, 0].tolist(), strict=True))
        left = self.left[layer][head] if self.left else {}
        noted = {position: {name: numbers[position] for name, numbers in left.items()} for position in tokens}
        for position in positions:
            key, value = (states[head, places[position]].tolist() for states in self.prefix.layers[layer])
            copied[position] = Entry(position - self.cache.num_tokens, key, value, noted[position])
        if record.kind == "merged":
            classes = torch.split(record.slot_classes, record.slot_lengths)[head].tolist()
            centers = record.positions[head].tolist()
            for position, center in ((p, centers[c]) for p, c in zip(tokens, classes, strict=True)):
                if position != center:
                    norm = float(self.prefix.layers[layer][0][head, places[position]].norm())
                    copied[center].shared.append(Member(copied[center], norm, noted[position]))
            visible[list(places.values())] = False
        visible[[places[position] for position in positions]] = False
        copied = [*copied.values()]
        entries[:] = entries + copied if self.loop.protected else copied + entries


class RecursionLoop(LagKVLoop):
    """Figure 1 of LagKV: of two full partitions the first keeps its best r * lag by the scale of the second, for good.
    copied: tokens of the document that are in no judged partition."""

    budget = 0

    def reduce(self, entries, **_):
        stays, behind = entries[: self.protected], entries[self.protected :]
        fresh = [e for e in behind if "judged" not in e.noted]
        done = [e for e in behind if "judged" in e.noted]
        while len(fresh) >= 2 * self.interval:
            own, following = fresh[: self.interval], fresh[self.interval : 2 * self.interval]
            both = zip(self.scores(own, following, "key"), self.scores(own, following, "value"), strict=True)
            ranked = sorted(zip(own, map(sum, both), strict=True), key=lambda pair: -pair[1])
            for entry, _ in ranked[: int(self.r * self.interval)]:
                entry.noted["judged"] = True
            done += [e for e in own if "judged" in e.noted]
            fresh = fresh[self.interval :]
        return stays + done + fresh


class SharesLoop(RecursionLoop):
    """Without r: all judged partitions share what the budget leaves, the earliest one more.
    copied: entries of the document, the first of which begins a partition."""

    def reduce(self, entries, **_):
        stays, behind = entries[: self.protected], entries[self.protected :]
        for entry in behind:
            place = entry.position - self.protected if entry.position >= 0 else entry.position
            entry.noted["partition"] = (place + self.copied) // self.interval
        tokens = entries[-1].position + 1 - self.protected + self.copied
        full = tokens // self.interval
        of = [[e for e in behind if e.noted["partition"] == p] for p in range(full + 1)]
        for own, following in pairwise(of[:full]):
            if own and "score" not in own[0].noted:
                both = zip(self.scores(own, following, "key"), self.scores(own, following, "value"), strict=True)
                for entry, pair in zip(own, both, strict=True):
                    entry.noted["score"] = sum(pair)
        room = self.budget - self.protected - len(of[-1]) - len(of[-2])
        kept = []
        for p, own in enumerate(of[: full - 1]):
            count = room // (full - 1) + (p < room % (full - 1))
            chosen = sorted(own, key=lambda e: (-e.noted["score"], e.position))[:count]
            kept += sorted(chosen, key=lambda e: e.position)
        return stays + kept + of[-2] + of[-1]


def of(loop, **own):
    loop.__dict__.update(own)
    return loop


def behind(cache, first):
    """Of each layer and head, how many entries have positions from `first` on."""
    return [[int((own >= first).sum()) for own in record.positions] for record in cache.layers]


def proportional(weights, total):
    """Whole numbers that add up to the total; the largest remainders are rounded up."""
    shares = [Fraction(weight * total, sum(weights)) for weight in weights]
    up = sorted(range(len(shares)), key=lambda i: (math.floor(shares[i]) - shares[i], i))
    return [math.floor(share) + (i in up[: total - sum(map(math.floor, shares))]) for i, share in enumerate(shares)]


KEPT = {"policy": "h2o", "budget_tokens": 48, "keep_scores": True}
EMS = KEPT | {"policy": "ems", "window": 9, "tau": 0.05}
ARKV = KEPT | {"policy": "arkv", "window": 9, "tau1": 0.5, "tau2": 0.5, "tau3": 0.5}
SAGE = {"policy": "sage", "budget_tokens": 48}
LAG = {"policy": "lagkv", "lag": 12, "sink": 4, "r": 0.25}
CASES = {
    # SAGE-KV, step 4: R has 12 of 48 entries, and each new token, the question's included, takes the oldest's place.
    "sage": (SAGE, "window", {"every": 1, "leaving": 12, "protect_question": False}, 12, of(WindowLoop(1), budget=12)),
    "sage, question kept": (SAGE, "window", {"every": 4, "leaving": 12}, 12, of(WindowLoop(4), budget=12)),
    "streaming": ({"policy": "full"}, "window", {"every": 8}, 116, of(WindowLoop(8), budget=116)),
    # Keys that were rotated to their places in the cache, and means of merged tokens, are copied as they are.
    "positions=cache": (
        {"policy": "streaming_llm", "positions": "cache", "budget_tokens": 48},
        "window",
        {"every": 4, "leaving": 12},
        12,
        of(WindowLoop(4), budget=12),
    ),
    "merged by means": (
        {"policy": "cam", "budget_tokens": 48},
        "window",
        {"every": 4, "leaving": 12},
        12,
        of(WindowLoop(4), budget=12),
    ),
    "h2o": (KEPT, "h2o", {"every": 1}, 48, of(H2OLoop(1), budget=48)),
    "h2o, every 8th": (KEPT, "h2o", {"every": 8}, 48, of(H2OLoop(8), budget=48)),
    "h2o, no question": (
        KEPT,
        "h2o",
        {"every": 4, "protect_question": False},
        48,
        of(H2OLoop(4), budget=48, protected=0),
    ),
    # Each layer goes on with its own share, or with as large a part of the budget.
    "d2o": (KEPT | {"policy": "d2o"}, "d2o", {"every": 1}, None, D2OLoop(1, merges=0)),
    "d2o, by a budget": (
        KEPT | {"policy": "d2o", "budget_tokens": 80, "first": 1},
        "d2o",
        {"every": 4},
        None,
        D2OLoop(4, merges=0, total=71),
    ),
    "d2o, no question": (
        KEPT | {"policy": "d2o", "budget_tokens": 80, "first": 1},
        "d2o",
        {"every": 4, "protect_question": False},
        None,
        D2OLoop(4, merges=0, protected=0),
    ),
    "d2o, every 8th": (
        KEPT | {"policy": "d2o", "sink": 0},
        "d2o",
        {"every": 8, "recent": 0.3},
        None,
        D2OLoop(8, merges=0, recent=0.3),
    ),
    "arkv": (ARKV, "arkv", {"every": 1, "window": 9}, 48, of(ARKVLoop(1, window=9), budget=48)),
    "arkv, every 4th, no question": (
        ARKV | {"prefill": "chunked", "chunk": 128},
        "arkv",
        {"every": 4, "window": 5, "protect_question": False},
        48,
        of(ARKVLoop(4, window=5), budget=48, protected=0),
    ),
    "ems": (
        EMS,
        "ems",
        {"every": 1, "window": 9, "tau": 0.05},
        48,
        of(EMSLoop(1, window=9, tau=0.05, merges=0, losses=0), budget=48),
    ),
    "ems, whose table is full": (
        EMS,
        "ems",
        {"every": 1, "window": 9, "tau": 0.05, "gamma": 1.5},
        48,
        of(EMSLoop(1, window=9, tau=0.05, gamma=1.5, merges=0, losses=0), budget=48),
    ),
    "ems, no question": (
        EMS,
        "ems",
        {"every": 8, "window": 9, "tau": 0.05, "protect_question": False},
        48,
        of(EMSLoop(8, window=9, tau=0.05, merges=0, losses=0), budget=48, protected=0),
    ),
    "ems, evicting alone before": (
        EMS | {"merge": False},
        "ems",
        {"every": 8, "window": 9, "tau": 0.05},
        48,
        of(EMSLoop(8, window=9, tau=0.05, merges=0, losses=0), budget=48),
    ),
    "lazy_eviction": (
        {"policy": "snapkv", "budget_tokens": 48},
        "lazy_eviction",
        {"window": 10, "alpha": 0.02},
        48,
        of(LazyLoop(10, alpha=0.02), budget=48),
    ),
    # LagKV: 116 tokens behind the sink are 8 partitions, the last of 12, and a remainder of 8.
    "lagkv": (LAG, "lagkv", {"lag": 12, "r": 0.25}, 20, RecursionLoop(12, r=0.25)),
    "lagkv, no question": (
        LAG,
        "lagkv",
        {"lag": 12, "r": 0.25, "protect_question": False},
        20,
        of(RecursionLoop(12, r=0.25), protected=0),
    ),
    # The 28 entries before the tail, the question, partition and remainder stay, and one that all partitions share.
    "lagkv, by its least budget": (LAG, "lagkv", {"lag": 12}, 20, of(SharesLoop(12, copied=20), budget=28)),
    "lagkv, by a budget": (LAG, "lagkv", {"lag": 12}, 20, of(SharesLoop(12, copied=20), budget=41, total=69)),
    "lagkv, by a budget, no question": (
        LAG,
        "lagkv",
        {"lag": 12, "protect_question": False},
        20,
        of(SharesLoop(12, copied=20), budget=31, total=59, protected=0),
    ),
}
CASES["sage"][-1].protected = 0
SMALL = {
    "window": {"every": 8, "leaving": 12},
    "lagkv": {"lag": 12},
    "lazy_eviction": {"window": 8, "alpha": 0.02},
    "h2o": {"every": 8},
    "d2o": {"every": 8},
    "arkv": {"every": 8, "window": 9},
    "ems": {"every": 8, "window": 9},
    "trimkv": {"every": 8, "gates": "make_each_token_count"},
}
MADE = {
    "window": {"policy": "h2o", "budget_tokens": 48},
    "lagkv": LAG,
    "lazy_eviction": {"policy": "snapkv", "budget_tokens": 48},
    "h2o": KEPT,
    "d2o": KEPT | {"policy": "d2o"},
    "ems": EMS,
    "arkv": ARKV,
    "trimkv": KEPT | {"policy": "make_each_token_count"},
}
SCOPED = list(SMALL)


@pytest.fixture
def scoped_engine(monkeypatch, tmp_path):
    """As `engine_of`, with gates."""

    def made(name, group):
        engine = engine_of(name, group)
        gated(engine, "make_each_token_count", monkeypatch, tmp_path)
        return engine

    return made


def stepped(engine, answers):
    batch = engine.batch()
    while going := [answer for answer in answers if not answer.finished]:
        for told in batch.step(going):
            assert isinstance(told, str), told


def begun(engine, cache, policy, params, tokens=TOKENS, budget=None, question=None):
    question, document = question or ids(QUESTION, seed=2), engine.attach(cache)
    reducer = engine.bound(policy, question_tokens=len(question), params=params, document=document, budget=budget)
    return engine.start(document, question, Sampling(tokens), reducer=reducer)


@in_turn({"case": [*CASES], "model, group": SHAPES})
def test_a_policy_over_the_whole_cache_is_its_paper_s_loop(monkeypatch, case, model, group):
    """The logits of each token, and what every reduction leaves of each head, by position."""
    made, name, params, tail, loop = CASES[case]
    engine = engine_of(model, group)
    cache = engine.compress(ids(DOCUMENT), **made)
    tails = [[tail] * record.kv_heads for record in cache.layers]
    if tail is None:
        sink = cache.identity.policy_params["sink"]
        tails = behind(cache, sink)
        shares = [own[0] for own in tails]
        assert all(len({*own}) == 1 for own in tails)
        assert len({*shares}) > 1 or "first" not in made, shares
        total = sum(shares) if "total" not in loop.__dict__ else (loop.total - sink) * len(shares)
        loop = of(copy.copy(loop), budgets=proportional(shares, total))
    left = made.get("keep_scores") and left_of(engine, cache)
    compared(
        monkeypatch, engine, cache, name, params, loop,
        lambda loop: WholeCache(engine.model, cache, loop, tails, left), getattr(loop, "total", None),
    )  # fmt: skip


def compared(monkeypatch, engine, cache, name, params, loop, made_by_hand, budget=None):
    """An answer, and the same by hand."""
    found, kept, passed, reduce = [], [], engine.passes.continuing, SUFFIX_POLICIES[name].reduce

    def reduced(policy, suffix):
        reduction = reduce(policy, suffix)
        there = torch.ones_like(reduction.kept).bool() if reduction.there is None else reduction.there
        heads = zip(suffix.positions.gather(1, reduction.kept), there, strict=True)
        kept.extend(positions[entries].tolist() for positions, entries in heads)
        return reduction

    monkeypatch.setattr(SUFFIX_POLICIES[name], "reduce", reduced)
    monkeypatch.setattr(engine.passes, "continuing", lambda *given: found.append(passed(*given)) or found[-1])
    answer = begun(engine, cache, name, params, budget=budget)
    stepped(engine, [answer])
    by_hand = made_by_hand(loop)
    right = [by_hand.logits(token) for token in [*ids(QUESTION, seed=2), *answer.token_ids[:-1]]][QUESTION - 1 :]
    scale = right[0].abs().max()
    errors = [float((ours[0, -1] - logits).abs().max() / scale) for ours, logits in zip(found, right, strict=True)]
    assert max(errors) < 1e-4, errors
    assert getattr(by_hand.loop, "merges", 1) > 0
    last = 4 * ((len(found) - 1) % loop.interval == 0)  # behind the last token the engine reduces no more
    assert kept == by_hand.kept[: len(kept)] != []
    assert len(by_hand.kept) - len(kept) in (0, last)


def left_of(engine, cache):
    """Of each layer and head, what a document leaves of its tokens by the paper of the cache's policy."""
    by_hand, params = LeftByHand(engine.model, ids(DOCUMENT)), cache.identity.policy_params
    if cache.identity.policy == "arkv":
        claims = [by_hand.claim(layer, params) for layer in range(len(cache.layers))]
        assert len(set(claims)) > 1
        return [[{"share": [claim / max(claims)] * DOCUMENT}] * 2 for claim in claims]
    left = []
    for layer, record in enumerate(cache.layers):
        heads = []
        for head in range(record.kv_heads):
            noted = {"sum": by_hand.sums(layer, head)}
            if cache.identity.policy == "ems":
                past = by_hand.sums(layer, head, params["window"])
                noted = {"all": noted["sum"], "past": past, "current": [0.0] * DOCUMENT}
            if cache.identity.policy == "d2o" and record.lengths[head] < DOCUMENT:  # else nothing has left
                noted["tau"] = [by_hand.threshold(layer, [own.tolist() for own in record.positions])] * DOCUMENT
            heads.append(noted)
        left.append(heads)
    return left


def gated(engine, trained, monkeypatch, tmp_path):
    """Random gates, which are there for the engine's model from here on."""
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    weights = engine.identity.weights
    gates = random_gates(trained, engine.preparer.geometry, weights=weights)
    for name, tensor in gates.tensors.items():
        if name.endswith("up"):  # or most rates would be 1 in fp32
            tensor.mul_(0.01)
    gates = Gates.of(gates.header, gates.tensors)
    gate_path(weights, trained).write_bytes(gates.to_bytes())
    return gates


class GatedWholeCache(GatedByHand, WholeCache):
    """With gates."""


RATED = [
    ({"budget_tokens": 48}, {"every": 1}, None),
    ({"budget_tokens": 70, "sink": 0, "prefill": "chunked", "chunk": 64}, {"every": 8}, None),
    ({"budget_tokens": 60, "protect": ["tokens:20-30"]}, {"every": 4}, 51),
    ({"budget_tokens": 48}, {"every": 4, "protect_question": False}, None),
    ({"budget_tokens": 48}, {"every": 1}, 14),  # some heads keep the question alone
]


@in_turn(
    {
        "trained, made, params, total": [
            (trained, *case) for trained in ("trimkv", "make_each_token_count") for case in RATED
        ],
        "model, group": SHAPES,
    }
)
def test_rates_of_the_document_compete_with_those_of_the_answer(
    monkeypatch, tmp_path, trained, made, params, total, model, group
):
    """By random gates, read whole and in chunks: the logits of each token and what every reduction leaves. Each head
    keeps its own best, or with gates of Make Each Token Count all heads of all layers the best of all."""
    engine = engine_of(model, group)
    loop = {"trimkv": TrimKVLoop, "make_each_token_count": GlobalLoop}[trained](params["every"])
    gates = gated(engine, trained, monkeypatch, tmp_path)
    cache = engine.compress(ids(DOCUMENT), policy=trained, keep_scores=True, **made)
    of_layers = [
        {name: tensor.double() for name, tensor in gates.layer(layer, torch.device("cpu")).items()}
        for layer in range(len(cache.layers))
    ]
    by_hand = LeftByHand(engine.model, ids(DOCUMENT))
    left = [
        [{"rate": by_hand.rates(layer, head, gate)} for head in range(record.kv_heads)]
        for layer, (record, gate) in enumerate(zip(cache.layers, of_layers, strict=True))
    ]
    if "prefill" in made:  # tokens of the second chunk saw what was left of the first
        left = [
            [{"rate": dict(zip(own.tolist(), rates.tolist(), strict=True))} for own, rates in heads_of(record)]
            for record in cache.layers
        ]
    sizes, tails = behind(cache, 0), behind(cache, 30 if "protect" in made else made.get("sink", 4))
    if not params.get("protect_question", True):
        loop.protected = 0
    if trained == "trimkv":
        tails = [[min(map(min, tails))] * len(own) for own in tails]
        loop.budget = tails[0][0] if total is None else total - (sizes[0][0] - tails[0][0])
        assert len({size for own in sizes for size in own}) == 1
    else:
        in_place = sum(map(sum, sizes)) - sum(map(sum, tails))
        loop.total = sum(map(sum, tails)) if total is None else 4 * total - in_place
        assert len({count for own in tails for count in own}) > 1, tails
    compared(
        monkeypatch, engine, cache, "trimkv", params | {"gates": trained}, loop,
        lambda loop: GatedWholeCache(of_layers, engine.model, cache, loop, tails, left), total,
    )  # fmt: skip


def test_rates_are_of_the_gates_that_are_asked_for(monkeypatch, tmp_path):
    engine = engine_of("llama", 2)
    gated(engine, "make_each_token_count", monkeypatch, tmp_path)
    cache = engine.compress(ids(DOCUMENT), policy="make_each_token_count", budget_tokens=48, keep_scores=True)
    with pytest.raises(PolicyUnsupported, match="are of policy make_each_token_count") as refused:
        begun(engine, cache, "trimkv", {})
    assert refused.value.param == "suffix.params.gates"


def test_gates_that_were_trained_anew_do_not_go_on(monkeypatch, tmp_path):
    """Rates of two files mean different things."""
    engine = engine_of("llama", 2)
    gates = gated(engine, "trimkv", monkeypatch, tmp_path)
    cache = engine.compress(ids(DOCUMENT), policy="trimkv", budget_tokens=48, keep_scores=True)
    begun(engine, cache, "trimkv", {})
    anew = Gates.of(gates.header, {name: tensor * 2 for name, tensor in gates.tensors.items()})
    gate_path(engine.identity.weights, "trimkv").write_bytes(anew.to_bytes())
    with pytest.raises(PolicyUnsupported, match=f"are of gates '{gates.digest}'") as refused:
        begun(engine, cache, "trimkv", {})
    assert refused.value.param == "suffix.scope"


@pytest.mark.parametrize(
    ("policy", "params", "value"),
    [
        ("h2o", {"normalize": "rows"}, '"none"'),
        ("h2o", {"every": 8}, "1"),
        ("cam", {"every": 8}, "1"),
        ("ems", {"every": 8}, "1"),
        ("ems", {"pos": "pre"}, '"post"'),
        ("d2o", {"store": "slots"}, '"means"'),
    ],
)
def test_what_no_answer_could_go_on_with_is_not_kept(policy, params, value):
    engine, name = engine_of("llama", 2), [*params][-1]
    with pytest.raises(PolicyUnsupported, match=f"give {name} {value}, or leave keep_scores out") as refused:
        engine.compress(ids(DOCUMENT), policy=policy, budget_tokens=48, keep_scores=True, **params)
    assert refused.value.param == f"policy_params.{name}"


@pytest.mark.parametrize(("around", "base"), [("ada", "h2o"), ("ada", "trimkv"), ("fair", "h2o"), ("think", "h2o")])
def test_a_policy_around_another_keeps_no_scores(around, base):
    engine = engine_of("llama", 2)
    with pytest.raises(InvalidRequest, match=f"leave keep_scores out, or take policy '{base}' itself") as refused:
        engine.compress(ids(DOCUMENT), policy=around, base=base, budget_tokens=48, keep_scores=True)
    assert refused.value.param == "policy_params.keep_scores"


KEEPING = sorted(name for name, policy in POLICIES.items() if issubclass(policy, KeepsScores))
READING = [(name, {}) for name in KEEPING] + [
    (name, {"prefill": "chunked", "chunk": 64}) for name in KEEPING if issubclass(POLICIES[name], ChunkedPolicy)
]


@pytest.mark.parametrize("budget", [48, DOCUMENT])
@pytest.mark.parametrize(("policy", "params"), READING)
def test_the_numbers_are_there_whatever_the_budget_and_the_prefill(monkeypatch, tmp_path, policy, params, budget):
    engine = engine_of("llama", 2)
    if issubclass(POLICIES[policy], GatePolicy):
        gated(engine, policy, monkeypatch, tmp_path)
    cache = engine.compress(ids(DOCUMENT), policy=policy, budget_tokens=budget, keep_scores=True, **params)
    assert [sorted(record.columns) for record in cache.layers] == [sorted(POLICIES[policy].column_names)] * len(
        cache.layers
    )
    assert cache.kept_tokens == budget


@pytest.mark.parametrize("sink", ["abc", None, -3, 2**80, 0.5, [4]])
@pytest.mark.parametrize("policy", ["d2o", "trimkv"])
def test_a_cache_from_elsewhere_may_say_anything_of_its_sinks(monkeypatch, tmp_path, policy, sink):
    engine = engine_of("llama", 2)
    gated(engine, "trimkv", monkeypatch, tmp_path)
    cache = engine.compress(ids(DOCUMENT), policy=policy, budget_tokens=48, keep_scores=True)
    said = replace(cache.identity, policy_params={**cache.identity.policy_params, "sink": sink})
    cache = replace(cache, identity=said)
    if sink == 2**80:
        with pytest.raises(PolicyUnsupported, match="lets no entry of this cache leave"):
            begun(engine, cache, policy, {})
    else:
        begun(engine, cache, policy, {})


@pytest.mark.parametrize("policy", ["h2o", "d2o", "ems", "arkv"])
def test_without_it_a_cache_is_the_one_of_before(policy):
    """In id and bytes; with it in keys, values and positions."""
    engine = engine_of("llama", 2)
    plain, kept = (engine.compress(ids(DOCUMENT), **MADE[policy] | {"keep_scores": keep}) for keep in (False, True))
    assert "keep_scores" not in plain.identity.policy_params
    assert all(not record.columns for record in plain.layers)
    without = {name: value for name, value in MADE[policy].items() if name != "keep_scores"}
    assert engine.compress(ids(DOCUMENT), **without).to_bytes() == plain.to_bytes()
    assert plain.identity != kept.identity
    for ours, theirs in zip(plain.layers, kept.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.entry_positions, theirs.entry_positions)


def heads_of(record):
    return zip(record.positions, torch.split(record.columns["rate"], record.lengths), strict=True)


def bits(cache):
    return [
        tensor.clone() for record in cache.layers for tensor in (record.keys, record.values, *record.columns.values())
    ]


@pytest.mark.parametrize("name", few(4, SCOPED))
def test_a_budget_for_all_changes_no_bit(scoped_engine, name):
    engine = scoped_engine("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **(MADE[name] | ({} if name == "lagkv" else {"budget_tokens": DOCUMENT})))
    room = len(cache.layers[0].positions[0]) + QUESTION + TOKENS
    plain = engine.start(cache, ids(QUESTION, seed=2), Sampling(TOKENS))
    scoped = begun(engine, cache, name, SMALL[name], budget=room)
    tight = begun(engine, cache, name, SMALL[name], budget=room - 2)  # the last token is in no cache
    for answer in (plain, scoped, tight):
        stepped(engine, [answer])
    assert scoped.answer() == plain.answer()
    assert tight.seen is not scoped.seen is plain.seen


@pytest.mark.parametrize("name", few(4, SCOPED))
def test_other_answers_and_what_is_stored_see_nothing_of_it(scoped_engine, name):
    """In one batch, with and without a scope, streams of steps as they come; the stored cache keeps its bits."""
    engine = scoped_engine("qwen2", 4)
    cache = engine.compress(ids(DOCUMENT), **MADE[name])
    before, question = bits(cache), ids(QUESTION + 4, seed=5)

    def answers():
        return [
            engine.start(engine.attach(cache), ids(QUESTION, seed=2), Sampling(TOKENS)),
            begun(engine, cache, name, SMALL[name]),
            begun(engine, cache, name, SMALL[name], question=question),
            begun(engine, cache, name, SMALL[name], tokens=TOKENS // 2),
        ]

    together, alone = answers(), answers()
    stepped(engine, together)
    for answer in alone:
        stepped(engine, [answer])
    assert [answer.answer() for answer in together] == [answer.answer() for answer in alone]
    assert all(map(torch.equal, bits(cache), before))


STORED = {
    "full": lambda engine: engine.compress(ids(DOCUMENT), policy="full"),
    "protected": lambda engine: engine.compress(
        ids(DOCUMENT), policy="snapkv", budget_tokens=80, protect=["tokens:40-60"]
    ),
    "with scores": lambda engine: engine.compress(ids(DOCUMENT), **KEPT | {"budget_tokens": 80}),
    "with scores, appended": lambda engine: engine.extend(
        engine.compress(ids(80), **KEPT | {"budget_tokens": 60}), ids(40, seed=9), **KEPT | {"budget_tokens": 30}
    ),
    "appended": lambda engine: engine.extend(engine.compress(ids(80), policy="full"), ids(40, seed=9), policy="full"),
}


def logits_of(engine, answer):
    """Of each token of an answer, `[vocabulary]`."""
    passed, rows = engine.passes.continuing, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.passes, "continuing", lambda *given: rows.append(passed(*given)) or rows[-1])
        stepped(engine, [answer])
    return torch.stack([row[0, -1] for row in rows])


@in_turn({"codec": ["none", "int4:group=32,residual=16", "int8", "lossless", "mixed"], "stored": [*STORED]})
def test_entries_of_any_record_are_copied_as_they_are_read(codec, stored):
    """The budget has room for all but one token, so that until then all is seen, in another order: the logits."""
    engine, tokens = engine_of("llama", 2), 12
    cache = engine.encoded(STORED[stored](engine), codec)
    right = logits_of(engine, engine.start(engine.attach(cache), ids(QUESTION, seed=2), Sampling(tokens)))
    room = max(len(own) for record in engine.decoded(cache).layers for own in record.positions) + QUESTION + tokens - 2
    own = [("h2o", {})] if "scores" in stored else []
    for name, params in (("window", {"leaving": 5}), ("window", {"leaving": 20}), ("window", {"leaving": 40}), *own):
        answer = begun(engine, cache, name, {"every": tokens - 1, **params}, tokens=tokens, budget=room)
        logits = logits_of(engine, answer)
        assert answer.seen.read_tokens < DOCUMENT
        assert (logits - right).abs().max() < 5e-6 * right.abs().max()


@in_turn({"codec": ["none", "int4:group=32,residual=16", "int8", "lossless", "mixed"], "name": ["d2o", "trimkv"]})
def test_so_are_those_of_heads_with_other_numbers(scoped_engine, codec, name):
    engine, tokens = scoped_engine("llama", 2), 12
    cache = engine.encoded(engine.compress(ids(DOCUMENT), **MADE[name]), codec)
    assert len({len(own) for record in engine.decoded(cache).layers for own in record.positions}) > 1
    right = logits_of(engine, engine.start(engine.attach(cache), ids(QUESTION, seed=2), Sampling(tokens)))
    params, room = SMALL[name] | {"every": tokens - 1}, 48 + QUESTION + tokens - 2
    answer = begun(engine, cache, name, params, tokens=tokens, budget=room)
    logits = logits_of(engine, answer)
    assert own_prefixes(answer)
    assert (logits - right).abs().max() < 5e-6 * right.abs().max()


@pytest.mark.parametrize("name", ["d2o", "trimkv"])
def test_what_layers_or_heads_share_is_counted_on_average(scoped_engine, name):
    engine = scoped_engine("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **MADE[name])
    for budget, room in ((None, 0), (60, 12)):
        given = {"question_tokens": QUESTION, "params": SMALL[name], "budget": budget}
        reducer = engine.bound(name, document=engine.attach(cache), **given)
        assert reducer.of_document == 44
        assert reducer.beside == 44 + room
        assert reducer.most == max(QUESTION, room) + 8
    with pytest.raises(InvalidRequest, match="always keeps 12 entries here: 4 of the document, 7 of the") as refused:
        begun(engine, cache, name, SMALL[name], budget=11)
    assert refused.value.param == "suffix.budget"
    answer = begun(engine, cache, name, SMALL[name], budget=12)
    stepped(engine, [answer])
    usage = answer.answer().usage
    assert usage.read_tokens == 4
    assert usage.suffix_tokens <= 12 - 4 + 8


@pytest.mark.parametrize("codec", ["none", "int4:group=32,residual=16", "int8", "lossless", "mixed"])
def test_numbers_of_entries_go_with_them(codec):
    """Beside protected text, too, which has none: a copy has each entry's own, here its position."""
    engine = engine_of("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **KEPT | {"budget_tokens": 80}, protect=["tokens:10-20"])
    layers = [
        entries_from(
            [replace(part, columns=dict.fromkeys(part.columns, part.entry_positions.float())) for part in parts_of(own)]
        )
        for own in cache.layers
    ]
    document = engine.attach(engine.encoded(replace(cache, layers=tuple(layers)), codec))
    tail = engine.bound("h2o", question_tokens=QUESTION, document=document).tail
    for layer in range(len(layers)):
        _, positions, columns, _ = tail.copy(layer)
        assert positions.shape[1] > 50
        assert torch.equal(columns["sum"], (positions + DOCUMENT).float())


CLASSES = {
    "whole": lambda engine: engine.compress(ids(DOCUMENT), **EMS),
    "protected": lambda engine: engine.compress(ids(DOCUMENT), **EMS, protect=["tokens:50-60"]),
    "appended": lambda engine: engine.extend(engine.compress(ids(80), **EMS), ids(40, seed=9), **EMS),
}


@in_turn({"codec": ["none", "int4:group=32,residual=16", "int8", "lossless", "mixed"], "stored": [*CLASSES]})
def test_classes_of_any_record_go_on_with_their_tokens(codec, stored):
    """As above. What stands before protected text is read in place, class and tokens; and each token goes on with its
    own numbers, here its position."""
    engine, tokens = engine_of("llama", 2), 12
    cache = CLASSES[stored](engine)
    layers = []
    for own in cache.layers:
        parts = [replace(part, columns=dict.fromkeys(part.columns, part.tokens[0].float())) for part in parts_of(own)]
        layers.append(entries_from(parts))
        assert any(part.tokens[1] != part.lengths for part in parts)
    cache = engine.encoded(replace(cache, layers=tuple(layers)), codec)
    cache = type(cache).from_bytes(cache.to_bytes())
    right = logits_of(engine, engine.start(engine.attach(cache), ids(QUESTION, seed=2), Sampling(tokens)))
    room = len(engine.decoded(cache).layers[0].positions[0]) + QUESTION + tokens - 2
    answer = begun(engine, cache, "ems", {"every": tokens - 1, "window": 4}, tokens=tokens, budget=room)
    logits = logits_of(engine, answer)
    assert (logits - right).abs().max() < 5e-6 * right.abs().max()
    tail = engine.bound("ems", question_tokens=QUESTION, params={"window": 4}, document=engine.attach(cache)).tail
    assert answer.answer().usage.read_tokens == tail.shares[0].in_place
    assert (tail.shares[0].in_place > 0) == (stored == "protected")
    for layer, record in enumerate(engine.decoded(cache).layers):
        _, positions, columns, _ = tail.copy(layer)
        slots, positions = tail.slots(layer), positions + DOCUMENT
        assert torch.equal(columns["all"], positions.float())
        for head, stands in enumerate(slots.there):
            centers = positions[head, slots.owners[head, stands]].tolist()
            pairs = [pair for part in parts_of(record) for pair in pairs_of(part, head)]
            found = zip(slots.columns["past"][head, stands].tolist(), centers, strict=True)
            assert sorted(found) == sorted((p, c) for p, c in pairs if p != c and c in positions[head])


def pairs_of(record, head):
    """Each token of a head, with the center of its class."""
    if record.kind == "kept":
        return [(p, p) for p in record.positions[head].tolist()]
    tokens = torch.split(record.slot_positions, record.slot_lengths)[head].tolist()
    classes = torch.split(record.slot_classes, record.slot_lengths)[head].long()
    return list(zip(tokens, record.positions[head][classes].tolist(), strict=True))


def test_classes_without_a_center_do_not_go_on():
    engine = engine_of("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **EMS)
    layers = tuple(replace(record, slot_scales=record.slot_scales * 2) for record in cache.layers)
    with pytest.raises(PolicyUnsupported, match="whose key is that of none of them") as refused:
        begun(engine, replace(cache, layers=layers), "ems", {})
    assert refused.value.param == "suffix.scope"


def test_tokens_that_share_entries_count_in_what_an_answer_takes():
    engine = engine_of("llama", 2)
    reducer = engine.bound("ems", question_tokens=QUESTION, params={"gamma": 1.5})
    assert reducer.slot_bytes(100) == 2 * 50 * (8 + 4 + 3 * 4 + 4 + 4)
    assert engine.bound("h2o", question_tokens=QUESTION).slot_bytes(100) == 0
    document = engine.attach(engine.compress(ids(DOCUMENT), **EMS))
    reducer = engine.bound("ems", question_tokens=QUESTION, params={"gamma": 1.0, "window": 4}, document=document)
    most = max(int(own.sum()) for layer in range(2) for record in document.entries(layer) for own in record.beside)
    assert reducer.slot_bytes(100) == 2 * most * 32 > 0


def test_entries_in_few_bits_are_copied_as_they_are_stored():
    """With the share of their layer, from a blob; and an answer goes on with them within the budget."""
    engine = engine_of("llama", 2)
    cache = engine.encoded(engine.compress(ids(DOCUMENT), **ARKV), "mixed:high=none,share=policy,group=8")
    cache = type(cache).from_bytes(cache.to_bytes())
    tail = engine.bound("arkv", question_tokens=QUESTION, params={"window": 9}, document=engine.attach(cache)).tail
    shares = set()
    for layer, record in enumerate(cache.layers):
        (keys, values), positions, columns, _ = tail.copy(layer)
        for part in parts_of(record):
            for head, (own_keys, own_values, at) in enumerate(zip(*part.plain_heads(), part.positions, strict=True)):
                places = torch.searchsorted(positions[head], at - tail.tokens)
                assert torch.equal(keys[head, places], own_keys)
                assert torch.equal(values[head, places], own_values)
        shares |= {*columns["share"].unique().tolist()}
    assert len(shares) == 2
    assert min(len(parts_of(record)) for record in cache.layers) == 1 < max(len(parts_of(own)) for own in cache.layers)
    answer = begun(engine, cache, "arkv", {"every": 1, "window": 9})
    stepped(engine, [answer])
    usage = answer.answer().usage
    assert usage.read_tokens + usage.suffix_tokens <= 49


@pytest.mark.parametrize("share", [-3.0, 9e30])
def test_a_cache_from_elsewhere_may_say_any_share(share):
    engine = engine_of("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **ARKV)
    layers = [replace(own, columns={"share": torch.full_like(own.columns["share"], share)}) for own in cache.layers]
    answer = begun(engine, replace(cache, layers=tuple(layers)), "arkv", {"every": 1, "window": 9})
    stepped(engine, [answer])
    assert len(answer.token_ids) == TOKENS


PROTECTED = {"first": (["first:30"], range(30)), "middle": (["tokens:60-80"], range(60, 80))}


@pytest.mark.parametrize("name", ["window", "h2o"])
@pytest.mark.parametrize("where", PROTECTED)
def test_protected_text_stays(where, name):
    """And all before it; what is behind it leaves, down to the least budget."""
    rules, tokens = PROTECTED[where]
    engine = engine_of("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **KEPT | {"budget_tokens": DOCUMENT}, protect=rules)
    with pytest.raises(InvalidRequest, match=f"{tokens[-1] + 1} of the document"):
        begun(engine, cache, name, {"every": 8}, budget=tokens[-1] + 1 + QUESTION)
    answer = begun(engine, cache, name, {"every": 8}, budget=tokens[-1] + 2 + QUESTION)
    stepped(engine, [answer])
    assert answer.answer().usage.read_tokens == tokens[-1] + 1
    whole = engine.compress(ids(DOCUMENT), **KEPT, protect=["tokens:119-120"])
    with pytest.raises(PolicyUnsupported, match="lets no entry of this cache leave"):
        begun(engine, whole, name, {"every": 8})


@pytest.mark.parametrize("name", ["window", "h2o"])
def test_tokens_of_the_chat_template_stay(tiny, name):
    engine = tiny
    cache = engine.compress("The falcon is amber. " * 20, policy="h2o", compression_ratio=0, keep_scores=True)
    document = engine.attach(cache)
    params = {"every": 4, **({"sink": 0} if name == "window" else {})}
    reducer = engine.bound(name, question_tokens=5, params=params, document=document)
    prefix = engine.encoder.stored_prefix(cache.identity)
    assert prefix > 0
    assert reducer.of_document == cache.num_tokens - prefix


@in_turn({"name": SCOPED, "protect": [True, False]})
def test_what_a_reduction_leaves_is_within_the_budget(scoped_engine, name, protect):
    """The default one: as many entries as the document has, or what the policy always keeps."""
    engine = scoped_engine("llama", 2)
    cache = engine.compress(ids(DOCUMENT), **MADE[name])
    params = {**SMALL[name], "protect_question": protect}
    answer, batch, totals = begun(engine, cache, name, params), engine.batch(), []
    while not answer.finished:
        assert isinstance(batch.step([answer])[0], str)
        totals.append(answer.row.stored + answer.row.beside + answer.seen.read_tokens)
    interval = next(filter(None, map(params.get, ("lag", "every", "window"))))
    least = 28 + QUESTION + 12 + 8 + 1 if protect else 28 + 24
    left = set(totals[2 * interval :: interval])
    assert max(left) == (48 if name != "lagkv" else least)
    assert len(left) == 1 or name == "arkv"  # of which a quarter goes each time


def test_heads_may_keep_different_tokens_where_few_leave():
    engine = engine_of("llama", 2)
    cache = engine.compress(ids(DOCUMENT), policy="ada", budget_tokens=60)
    lengths = {len(own) for record in cache.layers for own in record.positions}
    answer = begun(engine, cache, "window", {"every": 8, "leaving": 12})
    stepped(engine, [answer])
    usage = answer.answer().usage
    assert len(lengths) > 1
    assert usage.suffix_tokens <= 12 + 8
    assert usage.read_tokens == 60 - 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("made", ["sage", "h2o", "d2o", "ems", "trimkv", "make_each_token_count", "arkv"])
def test_over_4000_tokens_the_total_stays_at_the_budget(monkeypatch, tmp_path, made):
    """After each token, over all layers and heads, and in bytes of keys and values that batch and answer hold."""
    engine, budget, every = engine_of("llama", 2), 128, 1 if made == "sage" else 32
    name = {"sage": "window", "make_each_token_count": "trimkv"}.get(made, made)
    params = {"every": every} | ({"gates": made} if name == "trimkv" else {})
    if name == "trimkv":
        gated(engine, made, monkeypatch, tmp_path)
    cache = engine.compress(ids(400), **({} if made == "sage" else KEPT) | {"policy": made, "budget_tokens": budget})
    before, answer, batch = bits(cache), begun(engine, cache, name, params, tokens=4000), engine.batch()
    entry, most = 2 * 2 * 2 * engine.model.config.head_dim * 4, 0
    with kvshelf_attention(engine.model):
        while not answer.finished:
            batch.step([answer])
            read = answer.seen.read_tokens * (len(answer.token_ids) > 1)
            if len(answer.token_ids) > every:
                assert answer.row.stored + answer.row.beside + read <= budget + every - 1 + answer.finished
            beside = sum(prefix.keys.nbytes + prefix.values.nbytes for prefix in own_prefixes(answer))
            most = max(most, batch.nbytes + beside)
    assert most <= (budget + 127) // 64 * 64 * entry  # capacities are multiples of 64
    assert batch.nbytes == capacity_for(answer.row.stored, answer.row.most) * entry
    assert all(map(torch.equal, bits(cache), before))


def own_prefixes(answer):
    """What it reads of its own beside the suffix."""
    if len(answer.token_ids) < 2:
        return []
    prefixes = (prefix for layer in range(2) for prefix in answer.seen.prefixes(layer))
    return [prefix for prefix in prefixes if isinstance(prefix, PackedPrefix)]


@pytest.mark.parametrize(
    ("policy", "suffix", "param", "words"),
    [
        ("full", {"policy": "cam"}, "suffix.scope", "among question and answer alone"),
        ("full", {"policy": "window", "scope": "all"}, "suffix.scope", "it must be suffix or cache"),
        ("full", {"policy": "window", "budget": 10}, "suffix.budget", "4 of the document, 7 of the question"),
        ("ada", {"policy": "h2o"}, "suffix.scope", "leaves all of them equally many"),
        *(
            ("full", {"policy": name}, "suffix.scope", f"by policy {name} with keep_scores true")
            for name in ("h2o", "d2o", "ems", "arkv")
        ),
        ("keydiff", {"policy": "lagkv", "params": {"lag": 12}}, "suffix.scope", "not of policy lagkv"),
        ("keydiff", {"policy": "window", "params": {"sink": 900}}, "suffix.scope", "lets no entry of this cache leave"),
        ("ems", {"policy": "window"}, "suffix.scope", "merged tokens"),
        ("think", {"policy": "h2o"}, "suffix.scope", "have lost channels"),
    ],
)
def test_a_scope_that_cannot_be_is_refused_before_any_work(monkeypatch, policy, suffix, param, words):
    engine = engine_of("llama", 2)
    size = {} if policy in ("full", "think") else {"budget_tokens": 60}
    cache = engine.compress(ids(DOCUMENT), policy=policy, **size)
    monkeypatch.setattr(engine.passes, "continuing", None)
    with pytest.raises((InvalidRequest, PolicyUnsupported), match=words) as refused:
        engine.answer(cache, ids(QUESTION), suffix={"scope": "cache", **suffix})
    assert refused.value.param == param


def test_beside_several_documents_and_selectors_it_is_refused(monkeypatch):
    engine = engine_of("llama", 2)
    caches = [engine.compress(ids(DOCUMENT, seed=seed), policy="full") for seed in (0, 1)]
    monkeypatch.setattr(engine.passes, "continuing", None)
    suffix = {"policy": "window", "scope": "cache"}
    routed = {"route": "likelihood"}  # which reads no document first
    for asked, more in ((caches, {}), (caches, routed), (caches[0], {"select": "quest", "select_tokens": 64})):
        with pytest.raises(PolicyUnsupported) as refused:
            engine.answer(asked, ids(QUESTION), suffix=suffix, **more)
        assert refused.value.param == "suffix.scope"


def lagged(engine, **more):
    return engine.compress(ids(DOCUMENT), **{**LAG, **more})


CUTS = {
    "not of policy lagkv": lambda engine: engine.compress(ids(DOCUMENT), policy="full"),
    "not of policy lagkv by score lag": lambda engine: lagged(engine, score="local"),
    "its lag is 30, not 12": lambda engine: lagged(engine, lag=30),
    "its r is 0.5, not 0.25": lambda engine: lagged(engine, r=0.5),
    "protected tokens": lambda engine: lagged(engine, protect=["tokens:10-20"]),
    "its last tokens were appended": lambda engine: engine.extend(lagged(engine), ids(97, seed=9), **LAG),
    "lets no entry of this cache leave": lambda engine: engine.compress(ids(15), **LAG),  # less than a partition
}


@pytest.mark.parametrize("why", CUTS)
def test_lagkv_goes_on_with_its_own_partitions_alone(why):
    engine = engine_of("llama", 2)
    cache = CUTS[why](engine)
    with pytest.raises(PolicyUnsupported, match=why) as refused:
        begun(engine, cache, "lagkv", {"lag": 12, "r": 0.25})
    assert refused.value.param == "suffix.scope"


def test_what_a_retention_keeps_has_no_budget():
    engine = engine_of("llama", 2)
    with pytest.raises(InvalidRequest, match=r"leave suffix\.budget out") as refused:
        begun(engine, lagged(engine), "lagkv", {"lag": 12, "r": 0.25}, budget=900)
    assert refused.value.param == "suffix.budget"


@pytest.mark.parametrize("sink", [0, 1, 9])
def test_lagkv_finds_where_the_partitions_of_a_cache_begin(tiny, sink):
    """Behind its sinks, or behind what the chat template wrote: the tail begins a whole number of them later."""
    cache = tiny.compress("The falcon is amber. " * 40, policy="lagkv", lag=12, sink=sink, r=0.25)
    reducer = tiny.bound("lagkv", question_tokens=5, params={"lag": 12, "r": 0.25}, document=tiny.attach(cache))
    first = max(sink, tiny.encoder.stored_prefix(cache.identity))
    assert reducer.of_document == 12 + (cache.num_tokens - first) % 12
    messages = [{"role": "user", "content": "The falcon is amber. " * 40}]
    cache = tiny.compress(messages, policy="lagkv", lag=12, sink=sink, r=0.25)
    with pytest.raises(PolicyUnsupported, match="it is of messages"):
        tiny.bound("lagkv", question_tokens=5, params={"lag": 12}, document=tiny.attach(cache))


@pytest.mark.parametrize("params", [{"leaving": 3}, {"sink": 4}])
def test_what_is_about_the_document_s_entries_needs_the_scope(params):
    engine = engine_of("llama", 2)
    with pytest.raises(InvalidRequest, match=r"give suffix\.scope cache") as refused:
        engine.bound("window", question_tokens=QUESTION, params=params)
    assert refused.value.param == f"suffix.params.{next(iter(params))}"


def test_a_reducer_is_of_its_document_and_alone_says_what_is_read():
    engine = engine_of("llama", 2)
    documents = [engine.attach(engine.compress(ids(DOCUMENT, seed=seed), policy="full")) for seed in (0, 1)]
    reducer = engine.bound("window", question_tokens=QUESTION, document=documents[0])
    for document, more, words in (
        (documents[1], {}, "another document"),
        (documents[0], {"passages": True}, "tells no passages"),
        (documents[0], {"selection": reducer.tail}, "selects nothing"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            engine.start(document, ids(QUESTION), Sampling(3), reducer=reducer, **more)


def test_the_copy_is_made_layer_by_layer_and_its_tables_are_counted():
    engine = engine_of("llama", 2)
    document = engine.attach(engine.compress(ids(4000), policy="full"))
    reducer = engine.bound("window", question_tokens=QUESTION, params={"leaving": 16}, document=document)
    answer, batch = engine.start(document, ids(QUESTION), Sampling(20), reducer=reducer), engine.batch()
    batch.step([answer])
    tables = [prefix.chosen.rows.nbytes for layer in (0, 1) for prefix in answer.seen.prefixes(layer)]
    assert reducer.table_bytes == sum(tables) == 4 * 2 * 2 * (4000 - 16)
    again = engine.bound("window", question_tokens=QUESTION, params={"leaving": 16}, document=document)
    second = engine.start(document, ids(QUESTION), Sampling(20), reducer=again)
    second.row.stored = 3
    copied = again.copies(second.row)
    assert again.tail.prefixes(0) == ()
    next(copied.layers)
    assert again.tail.prefixes(0)
    assert again.tail.prefixes(1) == ()
