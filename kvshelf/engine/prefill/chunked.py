"""Chunked prefill: each chunk sees the entries kept from earlier chunks, so that the KV cache never exceeds the budget
plus the policy's buffer: tokens that wait for the next partition, or a block and the probe that judges it.

Protected tokens are read with the chunk that they stand in, set aside once each layer has read them, and seen by every
later chunk. No absorber sees them; they are a part of the budget.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from kvshelf.artifact.records import Entries, Kept
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, AttachedLayer
from kvshelf.engine.attention.function import CONTEXT, Attended, ForwardContext
from kvshelf.engine.attention.inspection import require_every_layer
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.prefill.protecting import protected_entries, put_back
from kvshelf.engine.prefill.reducing import require_finite_scores
from kvshelf.kernels.prefix_attention import StackedPrefix
from kvshelf.kernels.select import pack
from kvshelf.methods.policies.base import Absorber
from kvshelf.methods.policies.blocks import BlockAbsorber, BlockPast
from kvshelf.methods.policies.partitions import PartitionAbsorber
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.devices import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChunkedPrefill(ForwardContext):
    """A chunked prefill: after the attention of each layer the policy reduces the oldest tokens
    of its buffer, then `checkpoint` lets other work run."""

    reads_attention = False

    def __init__(
        self,
        job: Job,
        *,
        num_layers: int,
        checkpoint: Callable[[], None],
    ) -> None:
        absorber = job.absorber
        assert absorber is not None
        self._policy = absorber.policy
        self._document = job.document
        self._chunks = list(absorber.chunks)
        self._probes = [probe.token_ids for probe in job.passes] or [()] * len(self._chunks)
        self._layers = [_layer(absorber) for _ in range(num_layers)]
        self._checkpoint = checkpoint
        self.compress_s = 0.0
        self.paused_s = 0.0

    def run(self, model: PreTrainedModel, token_ids: Sequence[int]) -> None:
        """One forward pass per chunk and the probe behind it, at the tokens' true positions."""
        cache = Cache(layers=self._layers)
        device = input_device(model)
        ends = map(self._document.judged.behind, accumulate(self._chunks))
        for (start, end), probe in zip(pairwise([0, *ends]), self._probes, strict=True):
            ids = torch.tensor([[*token_ids[start:end], *probe]], device=device)
            at = torch.arange(start, start + ids.shape[1], device=device).unsqueeze(0)
            self._rows = len(probe)
            self._protected = pad(self._document.protected[start:end], (0, len(probe)))
            model.base_model(input_ids=ids, position_ids=at, use_cache=True, **{CACHE_ARGUMENT: cache, CONTEXT: self})

    def after_attention(self, layer: Attended) -> None:
        started = time.perf_counter()
        own = self._layers[layer.layer_idx]
        own.set_aside(self._protected)
        own.reduce(layer, self._rows)
        del own.given  # all states of this pass, which no other layer reads
        absorbed = time.perf_counter()
        self._checkpoint()
        self.compress_s += absorbed - started
        self.paused_s += time.perf_counter() - absorbed

    def records(self) -> tuple[Entries, ...]:
        """All layers, in order. Tokens that are still in the buffer at the end are all kept. To be called once: each
        layer is freed as its record is made, which for protected tokens is a copy.

        Raises `PolicyUnsupported` where a layer was not observed, or scores that are not finite chose entries.
        """
        require_every_layer(
            [i for i, layer in enumerate(self._layers) if layer.is_initialized], range(len(self._layers))
        )
        records = []
        while self._layers:
            records.append(self._layers.pop(0).whole(self._document))
        require_finite_scores(records, self._policy)
        return tuple(records)


class ReadLayer(AttachedLayer):
    """One layer while the document is read: what stays is the prefix, the tokens of a pass the suffix."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self._aside: tuple[StackedPrefix, ...] = ()

    @property
    def judged(self) -> int:
        """Tokens before the suffix that the absorber has seen."""
        return self.start - sum(aside.keys.shape[1] for aside in self._aside)

    def set_aside(self, protected: Tensor) -> None:
        """Take protected tokens out of the suffix. protected: which of the last pass's tokens are, `[T]` bool."""
        if not protected.any():
            return
        of_suffix = pad(protected, (self._length - len(protected), 0))
        inside, left = (mask.nonzero()[:, 0].to(self.keys.device) for mask in (of_suffix, ~of_suffix))
        before = [[aside.keys, aside.values] for aside in self._aside]
        own = [states[0][:, inside] for states in (self.keys, self.values)]
        self._aside = (StackedPrefix(*(torch.cat(parts, dim=1) for parts in zip(*before, own, strict=True))),)
        self.keys, self.values = self.keys[:, :, left], self.values[:, :, left]
        self.start += len(inside)
        self._length = len(left)

    @abstractmethod
    def record(self) -> Kept:
        """The entries kept of what the absorber has seen, by their places in it."""

    def whole(self, document: DocumentView) -> Entries:
        """The entries of the whole document that stay."""
        record, places = self.record(), document.judged.places
        if places is None:
            return record
        (aside,) = self._aside
        at = document.protected.nonzero()[:, 0].to(aside.keys.device)
        return put_back(record, protected_entries(aside.keys, aside.values, at), places)


class ProbedLayer(ReadLayer):
    """One layer while the document is read: kept entries are the prefix, a block and the probe behind it the suffix.

    Heads may keep different numbers of entries. While a layer is reduced, what it kept before and what it will keep are
    both in memory; other layers hold the budget.
    """

    def __init__(self, absorber: BlockAbsorber) -> None:
        super().__init__()
        self._absorber = absorber
        self._kept: Kept | None = None

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    def _write(self, end: int, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        # A pass is all of the suffix: there is nothing to append it to.
        self.keys, self.values = key_states.contiguous(), value_states.contiguous()

    def reduce(self, attended: Attended, probe: int) -> None:
        """Judge what is left of the document so far by the last `probe` tokens of this pass, drop these, and keep as
        many entries as the budget has room for."""
        block = self._length - probe
        old = _by_head(self._kept or _nothing(self.keys[0], self.values[0]))
        queries = attended.queries[0, :, attended.queries.shape[2] - probe :]
        grouped = queries.reshape(len(old), -1, *queries.shape[1:])
        importance = [
            self._absorber.importance(
                BlockPast(
                    keys=torch.cat([head.keys, self.keys[0, h, :block]]),
                    importance=head.importance,
                    sinks=self._absorber.sinks(self.judged + block),
                    queries=grouped[h],
                    own_keys=self.keys[0, h, block:],
                    scaling=attended.scaling,
                )
            )
            for h, head in enumerate(old)
        ]
        self._kept = self._best(old, block, importance, self._absorber.counts(importance, attended.layer_idx))
        self.prefix = (*self._kept.prefixes(), *self._aside)
        del self.keys, self.values
        self.start += block
        self._length = 0

    def _best(self, old: Sequence[_Head], block: int, importance: Sequence[Tensor], counts: Sequence[int]) -> Kept:
        """The most important of the kept entries and the block's; equal ones by the smaller position."""
        positions = torch.arange(self.judged, self.judged + block, dtype=torch.int32, device=self.keys.device)
        chosen = []
        for h, (head, scores, count) in enumerate(zip(old, importance, counts, strict=True)):
            rows = scores.sort(descending=True, stable=True).indices[:count].sort().values
            new = self.keys[0, h, :block], self.values[0, h, :block], positions
            chosen.append((*(_rows(*pair, rows) for pair in zip(head, new, strict=False)), scores[rows]))
        keys, values, entries_at, of_entries = map(torch.cat, zip(*chosen, strict=True))
        offsets = tuple(accumulate(counts, initial=0))
        return Kept(keys=keys, values=values, entries_at=entries_at, offsets=offsets, importance=of_entries)

    def record(self) -> Kept:
        assert self._kept is not None, "the document has a block"
        return self._kept


class _Head(NamedTuple):
    """One KV head of a record: `[n, ...]` each."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    importance: Tensor


def _by_head(kept: Kept) -> list[_Head]:
    """Views of the heads of a record."""
    tensors = cast("tuple[Tensor, ...]", (kept.keys, kept.values, kept.entry_positions, kept.importance))
    return [_Head(*(tensor[start:end] for tensor in tensors)) for start, end in pairwise(kept.offsets)]


def _nothing(keys: Tensor, values: Tensor) -> Kept:
    """A record without entries, for heads of these keys and values `[kv_heads, T, ...]`."""
    return Kept(
        keys=keys[0, :0],
        values=values[0, :0],
        entries_at=torch.empty(0, dtype=torch.int32, device=keys.device),
        offsets=(0,) * (len(keys) + 1),
        importance=torch.empty(0, device=keys.device),
    )


def _rows(first: Tensor, second: Tensor, rows: Tensor) -> Tensor:
    """Rows of `second` behind those of `first`, by ascending number, without a copy of the two together."""
    before = int((rows < len(first)).sum())
    return torch.cat([first[rows[:before]], second[rows[before:] - len(first)]])


def _layer(absorber: Absorber) -> ChunkedLayer | ProbedLayer:
    if absorber.probed:
        return ProbedLayer(cast(BlockAbsorber, absorber))
    return ChunkedLayer(cast(PartitionAbsorber, absorber))


class ChunkedLayer(ReadLayer):
    """One layer while the document is read: kept entries are the prefix, tokens not yet reduced the suffix.

    Kept entries stand in buffers `[kv_heads, capacity, ...]` of the final size, which become the record without a copy.
    The suffix is never longer than what the policy waits for and a chunk.
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

    def reduce(self, attended: Attended, probe: int) -> None:  # noqa: ARG002
        """Absorb what this pass brought: it has no probe, and nothing asks for queries."""
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
        heads, taken = mask.shape
        count = int(mask[0].sum())
        new = slice(self._kept, self._kept + count)
        keys, values, positions, _ = pack(self.keys[0, :, :taken], self.values[0, :, :taken], mask, [count] * heads)
        self._kept_keys[:, new] = keys.view(heads, count, keys.shape[-1])
        self._kept_values[:, new] = values.view(heads, count, values.shape[-1])
        self._positions[:, new] = positions.view(heads, count) + self.judged
        self._importance[:, new] = importance.gather(1, positions.view(heads, count).long())
        self.keys, self.values = self.keys[:, :, taken:].clone(), self.values[:, :, taken:].clone()
        self._kept += count
        self.start += taken
        self._length -= taken
