"""The objective that trains the gates of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.gates.base import GatePolicy, TokenGate
from kvshelf.training.gates.distill import Distilled
from kvshelf.training.gates.importance import Importance
from kvshelf.training.gates.lookahead import Lookahead
from kvshelf.training.gates.trainer import Objective

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine


_RANK: Final = 8


def trained_policy(family: str, target: str | None) -> type[GatePolicy]:
    """The policy of this name, or with gates of this family and target. Raises `InvalidRequest`."""
    known = [policy for policy in POLICIES.values() if issubclass(policy, GatePolicy)]
    for policy in known:
        if family in (policy.name, policy.family) and target in (None, policy.target):
            return policy
    listed = ", ".join(f"{policy.name} ({policy.family}, {policy.target})" for policy in known)
    about = repr(family) if target is None else f"{family!r} with the target {target!r}"
    raise InvalidRequest(f"no policy has gates of {about}; there are {listed}", param="family")


def objective(policy: type[GatePolicy], engine: Engine, width: int | None = None) -> Objective:
    """The objective of a policy's gates for this model. width: of the gates' hidden layer, by default a quarter of the
    model's, as Locret's; for learned tokens the rank of their additions."""
    if policy.family == "probe":
        return Lookahead(policy, engine, width or _RANK)
    width = width or max(1, engine.preparer.geometry.hidden // 4)
    if not issubclass(policy, TokenGate):
        raise InvalidRequest(
            f"the gates of policy {policy.name!r} judge no token by itself, and nothing here trains them",
            param="family",
        )
    return (Distilled if policy.target == "distill" else Importance)(policy, engine, width)
