"""The policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kvshelf.methods import registry
from kvshelf.methods.info import MethodInfo
from kvshelf.methods.policies.base import Policy

POLICIES = registry.Registry(Policy)  # type: ignore[type-abstract]


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """The policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    return POLICIES.build(name, params)


def everything() -> Policy:
    """The policy that keeps every entry."""
    return build("full", {})


def infos() -> list[MethodInfo]:
    """Every policy, from its class."""
    return [_info(cls) for cls in POLICIES.values()]


@cache
def sourced_infos() -> list[MethodInfo]:
    """The policies of installed sources."""
    return [_info(cls) for cls in POLICIES.sourced()]


def _info(cls: type[Policy]) -> MethodInfo:
    default = cls.build({}, POLICIES)
    return registry.info_of(
        cls,
        version=cls.version,
        phase=default.phase,
        takes_budget=cls.takes_budget,
        takes_questions=default.takes_questions,
        stored=dict(cls.stored),
    )
