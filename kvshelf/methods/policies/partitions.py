"""Base of LagKV and LocalKV: a document cut into partitions, each judged by its own neighbourhood alone.

Judging a partition needs no token after the next partition. So one-shot and recursive selection agree on equal keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.select import select
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import Absorber, Policy, keep, prefill_parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget, WholeLayers
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.view import DocumentView, LayerView


def retained(r: float, lag: int) -> int:
    """Entries that a partition of `lag` tokens keeps, rounded down."""
    return math.floor(r * lag + 1e-9)  # 0.29 * 100 is 28.99...; the small term makes it the 29 that was meant


@dataclass(frozen=True)
class PartitionCut:
    """A document of `num_tokens`: `sink` tokens, partitions of `lag`, and a remainder shorter than `lag`. All
    partitions but the last are reduced; the rest stays whole."""

    num_tokens: int
    sink: int
    lag: int

    @property
    def reduced(self) -> int:
        """The number of partitions that are reduced."""
        return max(0, (self.num_tokens - self.sink) // self.lag - 1)

    @property
    def whole(self) -> int:
        """Tokens that stay: sink, last partition and remainder."""
        return self.num_tokens - self.reduced * self.lag

    def retained(self, r: float) -> int:
        """Entries of the document where each reduced partition keeps the part `r` of its tokens (eq. 12)."""
        return self.whole + self.reduced * retained(r, self.lag)

    def shares(self, entries: int) -> list[int]:
        """Entries that each reduced partition keeps, so that the document keeps `entries` (eq. 12 solved for the
        share). If the division is uneven, the earliest partitions keep one more. Only the length decides, so shares are
        known while the document is read."""
        assert entries >= self.whole, "whole partitions have room"
        share, remainder = divmod(entries - self.whole, self.reduced)
        return [share + (index < remainder) for index in range(self.reduced)]


@dataclass(frozen=True)
class PartitionPolicy(Policy):
    """Equations 7 to 16 of the LagKV paper."""

    sink: int = parameter(4, "first tokens always kept", minimum=0)
    lag: int = parameter(128, "tokens per partition", minimum=2)
    score: str = parameter(
        "lag",
        "what judges a partition: the scale of the next (lag), its own (local), or the norms of its keys (l2)",
        choices=("lag", "local", "l2"),
    )
    value_weight: float = parameter(1.0, "what the values' score counts beside the keys'; l2 has no values", minimum=0)
    skip_layers: int = parameter(0, "first layers that stay whole; the others pay for them", minimum=0)
    prefill: str = prefill_parameter("lag")
    r: float | None = parameter(
        None,
        "part of each reduced partition that stays, in place of a budget; null: the budget decides",
        minimum=1e-6,
        maximum=1,
        added=True,
    )

    @property
    def sizes_itself(self) -> bool:
        return self.r is not None

    def own_budget(self, document: DocumentView) -> Budget:
        """The mean over all layers, rounded down: that of equation 12, and all of the first `skip_layers`."""
        tokens, layers = document.num_tokens, document.num_layers or 1
        skipped = min(self.skip_layers, layers)
        assert self.r is not None, "the policy must size itself"
        mean = (self._cut(document).retained(self.r) * (layers - skipped) + tokens * skipped) // layers
        return Budget(mean, 1 - mean / tokens)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        super().fitted(document, budget, given)
        if self.skip_layers and self.prefill == "chunked":
            raise PolicyUnsupported(
                "prefill=chunked reduces all layers alike, and skip_layers leaves some whole; take one of them",
                param="policy_params.skip_layers",
            )
        if self.score == "l2" and "value_weight" in given:
            raise PolicyUnsupported(
                "score=l2 looks at keys alone, so value_weight says nothing; leave it out, or take score=lag",
                param="policy_params.value_weight",
            )
        if self.r is not None:
            return self
        least = document.protected_prefix + 1
        room = self._whole_layers.fewest(document.num_layers, document.num_tokens, budget.tokens, least, "skip_layers")
        policy = self
        if "sink" not in given:
            policy = replace(policy, sink=min(self.sink, room // 2))
        if "lag" not in given:
            # Halving keeps partitions aligned with those of the default; any smaller lag that fits would do.
            while policy.lag > 2 and policy._cut(document).whole > room:
                policy = replace(policy, lag=policy.lag // 2)
        cut = policy._cut(document)
        if cut.whole > room:
            raise PolicyUnsupported(
                f"sink and the last partitions stay whole and take {cut.sink} + {cut.whole - cut.sink} entries at lag "
                f"{policy.lag}, more than the {room} per KV head of the budget; lower lag or sink, or raise "
                "the budget",
                param="policy_params.lag",
            )
        return policy

    @property
    def ragged(self) -> bool:
        return self.skip_layers > 0

    @property
    def _whole_layers(self) -> WholeLayers:
        return WholeLayers(first=self.skip_layers)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        cut = self._cut(layer.document)
        if self.r is None:
            budget = self._whole_layers.of_layer(layer.place, layer.num_layers, layer.num_tokens, budget)
        else:
            whole = layer.place < self.skip_layers
            count = layer.num_tokens if whole else cut.retained(self.r)
            budget = LayerBudget.uniform(layer.kv_heads, count)
        if not cut.reduced:
            return Full().reduce(layer, budget)
        judged = slice(cut.sink, cut.sink + cut.reduced * self.lag)
        with_next = slice(cut.sink, judged.stop + self.lag)
        scores = self.scores(layer.keys[:, with_next], layer.values[:, with_next])
        mask = torch.ones(layer.kv_heads, layer.num_tokens, dtype=torch.bool, device=layer.keys.device)
        mask[:, judged] = self.choose(scores, [cut.shares(count) for count in budget.per_head])
        importance = torch.full(mask.shape, torch.inf, device=mask.device)
        importance[:, judged] = scores.flatten(1)
        return keep(layer, mask, importance, budget.per_head)

    def scores(self, keys: Tensor, values: Tensor) -> Tensor:
        """Equation 11, or 16, for all partitions but the last: `[kv_heads, partitions - 1, lag]` fp32 of keys
        `[kv_heads, partitions * lag, D]` and values `[kv_heads, partitions * lag, Dv]`."""
        if self.score == "l2":
            return -row_norms(keys).view(len(keys), -1, self.lag)[:, :-1]
        return lag_scores(keys, values, self.lag, own_scale=self.score == "local", value_weight=self.value_weight)

    def choose(self, scores: Tensor, shares: Sequence[Sequence[int]]) -> Tensor:
        """The best `shares[h][p]` of each head and partition: bool `[kv_heads, partitions * lag]`."""
        none_protected = torch.zeros(self.lag, dtype=torch.bool, device=scores.device)
        flat = [share for head in shares for share in head]
        return select(scores.flatten(0, 1), none_protected, flat).view(scores.shape[0], -1)

    def absorber(self, document: DocumentView, budget: Budget) -> Absorber | None:
        if self.prefill == "whole":
            return None
        cut = self._cut(document)
        entries = budget.tokens if self.r is None else cut.retained(self.r)
        return PartitionAbsorber(self, cut, tuple(cut.shares(entries)))

    def _cut(self, document: DocumentView) -> PartitionCut:
        return PartitionCut(document.num_tokens, max(self.sink, document.protected_prefix), self.lag)


@dataclass(frozen=True)
class PartitionAbsorber:
    """The recursive form: whenever two partitions are buffered, the first of them is reduced and then never changes.

    The first pass takes the sinks and two partitions, later ones take one partition each, as in the paper. A pass still
    sees the entries it evicts (the paper: use, then compress).
    """

    policy: PartitionPolicy
    cut: PartitionCut
    shares: tuple[int, ...]

    again: ClassVar[bool] = False

    @property
    def mode(self) -> str:
        return f"chunked:lag={self.cut.lag}"

    @property
    def entries(self) -> int:
        """Entries that each KV head keeps."""
        return self.cut.whole + sum(self.shares)

    @property
    def chunks(self) -> list[int]:
        first = self.cut.sink + 2 * self.cut.lag
        full, remainder = divmod(self.cut.num_tokens - first, self.cut.lag)
        return [first, *[self.cut.lag] * full, *[remainder] * (remainder > 0)]

    def absorb(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Judge the oldest tokens that are not yet reduced; None if more tokens must come first.

        keys: `[kv_heads, T, D]`, values: `[kv_heads, T, Dv]` of these tokens, from position `start`. Returns which of
        the first n stay, `[kv_heads, n]` bool with equally many set in every head, and their importance, likewise fp32.
        """
        heads, buffered, _ = keys.shape
        if start < self.cut.sink:
            sinks = torch.ones(heads, min(buffered, self.cut.sink - start), dtype=torch.bool, device=keys.device)
            return sinks, torch.full(sinks.shape, torch.inf, device=keys.device)
        partition = (start - self.cut.sink) // self.cut.lag
        two = slice(2 * self.cut.lag)
        if buffered < two.stop or partition == len(self.shares):
            return None
        scores = self.policy.scores(keys[:, two], values[:, two])
        return self.policy.choose(scores, [[self.shares[partition]]] * heads), scores.flatten(1)
