"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., 2024, arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget, LayerBudget, fitted_sink
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first tokens (attention sinks) and the most recent ones; the middle is gone.

    With `positions` "absolute", keys keep the RoPE angles of their places in the document, and a question continues at
    the document's end. With "cache", as in the paper (section 3.2), keys are un-rotated and rotated once in fp32 to
    their places in the cache, and a question's first position is the number of kept entries.

    Departures: the chat template's tokens before the document count as sinks when there are more of them than `sink`.
    The paper streams without end and so rotates at every step; here the document is finite, and one rotation is enough.
    """

    name: ClassVar[str] = "streaming_llm"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    advice: ClassVar[str] = "where only the end of a document matters, and as the baseline that chooses nothing."

    by_position: ClassVar[bool] = True

    sink: int = parameter(4, "first tokens always kept", minimum=0)
    positions: str = parameter(
        "absolute", "angles of the keys: places in the document or in the cache", choices=("absolute", "cache")
    )

    @property
    def needs(self) -> Needs:
        return Needs.ROPE if self.positions == "cache" else Needs.NOTHING

    def next_position(self, num_tokens: int, budget: Budget) -> int:
        return budget.tokens if self.positions == "cache" else num_tokens

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens, requested="sink" in given)
        return replace(self, sink=sink)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        sinks = max(self.sink, layer.protected_prefix)
        # Two runs of rows per head, copied as slices: indexing the rows takes three times as long.
        recents = [slice(layer.num_tokens - (count - sinks), layer.num_tokens) for count in budget.per_head]
        positions = _positions(sinks, recents, layer.keys.device)
        record = Kept(
            keys=_runs(layer.keys, sinks, recents),
            values=_runs(layer.values, sinks, recents),
            entries_at=positions,
            offsets=offsets_of(budget.per_head),
            importance=positions.float().masked_fill_(positions < sinks, torch.inf),
        )
        return record if self.positions == "absolute" else _in_cache(layer, record)


def _runs(states: Tensor, sinks: int, recents: Sequence[slice]) -> Tensor:
    """The first rows and the recent ones of each head: `[entries, D]` of `[kv_heads, N, D]`."""
    return torch.cat([part for head, r in zip(states, recents, strict=True) for part in (head[:sinks], head[r])])


def _positions(sinks: int, recents: Sequence[slice], device: torch.device) -> Tensor:
    """Positions of the same rows, `[entries]` int32. To make all positions and slice them would be slower."""
    first = torch.arange(sinks, dtype=torch.int32, device=device)
    runs = [torch.arange(r.start, r.stop, dtype=torch.int32, device=device) for r in recents]
    return torch.cat([part for run in runs for part in (first, run)])


def _in_cache(layer: LayerView, record: Kept) -> Kept:
    """The record with every key rotated to its slot instead of its position."""
    assert layer.rope is not None
    assert record.uniform, "a slot of the cache is the same place in every head"
    assert isinstance(record.keys, torch.Tensor)
    positions = record.positions[0]
    keys = record.keys.view(layer.kv_heads, len(positions), -1)
    slots = torch.arange(len(positions), device=keys.device)
    return replace(record, keys=layer.rope.moved(keys, positions, slots).to(keys.dtype).flatten(0, 1))
