"""Reduces each layer of a prefill as soon as its attention is done, so that the layer can be freed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kvshelf.artifact.growth import placed
from kvshelf.artifact.packed import Packed
from kvshelf.artifact.records import Entries, Kept, Latents, LayerRecord, Recent, States, entries_of
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.attention.inspection import require_every_layer
from kvshelf.engine.forward.calls import Calls
from kvshelf.engine.forward.projection import Projection
from kvshelf.engine.prefill.protecting import aside, put_back
from kvshelf.engine.summary import SummaryMaker
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import of_entries, select
from kvshelf.kernels.transfer import upload_numbers
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy, Unsized, keep, sized
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.chunked import best_rows, only_rows
from kvshelf.methods.policies.sharing import LayerStats, Sharing
from kvshelf.methods.policies.together import importance_together, reduce_together, scores_together
from kvshelf.methods.policies.view import DocumentView, LayerView, Probed, Ranks
from kvshelf.model.layers import LayerKind, attending, reducible
from kvshelf.model.rope import Rope

_SLACK = 1.125
"""How far a cascade may exceed its budget before it is cut: cutting copies the rest, so not after every layer."""


@dataclass(eq=False)
class LayerReducer:
    """Reduces the layers of one document by one policy. kinds: of all layers. ranks: as of a `LayerView`. behind: the
    layers of the cache to which the document is appended, if it is. states: of each layer behind the document, set
    after the pass; empty for a model without states."""

    policy: Policy
    document: DocumentView
    budget: Budget
    kinds: tuple[LayerKind, ...]
    probe_lengths: tuple[int, ...]
    rope: Rope | None
    ranks: Ranks | None = None
    behind: Sequence[LayerRecord] = ()

    def __post_init__(self) -> None:
        self._places = {layer: place for place, layer in enumerate(reducible(self.kinds))}
        self.sees_queries = Needs.QUERIES in self.policy.needs
        self._records: dict[int, Entries | Unsized] = {}
        self._notes: dict[int, Any] = {}
        self._chooser = self.policy.chooser
        # An index is of all entries, in their order, and residuals are of all tokens: these policies keep them all.
        self._sets_aside = bool(self.document.protect) and not (self.policy.indexes or self.policy.has_residuals)
        self._aside: dict[int, Kept] = {}
        self._budget = self.budget
        if self._sets_aside:
            self._budget = self.budget.beside(self.document.num_protected, self.document.num_tokens)
        self._before: Tensor | None = None
        """The tokens that some head of the layer before keeps, `[N]` bool."""
        self._cascade: Cascade | None = None
        self._scorer = self._chooser.scorer
        if self._scorer is not None and self._scorer.sharing is not None:
            self._cascade = Cascade(self._scorer.sharing, self._budget, len(self._places))
        self.states: Sequence[States] = ()
        self.compress_s = 0.0

    def after_attention(self, attended: Attended) -> None:
        started = time.perf_counter()
        index = attended.layer_idx
        kind = self.kinds[index]
        if not kind.attends:
            return  # it reads the keys and values of a layer before
        if kind.sees_all:
            self.reduce(self.view(attended), self._stored(attended))
        else:
            num_tokens = self.document.num_tokens
            keys, values = (of[0, :, :num_tokens] for of in (attended.keys, attended.values))
            before = entries_of(self.behind[index]) if self.behind else None
            if isinstance(before, Recent):
                self._records[index] = before.followed_by(keys, values, self.document.end)
            else:
                self._records[index] = Recent.of(keys, values, kind.window, kind.chunk)
        self.compress_s += time.perf_counter() - started

    def reduce(self, layer: LayerView, latents: LayerView | None = None) -> None:
        """Take one layer. latents: the layer as it is stored, where its heads share latents."""
        index = layer.layer_idx
        if self._sets_aside:
            self._aside[index] = aside(layer if latents is None else latents)
            layer, latents = layer.judged, None if latents is None else latents.judged
        if self._before is not None:
            layer = replace(layer, before=self._before.to(layer.keys.device))
        self._notes[index] = self.policy.noted(layer)
        if self._cascade is None:
            tokens = self._budget.tokens
            if latents is not None:
                self._records[index] = reduce_together(self._chooser, layer, latents, tokens)
            else:
                self._records[index] = self._chooser.begin(layer, LayerBudget.uniform(layer.kv_heads, tokens))
            if Needs.BEFORE in self._chooser.needs:
                self._records |= sized({index: self._records[index]})
                record = self._records[index]
                assert isinstance(record, Kept), "a policy that merges keeps no tokens"
                self._before = torch.zeros(layer.num_tokens, dtype=torch.bool, device=layer.keys.device)
                self._before[record.entry_positions.long()] = True
        else:
            assert self._scorer is not None, "the one that shares"
            weight = self._scorer.weight(layer)
            if not math.isfinite(weight):  # shares need a finite weight now, so this cannot wait for the end
                raise _not_finite(self._chooser, f"the weight of layer {index}")
            together = latents is not None
            importance = importance_together(self._scorer, layer) if together else self._scorer.importance(layer)
            precedence = self._scorer.precedence(layer, importance)
            self._cascade.add(layer if latents is None else latents, importance, weight, precedence)

    def reduced(self) -> dict[int, Entries]:
        """The layers taken so far. Raises `PolicyUnsupported` where scores that are not finite chose entries."""
        records = sized(self._records) | (self._cascade.records if self._cascade is not None else {})
        require_finite_scores(list(records.values()), self.policy)
        return records

    def records(self) -> tuple[LayerRecord, ...]:
        """All layers, in order. Raises `PolicyUnsupported` where the attention of a layer was not observed, and as
        `reduced`."""
        records, layers = self.reduced(), attending(self.kinds)
        require_every_layer(records, layers)
        chosen = {layer: records[layer] for layer in self._places}
        records |= self.policy.finished(chosen, self._notes, self._budget)
        require_finite_scores(list(records.values()), self.policy)
        if (places := self.document.judged.places) is not None:
            records |= {layer: put_back(records[layer], kept, places) for layer, kept in self._aside.items()}
        stored = {layer: self._as_stored(layer, records[layer]) for layer in layers}
        states = self.states or [States(())] * len(self.kinds)
        return tuple(
            stored[layer] if layer in stored and not of_layer.states else States(of_layer.states, stored.get(layer))
            for layer, of_layer in enumerate(states)
        )

    def _as_stored(self, layer: int, entries: Entries) -> Entries:
        """The entries at their positions; latents, which were reduced as keys and values of one head, as `Latents`."""
        if isinstance(entries, Recent):
            return entries
        entries = placed(entries, self.document.first_position)
        return Latents.of(entries) if self.kinds[layer].latents and isinstance(entries, Kept) else entries

    def view(self, attended: Attended) -> LayerView:
        """A layer as the policy sees it: the states of the document and those of each probe pass behind it."""
        num_tokens = self.document.num_tokens
        return LayerView(
            layer_idx=attended.layer_idx,
            keys=attended.keys[0, :, :num_tokens],
            values=attended.values[0, :, :num_tokens],
            queries=attended.queries[0, :, :num_tokens] if self.sees_queries else None,
            lse=attended.lse[0] if self.sees_queries and attended.lse is not None else None,
            scaling=attended.scaling,
            document=self.document,
            num_layers=len(self._places),
            place=self._places[attended.layer_idx],
            probes=self._probes(attended) if self.sees_queries else (),
            rope=self.rope if Needs.ROPE in self.policy.needs else None,
            module=attended.module,
            ranks=self.ranks,
            call=attended.call,
            inputs=None if attended.inputs is None else attended.inputs[0, :num_tokens],
        )

    def _stored(self, attended: Attended) -> LayerView | None:
        """A layer with latents as it is stored: latents as keys and rotated parts as values, of one head. Copied, as a
        record of all tokens would otherwise keep those of the probe passes in memory, too."""
        if attended.latents is None:
            return None
        keys, values = (states[0, :, : self.document.num_tokens].clone() for states in attended.latents)
        return replace(self.view(attended), keys=keys, values=values)

    def _probes(self, attended: Attended) -> tuple[Probed, ...]:
        ends = accumulate(self.probe_lengths, initial=self.document.num_tokens)
        tensors = (attended.queries, attended.keys, attended.values)
        return tuple(Probed(*(states[0, :, a:b] for states in tensors)) for a, b in pairwise(ends))


@dataclass(eq=False)
class Scorer(LayerReducer):
    """Takes the policy's scores of each layer that policies reduce, `[kv_heads, N]` fp32, and keeps no entries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scores: dict[int, Tensor] = {}

    def after_attention(self, attended: Attended) -> None:
        policy = self._scorer
        assert policy is not None, "see `Compressor.scores`"
        if not self.kinds[attended.layer_idx].reducible:
            return
        layer = self.view(attended)
        score = policy.score(layer) if attended.latents is None else scores_together(policy, layer)
        self.scores[layer.layer_idx] = layer.all_heads(score)


@dataclass(eq=False)
class SharedReducer(ForwardContext):
    """Observes a prefill that several levels share: each reduces the layer, then `checkpoint` lets other work run.

    measured: lengths of more probe passes, behind those of the policies, which no policy sees. summary: observes the
    layers, too. calls: records those of the attention modules, for policies that need them, and with a projection those
    of the layers. projection: for a policy that stores the inputs of layers.
    """

    reducers: Sequence[LayerReducer]
    measured: Sequence[int]
    checkpoint: Callable[[], None]
    summary: SummaryMaker
    calls: Calls | None = None
    projection: Projection | None = None
    paused_s: float = field(default=0.0, init=False)

    @property
    def probe_lengths(self) -> tuple[int, ...]:
        return (*self.reducers[0].probe_lengths, *self.measured)

    @property
    def reads_attention(self) -> bool:
        return self.needs(Needs.SUMS)

    def needs(self, needed: Needs) -> bool:
        return any(needed in reducer.policy.needs for reducer in self.reducers)

    @property
    def sees_queries(self) -> bool:
        return any(reducer.sees_queries for reducer in self.reducers)

    def after_attention(self, layer: Attended) -> None:
        if not self.reducers[0].kinds[layer.layer_idx].attends:
            return  # it reads the keys and values of a layer before
        self.summary.after_attention(layer)
        if self.calls is not None and self.needs(Needs.CALL):
            layer = replace(layer, call=self.calls.take(layer.module))
        if self.calls is not None and self.projection is not None:
            inputs = next(iter(self.calls.take(self.projection.layers[layer.layer_idx]).arguments.values()))
            # A hook of the model, or a product that scales all rows by the largest, would make other keys: try three.
            last = self.reducers[0].document.num_tokens - 1
            rows = upload_numbers([0, last // 2, last], inputs.device)
            states = layer.keys[0, :, rows], layer.values[0, :, rows]
            self.projection.require_exact(layer.layer_idx, inputs[0, rows], rows, states)
            layer = replace(layer, inputs=inputs)
        for reducer in self.reducers:
            reducer.after_attention(layer)
        started = time.perf_counter()
        self.checkpoint()
        self.paused_s += time.perf_counter() - started


def require_finite_scores(records: Iterable[LayerRecord], policy: Policy) -> None:
    """Refuse a cache whose entries were chosen by scores that are not finite; `importance_of` says how they show.

    All layers are checked together after the last one: one wait for the device per document.
    """
    importances = [record.importance for record in records if isinstance(record, Packed)]
    sums = [importance.isnan().sum() for importance in importances if importance is not None]
    if not sums:
        return
    counts = torch.stack([total.to(sums[0].device) for total in sums]).tolist()
    if any(counts):
        layers = [index for index, count in enumerate(counts) if count]
        shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        scores = f"{sum(counts)} scores of entries kept in {len(layers)} of {len(counts)} layers ({shown})"
        raise _not_finite(policy, scores)


def _not_finite(policy: Policy, numbers: str) -> PolicyUnsupported:
    return PolicyUnsupported(
        f"under policy {policy.name!r}, {numbers} came out as NaN or infinity, and would choose at random; where a "
        "model overflows in float16, load it with dtype bfloat16 or float32; policy 'streaming_llm' looks at no scores",
        param="policy",
    )


class Cascade:
    """Layers that share one budget. While there is room, layers stay whole, and no shares are computed. Then each layer
    is reduced as it arrives, and earlier layers shrink to make room."""

    def __init__(self, sharing: Sharing, budget: Budget, num_layers: int) -> None:
        self._sharing = sharing
        self._budget = budget
        self._num_layers = num_layers
        self._layers: dict[int, LayerStats] = {}  # of the kept entries of all heads
        self.records: dict[int, Kept] = {}
        self._precedence: dict[int, Tensor] = {}
        """Of the entries of each record, `[entries]` fp32: those with the smallest leave first."""

    def add(self, layer: LayerView, importance: Tensor, weight: float, precedence: Tensor | None = None) -> None:
        """Take a layer with the importance of its entries, by which layers and heads share, `[kv_heads, N]` fp32.
        precedence: by which entries of a head stay, likewise; default: the importance."""
        precedence = importance if precedence is None else precedence
        stats = LayerStats(list(layer.all_heads(importance)), weight)
        of_all: Sequence[int] = [layer.num_tokens] * len(stats.importance)
        last = len(self._layers) + 1 == self._num_layers
        if last or not self._fits(of_all):
            layers = [*(earlier.on(layer.keys.device) for earlier in self._layers.values()), stats]  # to be compared
            *shares, of_all = self._sharing.counts(layers, self._budget, self._num_layers)  # waits for the device
            if last or not self._fits(of_all):
                self._shrink(layer, shares)
        free = torch.zeros(layer.num_tokens, dtype=torch.bool, device=importance.device)
        counts = layer.own_heads(of_all)
        record = keep(layer, select(precedence, free, counts), importance, counts)
        self.records[layer.layer_idx] = record
        assert record.importance is not None
        self._precedence[layer.layer_idx] = (
            record.importance if precedence is importance else of_entries(precedence, record.entry_positions, counts)
        )
        self._layers[layer.layer_idx] = stats.best(of_all)

    def _fits(self, counts: Sequence[int]) -> bool:
        """Whether a layer with so many entries of each head has room beside the kept entries of earlier layers."""
        entries = sum(counts) + sum(len(head) for earlier in self._layers.values() for head in earlier.importance)
        return entries <= _SLACK * self._budget.tokens * len(counts) * self._num_layers

    def _shrink(self, layer: LayerView, shares: Sequence[Sequence[int]]) -> None:
        """Cut the layers before this one to their shares."""
        for index, of_all in zip(self.records, shares, strict=True):
            self._layers[index] = self._layers[index].best(of_all)
            best = best_rows(self.records[index], self._precedence[index], layer.own_heads(of_all))
            if best is not None:
                self._precedence[index] = self._precedence[index][best[0]]
                self.records[index] = only_rows(self.records[index], *best)
