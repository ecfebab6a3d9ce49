"""Bases of policies that are built around another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from kvshelf.artifact.identity import ModelIdentity
from kvshelf.artifact.records import Entries
from kvshelf.errors import InvalidRequest
from kvshelf.methods.method import Needs, parameter, parameter_fields
from kvshelf.methods.policies.base import Phase, Policy, ScoringPolicy, only_scores
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.gate_file import Gates, Geometry
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass


@dataclass(frozen=True)
class Around(Policy):
    """A policy around `inner`, the policy that its parameter `base` names. A request has the parameters of both. By
    default `inner` observes, probes and chooses."""

    takes: ClassVar[str]
    """The condition on a base, in words."""

    base: str = parameter("snapkv", "the policy that chooses; its own parameters are given beside this one")
    inner: Policy = field(default_factory=Full)

    @classmethod
    @abstractmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[Policy]]:
        """The policies that this one can be built around, by name."""

    @classmethod
    def build(cls, params: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Self:
        own = {f.name for f in parameter_fields(cls)}
        around = super().build({name: value for name, value in params.items() if name in own}, known)
        legal = cls.bases(known)
        if around.base not in legal:
            raise InvalidRequest(
                f"base is {around.base!r}; {cls.name} can be built around {cls.takes}: one of {', '.join(legal)}",
                param="policy_params.base",
            )
        of_base = {name: value for name, value in params.items() if name not in own}
        inner = around.build_inner(legal[around.base], of_base, known)
        if inner.parameters().get("prefill", "whole") != "whole":
            raise InvalidRequest(
                f"{cls.name} works on whole layers; take prefill=whole, or policy {around.base!r} itself",
                param="policy_params.prefill",
            )
        if isinstance(around, ScoringPolicy) and inner.takes_budget and inner.sizes_itself:
            raise InvalidRequest(
                f"{cls.name} shares a budget by scores, and what is given of {around.base!r} ({', '.join(of_base)}) "
                f"says how much stays; leave that out, or take policy {around.base!r} itself",
                param="policy_params.base",
            )
        if inner.parameters().get("keep_scores"):
            raise InvalidRequest(
                f"{cls.name} stores no scores of its base; leave keep_scores out, or take policy "
                f"{around.base!r} itself",
                param="policy_params.keep_scores",
            )
        return replace(around, inner=inner)

    def build_inner(self, base: type[Policy], params: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Policy:
        return base.build(params, known)

    @property
    def chooser(self) -> Policy:
        return self.inner.chooser

    def parameters(self) -> dict[str, Any]:
        return self.inner.parameters() | super().parameters()  # this policy's value of a name that both have

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:
        return self.inner.gate_file(model, folder, geometry)

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        return replace(self, inner=self.inner.fitted(document, budget, given))

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Entries:
        return self.inner.reduce(layer, budget)

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def revision(self) -> int:
        return 1000 * self.version + self.inner.revision

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    @property
    def takes_questions(self) -> bool:
        return self.inner.takes_questions

    @property
    def exact(self) -> bool:
        return self.inner.exact

    @property
    def ragged(self) -> bool:
        return self.budgets_heads or self.inner.ragged

    @property
    def sizes_itself(self) -> bool:
        return super().sizes_itself or (self.inner.takes_budget and self.inner.sizes_itself)

    def own_budget(self, document: DocumentView) -> Budget:
        return self.inner.own_budget(document) if self.takes_budget else super().own_budget(document)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        return self.inner.probe_passes(document)

    def probe_text(self, document: DocumentView) -> str:
        return self.inner.probe_text(document)

    def next_position(self, num_tokens: int, budget: Budget) -> int:
        return self.inner.next_position(num_tokens, budget)


@dataclass(frozen=True)
class AroundScorer(Around, ScoringPolicy):
    """A policy that scores as its base does, and itself decides which entries stay by these scores."""

    inner: ScoringPolicy = field(default_factory=SnapKV)

    reduce = ScoringPolicy.reduce

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


def scorers(known: Mapping[str, type[Policy]]) -> dict[str, type[ScoringPolicy]]:
    """The policies that only score, and are not built around another one."""
    return {name: base for name, base in known.items() if only_scores(base) and not issubclass(base, Around)}
