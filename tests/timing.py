"""Processor time of what a test calls: the least of some rounds, so that neither collected garbage nor a neighbour on
the machine fails a test that compares two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from timeit import Timer
from typing import Any


def least_s(call: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of this thread's processor time that the quickest of some calls took."""
    return min(Timer(call, timer=time.thread_time).repeat(rounds, 1))
