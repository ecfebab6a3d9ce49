"""Garbage collection while a process starts.

Imported modules stay. To search them for garbage again and again takes a sixth of the time of importing transformers.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def begin() -> None:
    """Collect rarely until `end`."""
    gc.set_threshold(50_000, 20, 100)


def end() -> None:
    """Collect as often as usual again, because reference cycles may hold tensors. What there is by now stays, so it is
    searched no more."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
