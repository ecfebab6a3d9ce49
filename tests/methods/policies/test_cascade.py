"""The cascade: layers that share a budget are reduced as they arrive, and what stays is what waiting would keep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact.records import Kept
from kvshelf.engine.prefill.reducing import Cascade
from kvshelf.kernels.select import select
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.cake import Cake
from kvshelf.methods.policies.chunked import best_rows, only_rows
from kvshelf.methods.policies.layer_defensivekv import LayerDefensiveKV
from kvshelf.methods.policies.sharing import GlobalSharing, LayerStats, ProportionalSharing
from kvshelf.methods.policies.view import DocumentView, LayerView
from tests.amounts import amount


@dataclass
class Cache:
    """Layers that arrive one after the other, with their importance and weight."""

    layers: list[LayerView]
    importance: list[torch.Tensor]
    weights: list[float]
    budget: Budget
    sizes: list[int] = field(default_factory=list)

    @classmethod
    def drawn(cls, data) -> Cache:
        count, heads, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(2, 30))
        kept = data.draw(st.integers(0, tokens - 1))
        budget = data.draw(st.integers(max(1, kept), tokens))
        scores = st.lists(st.integers(0, 5).map(float), min_size=tokens, max_size=tokens)
        importance = [torch.tensor([data.draw(scores) for _ in range(heads)]) for _ in range(count)]
        for layer in importance:
            layer[:, :kept] = torch.inf
        weights = [data.draw(st.floats(0, 10)) for _ in range(count)]
        return cls.of(importance, weights, budget)

    @classmethod
    def of(cls, importance, weights, budget) -> Cache:
        heads, tokens = importance[0].shape
        layers = []
        for i in range(len(importance)):
            # Every entry is recognizable: its key is made of its layer, head and position.
            keys = (
                torch.stack(torch.meshgrid(torch.arange(heads), torch.arange(tokens), indexing="ij"), dim=-1)
                + 100.0 * i
            )
            layers.append(LayerView(i, keys, -keys, None, 1.0, DocumentView(range(tokens)), len(importance)))
        return cls(layers, importance, weights, Budget(budget, 1 - budget / tokens))

    def cascaded(self, sharing) -> dict[int, Kept]:
        cascade = Cascade(sharing, self.budget, len(self.layers))
        for layer, importance, weight in zip(self.layers, self.importance, self.weights, strict=True):
            cascade.add(layer, importance, weight)
            self.sizes.append(sum(record.entries for record in cascade.records.values()))
        return cascade.records

    def waited(self, sharing) -> list[list[list[int]]]:
        """The positions that stay when every layer is there in full."""
        stats = [LayerStats(list(scores), weight) for scores, weight in zip(self.importance, self.weights, strict=True)]
        counts = sharing.counts(stats, self.budget, len(self.layers))
        nothing = torch.zeros(self.importance[0].shape[1], dtype=torch.bool)
        masks = [select(scores, nothing, share) for scores, share in zip(self.importance, counts, strict=True)]
        return [[head.nonzero().flatten().tolist() for head in mask] for mask in masks]

    @property
    def total(self) -> int:
        return self.budget.tokens * self.importance[0].shape[0] * len(self.layers)


SHARINGS = [GlobalSharing(), GlobalSharing(0.2), GlobalSharing(1.0), ProportionalSharing()]


@pytest.mark.parametrize("sharing", SHARINGS, ids=repr)
@settings(deadline=None, max_examples=amount(40, 200))
@given(data=st.data())
def test_a_cascade_keeps_what_waiting_for_every_layer_would_keep(sharing, data):
    cache = Cache.drawn(data)
    records = cache.cascaded(sharing)
    assert [[head.tolist() for head in records[i].positions] for i in sorted(records)] == cache.waited(sharing)
    assert cache.sizes[-1] == cache.total, "exact"
    for i, record in records.items():
        for head, (keys, values) in enumerate(record.heads()):
            at = record.positions[head].long()
            assert torch.equal(keys, cache.layers[i].keys[head, at])
            assert torch.equal(values, cache.layers[i].values[head, at])
        at = [h * len(cache.importance[i][0]) + int(j) for h, head in enumerate(record.positions) for j in head]
        assert torch.equal(record.importance, cache.importance[i].flatten()[at])


def naive_global(cache, floor):
    """One list of all entries of the cache, best first; no sharing, no selection kernel."""
    heads, tokens = cache.importance[0].shape
    forced, rest = set(), []
    for layer, scores in enumerate(cache.importance):
        for head in range(heads):
            order = sorted(range(tokens), key=lambda j: (-float(scores[head, j]), j))
            kept = max(int(torch.isposinf(scores[head]).sum()), int(floor * cache.budget.tokens), int(floor > 0))
            forced |= {(layer, head, j) for j in order[:kept]}
            rest += [(-float(scores[head, j]), layer, head, j) for j in order[kept:]]
    chosen = forced | {entry[1:] for entry in sorted(rest)[: cache.total - len(forced)]}
    return [[sorted(j for i, h, j in chosen if (i, h) == (layer, head)) for head in range(heads)]
            for layer in range(len(cache.layers))]  # fmt: skip


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@settings(deadline=None, max_examples=amount(30, 100))
@given(data=st.data())
def test_a_global_cascade_keeps_the_best_of_the_whole_cache(floor, data):
    cache = Cache.drawn(data)
    records = cache.cascaded(GlobalSharing(floor))
    kept = [[head.tolist() for head in records[i].positions] for i in sorted(records)]
    assert kept == naive_global(cache, floor)


@pytest.mark.parametrize("sharing", SHARINGS, ids=repr)
@pytest.mark.parametrize("trend", [0.0, 1.0, -1.0])
def test_the_peak_is_the_budget_an_eighth_and_one_layer(sharing, trend):
    """Whether later layers score higher, lower or alike. Before a layer is added, only what is held counts; while it is
    added, the layer itself comes on top."""
    generator = torch.Generator().manual_seed(0)
    importance = [torch.rand(2, 200, generator=generator) + trend * i for i in range(24)]
    cache = Cache.of(importance, [2.0 + trend * i / 24 for i in range(24)], 25)
    cache.cascaded(sharing)
    assert max(cache.sizes) <= 1.125 * cache.total
    assert cache.sizes[-1] == cache.total
    if trend == 0 and sharing != GlobalSharing(1.0):
        assert max(cache.sizes) > cache.total, "it is not cut after every layer"
    if sharing == GlobalSharing():
        assert cache.sizes[2] == 3 * 2 * 200, "nothing is cut before it has to be"


def record_of(importance, lengths):
    rows = sum(lengths)
    return Kept(
        keys=torch.arange(rows * 2.0).view(rows, 2),
        values=torch.arange(rows * 3.0).view(rows, 3),
        entries_at=torch.cat([torch.arange(n) * 2 for n in lengths]).to(torch.int32),
        offsets=tuple(accumulate(lengths, initial=0)),
        importance=torch.tensor(importance),
    )


def test_shrinking_keeps_the_best_of_each_head_and_the_earlier_of_equals():
    record = record_of([1.0, 3.0, 3.0, 3.0, torch.inf, 0.0, 0.0], [4, 3])
    less = only_rows(record, *best_rows(record, record.importance, (2, 2)))
    assert [head.tolist() for head in less.positions] == [[2, 4], [0, 2]]
    assert less.importance.tolist() == [3.0, 3.0, torch.inf, 0.0]
    assert torch.equal(less.keys, record.keys[[1, 2, 4, 5]])
    assert torch.equal(less.values, record.values[[1, 2, 4, 5]])
    assert best_rows(record, record.importance, (4, 3)) is None
    assert best_rows(record, record.importance, (0, 1))[1] == (0, 0, 1)
    other = torch.tensor([9.0, 0.0, 0.0, 8.0, 0.0, 0.0, 7.0])  # who stays need not be who is important
    assert best_rows(record, other, (2, 1))[0].tolist() == [0, 3, 6]


def test_shrinking_refuses_to_grow():
    with pytest.raises(AssertionError, match="only shrink"):
        best_rows(record_of([1.0, 2.0], [1, 1]), torch.tensor([1.0, 2.0]), (1, 2))


@dataclass(frozen=True)
class RecordedCake(Cake):
    seen: ClassVar[list] = []

    def importance(self, layer):
        self.seen.append((super().importance(layer), self.weight(layer)))
        return self.seen[-1][0]


@dataclass(frozen=True)
class RecordedDefensive(LayerDefensiveKV):
    seen: ClassVar[list] = []

    def importance(self, layer):
        self.seen.append((super().importance(layer), self.weight(layer)))
        return self.seen[-1][0]


@pytest.mark.parametrize("recorded", [RecordedCake, RecordedDefensive])
@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_a_model_reduced_in_cascade_keeps_what_its_layers_in_full_would(oracle, recorded, ratio):
    """A real prefill; the importance of all layers in full is kept aside for the comparison."""
    job = oracle.engine.prepare(oracle.ids, policy=recorded.name, compression_ratio=ratio)
    policy = recorded(**job.policy.parameters())
    recorded.seen.clear()
    cache = oracle.engine.run(replace(job, policy=policy)).cache
    importance, weights = zip(*recorded.seen, strict=True)
    stats = [LayerStats(list(scores), weight) for scores, weight in recorded.seen]
    counts = policy.sharing.counts(stats, job.budget, len(importance))
    assert len(set(weights)) == (len(weights) if recorded is RecordedCake else 1)
    for record, scores, share in zip(cache.layers, importance, counts, strict=True):
        for head, head_scores, count in zip(record.positions, scores, share, strict=True):
            assert head.tolist() == sorted(head_scores.sort(descending=True, stable=True).indices[:count].tolist())
    assert sum(map(sum, counts)) == job.budget.tokens * len(counts) * len(counts[0])
