"""D2O while decoding: heavy hitters and recent tokens, into which what leaves merges (arXiv 2406.13035)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.merging import NO_THRESHOLD, by_threshold
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, behind_sinks, best, numbers_of


@dataclass(frozen=True)
class D2O(PeriodicPolicy):
    """Keep the entries to which all tokens together attended most, and the most recent ones; one that leaves merges
    into the entry whose key is most like its own, if it is like enough.

    Scores, weights and threshold are those of policy `d2o`. At each reduction the threshold becomes the mean of the one
    before and the mean cosine of what leaves, or `tau`. Under scope "cache" each layer goes on with the share of the
    budget that its policy gave it: the document's entries behind its sinks compete and take members, with the sums and
    the threshold of the layer that were left (`keep_scores`).

    Departures: a protected question takes no members, and its rows add nothing; layers that the policy left whole
    (`first`, `last`) keep that share and no more; the mean over a GQA group; a reduction after every 32nd token, not
    after each, unless `every` is 1.
    """

    name: ClassVar[str] = "d2o"
    source: ClassVar[str] = "D2O, arXiv 2406.13035"
    advice: ClassVar[str] = "to see what merging by key similarity is worth beside h2o, in an answer, too."
    needs: ClassVar[Needs] = Needs.ATTENTION
    differ: ClassVar[Literal["layers"]] = "layers"
    columns: ClassVar[dict[str, float]] = {"sum": 0.0, "tau": NO_THRESHOLD}
    carried: ClassVar[frozenset[str]] = frozenset({"sum", "tau"})

    recent: float = parameter(0.5, "part of what the question leaves for the last entries", minimum=0, maximum=1)
    tau: float | None = parameter(None, "least cosine at which an entry merges; above 1 none do; null: the mean")

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        return behind_sinks(positions, made)

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        columns["sum"] += weights.mean(1)

    def reduce(self, suffix: Suffix) -> Reduction:
        sums, taus = suffix.columns["sum"], suffix.columns["tau"]
        stays = best(suffix, sums, int(self.recent * (suffix.budget - suffix.protected)))
        centers = stays.clone()
        centers[:, : suffix.protected] = False
        before = taus.max()
        plan, cosines, tau = by_threshold(
            suffix.keys,
            stays,
            suffix.positions - suffix.positions.min(),
            None,
            tau=self.tau,
            before=None if before == NO_THRESHOLD else before,
            centers=centers,
        )
        kept = numbers_of(stays)
        weights = torch.where(stays, 1.0, cosines).exp()
        keys, values = (plan.means(states, weights).view(*kept.shape, -1) for states in (suffix.keys, suffix.values))
        columns = {"sum": sums.gather(1, kept), "tau": torch.full_like(kept, float(tau), dtype=taus.dtype)}
        return Reduction(kept, keys, values, columns)
