"""Chunked prefill: each chunk sees the entries kept from earlier chunks, so that the KV cache never exceeds the budget
plus the policy's buffer: tokens that wait for the next partition, or a chunk and the probe behind it. Where layers
share the budget, each keeps its chunk until the last layer has read it.

Protected tokens are read with their chunk, set aside once each layer has read them, and seen by every later chunk. No
absorber sees them; they are a part of the budget.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvshelf.artifact.growth import plain_again
from kvshelf.artifact.records import Entries, Kept, LayerRecord
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, AttachedLayer, AttachedStates
from kvshelf.engine.attention.function import CONTEXT, Attended, ForwardContext
from kvshelf.engine.attention.inspection import require_every_layer
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.prefill.protecting import protected_entries, put_back
from kvshelf.engine.prefill.reducing import LayerReducer, require_finite_scores
from kvshelf.kernels.prefix_attention import StackedPrefix
from kvshelf.kernels.select import pack
from kvshelf.methods.policies.chunked import ChunkAbsorber, LayerPast
from kvshelf.methods.policies.partitions import PartitionAbsorber
from kvshelf.methods.policies.view import DocumentView, LayerView
from kvshelf.model.devices import input_device
from kvshelf.model.layers import LayerKind
from kvshelf.model.rope import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChunkedPrefill(ForwardContext):
    """A chunked prefill: after the attention of each layer the policy reduces the oldest tokens of its buffer, or the
    kept entries and the chunk, then `checkpoint` lets other work run."""

    reads_attention = False

    def __init__(
        self, job: Job, *, kinds: tuple[LayerKind, ...], rope: Rope | None, checkpoint: Callable[[], None]
    ) -> None:
        assert job.absorber is not None
        self._absorber = job.absorber
        self._job = job
        self._kinds = kinds
        self._rope = rope
        self._probes = [probe.token_ids for probe in job.passes] or [()] * len(self._absorber.chunks)
        self._layers: list[ChunkedLayer | RejudgedLayer] = [
            RejudgedLayer(cast(ChunkAbsorber, job.absorber))
            if job.absorber.again
            else ChunkedLayer(cast(PartitionAbsorber, job.absorber))
            for _ in kinds
        ]
        if job.parent is not None:
            for layer, record in zip(cast("list[RejudgedLayer]", self._layers), job.parent.layers, strict=True):
                layer.resume(cast(Kept, plain_again(record, ())), job.document)
        self._checkpoint = checkpoint
        self.compress_s = 0.0
        self.paused_s = 0.0

    def run(self, model: PreTrainedModel, token_ids: Sequence[int]) -> None:
        """One forward pass per chunk and the probe behind it, at the tokens' true positions."""
        cache = Cache(layers=self._layers)
        device = input_device(model)
        judged, document = self._job.document.judged, self._job.document
        ends, before = [0, *accumulate(self._absorber.chunks)], document.first_position
        for (first, last), probe in zip(pairwise(ends), self._probes, strict=True):
            start, end = (0 if count == 0 else judged.behind(count) - before for count in (first, last))
            ids = torch.tensor([[*token_ids[start:end], *probe]], device=device)
            at = torch.arange(before + start, before + start + ids.shape[1], device=device).unsqueeze(0)
            self._protected = pad(document.protected[start:end], (0, len(probe)))
            chunk, lengths = judged.part(first, last), (len(probe),) if probe else ()
            policy, budget = self._absorber.policy, self._job.budget
            self._chunk = LayerReducer(policy, chunk, budget, self._kinds, lengths, self._rope)
            model.base_model(input_ids=ids, position_ids=at, use_cache=True, **{CACHE_ARGUMENT: cache, CONTEXT: self})
            self._reduce_together()

    @property
    def hides(self) -> bool:
        """Whether the policy says which of a chunk's tokens later ones see."""
        return self._absorber.again and self._absorber.policy.hides  # type: ignore[attr-defined]

    def before_attention(self, layer: Attended) -> None:
        started = time.perf_counter()
        judged = ~self._protected.to(layer.queries.device)
        cast(RejudgedLayer, self._layers[layer.layer_idx]).hide(layer, self._chunk, judged)
        self.compress_s += time.perf_counter() - started

    def after_attention(self, layer: Attended) -> None:
        started = time.perf_counter()
        read = self._layers[layer.layer_idx]
        read.set_aside(self._protected)
        if self._protected.any():
            layer = replace(layer, queries=layer.queries[:, :, ~self._protected.to(layer.queries.device)])
        read.reduce(layer, self._chunk)
        del read.visible  # all states of this pass, which no other layer reads
        absorbed = time.perf_counter()
        self._checkpoint()
        self.compress_s += absorbed - started
        self.paused_s += time.perf_counter() - absorbed

    def _reduce_together(self) -> None:
        if not self._absorber.again or self._absorber.policy.phase == "during":
            return
        started, layers = time.perf_counter(), cast("list[RejudgedLayer]", self._layers)
        absorber = cast(ChunkAbsorber, self._absorber)
        shares = absorber.policy.shares([layer.past for layer in layers], absorber.budget)
        for layer, counts in zip(layers, shares, strict=True):
            layer.cut(counts)
        self.compress_s += time.perf_counter() - started

    def records(self) -> tuple[LayerRecord, ...]:
        """All layers, in order. Tokens that are still in the buffer at the end are all kept. To be called once: each
        layer is freed as its record is made, which for protected tokens is a copy.

        Raises `PolicyUnsupported` where a layer was not observed, or scores that are not finite chose entries.
        """
        observed = [index for index, layer in enumerate(self._layers) if layer.is_initialized]
        require_every_layer(observed, range(len(self._kinds)))
        policy = self._absorber.policy
        notes = {index: layer.note for index, layer in enumerate(self._layers)}
        judged: dict[int, Entries] = {index: layer.record() for index, layer in enumerate(self._layers)}
        require_finite_scores(list(judged.values()), policy)
        judged |= policy.finished(judged, notes, self._job.budget)
        records: list[LayerRecord] = []
        while self._layers:
            records.append(self._layers.pop(0).whole(judged.pop(len(records)), self._job.document))
        return tuple(records)


class ReadLayer(AttachedLayer):
    """One layer while the document is read: the kept entries are the prefix, the tokens of a pass the suffix."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self._aside: tuple[StackedPrefix, ...] = ()

    @property
    def judged(self) -> int:
        """Tokens before the suffix that the absorber has judged."""
        return self.start - sum(aside.keys.shape[1] for aside in self._aside)

    def set_aside(self, protected: Tensor) -> None:
        """Take protected tokens out of the suffix. protected: which of the last pass's tokens are, `[T]` bool."""
        if not protected.any():
            return
        of_suffix = pad(protected, (self._length - len(protected), 0))
        inside, rest = (mask.nonzero()[:, 0].to(self.keys.device) for mask in (of_suffix, ~of_suffix))
        keys, values = self.keys[0][:, inside], self.values[0][:, inside]
        for aside in self._aside:
            keys, values = torch.cat([aside.keys, keys], dim=1), torch.cat([aside.values, values], dim=1)
        self._aside = (StackedPrefix(keys, values),)
        self.keys, self.values = self.keys[:, :, rest], self.values[:, :, rest]
        self.start += len(inside)
        self._length = len(rest)

    @abstractmethod
    def reduce(self, attended: Attended, chunk: LayerReducer) -> None:
        """Let the absorber judge the tokens of this pass, without those set aside. chunk: makes views of its layers."""

    @abstractmethod
    def record(self) -> Kept:
        """The kept entries of the tokens that the absorber has judged, by their places among these."""

    def whole(self, record: Entries, document: DocumentView) -> Entries:
        """The kept entries of the whole document. record: those of `record`."""
        places = document.judged.places
        if places is None:
            return record
        (aside,) = self._aside
        at = document.protected.nonzero()[:, 0].to(aside.keys.device)
        return put_back(record, protected_entries(aside.keys, aside.values, at), places)


class RejudgedLayer(ReadLayer):
    """One layer whose kept entries are judged again with each chunk: they are the prefix, a chunk and the probe behind
    it the suffix.

    Heads may keep different numbers of entries. While a layer is reduced, its entries from before, these joined with
    the chunk, and its new entries are in memory; of other layers, the entries between two chunks.
    """

    def __init__(self, absorber: ChunkAbsorber) -> None:
        super().__init__()
        self._absorber = absorber
        self._past: LayerPast | None = None
        self._judged: LayerPast | None = None

    def resume(self, record: Kept, document: DocumentView) -> None:
        """Continue the entries of a stored cache."""
        self.start = document.first_position
        self._set_past(self._absorber.policy.resumed(record, document.first_position, document.end))

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    def _write(self, end: int, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        # The suffix has this pass alone.
        self.keys, self.values = key_states.contiguous(), value_states.contiguous()

    def hide(self, attended: Attended, chunk: LayerReducer, judged: Tensor) -> None:
        """Judge the chunk before its tokens attend, and hide tokens from later ones where the policy says so. judged:
        which of the pass's tokens it judges, `[T]` bool."""
        queries, keys, values = (of[:, :, judged] for of in (attended.queries, attended.keys, attended.values))
        layer = chunk.view(replace(attended, queries=queries, keys=keys, values=values))
        self._judged = self._with(layer)
        hidden = attended.keys.new_zeros(1, layer.kv_heads, len(judged), dtype=torch.bool)
        hidden[0, :, judged] = self._absorber.policy.hidden(self._judged, layer.num_tokens)
        states = cast(AttachedStates, self.visible[0])
        (rows,) = states.layout.suffixes
        states.layout = replace(states.layout, suffixes=(replace(rows, hidden=hidden),))

    def _with(self, layer: LayerView) -> LayerPast:
        """The kept entries and a chunk, judged."""
        past = self._past or LayerPast.nothing(layer, self._absorber.document.num_tokens)
        return self._absorber.policy.take(past, layer)

    def reduce(self, attended: Attended, chunk: LayerReducer) -> None:
        """Judge the kept entries and the chunk, and keep as many as the budget has room for; all of them where layers
        share it."""
        layer, policy = chunk.view(replace(attended, keys=self.keys, values=self.values)), self._absorber.policy
        self._set_past(self._judged or self._with(layer))
        self._judged = None
        if policy.phase == "during":
            self.cut(*policy.shares([self.past], self._absorber.layer_budget(layer.layer_idx)))
        self.start += layer.num_tokens
        self._length = 0
        del self.keys, self.values

    @property
    def past(self) -> LayerPast:
        """The kept entries of the chunks read so far."""
        assert self._past is not None, "a chunk has been read"
        return self._past

    def cut(self, counts: Sequence[int]) -> None:
        """Keep `counts[h]` entries of head h."""
        self._set_past(self._absorber.policy.cut(self.past, counts))

    def _set_past(self, past: LayerPast) -> None:
        self._past = past
        self.prefix = (*past.record.prefixes(), *self._aside)

    @property
    def note(self) -> Any:
        """As of `Policy.noted`, once the last chunk is read."""
        return self.past.note

    def record(self) -> Kept:
        return self._absorber.policy.recorded(self.past)


class ChunkedLayer(ReadLayer):
    """One layer whose kept entries stay: they are the prefix, tokens not yet reduced the suffix.

    Kept entries stand in buffers `[kv_heads, capacity, ...]` of the final size, which become the record without a copy.
    The suffix is never longer than a partition of the policy and a chunk.
    """

    def __init__(self, absorber: PartitionAbsorber) -> None:
        super().__init__()
        self._absorber = absorber
        self._capacity = absorber.entries
        self._kept = 0

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (states.new_empty(states[:, :, :0].shape) for states in (key_states, value_states))
        self.is_initialized = True
        shape = key_states.shape[1], self._capacity
        self._kept_keys = key_states.new_empty(*shape, key_states.shape[-1])
        self._kept_values = value_states.new_empty(*shape, value_states.shape[-1])
        self._positions = torch.empty(shape, dtype=torch.int32, device=key_states.device)
        self._importance = torch.empty(shape, dtype=torch.float32, device=key_states.device)

    def _write(self, end: int, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)

    note: None = None

    def reduce(self, attended: Attended, chunk: LayerReducer) -> None:  # noqa: ARG002
        self.absorb()

    def absorb(self) -> None:
        """Reduce the oldest tokens of the suffix while the policy has enough of them."""
        while self._length:
            chosen = self._absorber.absorb(self.judged, self.keys[0], self.values[0])
            if chosen is None:
                break
            self._take(*chosen)
        kept = StackedPrefix(self._kept_keys[:, : self._kept], self._kept_values[:, : self._kept])
        self.prefix = (*([kept] if self._kept else []), *self._aside)

    def record(self) -> Kept:
        if self._length:
            rest = torch.ones(self._kept_keys.shape[0], self._length, dtype=torch.bool, device=self._kept_keys.device)
            self._take(rest, torch.full(rest.shape, torch.inf, device=rest.device))
        assert self._kept == self._capacity, "an absorber keeps exactly the budget"
        heads = self._kept_keys.shape[0]
        return Kept(
            keys=self._kept_keys.flatten(0, 1),
            values=self._kept_values.flatten(0, 1),
            entries_at=self._positions.flatten(),
            offsets=tuple(range(0, heads * self._capacity + 1, self._capacity)),
            importance=self._importance.flatten(),
        )

    def _take(self, mask: Tensor, importance: Tensor) -> None:
        """Of the first tokens of the suffix, keep the marked ones and drop the others. mask: `[kv_heads, n]` bool."""
        heads, tokens = mask.shape
        count = int(mask[0].sum())
        new = slice(self._kept, self._kept + count)
        keys, values, positions, _ = pack(self.keys[0, :, :tokens], self.values[0, :, :tokens], mask, [count] * heads)
        self._kept_keys[:, new] = keys.view(heads, count, keys.shape[-1])
        self._kept_values[:, new] = values.view(heads, count, values.shape[-1])
        self._positions[:, new] = positions.view(heads, count) + self.judged
        self._importance[:, new] = importance.gather(1, positions.view(heads, count).long())
        self.keys, self.values = self.keys[:, :, tokens:].clone(), self.values[:, :, tokens:].clone()
        self._kept += count
        self.start += tokens
        self._length -= tokens
