"""Ada-KV: heads share a budget by their scores (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.select import Counts, importance_of, total_of
from kvshelf.methods.method import parameter, parameter_fields
from kvshelf.methods.policies.around import AroundScorer, scorers
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.sharing import GlobalSharing, flat_shares, least
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class Ada(AroundScorer):
    """Let another policy score, and give heads with more high scores more of the budget: the heads of a layer share the
    layer's budget, or all heads share the cache's.

    Algorithm 1 of the paper with kvpress's safeguard: each head keeps its best entries up to `floor` of an even share.
    The rest of the budget goes to the best scores of all heads together, so that the total is exact. (The authors' code
    mixes the two counts and rounds, and can miss the total by a few.) Where the base gives layers unequal budgets
    (pyramidkv), the heads of a layer share their layer's. `across="cache"` is not in the paper.

    Scores must mean the same in every head, and with `across="cache"` in every layer. Parts of an attention row do
    (snapkv, h2o). Norms and cosines of keys (knorm, keydiff) do not: a head with long keys would get more for no merit.
    """

    name: ClassVar[str] = "ada"
    source: ClassVar[str] = "Ada-KV, arXiv 2407.11550"
    advice: ClassVar[str] = "around a policy that scores by attention, where heads differ in how much they look at."
    budgets_heads: ClassVar[bool] = True
    takes: ClassVar[str] = (
        "a policy that scores the tokens of each head by itself and leaves the sharing of budgets to ada"
    )

    base: str = parameter("snapkv", "the policy that scores; its own parameters are given beside this one")
    floor: float = parameter(0.2, "part of an even share that each head always keeps", minimum=0, maximum=1)
    across: str = parameter("layer", "the heads that share a budget", choices=("layer", "cache"))

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[ScoringPolicy]]:
        return {
            name: base
            for name, base in scorers(known).items()
            if not base.shared_by_heads and (base.sharing is ScoringPolicy.sharing or _can_leave_sharing(base))
        }

    def build_inner(self, base: type[Policy], params: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Policy:
        assert issubclass(base, ScoringPolicy)
        leaves_sharing = _can_leave_sharing(base)
        if self.across == "cache" and base.counts is not ScoringPolicy.counts and not leaves_sharing:
            raise InvalidRequest(
                f"policy {self.base!r} shares the budget among layers or heads itself, which across 'cache' would undo;"
                " give across 'layer', or another base",
                param="policy_params.across",
            )
        return base.build({**params, **({"across": "head"} if leaves_sharing else {})}, known)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:
        total = total_of(self.inner.counts(layer, scores, protected, budget))
        # Protected entries are infinitely important, and need no floor.
        return flat_shares(importance_of(scores, protected), total, least(self.floor, total // len(scores), 0))

    @property
    def sharing(self) -> GlobalSharing | None:
        return GlobalSharing(self.floor) if self.across == "cache" else None


def _can_leave_sharing(cls: type[Policy]) -> bool:
    """Whether the policy's parameter `across` can give each head its own budget."""
    return any(f.name == "across" and "head" in f.metadata["choices"] for f in parameter_fields(cls))
