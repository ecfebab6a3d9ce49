"""The name of `kvshelf.methods.selectors` before version 0.2, for plug-ins that have it still."""

from __future__ import annotations

import warnings
from typing import Any

from kvshelf.methods import selectors


def __getattr__(name: str) -> Any:
    value = getattr(selectors, name)
    warnings.warn(f"import {name} from kvshelf.methods.selectors", DeprecationWarning, stacklevel=2)
    return value
