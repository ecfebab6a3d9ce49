"""The selectors by name. A new selector is a file here and a line in `SELECTORS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.errors import InvalidRequest, nearest
from kvshelf.workers.policies.base import require_parameters
from kvshelf.workers.policies.registry import POLICIES
from kvshelf.workers.selectors.base import Selector, UnitSelector
from kvshelf.workers.selectors.by_policy import ByPolicy, can_select
from kvshelf.workers.selectors.fasa import Fasa
from kvshelf.workers.selectors.quest import Quest

UNIT_SELECTORS: Mapping[str, type[UnitSelector]] = {cls.name: cls for cls in (Quest, Fasa)}

_PREFIX = "policy:"


def names() -> list[str]:
    """What `build` takes: the selectors, and `policy:NAME` of each policy that can choose for a question."""
    policies = [f"{_PREFIX}{name}" for name, cls in POLICIES.items() if can_select(cls)]
    return [*UNIT_SELECTORS, "sage", *policies]


def build(method: str, params: Mapping[str, Any]) -> Selector:
    """The selector of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if method in UNIT_SELECTORS:
        return UNIT_SELECTORS[method].build(params)
    policy = "sage" if method == "sage" else method.removeprefix(_PREFIX)
    if method not in names():
        raise InvalidRequest(
            f"unknown selector {method!r}{nearest(method, names())}; this version has {', '.join(names())}",
            param="select.method",
        )
    cls = POLICIES[policy]
    require_parameters(cls, f"policy {policy!r}", params, "select.params")
    return ByPolicy(policy=cls.build(params, POLICIES))
