"""Callbacks by which a caller of the engine learns of its progress, and stops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Checkpoint = Callable[[], None]
Progress = Callable[[Literal["prefill", "quality"], int, int], None]
"""Called with how many layers of a prefill, or measured levels, are done, and of how many."""


def nothing(*_: object) -> None:
    """The checkpoint and the progress that do nothing."""
