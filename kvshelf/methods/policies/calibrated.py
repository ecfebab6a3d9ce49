"""Base of policies that know a model's heads and layers from its calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.calibration import Calibration


@dataclass(frozen=True)
class CalibratedPolicy(Policy):
    """Judges heads or layers by what `kvshelf calibrate` measured once per model."""

    calibration: str | None = parameter(None, "digest of the calibration to use; null: the one that is there")

    @property
    def needs(self) -> Needs:
        return super().needs | Needs.CALIBRATION

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        return replace(policy, calibration=required_digest(self.calibration, calibration_of(document).digest))


def required_digest(named: str | None, digest: str) -> str:
    """The `digest` of the model's calibration. Raises `PolicyUnsupported` where a request named another."""
    if named not in (None, digest):
        raise PolicyUnsupported(
            f"calibration {named!r} is not this model's, which is {digest!r}; leave it out",
            param="policy_params.calibration",
        )
    return digest


def calibration_of(document: DocumentView) -> Calibration:
    assert document.calibration is not None, "the policy says that it needs the calibration"
    return document.calibration


def retrieval_scores(calibration: Calibration, kv_heads: int) -> list[float]:
    """The scores of the KV heads of all layers: of each that of its query head which retrieves most."""
    group = calibration.query_heads // kv_heads
    return [max(layer[i : i + group]) for layer in calibration.head_scores for i in range(0, len(layer), group)]
