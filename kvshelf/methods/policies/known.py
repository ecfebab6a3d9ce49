"""All policies as documentation, forms and plans need them. Needs no torch, unless another package has a policy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvshelf.methods.policies.info import GROUP, PolicyInfo, measured_rows, packaged
from kvshelf.methods.policies.parameters import unknown


def catalog() -> list[PolicyInfo]:
    """Every policy with its parameters, ranges and source.

    Those of kvshelf are `packaged`. Those of other packages come from their classes, and raise as `installed` does.
    """
    ours = list(_ours())
    if not entry_points(group=GROUP):
        return ours
    from kvshelf.methods.policies.registry import POLICIES, info_of

    names = {info.name for info in ours}
    return [*ours, *(info_of(cls) for name, cls in POLICIES.items() if name not in names)]


def policy_info(name: str) -> PolicyInfo:
    """One policy. Raises `InvalidRequest` for an unknown name."""
    known = {info.name: info for info in catalog()}
    if name not in known:
        raise unknown("policy", name, known, "policy")
    return known[name]


def cost_name(policy: str, params: Mapping[str, Any]) -> str:
    """The name under which a policy's cost is measured.

    A policy that lets another one score, its `base`, costs what that one costs: around another base than by default its
    cost is another one, which no bench has measured.
    """
    base = params.get("base")
    about = policy_info(policy).parameters.get("base")
    return policy if about is None or base in (None, about.default) else f"{policy} around {base}"


def compress_share(cost: str) -> float | None:
    """`PolicyInfo.compress_share` of a `cost_name`; None if nobody measured it."""
    return next((info.compress_share for info in catalog() if info.name == cost), None)


@cache
def _ours() -> tuple[PolicyInfo, ...]:
    return tuple(PolicyInfo(**about, measured=measured_rows(about["name"])) for about in packaged("policies"))
