"""The suffix policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.methods import registry
from kvshelf.methods.info import MethodInfo
from kvshelf.methods.method import Needs
from kvshelf.methods.suffixes.base import SuffixPolicy

SUFFIX_POLICIES = registry.Registry(SuffixPolicy)  # type: ignore[type-abstract]


def build(name: str, params: Mapping[str, Any]) -> SuffixPolicy:
    """The suffix policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    return SUFFIX_POLICIES.build(name, params)


def untrained() -> list[str]:
    """The names of the suffix policies that need no gates: every model can have them."""
    return [name for name, cls in SUFFIX_POLICIES.items() if Needs.GATES not in cls().needs]


def infos() -> list[MethodInfo]:
    """Every suffix policy, from its class."""
    return [registry.info_of(cls) for cls in SUFFIX_POLICIES.values()]
