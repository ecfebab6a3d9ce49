"""The compression policies. Names are imported on first use: the module of an installed policy needs the base classes
before the registry loads it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvshelf.methods.method import Needs, parameter
    from kvshelf.methods.policies.base import Policy, ScoringPolicy
    from kvshelf.methods.policies.registry import POLICIES, build
    from kvshelf.methods.policies.view import LayerView

__all__ = ["POLICIES", "LayerView", "Needs", "Policy", "ScoringPolicy", "build", "parameter"]

_HOMES = {
    "POLICIES": "policies.registry",
    "LayerView": "policies.view",
    "Needs": "method",
    "Policy": "policies.base",
    "ScoringPolicy": "policies.base",
    "build": "policies.registry",
    "parameter": "method",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"kvshelf.methods.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
