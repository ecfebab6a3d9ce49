"""SentenceKV: the tokens that matter, and then the sentences that matter (Zhu et al., 2025, arXiv 2504.00970)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of, select
from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import TailPolicy, keep, pooling_kernel
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.segments import MAX_SENTENCE, Segments
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class SentenceKV(TailPolicy):
    """Keep the tokens that the end of the prompt attends to (the maximum over 7 neighbours), the first tokens and the
    window; with `semantic_factor` above 1, only attended tokens of the most relevant sentences.

    B is the budget. kvshelf does the paper's prefill phase and, on request, its first decode step. Prefill: each KV
    head keeps `semantic_factor` * B tokens by SnapKV's score (window 32, maximum over 7 neighbours). First step:
    sentences rank by the product of the mean key of their kept tokens with the mean query of the observing rows. In
    this order they give their tokens until there are B, the first `sink` tokens and the window included.

    While the model answers, selector `sentencekv` chooses sentences again, among the entries of a cache. So
    `semantic_factor` is 1 by default (the paper: 3 or more): the prefill chooses all B entries, and sentences decide
    nothing. Above 1, sentences are chosen once, for the end of the prompt and not for the question: a factor of 3 cost
    the bundled model more than half of its right answers to unknown questions.

    Departures: a GQA group shares the mean of its scores and of its queries, while the authors repeat KV heads. The
    query is the mean over all observing rows, as no sentence of an answer has begun. In kvshelf, sentences end at . ? !
    and at line ends, and are cut after 256 tokens.
    """

    name: ClassVar[str] = "sentencekv"
    source: ClassVar[str] = "SentenceKV, arXiv 2504.00970"
    advice: ClassVar[str] = "as snapkv, where first tokens and wider neighbourhoods should stay."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.TEXT

    window: int = parameter(32, "last tokens that observe; those of the document are kept", minimum=1)
    kernel: int = pooling_kernel(7)
    sink: int = parameter(32, "first tokens always kept", minimum=0)
    semantic_factor: float = parameter(
        1.0, "tokens that sentences are chosen from, as a multiple of the budget", minimum=1
    )

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        if "sink" not in given:
            policy = replace(policy, sink=min(policy.sink, budget.tokens // 4))
        if "window" not in given:
            policy = replace(policy, window=max(1, min(policy.window, budget.tokens - policy.sink)))
        if max(policy.sink, document.protected_prefix) + policy.window <= budget.tokens:
            return policy
        if "sink" not in given:
            return replace(policy, sink=budget.tokens - policy.window)
        raise PolicyUnsupported(
            f"sink is {self.sink} beside a window of {policy.window}, and the budget holds {budget.tokens} entries per "
            f"KV head; lower sink to at most {budget.tokens - policy.window} or raise the budget",
            param="policy_params.sink",
        )

    def score(self, layer: LayerView) -> Tensor:
        window = layer.window(self.window)
        return window.pad(pooled(window.mean(), self.kernel, "max"))

    def protected(self, layer: LayerView) -> Tensor:
        return super().protected(layer) | (layer.positions < self.sink)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        scores, protected = self.score(layer), self.protected(layer)
        survivors = [int(min(self.semantic_factor * count, layer.num_tokens)) for count in budget.per_head]
        alive = select(scores, protected, survivors)
        segments = Segments.cut(torch.tensor(layer.document.sentence_ends), MAX_SENTENCE, alive.device)
        # All tokens of a sentence have the same relevance, so they are taken in order.
        relevance = torch.stack([self._relevance(layer, head, segments, alive) for head in range(layer.kv_heads)])
        lowest = torch.finfo(relevance.dtype).min  # finite: `select` keeps scores that are not finite
        kept = select(relevance.masked_fill(~alive, lowest), protected, budget.per_head)
        bad = ~relevance.isfinite()
        return keep(layer, kept, importance_of(scores.masked_fill(bad, torch.nan), protected), budget.per_head)

    def _relevance(self, layer: LayerView, head: int, sentences: Segments, alive: Tensor) -> Tensor:
        """Relevance of each token's sentence, `[N]` fp32: mean key of its surviving tokens, times the mean query."""
        query = layer.window(self.window).queries(head).float().mean(dim=(0, 1))  # [D]
        products = sentences.rows(torch.mv(layer.keys[head].float(), query))  # [sentences, width]
        counted = sentences.rows(alive[head])
        means = (products * counted).sum(dim=1) / counted.sum(dim=1).clamp_min(1)
        return sentences.tokens(means.unsqueeze(1).expand_as(products))
