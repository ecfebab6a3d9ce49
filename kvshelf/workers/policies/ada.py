"""Ada-KV: heads share a budget by their scores (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.select import importance_of
from kvshelf.workers.policies.base import Observes, Policy, ScoringPolicy, parameter, parameter_fields
from kvshelf.workers.policies.blocks import BlockPolicy
from kvshelf.workers.policies.budgets import Budget, LayerBudget
from kvshelf.workers.policies.sharing import GlobalSharing, flat_counts, least
from kvshelf.workers.policies.snapkv import SnapKV
from kvshelf.workers.policies.view import DocumentView, LayerView, ProbePass


@dataclass(frozen=True)
class Ada(ScoringPolicy):
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

    base: str = parameter("snapkv", "the policy that scores; its own parameters are given beside this one")
    floor: float = parameter(
        0.2, "part of an even share that each head keeps whatever its scores", minimum=0, maximum=1
    )
    across: str = parameter("layer", "the heads that share a budget", choices=("layer", "cache"))
    scoring: ScoringPolicy = field(default_factory=SnapKV)

    @classmethod
    def build(cls, given: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Self:
        own = {f.name for f in parameter_fields(cls)}
        ada = super().build({name: value for name, value in given.items() if name in own}, known)
        of_base = {name: value for name, value in given.items() if name not in own}
        base = _scoring_policy(ada.base, known)
        leaves_sharing = _can_leave_sharing(base)
        scoring = base.build(of_base | ({"across": "head"} if leaves_sharing else {}), known)
        if isinstance(scoring, BlockPolicy) and scoring.prefill != "whole":
            raise InvalidRequest(
                f"ada shares budgets once a layer is whole; take prefill=whole, or policy {ada.base!r} itself",
                param="policy_params.prefill",
            )
        if ada.across == "cache" and base.counts is not ScoringPolicy.counts and not leaves_sharing:
            raise InvalidRequest(
                f"policy {ada.base!r} shares the budget among layers or heads itself, which across 'cache' would undo; "
                "give across 'layer', or another base",
                param="policy_params.across",
            )
        return replace(ada, scoring=scoring)

    def parameters(self) -> dict[str, Any]:
        return self.scoring.parameters() | super().parameters()  # `across` is this policy's

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        return replace(self, scoring=self.scoring.fitted(document, budget, given))

    def score(self, layer: LayerView) -> Tensor:
        return self.scoring.score(layer)

    def protected(self, layer: LayerView) -> Tensor:
        return self.scoring.protected(layer)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:
        total = sum(self.scoring.counts(layer, scores, protected, budget))
        floor = least(self.floor, total // len(scores), int(protected.sum()))
        return flat_counts(list(importance_of(scores, protected)), total, [floor] * len(scores))

    @property
    def sharing(self) -> GlobalSharing | None:
        return GlobalSharing(self.floor) if self.across == "cache" else None

    # What the base needs

    @property
    def revision(self) -> int:
        return 1000 * self.version + self.scoring.revision

    @property
    def observes(self) -> Observes:
        return self.scoring.observes

    @property
    def takes_questions(self) -> bool:
        return self.scoring.takes_questions

    @property
    def exact(self) -> bool:
        return self.scoring.exact

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        return self.scoring.probe_passes(document)

    def probe_text(self, document: DocumentView) -> str:
        return self.scoring.probe_text(document)

    def next_position(self, num_tokens: int, budget: Budget) -> int:
        return self.scoring.next_position(num_tokens, budget)


def _can_leave_sharing(cls: type[Policy]) -> bool:
    """Whether the policy shares budgets by a parameter `across`, which can also give each head its own."""
    return any(f.name == "across" and "head" in f.metadata["choices"] for f in parameter_fields(cls))


def _scoring_policy(name: str, known: Mapping[str, type[Policy]]) -> type[ScoringPolicy]:
    """The policy of that name, if budgets per head can be built around it. Raises `InvalidRequest`."""
    legal = {
        cls.name: cls
        for cls in known.values()
        if issubclass(cls, ScoringPolicy) and cls.reduce is ScoringPolicy.reduce and cls is not Ada
        if not cls.shared_by_heads and (cls.sharing is ScoringPolicy.sharing or _can_leave_sharing(cls))
    }
    if name not in legal:
        raise InvalidRequest(
            f"base is {name!r}; heads can share a budget around a policy that scores the tokens of each head by itself "
            f"and leaves the sharing to ada: one of {', '.join(legal)}",
            param="policy_params.base",
        )
    return legal[name]
