"""LagKV while decoding: each partition of the answer judged in the scale of the next one (arXiv 2504.04704)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.partitions import PartitionCut, retained
from kvshelf.methods.suffixes.base import Reduction, Suffix, SuffixPolicy, numbers_of


@dataclass(frozen=True)
class LagKV(SuffixPolicy):
    """Whenever a further partition of `lag` tokens is full, judge the one before it in that one's scale. Sees no query.

    Scores are those of policy `lagkv` (eq. 7 to 11). The last full partition stays whole, and those before it share the
    rest of the budget equally: a partition keeps its own best, fewer as the answer grows. These are the
    entries that policy `lagkv` would keep of the same keys and values, had they come at once, with the question as its
    sink. Where the answer has more partitions than entries to share, the oldest keep one each and the others none.

    With `r`, the paper's retention, each judged partition keeps r * lag entries for good, rounded down, in place of a
    budget: the answer grows, slower. Under scope "cache" the recursion goes on where the document's ended, in a cache
    of policy `lagkv`: its last full partition and the remainder are the first that the answer completes and judges.
    Partitions that were judged before stay as they are.

    Departures: without `r` the share follows from the budget; the question is in no partition unless
    `protect_question` is false; `lag` is 128, not 1024, because answers are shorter than documents.
    """

    name: ClassVar[str] = "lagkv"
    source: ClassVar[str] = "LagKV, arXiv 2504.04704"
    advice: ClassVar[str] = "as the default for long answers: it needs no attention weights, so it costs little."
    columns: ClassVar[dict[str, float]] = {"score": torch.inf}

    lag: int = parameter(128, "tokens per partition", minimum=2)
    r: float | None = parameter(
        None, "part of a partition that stays; null: what the budget leaves", minimum=1e-6, maximum=1
    )

    @property
    def interval(self) -> int:
        return self.lag

    @property
    def least(self) -> int:
        # The last full partition and what a question that is not protected leaves of another one stay whole.
        return self.lag + 1 if self.protect_question else 2 * self.lag

    def least_with(self, copied: int) -> int:
        # Behind a protected question the document's remainder begins every partition, so it stays whole for good.
        return self.least + (copied % self.lag if self.protect_question else 0)

    @property
    def bounded(self) -> bool:
        return self.r is None

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:
        params = made.policy_params
        sink, lag, r = max(params.get("sink", 0), prefix), params.get("lag"), params.get("r")
        refusals = (
            (made.policy != "lagkv" or params.get("score") != "lag", "it is not of policy lagkv by score lag"),
            (bool(made.parent), "its last tokens were appended, and partitions begin anew there"),
            (made.boundary not in ("text", "document"), "it is of messages, and not known where partitions begin"),
            (bool(made.protect), "it has protected tokens, which are in no partition"),
            (made.layout == "plain" and sink > params.get("sink", 0), "it has no sink"),  # the BOS token, if any
            (self.lag != lag, f"its lag is {lag}, not {self.lag}"),
            (None not in (self.r, r) and self.r != r, f"its r is {r}, not {self.r}"),
        )
        if why := next((why for cannot, why in refusals if cannot), ""):
            raise PolicyUnsupported(
                f"suffix policy lagkv goes on where the partitions of this cache end, but {why}; leave suffix.scope "
                "out, or ask a cache of policy lagkv with suffix.params as that has them",
                param="suffix.scope",
            )
        count = self.lag + (made.num_tokens - sink) % self.lag
        return [count if made.num_tokens - sink >= self.lag else 0] * len(positions)

    def reduce(self, suffix: Suffix) -> Reduction:
        cut = PartitionCut(suffix.copied + suffix.tokens, suffix.protected, self.lag)
        whole = self.lag + (cut.num_tokens - suffix.protected) % self.lag
        shared = slice(suffix.protected, max(suffix.protected, suffix.stored - whole))
        scores = self._scores(suffix, cut, shared)
        places = suffix.positions[:, shared]
        partition = (places + suffix.copied - (places >= 0) * suffix.protected) // self.lag
        # By partition, then by score, the best first; of equal scores the smaller position wins, as in `select`.
        order = scores[:, shared].argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, partition.gather(1, order).argsort(dim=1, stable=True))
        partition = partition.gather(1, order)
        rank = torch.arange(order.shape[1], device=order.device) - torch.searchsorted(partition, partition)
        # Shares never grow, so no share needs an entry that has left.
        counts = cut.shares(suffix.budget) if self.r is None else cut.reduced * [retained(self.r, self.lag)]
        shares = torch.tensor(counts, device=order.device)
        stays = torch.ones(scores.shape, dtype=torch.bool, device=order.device)
        stays[:, shared] = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, rank < shares[partition])
        kept = numbers_of(stays)
        return Reduction(kept, columns={"score": scores.gather(1, kept)})

    def _scores(self, suffix: Suffix, cut: PartitionCut, shared: slice) -> Tensor:
        """The column "score" with the scores of the partitions whose next one has become full: at the first reduction
        all of them, later the one before the last."""
        new = cut.reduced if suffix.stored == cut.num_tokens else 1
        begin, end = shared.stop - new * self.lag, shared.stop + self.lag
        scores = suffix.columns["score"].clone()
        of_new = lag_scores(suffix.keys[:, begin:end], suffix.values[:, begin:end], self.lag)
        scores[:, begin : shared.stop] = of_new.flatten(1)
        return scores
