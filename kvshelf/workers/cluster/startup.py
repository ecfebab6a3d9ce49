"""Garbage collection while a process starts: searching modules, which are no garbage, takes a sixth of their import."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def begin() -> None:
    """Collect rarely until `end`."""
    gc.set_threshold(50_000, 20, 100)


def end() -> None:
    """Collect as often as usual again, because reference cycles may hold tensors. Objects made by now stay, so they are
    searched no more."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
