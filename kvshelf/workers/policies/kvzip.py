"""KVzip: what the model reads to write the document down again (Kim et al., 2025, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.kernels.select import importance_of
from kvshelf.kernels.window_scores import window_attention
from kvshelf.workers.policies.base import Observes, ScoringPolicy, parameter
from kvshelf.workers.policies.budgets import Budget, LayerBudget
from kvshelf.workers.policies.parameters import fitted_sink
from kvshelf.workers.policies.sharing import GlobalSharing, Sharing, flat_counts
from kvshelf.workers.policies.view import DocumentView, LayerView, ProbePass

_FIRST = "\n\nRepeat the previous context exactly."
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
_LEAD = 8  # last tokens of the chunk before, which say where to start
_LEAST_CHUNK = 256
_ROWS = 128
"""Replay rows that are scored at a time: their weights are `[group, rows, 2 chunks]` fp32, 8 MiB at chunks of 2,048."""


@dataclass(frozen=True)
class KVzip(ScoringPolicy):
    """Keep what the model attends to while it repeats the document word for word, chunk by chunk.

    For each chunk, a pass runs behind the document: a prompt that asks to repeat the chunk (after the first chunk, from
    the last 8 tokens of the chunk before on), the chat template's text before the answer, and the chunk itself. Each
    pass sees the whole document. The score of token j of chunk i is the largest weight that any row of pass i, of any
    head of the GQA group, gives it in a softmax over the first `sink` tokens, the chunk and the pass. All layers and
    heads share one budget (`across="cache"`, the authors' "pair"), or each layer has its own, or each head
    ("pair-uniform"). The forward pass has 2 N tokens or more, which must fit into the model's longest sequence.

    Departures: the sink block is the chat template's tokens or the first `sink`, whichever are more, and always stays;
    softmax runs in fp32; the kept total is exact, while the authors' threshold drops ties; without a tokenizer the
    prompt is only the 8 tokens. A default `chunk` shrinks to what the model has room for, but not below 256.
    """

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416"
    advice: ClassVar[str] = (
        "for documents compressed once and asked often: closest to the full cache, for two to five times the prefill."
    )
    observes: ClassVar[Observes] = Observes.QUERIES

    chunk: int = parameter(2048, "document tokens repeated at a time", minimum=64)
    sink: int = parameter(4, "first tokens in every softmax, always kept", minimum=0)
    across: str = parameter("cache", "who shares a budget", choices=("cache", "layer", "head"))

    @property
    def sharing(self) -> Sharing | None:
        return GlobalSharing() if self.across == "cache" else None

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        if self.across != "layer":
            return budget.per_head
        heads = list(importance_of(scores, protected))
        return flat_counts(heads, budget.total, [int(protected.sum())] * len(heads))

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens - 1, given="sink" in given)
        policy = replace(self, sink=sink)
        if "chunk" in given or document.max_tokens is None:
            return policy
        words = [self._ask(document, None), self._ask(document, (0,) * _LEAD)]
        room = document.max_tokens - document.end - max(map(len, words))
        return replace(policy, chunk=min(self.chunk, max(room, _LEAST_CHUNK)))

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        passes = []
        lead: tuple[int, ...] | None = None
        for start, end in self._chunks(document):
            tokens = tuple(document.token_ids[start:end])
            passes.append(ProbePass((*self._ask(document, lead), *tokens), document.end))
            lead = tokens[-_LEAD:]
        return passes

    def probe_text(self, document: DocumentView) -> str:
        return "" if document.text is None else document.text.decode(self._ask(document, None))

    def score(self, layer: LayerView) -> Tensor:
        scores = torch.zeros(layer.kv_heads, layer.num_tokens, device=layer.keys.device)
        for index, (start, end) in enumerate(self._chunks(layer.document)):
            before = min(self._sinks(layer.document), start)
            for head in range(layer.kv_heads):
                keys = torch.cat([layer.keys[head, :before], layer.keys[head, start:end]])
                scores[head, start:end] = self._largest(layer, index, head, keys)[before:]
        return scores

    def protected(self, layer: LayerView) -> Tensor:
        return layer.positions < self._sinks(layer.document)

    def _largest(self, layer: LayerView, index: int, head: int, keys: Tensor) -> Tensor:
        """The largest weight that pass `index` gives to each of `keys` `[n, D]` in one GQA group: `[n]` fp32."""
        probed = layer.probes[index]
        queries, own = layer.grouped(probed.queries)[head], probed.keys[head]
        every = torch.cat([keys, own])  # one tensor: the scored rows are the last of the keys that they see
        count = keys.shape[0]
        largest = torch.zeros(count, device=keys.device)
        for first in range(0, own.shape[0], _ROWS):
            last = min(first + _ROWS, own.shape[0])
            weights = window_attention(queries[:, first:last], every[: count + last], layer.scaling)
            largest = torch.maximum(largest, weights[..., :count].amax(dim=(0, 1)))
        return largest

    def _sinks(self, document: DocumentView) -> int:
        return max(self.sink, document.protected_prefix)

    def _chunks(self, document: DocumentView) -> Iterator[tuple[int, int]]:
        """Bounds of the chunks: what follows the chat template's tokens."""
        for start in range(document.protected_prefix, document.num_tokens, self.chunk):
            yield start, min(start + self.chunk, document.num_tokens)

    def _ask(self, document: DocumentView, lead: tuple[int, ...] | None) -> tuple[int, ...]:
        """The tokens that ask for a chunk: the first, or the one after `lead`."""
        words = () if document.text is None else document.text.encode(_FIRST if lead is None else _NEXT)
        return (*words, *(lead or ()), *document.suffix)
