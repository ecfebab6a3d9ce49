"""PyramidInfer: of what the layer before keeps, what recent tokens attend to (Yang et al., 2024, arXiv 2405.12532)."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import keep_best
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget, LayerBudget, fitted_sink
from kvshelf.methods.policies.sharing import fill, largest_remainders
from kvshelf.methods.policies.view import DocumentView, LayerView

_LOGITS: Final = 1 << 24
"""Logits of all heads that are in memory at a time: 64 MB in fp32."""


@dataclass(frozen=True)
class PyramidInfer(Policy):
    """In part, as every layer still reads all tokens: keep what the last tokens attend to, of what the layer before
    keeps; the same tokens in every head, and fewer in deeper layers.

    The last `recent` of the document, R tokens, and the first `sink` stay. Another token's score is an average of the
    attention that the R rows give it, the mean over all heads of the layer. Rows weigh from 1 for the first to
    `last_weight` for the last, in equal steps. The softmax is over the tokens that the layer before keeps: no later
    layer keeps a token that one drops. Beside the tokens that always stay, layer l of L gets a part of the budget in
    proportion to the product of r_i over the layers i < l, r_i = decay + (1 - decay) (1 + cos(pi i / L)) / 2.

    Departures from the authors' code: there no later layer computes a dropped token, which makes the prefill faster.
    Here all layers compute all tokens, so rows of later layers have read dropped ones, and only the stored cache is
    smaller. There the first layer keeps all and `decay` alone decides for the others; here a budget does: no layer gets
    more than the document, the others take the excess in proportion, and shares are rounded by largest remainders, so
    that the total is exact. There a layer's attention decides about the next layer, here about its own. No entry leaves
    while decoding, because a stored cache never changes. Where half of the budget is less than R, R is that half.
    """

    name: ClassVar[str] = "pyramidinfer"
    source: ClassVar[str] = "PyramidInfer, arXiv 2405.12532, and the authors' code"
    advice: ClassVar[str] = "as a baseline: what one layer drops, all deeper layers drop."
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.BEFORE
    shared_by_heads: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    recent: float = parameter(0.2, "part of the document, at its end, that stays and judges", minimum=0, maximum=1)
    last_weight: float = parameter(1.2, "weight of the last row's attention; the first row has 1", minimum=0)
    decay: float = parameter(0.9, "part that the deepest layers hand on; the first hands on all", minimum=0, maximum=1)
    sink: int = parameter(4, "first tokens always kept", minimum=0)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens - 1, requested="sink" in given)
        rows, room = self._rows(document.num_tokens), budget.tokens - max(sink, document.protected_prefix)
        if rows > room and "recent" in given:
            raise PolicyUnsupported(
                f"recent {self.recent:g} is {rows} of {document.num_tokens} tokens, and the budget of {budget.tokens} "
                f"entries per KV head has room for {room}; lower recent or raise the budget",
                param="policy_params.recent",
            )
        fewer = min(rows, room, max(1, budget.tokens // 2))
        if "recent" in given or fewer == rows:
            return replace(self, sink=sink)
        return replace(self, sink=sink, recent=fewer / document.num_tokens)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        scores, protected = self.score(layer), self.protected(layer)
        counts = self.counts(layer, budget)
        keys, values, positions, importance = keep_best(layer.keys, layer.values, scores, protected, counts)
        return Kept(keys=keys, values=values, entries_at=positions, offsets=offsets_of(counts), importance=importance)

    def score(self, layer: LayerView) -> Tensor:
        """`[kv_heads, N]` fp32, the same for each head: below zero for what the layer before dropped."""
        rows, candidates = self._rows(layer.num_tokens), layer.positions  # [C]: the tokens that the layer may keep
        if layer.before is not None:
            candidates = (layer.before | self.protected(layer)).nonzero()[:, 0]
        keys = layer.keys[:, candidates].float().transpose(1, 2)  # [kv_heads, D, C]
        queries = layer.grouped(layer.all_queries)[:, :, -rows:]  # [kv_heads, group, R, D]
        at_once = max(1, _LOGITS // (len(layer.all_queries) * len(candidates)))
        weights = torch.linspace(1, self.last_weight, rows, device=keys.device)
        columns = torch.arange(len(candidates), device=keys.device)
        total = torch.zeros(len(candidates), device=keys.device)
        for start in range(0, rows, at_once):
            row_weights = weights[start : start + at_once]
            block = queries[:, :, start : start + len(row_weights)].float()
            # The group is folded into the rows: a product that is broadcast over it would copy all keys for each head.
            logits = torch.matmul(block.flatten(1, 2), keys).view(*block.shape[:3], -1) * layer.scaling
            last = torch.arange(start, start + len(row_weights), device=keys.device) + len(candidates) - rows
            attention = logits.masked_fill_(columns > last.unsqueeze(1), -torch.inf).softmax(dim=3)
            total += torch.einsum("hgrn,r->n", attention, row_weights)
        totals = layer.all_heads(total.unsqueeze(0))  # [ranks, C]
        scores = torch.full((layer.num_tokens,), -1.0, device=keys.device)  # below any average of attention
        scores[candidates] = totals.sum(dim=0) / (len(totals) * len(layer.all_queries) * weights.sum())
        return scores.expand(layer.kv_heads, -1).contiguous()

    def protected(self, layer: LayerView) -> Tensor:
        """`[N]` bool: tokens kept whatever their score."""
        late = layer.positions >= layer.num_tokens - self._rows(layer.num_tokens)
        return layer.protected | late | (layer.positions < self.sink)

    def counts(self, layer: LayerView, budget: LayerBudget) -> Sequence[int]:
        """Entries each head of this layer keeps."""
        always = max(layer.protected_prefix, self.sink) + self._rows(layer.num_tokens)  # as `protected` marks
        always, heads = min(always, layer.num_tokens), len(budget.per_head)
        total = (budget.total // heads - always) * layer.num_layers
        shares = largest_remainders(fill(self._parts(layer.num_layers), total, layer.num_tokens - always))
        return (always + shares[layer.place],) * heads

    def _parts(self, num_layers: int) -> list[float]:
        """How much each layer keeps in proportion to the others; it never rises."""
        turns = ((1 + math.cos(math.pi * place / num_layers)) / 2 for place in range(num_layers - 1))
        ratios = (self.decay + (1 - self.decay) * turn for turn in turns)
        return list(accumulate(ratios, operator.mul, initial=1.0))

    def _rows(self, num_tokens: int) -> int:
        """R of a document."""
        return max(1, round(self.recent * num_tokens))
