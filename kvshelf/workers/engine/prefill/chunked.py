"""Chunked prefill: each chunk sees the entries kept from earlier chunks, so that the KV cache never exceeds the budget
plus the policy's buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvshelf.kernels.prefix_attention import StackedPrefix
from kvshelf.kernels.select import pack
from kvshelf.store.artifact.records import Kept
from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT, AttachedLayer
from kvshelf.workers.engine.attention.function import CONTEXT, Attended
from kvshelf.workers.engine.inputs.requirements import require_every_layer
from kvshelf.workers.engine.prefill.reducing import require_finite_scores
from kvshelf.workers.model.devices import input_device
from kvshelf.workers.policies.base import Absorber

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChunkedPrefill:
    """The `ForwardContext` of a chunked prefill: after the attention of each layer the policy reduces the oldest tokens
    of its buffer, then `checkpoint` lets other work run."""

    probe_lengths: tuple[int, ...] = ()
    reads_attention = False

    def __init__(
        self,
        absorber: Absorber,
        budget_tokens: int,
        *,
        num_layers: int,
        checkpoint: Callable[[], None],
    ) -> None:
        self._policy = absorber.policy
        self._chunks = list(absorber.chunks)
        self._layers = [ChunkedLayer(absorber, budget_tokens) for _ in range(num_layers)]
        self._checkpoint = checkpoint
        self.compress_s = 0.0
        self.paused_s = 0.0

    def run(self, model: PreTrainedModel, token_ids: Sequence[int]) -> None:
        """One forward pass per chunk, at the tokens' true positions."""
        cache = Cache(layers=self._layers)
        device = input_device(model)
        ids = torch.tensor([token_ids], device=device)
        positions = torch.arange(len(token_ids), device=device).unsqueeze(0)
        for chunk, at in zip(torch.split(ids, self._chunks, 1), torch.split(positions, self._chunks, 1), strict=True):
            model.base_model(input_ids=chunk, position_ids=at, use_cache=True, **{CACHE_ARGUMENT: cache, CONTEXT: self})

    def after_attention(self, layer: Attended) -> None:
        started = time.perf_counter()
        self._layers[layer.layer_idx].absorb()
        absorbed = time.perf_counter()
        self._checkpoint()
        self.compress_s += absorbed - started
        self.paused_s += time.perf_counter() - absorbed

    def records(self) -> tuple[Kept, ...]:
        """All layers, in order. Tokens that are still in the buffer at the end are all kept.

        Raises `PolicyUnsupported` where a layer was not observed, or scores that are not finite chose entries.
        """
        require_every_layer(
            [i for i, layer in enumerate(self._layers) if layer.is_initialized], range(len(self._layers))
        )
        records = tuple(layer.record() for layer in self._layers)
        require_finite_scores(records, self._policy)
        return records


class ChunkedLayer(AttachedLayer):
    """One layer while the document is read: kept entries are the prefix, tokens not yet reduced the suffix.

    Kept entries stand in buffers `[kv_heads, capacity, ...]` of the final size, which become the record without a copy.
    The suffix buffers hold as many tokens as the policy waits for, because reduced tokens make room at once.
    """

    def __init__(self, absorber: Absorber, capacity: int) -> None:
        super().__init__((), 0)
        self._absorber = absorber
        self._capacity = capacity
        self._kept = 0

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        # The first chunk is the longest, and what is absorbed makes room for the next: the buffers never grow.
        self.keys = key_states.new_empty(key_states.shape)
        self.values = value_states.new_empty(value_states.shape)
        self.is_initialized = True
        shape = key_states.shape[1], self._capacity
        self._kept_keys = key_states.new_empty(*shape, key_states.shape[-1])
        self._kept_values = value_states.new_empty(*shape, value_states.shape[-1])
        self._positions = torch.empty(shape, dtype=torch.int32, device=key_states.device)
        self._importance = torch.empty(shape, dtype=torch.float32, device=key_states.device)

    def absorb(self) -> None:
        """Reduce the oldest tokens of the suffix while the policy has enough of them."""
        while self._length:
            chosen = self._absorber.absorb(
                self.start, self.keys[0, :, : self._length], self.values[0, :, : self._length]
            )
            if chosen is None:
                break
            self._take(*chosen)
        if self._kept:
            self.prefix = (StackedPrefix(self._kept_keys[:, : self._kept], self._kept_values[:, : self._kept]),)

    def record(self) -> Kept:
        """The entries kept from the whole document."""
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
        self._positions[:, new] = positions.view(heads, count) + self.start
        self._importance[:, new] = importance.gather(1, positions.view(heads, count).long())
        left = self._length - taken
        for buffer in (self.keys, self.values):
            buffer[:, :, :left] = buffer[:, :, taken : self._length].clone()  # the two ranges may overlap
        self._kept += count
        self.start += taken
        self._length = left
