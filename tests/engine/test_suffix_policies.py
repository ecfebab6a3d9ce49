"""Each suffix policy against a loop over Python lists in fp64, written from its description, within a forward by hand:
every token runs alone, and sees the document and what the loop left of the suffix."""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import AttentionInterface

from kvshelf.engine.decode.generation import Sampling
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import LogitRules
from kvshelf.methods.draws import uniform
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.gate_file import Gates, gate_path
from kvshelf.methods.policies.lagkv import LagKV as LagKVPolicy
from kvshelf.methods.policies.view import DocumentView
from kvshelf.methods.suffixes.base import SlotTable, Suffix
from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES, build
from tests.amounts import few, in_turn
from tests.by_hand import Prefix, drawn, frequencies, turned
from tests.methods.policies.gates import random_gates
from tests.views import random_layer

QUESTION, BUDGET, TOKENS = 7, 40, 110


@dataclass(eq=False)
class Entry:
    """One stored entry of one head: where its token stood behind the document, and what the loop noted."""

    position: int
    key: list
    value: list
    noted: dict = field(default_factory=dict)
    shared: list = field(default_factory=list)
    """`Member`s: other tokens that it stands for."""


@dataclass(eq=False)
class Member:
    """A token without an entry of its own: of an entry it has the direction and the value, and it has its own norm."""

    of: Entry
    norm: float
    noted: dict

    @property
    def key(self):
        return [x * self.norm / length(self.of.key) for x in self.of.key]

    @property
    def value(self):
        return self.of.value


def tokens_of(entries):
    return [token for entry in entries for token in (entry, *entry.shared)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def length(a):
    return math.sqrt(dot(a, a))


def mean(numbers):
    return sum(numbers) / len(numbers)


class Loop:
    """A policy in lists: `observe` and `reduce` get one head's entries. now: the newest token's position. The first
    `protected` entries stay, those of the question."""

    protected, budget = QUESTION, BUDGET

    def __init__(self, interval, **params):
        self.interval = interval
        self.__dict__.update(params)

    def observe(self, entries, weights, now):
        """weights: of each entry, those of the group."""

    def after(self, layers):
        """Reduce what each layer has, a list of entries for each head."""
        for layer, heads in enumerate(layers):
            if len(heads[0]) > self.budget_of(layer):
                heads[:] = self.reduced(heads, layer)
                assert all(len(entries) <= (self.budget_of(layer) or len(entries)) for entries in heads)

    def budget_of(self, layer):  # noqa: ARG002
        return self.budget

    def reduced(self, heads, layer):
        """What stays of the entries of each head of a layer."""
        return [self.reduce(entries, layer=layer, head=head) for head, entries in enumerate(heads)]

    def kept_best(self, entries, scores, recent):
        """The question, the last ones, and the best of the others; of equal ones the older."""
        middle = range(self.protected, len(entries) - recent)
        count = self.budget - self.protected - recent
        chosen = set(sorted(middle, key=lambda i: (-scores[i], i))[:count])
        return [e for i, e in enumerate(entries) if i < self.protected or i >= len(entries) - recent or i in chosen]


class WindowLoop(Loop):
    def reduce(self, entries, **_):
        return entries[: self.protected] + entries[len(entries) - (self.budget - self.protected) :]


class H2OLoop(Loop):
    def observe(self, entries, weights, now):  # noqa: ARG002
        for entry, given in zip(entries, weights, strict=True):
            entry.noted["sum"] = entry.noted.get("sum", 0.0) + mean(given)

    def reduce(self, entries, **_):
        return self.kept_best(entries, [e.noted["sum"] for e in entries], (self.budget - self.protected) // 2)


class LagKVLoop(Loop):
    """Partition by partition: its score is made once, as soon as the next one is full."""

    def reduce(self, entries, **_):
        end = entries[-1].position + 1
        partitions = (end - QUESTION) // self.interval
        of = [
            [e for e in entries[QUESTION:] if (e.position - QUESTION) // self.interval == p] for p in range(partitions)
        ]
        for own, following in pairwise(of):
            if "score" not in own[0].noted:
                assert len(own) == len(following) == self.interval
                scored = zip(self.scores(own, following, "key"), self.scores(own, following, "value"), strict=True)
                for entry, both in zip(own, scored, strict=True):
                    entry.noted["score"] = sum(both)
        room, reduced = BUDGET - QUESTION - self.interval, partitions - 1
        kept = entries[:QUESTION]
        for p, own in enumerate(of[:-1]):
            count = room // reduced + (p < room % reduced)
            chosen = sorted(own, key=lambda e: (-e.noted["score"], e.position))[:count]
            kept += sorted(chosen, key=lambda e: e.position)
        return kept + of[-1]

    def scores(self, own, following, what):
        rows, scale = [getattr(e, what) for e in own], [getattr(e, what) for e in following]
        low, high = [min(c) for c in zip(*scale, strict=True)], [max(c) for c in zip(*scale, strict=True)]
        deviations = []
        for row in rows:
            y = [(x - a) / (b - a) for x, a, b in zip(row, low, high, strict=True)]
            deviations.append(math.sqrt(sum((v - mean(y)) ** 2 for v in y) / (len(y) - 1)))
        total = sum(map(math.exp, deviations))
        return [math.exp(d) / total for d in deviations]


class EMSLoop(Loop):
    def observe(self, entries, weights, now):
        for entry, given in zip(entries, weights, strict=True):
            noted = entry.noted
            for name in ("all", "past", "current"):
                noted.setdefault(name, 0.0)
            noted["all"] += mean(given)
            noted["current"] += mean(given)
        if (now + 1 - QUESTION) % self.window == 0:
            for entry in entries:
                entry.noted["past"], entry.noted["current"] = entry.noted["current"], 0.0

    gamma = 4

    def reduce(self, entries, **_):
        tokens = tokens_of(entries)
        local = [t.noted["past"] + t.noted["current"] for t in tokens]
        everywhere = [t.noted["all"] for t in tokens]
        ratio = mean(local) / mean(everywhere)
        scores = {id(t): max(a * ratio, b) for t, a, b in zip(tokens, everywhere, local, strict=True)}
        kept = self.kept_best(entries, [scores[id(e)] for e in entries], self.window)
        centers = kept[self.protected : len(kept) - self.window]
        joining = {id(center): [] for center in centers}
        for entry in entries:
            if entry in kept:
                continue
            pairs = [(self.alike(entry.key, c.key), self.alike(entry.value, c.value), c) for c in centers]
            keys, values, nearest = max(pairs, key=lambda pair: pair[0] * pair[1])
            if keys > 0 and keys * values >= self.tau:
                joining[id(nearest)].append(entry)
        self.merges += sum(map(len, joining.values()))
        kept = [self.joined(e, joining.get(id(e)), scores) for e in kept]
        table = sorted((t for e in kept for t in e.shared), key=lambda t: -scores[id(t)])
        lost = table[int(self.gamma * self.budget) - self.budget :]
        self.losses += len(lost)
        for entry in kept:
            entry.shared = [t for t in entry.shared if t not in lost]
        return kept

    @staticmethod
    def alike(a, b):
        return dot(a, b) / (length(a) * length(b))

    @staticmethod
    def joined(center, others, scores):
        """The class of the center with those of others, each token weighing as much as its score."""
        if not others:
            return center
        every = [(e, sum(scores[id(t)] for t in (e, *e.shared))) for e in (center, *others)]
        total = sum(weight for _, weight in every)
        towards = [sum(w * e.key[c] / length(e.key) for e, w in every) / total for c in range(len(center.key))]
        scale = length(center.key) / length(towards)
        value = [sum(w * e.value[c] for e, w in every) / total for c in range(len(center.value))]
        whole = Entry(center.position, [x * scale for x in towards], value, center.noted)
        for token in (t for e in (center, *others) for t in (e, *e.shared) if t is not center):
            member = Member(whole, length(token.key), token.noted)
            scores[id(member)] = scores[id(token)]
            whole.shared.append(member)
        scores[id(whole)] = scores[id(center)]
        return whole


class D2OLoop(H2OLoop):
    """The threshold is the layer's: of all heads, which may drop other tokens."""

    recent, budgets = 0.5, ()

    def reduce(self, entries, **_):
        recent = int(self.recent * (self.budget - self.protected))
        return self.kept_best(entries, [e.noted["sum"] for e in entries], recent)

    def budget_of(self, layer):
        return self.budgets[layer] if self.budgets else self.budget

    def reduced(self, heads, layer):
        self.budget = self.budget_of(layer)
        kept = [self.reduce(entries) for entries in heads]
        dropped = {}
        for entries, own in zip(heads, kept, strict=True):
            for gone in (e for e in entries if e not in own):
                nearest = max(
                    (e for e in own if e not in entries[: self.protected]),
                    key=lambda center: EMSLoop.alike(gone.key, center.key),
                )
                dropped.setdefault(gone.position, []).append((EMSLoop.alike(gone.key, nearest.key), nearest, gone))
        now = mean([cosine for pairs in dropped.values() for cosine, _, _ in pairs])
        before = next((e.noted["tau"] for own in heads for e in own if "tau" in e.noted), None)
        now = now if before is None else (before + now) / 2
        for own in kept:
            for entry in own:
                entry.noted["tau"] = now
        joining = [pair for pairs in dropped.values() if mean([c for c, _, _ in pairs]) >= now for pair in pairs]
        self.merges += len(joining)
        return [[self.joined(e, [(c, gone) for c, to, gone in joining if to is e]) for e in own] for own in kept]

    @staticmethod
    def joined(center, members):
        every = [(1.0, center), *members]
        total = sum(math.exp(weight) for weight, _ in every)
        key, value = (
            [sum(math.exp(w) * getattr(e, of)[c] for w, e in every) / total for c in range(len(getattr(center, of)))]
            for of in ("key", "value")
        )
        return Entry(center.position, key, value, center.noted) if members else center


class ARKVLoop(Loop):
    """After the authors' code, each time for one head: the newest token ranks all before the last `window`."""

    def observe(self, entries, weights, now):  # noqa: ARG002
        for entry, given in zip(entries, weights, strict=True):
            entry.noted["weight"] = mean(given)

    def reduce(self, entries, **_):
        end = len(entries) - self.window
        past, room = entries[self.protected : end], self.budget - self.protected - self.window
        share = min(entry.noted.get("share", 1.0) for entry in entries)
        beside = [0.0, 0.0, *(entry.noted["weight"] for entry in past), 0.0, 0.0]
        scores = [mean(beside[i : i + 5]) for i in range(len(past))]
        ranked = sorted(range(len(past)), key=lambda i: (-scores[i], i))[: min(room, 3 * len(past) // 4)]
        for i in ranked[max(0, round(share * room) - self.window) :]:
            past[i].key, past[i].value = e4m3(past[i].key), e4m3(past[i].value)
        for entry in entries:
            entry.noted["share"] = share
        return entries[: self.protected] + [past[i] for i in sorted(ranked)] + entries[end:]


def e4m3(row):
    """The nearest numbers of four exponent and three mantissa bits, of which the largest, 448, is the row's."""
    scale = max(map(abs, row)) / 448
    steps = [2.0 ** (max(math.floor(math.log2(abs(x) / scale or 1.0)), -6) - 3) for x in row]
    return [round(x / scale / step) * step * scale for x, step in zip(row, steps, strict=True)]


class LazyLoop(Loop):
    def observe(self, entries, weights, now):
        for entry, given in zip(entries, weights, strict=True):
            last = entry.noted.setdefault("last", max(entry.position - 1, QUESTION - 1))
            entry.noted.setdefault("interval", 0)
            if max(given) >= self.alpha:
                entry.noted["interval"] = max(entry.noted["interval"], now - last)
                entry.noted["last"] = now

    def reduce(self, entries, **_):
        now = entries[-1].position

        def importance(entry):
            interval, idle = entry.noted["interval"], now - entry.noted["last"]
            often = 2 / (1 + math.exp(interval - 1)) if interval else 0
            exponent = 1 + idle / (interval + 1e-5)
            return often + (2 / (1 + math.exp(exponent)) if exponent < 700 else 0)

        return self.kept_best(entries, list(map(importance, entries)), self.interval)


class CaMLoop(Loop):
    def observe(self, entries, weights, now):  # noqa: ARG002
        for entry, given in zip(entries, weights, strict=True):
            entry.noted["sum"] = entry.noted.get("sum", 0.0) + mean(given)

    def reduce(self, entries, layer, head):
        entries, going = list(entries), len(entries) - BUDGET
        of_window = mean([e.noted["sum"] for e in entries[QUESTION + going :]])
        chances = [min(1.0, e.noted["sum"] / of_window) for e in entries[QUESTION : QUESTION + going]]
        for i, chance in enumerate(chances, QUESTION):
            if drawn(5, layer, head, entries[i].position) >= chance:
                continue
            self.merges += 1
            for target in entries[i + 1 : i + 1 + self.merge]:
                target.value = [a + b / self.merge for a, b in zip(target.value, entries[i].value, strict=True)]
        return entries[:QUESTION] + entries[QUESTION + going :]


class NGCLoop(Loop):
    def observe(self, entries, weights, now):  # noqa: ARG002
        for entry, given in zip(entries, weights, strict=True):
            entry.noted.setdefault("last", []).append(mean(given))

    def reduce(self, entries, **_):
        behind = entries[QUESTION:]
        blocks = [behind[i : i + self.block] for i in range(0, len(behind) - self.block + 1, self.block)]
        rest = behind[len(blocks) * self.block :]
        scores = [mean([sum(e.noted["last"][-self.queries :]) for e in block]) for block in blocks]
        going = int(self.share * len(blocks))
        while len(entries) - going * self.block > BUDGET:
            going += 1
        gone = set(sorted(range(len(blocks)), key=lambda b: (scores[b], b))[:going])
        kept = [e for b, block in enumerate(blocks) if b not in gone for e in block]
        return entries[:QUESTION] + kept + rest


class ByHand:
    """A model in fp64 that runs one token after the other."""

    def __init__(self, model, prefix, first_position, loop):
        self.model = copy.deepcopy(model).double()
        self.prefix, self.first, self.loop = prefix, first_position, loop
        self.heads = [[[] for _ in keys] for keys, _ in prefix.layers]
        AttentionInterface.register("test_suffix_by_hand", self.attend)
        self.model.set_attn_implementation("test_suffix_by_hand")
        self.ran = 0

    def logits(self, token):
        """Logits after one more token."""
        with torch.no_grad():
            logits = self.model(
                torch.tensor([[token]]), position_ids=torch.tensor([[self.first + self.ran]]), use_cache=False
            ).logits[0, -1]
        self.ran += 1
        answered = self.ran - QUESTION
        if answered > 0 and answered % self.loop.interval == 0:
            self.loop.after(self.heads)
        return logits

    def attend(self, module, query, key, value, _mask, scaling, **_):
        layer, group = module.layer_idx, query.shape[1] // key.shape[1]
        out = []
        for head, entries in enumerate(self.heads[layer]):
            entries.append(Entry(self.ran, key[0, head, 0].tolist(), value[0, head, 0].tolist()))
            keys, values = self.prefix.layers[layer]
            there = self.prefix.visible[layer][head]
            tokens = tokens_of(entries)
            own = [torch.tensor([getattr(t, what) for t in tokens]).double() for what in ("key", "value")]
            all_keys, all_values = torch.cat([keys[head][there], own[0]]), torch.cat([values[head][there], own[1]])
            queries = query[0, head * group : (head + 1) * group, 0]
            weights = torch.softmax(queries @ all_keys.T * scaling, dim=1)
            out.append(weights @ all_values)
            if self.ran >= QUESTION:
                self.loop.observe(tokens, weights[:, -len(tokens) :].T.tolist(), self.ran)
        return torch.cat(out)[None, None], None


CASES = {
    "window": ({"every": 8}, WindowLoop(8)),
    "lagkv": ({"lag": 12}, LagKVLoop(12)),
    "h2o": ({"every": 8}, H2OLoop(8)),
    "ems": ({"every": 8, "window": 9, "tau": 0.05}, EMSLoop(8, window=9, tau=0.05, merges=0, losses=0)),
    "ems, whose table is full": (
        {"every": 8, "window": 9, "tau": 0.05, "gamma": 1.2},
        EMSLoop(8, window=9, tau=0.05, gamma=1.2, merges=0, losses=0),
    ),
    "d2o": ({"every": 8}, D2OLoop(8, merges=0)),
    # Nothing is rounded here: a number at a tie is another one in fp32 (tests/engine/test_one_budget.py has none).
    "arkv": ({"every": 8, "window": 2}, ARKVLoop(8, window=2)),
    "lazy_eviction": ({"window": 14, "alpha": 0.01}, LazyLoop(14, alpha=0.01)),
    "cam": ({"every": 8, "merge": 3, "seed": 5}, CaMLoop(8, merge=3, merges=0)),
    "ngc_schedule": ({"every": 16, "block": 5, "queries": 3, "share": 0.3}, NGCLoop(16, block=5, queries=3, share=0.3)),
}


@pytest.mark.parametrize("name", few(6, CASES))
def test_a_policy_is_its_loop_over_lists(llama, monkeypatch, name):
    """The logits of each token of an answer, which runs by hand as the engine chose it; and what is left at the end,
    by position. The document is reduced, too, and both layers are compared through the second one's logits."""
    params, loop = CASES[name]
    name = name.partition(",")[0]
    cache = llama.engine.compress(llama.ids[:150], policy="keydiff", compression_ratio=0.7)
    question, found = llama.ids[30 : 30 + QUESTION], []
    passed = llama.engine.passes.continuing
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    monkeypatch.setattr(llama.engine.passes, "continuing", lambda *given: found.append(passed(*given)) or found[-1])
    reducer = llama.engine.bound(name, question_tokens=QUESTION, budget=BUDGET, params=params)
    answer, batch = llama.engine.start(cache, question, Sampling(TOKENS), reducer=reducer), llama.engine.batch()
    while not answer.finished:
        batch.step([answer])
    by_hand = ByHand(llama.model, Prefix.spelled_out(cache, frequencies(llama.model)), cache.next_position, loop)
    right = [by_hand.logits(token) for token in question][-1:]
    right += [by_hand.logits(token) for token in answer.token_ids[:-1]]
    scale = right[0].abs().max()
    errors = [float((ours[0, -1] - logits).abs().max() / scale) for ours, logits in zip(found, right, strict=True)]
    assert max(errors) < 1e-4, errors
    for layer, heads in enumerate(by_hand.heads):
        stored = reducer._layers[layer].of(answer.row, len(heads), torch.device("cpu"))[0].tolist()
        assert stored == [[entry.position for entry in entries] for entries in heads]
    assert getattr(loop, "merges", 1) > 0
    assert (getattr(loop, "losses", 0) > 0) == (getattr(loop, "gamma", 4) < 4)
    assert answer.row.stored < answer.row.logical == QUESTION + TOKENS - 1


def suffix_of(keys, values, **given):
    heads, stored, _ = keys.shape
    positions = torch.arange(stored).expand(heads, -1)
    named = {"layer": 0, "positions": positions, "columns": {}, "protected": 0, "tokens": stored}
    return Suffix(keys=keys, values=values, **{**named, **given})


def test_lagkv_keeps_what_the_policy_keeps_of_the_same_keys_at_once():
    """At each reduction of a growing suffix, whatever the budget and the partitions."""
    for lag, sink, budget in ((8, 5, 29), (8, 0, 17), (4, 3, 30), (16, 20, 70), (4, 2, 7)):
        policy = build("lagkv", {"lag": lag})
        view = random_layer(sink + 12 * lag, seed=budget)
        kept = torch.arange(sink).expand(view.kv_heads, -1)
        scores = torch.full(kept.shape, torch.inf)
        for tokens in range(sink + lag, view.num_tokens + 1, lag):
            new = torch.arange(tokens - lag, tokens).expand(view.kv_heads, -1)
            kept, scores = torch.cat([kept, new], 1), torch.cat([scores, torch.full(new.shape, torch.inf)], 1)
            if kept.shape[1] <= budget:
                continue
            at = kept.unsqueeze(2).expand(-1, -1, 8)
            suffix = suffix_of(
                view.keys.gather(1, at), view.values.gather(1, at), positions=kept, columns={"score": scores},
                protected=sink, budget=budget, tokens=tokens,
            )  # fmt: skip
            reduction = policy.reduce(suffix)
            kept, scores = kept.gather(1, reduction.kept), reduction.columns["score"]
            document = DocumentView(range(tokens), 0)
            whole = replace(view, keys=view.keys[:, :tokens], values=view.values[:, :tokens], document=document)
            at_once = LagKVPolicy(sink=sink, lag=lag).reduce(whole, LayerBudget((budget,) * view.kv_heads))
            assert [head.tolist() for head in at_once.positions] == kept.tolist()
        assert kept.shape[1] == budget


def test_lazy_eviction_keeps_what_is_used_every_step_longer_than_what_is_never_used():
    policy = build("lazy_eviction", {"window": 4})
    columns = {name: torch.full((1, 2), value) for name, value in policy.columns.items()}
    for now in range(2, 12):
        columns = {
            name: torch.cat([each, torch.full((1, 1), policy.columns[name])], 1) for name, each in columns.items()
        }
        weights = torch.zeros(1, 2, now + 1)
        weights[0, 1, 0] = 0.01  # of one query head alone
        policy.observe(columns, weights, torch.arange(now + 1)[None], now)
    assert columns["last"][0, :3].tolist() == [11, 0, 1]
    assert columns["gap"][0, :3].tolist() == [2, 0, 0]
    states = torch.randn(1, 12, 4)
    kept = policy.reduce(suffix_of(states, states, columns=columns, budget=5)).kept
    assert kept.tolist() == [[0, 8, 9, 10, 11]]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_token_that_shares_an_entry_gets_a_share_of_its_own(softcap):
    """As in one softmax over entries and tokens; none where the entry got nothing in fp32, and none where none is."""
    states = torch.Generator().manual_seed(3)
    keys, queries = (torch.randn(2, many, 8, generator=states) * 2 for many in (6, 3))
    owners = torch.tensor([[4, 0, 4, 2], [1, 5, -1, -1]])
    table = SlotTable(owners, torch.rand(2, 4, generator=states) + 0.5, {})
    shared = keys.gather(1, owners.clamp_min(0).unsqueeze(2).expand(-1, -1, 8)) * table.scales.unsqueeze(2)
    logits = queries.double() @ torch.cat([keys, shared], 1).double().mT * 0.3
    logits = logits if not softcap else softcap * (logits / softcap).tanh()
    logits[:, :, 6:] = logits[:, :, 6:].masked_fill(owners.unsqueeze(1) < 0, -torch.inf)
    right = logits.softmax(2)
    found = table.weights(right[:, :, :6].float(), queries, keys, LogitRules(0.3, softcap))
    assert torch.allclose(found.double(), right[:, :, 6:], atol=1e-6)
    assert not table.weights(torch.zeros(2, 3, 6), 100 * queries, keys, LogitRules(1.0)).any()


def test_of_no_tokens_that_share_entries_none_are_the_best():
    empty = SlotTable(torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0), {})
    nobody = SlotTable(torch.tensor([[-1], [-1]]), torch.ones(2, 1), {})
    assert [table.best(torch.zeros_like(table.scales), 3) for table in (empty, nobody)] == [None, None]


@pytest.mark.parametrize("name", sorted(SUFFIX_POLICIES))
def test_defaults_may_be_given(name):
    policy = build(name, {})
    assert build(name, policy.parameters()) == policy


def test_cam_with_one_heir_and_certainty_sums_all_values_up():
    policy = build("cam", {"merge": 1, "probability": 1.0, "every": 4})
    values = torch.randn(2, 700, 16, generator=torch.Generator().manual_seed(0))
    columns = {"sum": torch.zeros(2, 700)}
    once = policy.reduce(suffix_of(values, values, columns=columns, protected=3, budget=10))
    assert torch.allclose(once.values[:, 3], values[:, 3:694].double().sum(1).float(), atol=1e-4)
    assert torch.equal(once.values[:, [0, 1, 2, *range(4, 10)]], values[:, [0, 1, 2, *range(694, 700)]])
    assert once.kept.tolist() == [[0, 1, 2, *range(693, 700)]] * 2


def test_what_leaves_cam_is_shared_out_whole():
    policy = build("cam", {"merge": 3, "probability": 1.0, "every": 4})
    values = torch.randn(2, 90, 16, generator=torch.Generator().manual_seed(1))
    columns = {"sum": torch.zeros(2, 90)}
    once = policy.reduce(suffix_of(values, values, columns=columns, protected=3, budget=10))
    assert torch.allclose(once.values.double().sum(1), values.double().sum(1), atol=1e-4)


def test_cam_with_probability_none_is_the_window():
    policy = build("cam", {"probability": 0.0})
    values = torch.randn(2, 60, 8).bfloat16()
    never = policy.reduce(suffix_of(values, values, columns={"sum": torch.rand(2, 60)}, protected=3, budget=20))
    kept = build("window", {}).reduce(suffix_of(values, values, protected=3, budget=20)).kept
    assert torch.equal(never.kept, kept)
    assert torch.equal(never.values, values[:, kept[0]])


def test_draws_are_those_of_the_hash_and_spread_evenly():
    positions = torch.arange(2000).expand(3, -1)
    found = uniform(5, 2, positions)
    assert torch.equal(uniform(5, 2, positions[:2], first_head=1), found[1:])
    assert found[1, :50].tolist() == [drawn(5, 2, 1, position) for position in range(50)]
    assert abs(float(found.mean()) - 0.5) < 0.02
    assert float((found < 0.25).double().mean()) == pytest.approx(0.25, abs=0.02)
    others = [uniform(6, 2, positions), uniform(5, 3, positions), found.roll(1, 0), found.roll(1, 1)]
    assert all(abs(float(torch.corrcoef(torch.stack([found[0], other[0]]))[0, 1])) < 0.07 for other in others)


def test_the_second_name_of_a_policy_finds_it(llama):
    """Requests and stored settings may have it; lists do not."""
    assert build("ngc", {"every": 16}) == build("ngc_schedule", {"every": 16})
    assert "ngc" not in SUFFIX_POLICIES
    cache = llama.engine.compress(llama.ids[:150], policy="full")
    suffix = {"budget": 44, "params": CASES["ngc_schedule"][0]}
    ask = partial(llama.engine.answer, cache, llama.ids[30:41], max_new_tokens=24)
    assert ask(suffix={"policy": "ngc", **suffix}) == ask(suffix={"policy": "ngc_schedule", **suffix})
    for name in ("", "ngcs"):
        with pytest.raises(InvalidRequest, match="unknown suffix policy"):
            build(name, {})


class TrimKVLoop(Loop):
    """A token's rate is read from its query, key and value without their rotation, as it runs."""

    def gated(self, entries, rate):
        entries[-1].noted["rate"] = rate

    def reduce(self, entries, **_):
        now = entries[-1].position + 1
        return self.kept_best(entries, [(now - e.position) * e.noted["rate"] for e in entries], 0)


class GlobalLoop(TrimKVLoop):
    """The entries of all heads and layers compete; `total` stay."""

    def after(self, layers):
        heads = [entries for of_layer in layers for entries in of_layer]
        if sum(map(len, heads)) <= self.total:
            return
        now = 1 + max(entry.position for entries in heads for entry in entries)
        compete = [entry for entries in heads for entry in entries[self.protected :]]
        compete.sort(key=lambda entry: -(now - entry.position) * entry.noted["rate"])
        self.stay = {id(entry) for entry in compete[: self.total - self.protected * len(heads)]}
        for layer, of_layer in enumerate(layers):
            of_layer[:] = self.reduced(of_layer, layer)
        assert sum(len(entries) for of_layer in layers for entries in of_layer) == self.total

    def reduce(self, entries, **_):
        return [entry for place, entry in enumerate(entries) if place < self.protected or id(entry) in self.stay]


class GatedByHand(ByHand):
    """With gates: fp64 `{name: tensor}` of each layer."""

    def __init__(self, gates, *given):
        super().__init__(*given)
        self.gates, self.inv_freq = gates, frequencies(self.model)

    def attend(self, module, query, key, value, *given, **more):
        out = super().attend(module, query, key, value, *given, **more)
        back = torch.tensor([-(self.first + self.ran)])
        states = [turned(head, back, self.inv_freq) for of in (query, key) for head in of[0]] + [*value[0]]
        gate = self.gates[module.layer_idx]
        inputs = (torch.cat([state.flatten() for state in states]) - gate["mean"]) * gate["scale"]
        hidden = gate["up"] @ inputs
        outputs = gate["down"] @ (hidden * torch.sigmoid(hidden)) + gate["bias"]
        for entries, number in zip(self.heads[module.layer_idx], outputs.tolist(), strict=True):
            self.loop.gated(entries, -math.log1p(math.exp(-number)))
        return out


@in_turn({"every": [1, 8], "trained": ["trimkv", "make_each_token_count"]})
def test_trimkv_is_its_loop_over_lists(llama, monkeypatch, tmp_path, trained, every):
    """By random gates: the logits of each token, and that it was asked of a model that has none is told first."""
    engine, loop = llama.engine, TrimKVLoop(every)
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    params = {"every": every, "gates": trained}
    with pytest.raises(PolicyUnsupported, match="needs gates trained") as refused:
        engine.bound("trimkv", question_tokens=QUESTION, params=params)
    assert refused.value.param == "suffix.policy"
    weights = engine.identity.weights
    gates = random_gates(trained, engine.preparer.geometry, weights=weights)
    for name, tensor in gates.tensors.items():
        if name.endswith("up"):  # or most rates would be 1 in fp32
            tensor.mul_(0.01)
    gates = Gates.of(gates.header, gates.tensors)
    gate_path(weights, trained).write_bytes(gates.to_bytes())
    cache = engine.compress(llama.ids[:150], policy="keydiff", compression_ratio=0.7)
    question, found, passed = llama.ids[30 : 30 + QUESTION], [], engine.passes.continuing
    monkeypatch.setattr(engine.facts, "end_ids", frozenset)
    monkeypatch.setattr(engine.passes, "continuing", lambda *given: found.append(passed(*given)) or found[-1])
    bound = partial(engine.bound, "trimkv", question_tokens=QUESTION, budget=BUDGET, params=params)
    reducer, layer_of, moved = bound(), Gates.layer, []
    monkeypatch.setattr(Gates, "layer", lambda *given: moved.append(given[1]) or layer_of(*given))
    answer, batch = engine.start(cache, question, Sampling(TOKENS), reducer=reducer), engine.batch()
    while not answer.finished:
        batch.step([answer])
    tensors = [layer_of(gates, layer, torch.device("cpu")) for layer in range(len(cache.layers))]
    assert moved == list(range(len(cache.layers))), "each layer once, not at each token"
    tokens = [*question, *answer.token_ids[:-1]]
    of_layers = [{name: tensor.double() for name, tensor in own.items()} for own in tensors]
    prefix = Prefix.spelled_out(cache, frequencies(llama.model))
    by_hand = GatedByHand(of_layers, llama.model, prefix, cache.next_position, loop)
    right = [by_hand.logits(token) for token in tokens][QUESTION - 1 :]
    scale = right[0].abs().max()
    errors = [float((ours[0, -1] - logits).abs().max() / scale) for ours, logits in zip(found, right, strict=True)]
    assert max(errors) < 1e-4, errors
    with pytest.raises(PolicyUnsupported, match=f"by policy {trained} with keep_scores"):
        engine.bound("trimkv", question_tokens=QUESTION, params=params, document=engine.attach(cache))
    del answer, reducer, batch
    gc.collect()
    again, batch = engine.start(cache, question, Sampling(2), reducer=bound()), engine.batch()
    while not again.finished:
        batch.step([again])
    assert moved == 2 * list(range(len(cache.layers))), "and no longer than an answer is open"
