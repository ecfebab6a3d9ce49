"""The selectors by name, and `policy:NAME` of each policy that can choose for a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvshelf.errors import InvalidRequest
from kvshelf.methods import registry
from kvshelf.methods.info import MethodInfo, measured_rows
from kvshelf.methods.method import SELECTOR, Needs, require_parameters, unknown
from kvshelf.methods.policies.registry import POLICIES
from kvshelf.methods.selectors.base import Selector, UnitSelector
from kvshelf.methods.selectors.by_policy import ByPolicy, can_select

_PREFIX = "policy:"
_BY_POLICY = ("sage", *(f"{_PREFIX}{name}" for name, cls in POLICIES.items() if can_select(cls)))

UNIT_SELECTORS = registry.Registry(UnitSelector, reserved=_BY_POLICY)  # type: ignore[type-abstract]


def names() -> list[str]:
    """The names that `build` takes."""
    return [*UNIT_SELECTORS, *_BY_POLICY]


def reads_by_index(method: str) -> bool:
    """Whether this selector reads a cache in part from the shelf; see `Needs.INDEX`."""
    return method in UNIT_SELECTORS and Needs.INDEX in UNIT_SELECTORS.build(method, {}).needs


def build(method: str, params: Mapping[str, Any]) -> Selector:
    """The selector of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if method not in _BY_POLICY:
        if not isinstance(method, str) or method not in UNIT_SELECTORS:
            raise unknown(SELECTOR, method, names())
        return UNIT_SELECTORS.build(method, params)
    cls = POLICIES[method.removeprefix(_PREFIX)]
    for name in cls.settled.keys() & params.keys():
        why = f"selector {method!r} takes no {name}: {cls.settled[name]}"
        raise InvalidRequest(why, param=f"{SELECTOR.params}.{name}")
    require_parameters(cls, f"policy {cls.name!r}", params, SELECTOR.params)
    return ByPolicy(policy=cls.build(params, POLICIES))


def infos() -> list[MethodInfo]:
    """Every selector, from its class."""
    return [*map(registry.info_of, UNIT_SELECTORS.values()), *map(_of_policy, _BY_POLICY)]


def _of_policy(name: str) -> MethodInfo:
    cls = POLICIES[name.removeprefix(_PREFIX)]
    policy = registry.info_of(cls)
    summary, *details = registry.paragraphs(ByPolicy)
    return replace(
        policy,
        name=name,
        summary=f"{summary} Policy {policy.name}: {policy.summary}",
        details=details,
        advice=ByPolicy.advice,
        parameters={key: info for key, info in policy.parameters.items() if key not in cls.settled},
        measured=measured_rows(SELECTOR, name),
    )
