"""The compression policies. Names are imported on first use: the catalog needs no torch, the policies themselves do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvshelf.methods.policies.base import Policy, ScoringPolicy, parameter
    from kvshelf.methods.policies.info import PolicyInfo
    from kvshelf.methods.policies.known import catalog
    from kvshelf.methods.policies.registry import POLICIES, build
    from kvshelf.methods.policies.view import LayerView

__all__ = [
    "POLICIES", "LayerView", "Policy", "PolicyInfo", "ScoringPolicy", "build", "catalog", "parameter",
]  # fmt: skip

_HOMES = {
    "POLICIES": "registry",
    "LayerView": "view",
    "Policy": "base",
    "PolicyInfo": "info",
    "ScoringPolicy": "base",
    "build": "registry",
    "catalog": "known",
    "parameter": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
