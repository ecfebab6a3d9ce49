"""How long to wait before a failed action is tried again."""

from __future__ import annotations

import random


def backoff_s(repeat: int, first_s: float, limit_s: float, *, spread: float = 0.0) -> float:
    """The pause in seconds before repeat number `repeat`, counted from 0: it doubles from `first_s` up to `limit_s`.

    spread: the largest part of the pause to leave out by chance, so that many callers do not come back at once.
    """
    longest_s = min(first_s * 2.0 ** min(repeat, 1000), limit_s)  # a float overflows a little beyond 2^1000
    return longest_s * random.uniform(1.0 - spread, 1.0)
