"""The name of `kvshelf.methods.policies` before version 0.2, for plug-ins that have it still."""

from __future__ import annotations

import warnings
from typing import Any

from kvshelf.methods import policies


def __getattr__(name: str) -> Any:
    value = getattr(policies, name)
    warnings.warn(f"import {name} from kvshelf.methods.policies", DeprecationWarning, stacklevel=2)
    return value
