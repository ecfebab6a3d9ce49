"""KVzip: what the model reads to write the document down again (Kim et al., 2025, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.blocks import BlockPast, BlockPolicy, largest_weights
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

_FIRST = "\n\nRepeat the previous context exactly."
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
_LEAD = 8  # last tokens of the chunk before, with which a repetition starts
_LEAST_CHUNK = 256


@dataclass(frozen=True)
class KVzip(BlockPolicy):
    """Keep what the model attends to while it repeats the document word for word, chunk by chunk.

    For each chunk, a pass runs behind the document: a prompt that asks to repeat the chunk (after the first chunk, from
    the last 8 tokens of the chunk before on), the chat template's text before the answer, and the chunk itself. Each
    pass sees the whole document. The score of token j of chunk i is the largest weight that any row of pass i, of any
    head of the GQA group, gives it in a softmax over the first `sink` tokens, the chunk and the pass. All layers and
    heads share one budget (`across="cache"`, the authors' "pair"), or each layer has its own, or each head
    ("pair-uniform"). The forward pass has 2 N tokens or more, which must fit into the model's longest sequence.

    With `prefill` "chunked" each pass stands behind its chunk, and sees the chunk and the kept entries of those before.
    It scores its chunk alone, as above; entries of earlier chunks keep their scores. Then the lowest go until the
    budget holds, and layers share no budget: `across` is "layer" or "head".

    Departures: the sink block is the chat template's tokens or the first `sink`, whichever are more, and always stays;
    softmax runs in fp32; the kept total is exact, while the authors' threshold drops ties; without a tokenizer the
    prompt is only the 8 tokens. A default `chunk` shrinks to what the model has room for, but not below 256.
    """

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416"
    advice: ClassVar[str] = (
        "for documents compressed once and asked often: closest to the full cache, for two to five times the prefill."
    )

    chunk: int = parameter(2048, "document tokens repeated at a time", minimum=64)
    sink: int = parameter(4, "first tokens in every softmax, always kept", minimum=0)
    across: str = parameter("cache", "who shares a budget", choices=("cache", "layer", "head"))

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        if "chunk" in given or document.max_tokens is None:
            return policy
        prompts = [self._prompt(document, None), self._prompt(document, (0,) * _LEAD)]
        room = document.max_tokens - document.end - max(map(len, prompts))
        return replace(policy, chunk=min(self.chunk, max(room, _LEAST_CHUNK)))

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        passes = []
        lead: tuple[int, ...] | None = None
        for start, end in self.blocks(document):
            tokens = tuple(document.token_ids[start:end])
            position = document.end if self.prefill == "whole" else document.behind(end)
            passes.append(ProbePass((*self._prompt(document, lead), *tokens), position))
            lead = tokens[-_LEAD:]
        return passes

    def probe_text(self, document: DocumentView) -> str:
        return "" if document.text is None else document.text.decode(self._prompt(document, None))

    def score(self, layer: LayerView) -> Tensor:
        scores = torch.zeros(layer.kv_heads, layer.num_tokens, device=layer.keys.device)
        for index, (start, end) in enumerate(self.blocks(layer.document)):
            before, probed = min(self.sinks(layer.document), start), layer.probes[index]
            queries = layer.grouped(probed.queries)
            for head in range(layer.kv_heads):
                keys = torch.cat([layer.keys[head, :before], layer.keys[head, start:end]])
                weights = largest_weights(queries[head], keys, probed.keys[head], layer.scaling)
                scores[head, start:end] = weights[before:]
        return scores

    def judged(self, past: BlockPast) -> Tensor:
        keys = torch.cat([past.keys[: min(past.sinks, past.kept)], past.keys[past.kept :]])
        weights = largest_weights(past.queries, keys, past.own_keys, past.scaling)
        return torch.cat([past.importance, weights[len(keys) - past.block :]])

    def _prompt(self, document: DocumentView, lead: tuple[int, ...] | None) -> tuple[int, ...]:
        """The tokens that ask for the chunk after `lead`; None: for the first one."""
        words = () if document.text is None else document.text.encode(_FIRST if lead is None else _NEXT)
        return (*words, *(lead or ()), *document.suffix)
