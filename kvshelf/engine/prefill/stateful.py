"""The prefill of a model with recurrent states, and that of tokens appended to a stored cache.

Elsewhere, probe passes stand behind the document in one sequence, and attention keeps them apart. A recurrent layer
would run through all of them as through one text, and behind a stored cache attention reads that cache in place. So
here the document has a pass of its own, and each probe pass begins behind it with a copy of the states, over the full
cache, which stays in memory until the probes are done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.growth import followed
from kvshelf.artifact.records import States
from kvshelf.engine.attention.attached import AttachedCache, HandedOn, PassingLayer, in_line
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.attention.function import Attended, ForwardContext, joined
from kvshelf.engine.attention.latents import Handover
from kvshelf.engine.attention.states import StatefulCache, StateLayer, alone
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job, Parent
from kvshelf.engine.prefill.reducing import LayerReducer
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.registry import everything
from kvshelf.methods.policies.view import DocumentView, ProbePass
from kvshelf.model.caches import cache_class
from kvshelf.model.layers import LayerKind


class _PassStateLayer(StateLayer, PassingLayer):
    """A layer of a document's own pass that attends and has states."""

    def __init__(self, number_of_states: int) -> None:
        PassingLayer.__init__(self)
        StateLayer.__init__(self, number_of_states)


def read(passes: Passes, job: Job, context: ForwardContext) -> tuple[States, ...]:
    """One pass over the document alone, observed by `context`. Returns the states of each layer behind it."""
    if job.parent is not None:
        return _appended(passes, job.parent, job.document, context)
    caches: list[StatefulCache] = []

    def make(handover: Handover) -> StatefulCache:
        layers = [_empty(index, kind, handover) for index, kind in enumerate(passes.kinds)]
        caches.append(cache_class(StatefulCache, passes.model)(layers=layers))
        return caches[0]

    passes.causal(replace(job, passes=()).inputs(passes.devices.inputs), context, cache=make)
    return tuple(States(alone(states, 0)) for states in caches[0].states())


def _empty(index: int, kind: LayerKind, handover: Handover) -> StateLayer | PassingLayer:
    """A layer of a document's own pass."""
    if not kind.attends:
        return StateLayer(kind.states)
    if kind.latents:
        return HandedOn(index, handover)
    return _PassStateLayer(kind.states) if kind.states else PassingLayer()


def _appended(passes: Passes, parent: Parent, document: DocumentView, context: ForwardContext) -> tuple[States, ...]:
    """As `read`, over tokens that continue a stored cache."""
    past = passes.attached(parent.document)
    ids = torch.tensor([list(document.token_ids)], device=passes.devices.inputs)
    with torch.no_grad(), past.begun_by(passes.model.base_model):
        _run(passes, past, ids, torch.tensor([[document.first_position]], device=ids.device), context)
    return tuple(States(alone(states, 0)) for states in past.states())


@dataclass(frozen=True, eq=False)
class Read:
    """A document that these passes have read. states: of each layer. attended: of each layer that attends, by number.
    full: the full cache. paused_s: seconds of the checkpoints."""

    passes: Passes
    states: tuple[States, ...]
    attended: dict[int, Attended]
    full: CompressedCache
    paused_s: float

    @classmethod
    def of(cls, passes: Passes, job: Job, checkpoint: Checkpoint, *, queries: bool) -> Read:
        """queries: whether the queries of the document's tokens are kept, too."""
        observer = _LayerObserver(checkpoint, queries)
        states = read(passes, job, observer)
        before, budget = () if job.parent is None else job.parent.layers, Budget.full(job.num_tokens)
        reducer = LayerReducer(everything(), job.document, budget, passes.kinds, (), None, behind=before)
        for attended in observer.attended.values():
            reducer.after_attention(attended)
        reducer.states = states
        layers = reducer.records()
        if before:
            layers = tuple(followed(before, layers))
        full = CompressedCache(layers, job.document.end, job.document.end, job.identity)
        return cls(passes, states, observer.attended, full, observer.paused_s)

    @contextmanager
    def attached(self) -> Iterator[AttachedCache]:
        """The full cache, for passes of the model inside the block."""
        past = self.passes.attached(Attachment(self.full, self.passes.devices.layers, None))
        with past.begun_by(self.passes.model.base_model):
            yield past

    def probed(self, probes: Sequence[ProbePass]) -> Iterator[Attended]:
        """The states of each layer of the document and of the probe passes behind it, as in one sequence."""
        document = Attachment(self.full, self.passes.devices.layers, None)
        of_probes: dict[int, list[Attended]] = {layer: [] for layer in self.attended}
        for _, neighbours in groupby(probes, key=lambda probe: len(probe.token_ids)):
            same_length = list(neighbours)
            most = self.passes.attached(document).rows_at_once
            for at in range(0, len(same_length), most):
                for layer, attended in _behind(self.passes, document, same_length[at : at + most]).items():
                    of_probes[layer].append(attended)
        for layer, attended in self.attended.items():
            yield joined([attended, *map(_in_line, of_probes[layer])]) if of_probes[layer] else attended


class _LayerObserver(ForwardContext):
    def __init__(self, checkpoint: Checkpoint, queries: bool) -> None:
        self.attended: dict[int, Attended] = {}
        self.paused_s = 0.0
        self._checkpoint = checkpoint
        self._queries = queries

    def after_attention(self, layer: Attended) -> None:
        if not self._queries:  # several times as many as keys
            layer = replace(layer, queries=layer.queries[:, :, :0], lse=None)
        self.attended[layer.layer_idx] = layer
        started = time.perf_counter()
        self._checkpoint()
        self.paused_s += time.perf_counter() - started


def _behind(passes: Passes, document: Attachment, probes: Sequence[ProbePass]) -> dict[int, Attended]:
    """The states of each layer in some passes of one length, a row for each pass."""
    device, past = passes.devices.inputs, passes.attached(document)
    ids = torch.tensor([probe.token_ids for probe in probes], device=device)
    first = torch.tensor([[probe.first_position] for probe in probes], device=device)
    observer = _LayerObserver(nothing, queries=True)
    with past.begun_by(passes.model.base_model):
        _run(passes, past, ids, first, observer)
    return observer.attended


def _in_line(rows: Attended) -> Attended:
    return replace(rows, queries=in_line(rows.queries), keys=in_line(rows.keys), values=in_line(rows.values))


def _run(passes: Passes, past: AttachedCache, ids: Tensor, first: Tensor, context: ForwardContext) -> None:
    """A pass over tokens `[rows, T]` from positions `first` `[rows, 1]` on, behind an attached cache, observed by
    `context`, also where the model takes the tokens in several pieces."""
    pieces = past.pieces(ids)
    observers = [_LayerObserver(nothing, queries=True) for _ in pieces]
    for piece, observer in zip(pieces, observers, strict=True):
        positions = first + torch.arange(piece.shape[1], device=ids.device)
        passes.behind(piece, positions, past, context if len(pieces) == 1 else observer)
        first = first + piece.shape[1]
    for layer in observers[0].attended:  # empty for a pass in one piece, which `context` has observed
        context.after_attention(joined([observer.attended[layer] for observer in observers]))
