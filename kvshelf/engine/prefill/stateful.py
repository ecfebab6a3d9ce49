"""The prefill of a model with recurrent states, and that of tokens appended to a stored cache.

Elsewhere, probe passes stand behind the document in one sequence, and attention keeps them apart. A recurrent layer
would run through all of them as through one text, and behind a stored cache attention reads that cache in place. So
here the document has a pass of its own, and each probe pass begins behind it, over the full cache, with a copy of the
states. It is held until the probes are done: of all layers that attend, which in models with states are few, or of the
appended tokens alone.
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
    """One pass over the document alone, under the eyes of `context`. Returns the states of each layer behind it."""
    if job.parent is not None:
        return _appended(passes, job.parent, job.document, context)
    layers: list[StateLayer | PassingLayer] = []

    def made(handover: Handover) -> StatefulCache:
        layers.extend(_empty(index, kind, handover) for index, kind in enumerate(passes.kinds))
        return cache_class(StatefulCache, passes.model)(layers=layers)

    passes.causal(replace(job, passes=()).inputs(passes.devices.inputs), context, cache=made)
    return tuple(States(alone(layer.states(), 0) if isinstance(layer, StateLayer) else ()) for layer in layers)


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
    """A document that has been read by these passes, all of it held. states: of each layer. attended: what those saw
    that attend, by layer. full: the full cache."""

    passes: Passes
    states: tuple[States, ...]
    attended: dict[int, Attended]
    full: CompressedCache
    paused_s: float

    @classmethod
    def of(cls, passes: Passes, job: Job, checkpoint: Checkpoint, *, queries: bool) -> Read:
        """queries: whether the queries of the document's tokens are held, too. paused_s: what `checkpoint` took."""
        held = _Held(checkpoint, queries)
        states = read(passes, job, held)
        before = () if job.parent is None else job.parent.layers
        whole_budget = Budget.full(job.num_tokens)
        whole = LayerReducer(everything(), job.document, whole_budget, passes.kinds, (), None, behind=before)
        for attended in held.attended.values():
            whole.after_attention(attended)
        whole.states = states
        layers = whole.records()
        if before:
            layers = tuple(followed(before, layers))
        full = CompressedCache(layers, job.document.end, job.document.end, job.identity)
        return cls(passes, states, held.attended, full, held.paused_s)

    @contextmanager
    def asked(self) -> Iterator[AttachedCache]:
        """The full cache, to be asked inside the block."""
        past = self.passes.attached(Attachment(self.full, self.passes.devices.layers, None))
        with past.begun_by(self.passes.model.base_model):
            yield past

    def probed(self, probes: Sequence[ProbePass]) -> Iterator[Attended]:
        """What each layer saw of the document and of the probe passes behind it, as in one sequence."""
        document = Attachment(self.full, self.passes.devices.layers, None)
        behind: dict[int, list[Attended]] = {layer: [] for layer in self.attended}
        for _, same in groupby(probes, key=lambda probe: len(probe.token_ids)):
            passes = list(same)
            most = self.passes.attached(document).rows_at_once
            for some in (passes[at : at + most] for at in range(0, len(passes), most)):
                for layer, attended in _behind(self.passes, document, some).items():
                    behind[layer].append(attended)
        for layer, own in self.attended.items():
            yield joined([own, *map(_in_line, behind[layer])]) if behind[layer] else own


class _Held(ForwardContext):
    """Holds what each layer saw."""

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
    """What each layer saw of some passes of one length, a row each."""
    device, past = passes.devices.inputs, passes.attached(document)
    ids = torch.tensor([probe.token_ids for probe in probes], device=device)
    first = torch.tensor([[probe.first_position] for probe in probes], device=device)
    held = _Held(nothing, queries=True)
    with past.begun_by(passes.model.base_model):
        _run(passes, past, ids, first, held)
    return held.attended


def _in_line(rows: Attended) -> Attended:
    """Rows of tokens as one, one behind the other."""
    queries, keys, values = map(in_line, (rows.queries, rows.keys, rows.values))
    return replace(rows, queries=queries, keys=keys, values=values)


def _run(passes: Passes, past: AttachedCache, ids: Tensor, first: Tensor, context: ForwardContext) -> None:
    """A pass over tokens `[rows, T]` from positions `first` `[rows, 1]` on, behind an attached cache, under the eyes of
    `context`: also where the model takes them in several pieces."""
    pieces = past.pieces(ids)
    held = [_Held(nothing, queries=True) for _ in pieces]
    for piece, seen in zip(pieces, held, strict=True):
        positions = first + torch.arange(piece.shape[1], device=ids.device)
        passes.behind(piece, positions, past, context if len(pieces) == 1 else seen)
        first = first + piece.shape[1]
    for layer in held[0].attended:  # none of a pass in one piece, which `context` has seen
        context.after_attention(joined([each.attended[layer] for each in held]))
