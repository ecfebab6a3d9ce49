"""Base of KVzip and EpiCache: scores by the largest weight that a probe gives, over the whole document or block by
block while it is read (EpiCache, Kim et al., 2025, arXiv 2509.17396, section 3.1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import Counts, importance_of
from kvshelf.kernels.window_scores import window_attention
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy, prefill_parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget, fitted_sink
from kvshelf.methods.policies.chunked import ChunkedPolicy, LayerPast
from kvshelf.methods.policies.sharing import GlobalSharing, Sharing, flat_counts, flat_shares
from kvshelf.methods.policies.view import DocumentView, LayerView

_ROWS = 128
"""Rows of a probe that are scored at a time: their weights are `[group, rows, n]` fp32, 4 MiB a head at n = 8,192."""


@dataclass(frozen=True, eq=False)
class BlockPast:
    """One KV head when a block and the probe behind it have been read.

    keys: `[kept + block, D]`, after RoPE, of kept entries and of all tokens of this block; the first `sinks` always
    stay. importance: `[kept]` fp32, of the kept entries. queries: `[group, R, D]` and own_keys: `[R, D]`, of the probe.
    """

    keys: Tensor
    importance: Tensor
    sinks: int
    queries: Tensor
    own_keys: Tensor
    scaling: float

    @property
    def kept(self) -> int:
        return len(self.importance)

    @property
    def block(self) -> int:
        return len(self.keys) - self.kept


@dataclass(frozen=True)
class BlockPolicy(ChunkedPolicy, ScoringPolicy):
    """A subclass has the probe that follows a block, and judges by it.

    With `prefill` "chunked", each block sees the kept entries of the blocks before it, and its probe sees these and the
    block: a layer never has more entries than budget, block and probe. Then the lowest entries go for good until the
    budget holds: of all heads of the layer together, or of each head. The probe's own states are not stored.
    """

    in_chunks: ClassVar[frozenset[str]] = frozenset()

    chunk: int = parameter(2048, "document tokens of a block", minimum=64)
    sink: int = parameter(4, "first tokens, always kept", minimum=0)
    across: str = parameter("layer", "who shares a budget", choices=("layer", "head"))
    prefill: str = prefill_parameter("chunk")

    @property
    def needs(self) -> Needs:
        return Needs.QUERIES

    @property
    def ragged(self) -> bool:
        return self.across != "head"

    @property
    def sharing(self) -> Sharing | None:
        return GlobalSharing() if self.across == "cache" else None

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:
        heads = len(scores)
        tokens = self.tokens_of(layer.layer_idx, layer.document, budget.total // heads)
        if self.across != "layer":
            return (tokens,) * heads
        return flat_shares(importance_of(scores, protected), tokens * heads)

    def tokens_of(self, layer_idx: int, document: DocumentView, mean: int) -> int:  # noqa: ARG002
        """The mean number of entries that the heads of a layer keep. mean: over all layers."""
        return mean

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens - 1, requested="sink" in given)
        policy = replace(self, sink=sink)
        if self.prefill == "whole" or self.across != "cache":
            return policy
        if "across" in given:
            raise PolicyUnsupported(
                "layers that share one budget must all be there at once, and a chunked prefill reduces each before the "
                "next; take across=layer or prefill=whole",
                param="policy_params.across",
            )
        return replace(policy, across="layer")

    def protected(self, layer: LayerView) -> Tensor:
        return layer.positions < self.sinks(layer.document)

    @property
    def mode(self) -> str:
        return f"{super().mode},probed"

    def ends(self, document: DocumentView) -> list[int]:
        """The ends of the blocks; the first chunk has the tokens of the chat template, too."""
        return [end for _, end in self.blocks(document)]

    def take(self, past: LayerPast, chunk: LayerView) -> LayerPast:
        (probed,) = chunk.probes
        joined, sinks = past.joined(chunk), self.sinks(chunk.document)
        keys, _ = zip(*joined.record.heads(), strict=True)
        importance = []
        heads = zip(keys, past.importance, chunk.grouped(probed.queries), probed.keys, strict=True)
        for head_keys, before, queries, own_keys in heads:
            head = BlockPast(head_keys, before, min(sinks, joined.read), queries, own_keys, chunk.scaling)
            always = torch.arange(len(head_keys), device=head_keys.device) < sinks
            importance.append(importance_of(self.judged(head), always))
        return joined.judged(torch.cat(importance))

    def layer_budget(self, layer_idx: int, document: DocumentView, budget: Budget) -> Budget:
        return replace(budget, tokens=self.tokens_of(layer_idx, document, budget.tokens))

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        """All entries stay while the budget has room for them."""
        if self.across == "head":
            return super().shares(pasts, budget)
        (past,) = pasts
        heads = past.importance
        sinks = [int(head.isposinf().sum()) for head in heads]
        return [flat_counts(heads, budget.tokens * len(heads), sinks)]

    @abstractmethod
    def judged(self, past: BlockPast) -> Tensor:
        """The importance of the entries of one head, `[kept + block]` fp32, higher is kept."""

    def sinks(self, document: DocumentView) -> int:
        """First tokens that always stay: the chat template's or the first `sink`, whichever are more."""
        return max(self.sink, document.protected_prefix)

    def blocks(self, document: DocumentView) -> Iterator[tuple[int, int]]:
        """Bounds of the blocks, which begin behind the chat template's tokens."""
        for start in range(document.protected_prefix, document.num_tokens, self.chunk):
            yield start, min(start + self.chunk, document.num_tokens)


def largest_weights(queries: Tensor, keys: Tensor, own_keys: Tensor | None, scaling: float) -> Tensor:
    """The largest softmax weight that any row of a GQA group gives to each of `keys` `[n, D]`: `[n]` fp32.

    queries: `[group, R, D]`, behind all keys. own_keys: `[R, D]`, keys of the rows themselves, each of which sees those
    up to its own; None leaves them out of the softmax.
    """
    largest = torch.zeros(len(keys), device=keys.device)
    every = keys if own_keys is None else torch.cat([keys, own_keys])
    for first in range(0, queries.shape[1], _ROWS):
        last = min(first + _ROWS, queries.shape[1])
        if own_keys is None:
            weights = (queries[:, first:last].float() @ keys.float().T * scaling).softmax(dim=-1)  # [group, rows, n]
        else:  # these rows are the last of the keys that they see
            weights = window_attention(queries[:, first:last], every[: len(keys) + last], scaling)[..., : len(keys)]
        largest = torch.maximum(largest, weights.amax(dim=(0, 1)))
    return largest
