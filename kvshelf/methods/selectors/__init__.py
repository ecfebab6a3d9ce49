"""Which of a stored cache's entries a question reads: one selector, one file. Names are imported on first use: the
module of an installed selector needs the base class before the registry loads it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvshelf.methods.method import Needs, parameter
    from kvshelf.methods.selectors.base import Selector, StoredLayer, UnitSelector, of_pages
    from kvshelf.methods.selectors.registry import build, names

__all__ = ["Needs", "Selector", "StoredLayer", "UnitSelector", "build", "names", "of_pages", "parameter"]

_HOMES = {
    "Needs": "method",
    "Selector": "selectors.base",
    "StoredLayer": "selectors.base",
    "UnitSelector": "selectors.base",
    "build": "selectors.registry",
    "names": "selectors.registry",
    "of_pages": "selectors.base",
    "parameter": "method",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"kvshelf.methods.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
