"""How whoever waits for the engine is told of its progress, and gets to stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Checkpoint = Callable[[], None]
Progress = Callable[[Literal["prefill", "quality"], int, int], None]
"""Is told how far a compression is: how many layers of a prefill, or measured levels, are done, and of how many."""


def nothing(*_: object) -> None:
    """The checkpoint and the progress that do nothing."""
