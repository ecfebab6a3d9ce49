"""Ada-KV: heads share a budget by their scores (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.select import Counts, importance_of, total_of
from kvshelf.methods.method import parameter, parameter_fields
from kvshelf.methods.policies.around import Around
from kvshelf.methods.policies.base import Phase, Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.sharing import GlobalSharing, flat_shares, least
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class Ada(Around, ScoringPolicy):
    """Let another policy score, and give heads with more high scores more of the budget: the heads of a layer share the
    layer's budget, or all heads share the cache's.

    Algorithm 1 of the paper with kvpress's safeguard: each head keeps its best entries up to `floor` of an even share.
    The rest of the budget goes to the best scores of all heads together, so that the total is exact. (The authors' code
    mixes the two counts and rounds, and can miss the total by a few.) Where the base gives layers unequal budgets
    (pyramidkv), the heads of a layer share their layer's. `across="cache"` is not in the paper.

    Scores must mean the same in every head, and with `across="cache"` in every layer. Scores that are parts of an
    attention row do (snapkv, h2o). Norms and cosines of keys (knorm, keydiff) do not: a head with long keys would take
    the budget from others for no merit.

    Give the base's parameters together with these.
    """

    name: ClassVar[str] = "ada"
    source: ClassVar[str] = "Ada-KV, arXiv 2407.11550"
    advice: ClassVar[str] = "around a policy that scores by attention, where heads differ in how much they look at."
    budgets_heads: ClassVar[bool] = True
    takes: ClassVar[str] = (
        "a policy that scores the tokens of each head by itself and leaves the sharing of budgets to ada"
    )

    base: str = parameter("snapkv", "the policy that scores; its own parameters are given beside this one")
    floor: float = parameter(
        0.2, "part of an even share that each head keeps whatever its scores", minimum=0, maximum=1
    )
    across: str = parameter("layer", "the heads that share a budget", choices=("layer", "cache"))
    inner: ScoringPolicy = field(default_factory=SnapKV)

    reduce = ScoringPolicy.reduce

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[ScoringPolicy]]:
        return {
            base.name: base
            for base in known.values()
            if issubclass(base, ScoringPolicy) and base.reduce is ScoringPolicy.reduce and not issubclass(base, Around)
            if not base.shared_by_heads and (base.sharing is ScoringPolicy.sharing or _can_leave_sharing(base))
        }

    def made(self, base: type[Policy], given: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Policy:
        assert issubclass(base, ScoringPolicy)
        leaves_sharing = _can_leave_sharing(base)
        if self.across == "cache" and base.counts is not ScoringPolicy.counts and not leaves_sharing:
            raise InvalidRequest(
                f"policy {self.base!r} shares the budget among layers or heads itself, which across 'cache' would undo;"
                " give across 'layer', or another base",
                param="policy_params.across",
            )
        return base.build({**given, **({"across": "head"} if leaves_sharing else {})}, known)

    @property
    def chooser(self) -> Policy:
        return self

    @property
    def phase(self) -> Phase:
        return "during" if self.sharing is None else "cascade"

    def score(self, layer: LayerView) -> Tensor:
        return self.inner.score(layer)

    def protected(self, layer: LayerView) -> Tensor:
        return self.inner.protected(layer)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:
        total = total_of(self.inner.counts(layer, scores, protected, budget))
        # What is protected is infinitely important, and needs no floor.
        return flat_shares(importance_of(scores, protected), total, least(self.floor, total // len(scores), 0))

    @property
    def sharing(self) -> GlobalSharing | None:
        return GlobalSharing(self.floor) if self.across == "cache" else None


def _can_leave_sharing(cls: type[Policy]) -> bool:
    """Whether the policy shares budgets by a parameter `across`, which can also give each head its own."""
    return any(f.name == "across" and "head" in f.metadata["choices"] for f in parameter_fields(cls))
