"""SABlock: segments guide the scores, and keep the largest blocks that lose little (arXiv 2510.22556)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of, select
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import TailPolicy, keep
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.segments import Segments, best_blocks
from kvshelf.methods.policies.view import DocumentView, LayerView

MAX_SEGMENT = 64
"""Most tokens of a segment; longer ones are cut, as a table without punctuation would be one segment."""

_EPSILON = 1e-8  # of eq. 6
_TINY = 1e-30  # attention to a whole segment can underflow to 0


@dataclass(frozen=True)
class SABlock(TailPolicy):
    """A reconstruction, as two of the paper's formulas could not be had: give each part of a sentence a share of the
    budget by attention, and fill it with the largest blocks of neighbours that lose little attention; the same tokens
    in every head of a layer.

    Segments end at punctuation. s_j is the attention of the observing rows on token j, the mean over all query heads
    and rows (eq. 3, 4). I_k is the mean of s over segment k (eq. 5), D_k the entropy of its distribution there (eq. 6).
    W_k combines I_k and D_k with weight `diversity`, lambda (eq. 7), and turns s_j into s~_j with strength `alpha` (eq.
    8). m_k counts segment k's tokens among the best by s~ (eq. 9, 10). For each block size b, the segment is cut into
    blocks of b tokens. The blocks of best mean s~ give m_k tokens (the last one only its best). The largest b <= m_k
    wins whose tokens have at least `tau` of the s~ of the m_k best tokens (eq. 11, 12). The union of these tokens and
    the window stay (eq. 13), exactly the budget.

    No code is public and the formulas were not available, so these are kvshelf's: eq. 7 is W_k = I_k / max I * (1 +
    lambda * D_k / log |S_k|); eq. 8 is s~_j = s_j * (1 + alpha * W_k), or s_j * W_k ** alpha with `form="power"`; block
    sizes are the odd ones up to `block`, all of them or the powers of two (`sizes`); segments end at . , ; : ? ! and
    line ends, but not at the point within a number, and are cut after 64 tokens; all defaults. Departures: the chat
    template's tokens stay and are in no segment; where a probe observes, the document's own last tokens stay only with
    `keep_tail`, as no question attends from them. With `segments="sentences"` commas, semicolons and colons end none,
    nor in selector `policy:sablock`: a cache stores where its sentences end.
    """

    name: ClassVar[str] = "sablock"
    source: ClassVar[str] = "SABlock, arXiv 2510.22556"
    advice: ClassVar[str] = "with expected questions, where words without their neighbours say little."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.TEXT
    shared_by_heads: ClassVar[bool] = True
    settled: ClassVar[Mapping[str, str]] = {
        **TailPolicy.settled,
        "segments": "a stored cache knows the ends of sentences alone",
    }

    window: int = parameter(8, "last tokens that observe; those of the document are kept", minimum=1)
    alpha: float = parameter(0.5, "how strongly segments guide the scores of their tokens", minimum=0)
    diversity: float = parameter(0.5, "weight of the entropy within a segment (lambda)", minimum=0)
    block: int = parameter(9, "largest block", minimum=1, maximum=MAX_SEGMENT - 1)
    sizes: str = parameter("odd", "which sizes up to block are tried", choices=("odd", "all", "powers"))
    tau: float = parameter(0.9, "part of the score that blocks must hold", minimum=0, maximum=1)
    form: str = parameter("scaled", "how eq. 8 applies the weight of a segment", choices=("scaled", "power"))
    segments: str = parameter("punctuation", "what ends a segment", choices=("punctuation", "sentences"), added=True)
    keep_tail: bool = parameter(False, "keep the document's last window tokens where a probe observes, too")

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        if self.block > 1 and self.block not in self._sizes():
            raise PolicyUnsupported(
                f"the largest block is {self.block}, and sizes={self.sizes} has no such size; give another block, or "
                "sizes=all",
                param="policy_params.block",
            )
        return super().fitted(document, budget, given)

    def at_question(self, question_tokens: int) -> Self:
        return replace(super().at_question(question_tokens), segments="sentences")

    def score(self, layer: LayerView) -> Tensor:
        return self._guided(layer)[0].repeat(layer.kv_heads, 1)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        (scores, segments), protected = self._guided(layer), self.protected(layer)
        masks, region = {}, self._region(layer)
        for count in set(budget.per_head):
            best = select(scores.unsqueeze(0), protected, [count])[0]  # eq. 9
            blocks = self._blocks(segments.rows(scores[region]), segments, segments.rows(best[region]))
            masks[count] = protected.clone()
            masks[count][region] = segments.tokens(blocks)
        importance = importance_of(scores, protected).repeat(layer.kv_heads, 1)
        return keep(layer, torch.stack([masks[count] for count in budget.per_head]), importance, budget.per_head)

    def _guided(self, layer: LayerView) -> tuple[Tensor, Segments]:
        """s~ `[N]`, and the segments of all tokens that are not protected."""
        window, region = layer.window(self.window), self._region(layer)
        attention = window.pad(layer.all_heads(window.mean()).mean(dim=0))  # s, eq. 3 and 4
        document = layer.document
        ends = document.segment_ends if self.segments == "punctuation" else document.sentence_ends
        segments = Segments.cut(torch.tensor(ends)[region], MAX_SEGMENT, attention.device)
        rows = segments.rows(attention[region])  # [segments, width]
        total = rows.sum(dim=1)
        parts = rows / total.clamp_min(_TINY).unsqueeze(1)
        entropy = -(parts * (parts + _EPSILON).log()).sum(dim=1)  # D, eq. 6
        importance = total / segments.lengths  # I, eq. 5
        weight = importance / importance.max().clamp_min(_TINY)
        weight = weight * (1 + self.diversity * entropy / segments.lengths.clamp_min(2).log())  # W, eq. 7
        guide = weight**self.alpha if self.form == "power" else 1 + self.alpha * weight
        guided = attention.clone()
        guided[region] = segments.tokens(rows * guide.unsqueeze(1))  # eq. 8
        return guided, segments

    def _blocks(self, scores: Tensor, segments: Segments, best: Tensor) -> Tensor:
        """Exchange the best tokens of each segment for blocks with enough score. All: `[segments, width]`."""
        chosen, counts = best, best.sum(dim=1)  # blocks of 1; m, eq. 10
        least = self.tau * (scores * best).double().sum(dim=1)
        is_open = torch.ones_like(counts, dtype=torch.bool)
        for size in self._sizes():
            blocks = best_blocks(scores, segments.inside, counts, size)
            # Multiplied out, so that a segment without any score needs no division: eq. 11 and 12.
            enough = is_open & (counts >= size) & ((scores * blocks).double().sum(dim=1) >= least)
            chosen = torch.where(enough.unsqueeze(1), blocks, chosen)
            is_open &= ~enough
        return chosen

    def protected(self, layer: LayerView) -> Tensor:
        protected = super().protected(layer)
        return protected | (layer.positions >= layer.num_tokens - self.window) if self.keep_tail else protected

    def _region(self, layer: LayerView) -> slice:
        """The tokens that are not protected."""
        tail = max(layer.window(self.window).tail, self.window if self.keep_tail else 0)
        return slice(layer.protected_prefix, layer.num_tokens - tail)

    def _sizes(self) -> list[int]:
        """Sizes of blocks above 1, the largest first."""
        sizes = range(self.block, 1, -1)
        if self.sizes == "all":
            return list(sizes)
        return [size for size in sizes if (size % 2 == 1 if self.sizes == "odd" else size & (size - 1) == 0)]
