"""Tells the caller of a creation how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

from kvshelf.api import CreationProgress

Watcher = Callable[[CreationProgress], None]
"""Gets each event, on any thread; it must not block."""

_EVERY_S: Final = 0.2
"""Least seconds between two events of one phase, except for its first and last: a layer may take a millisecond."""


class Teller:
    """Turns what the engine and the store report of one document into events for `watcher`."""

    def __init__(self, watcher: Watcher, part: str | None = None) -> None:
        self._watcher = watcher
        self._part = part
        self._phase = ""
        self._began = self._told = 0.0

    def __call__(self, phase: Literal["prefill", "quality", "store"], done: int, total: int) -> None:
        """See `Progress` of the engine. A phase begins with its first report, and again where `done` is 0."""
        now = time.monotonic()
        if phase != self._phase or done == 0:
            self._phase, self._began = phase, now
        elif done < total and now - self._told < _EVERY_S:
            return
        self._told = now
        seconds = round(now - self._began, 3)
        self._watcher(CreationProgress(phase=phase, done=done, total=total, seconds=seconds, part=self._part))
