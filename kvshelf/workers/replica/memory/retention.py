"""Which cache leaves a full memory first: one order of pins, hints and past uses.

From the first to leave to the last:

    no pin and no hint     by past use: the least recent, or the least priority by GDSF (`kvshelf.store.eviction`)
    a hint                 the farthest next use first (KVFlow, arXiv 2507.07400)
    a pin                  the latest end first (Continuum, arXiv 2511.02230)

A cache without a hint counts as used later than any with one. Times are seconds of one clock, passed as `now`: nothing
here reads a clock, and nothing knows sizes or limits of a memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvshelf.store import eviction

Key = tuple[str, str]
"""Tenant and id of a cache."""

LEAST_HINT_S: Final = 10.0
"""How long a hint counts at least after the time it named."""


class Use(NamedTuple):
    """A use of a cache. uses: how many there were since it came into memory, this one included. cost_s: to read it
    again. clock: the priority of the cache that left last."""

    at: float
    uses: int
    cost_s: float
    nbytes: int
    clock: float


def by_recency(use: Use) -> float:
    """The priority by which the least recently used cache leaves first."""
    return use.at


def by_gdsf(use: Use) -> float:
    """The priority by which the cache leaves first that costs least to read again per byte, times its uses."""
    return eviction.priority(use.clock, use.uses, max(use.cost_s, eviction.LEAST_COST_S), use.nbytes)


class _Hint(NamedTuple):
    due: float
    void: float


class Retention:
    """The order of the caches in one memory; see the module. Not thread-safe."""

    def __init__(self, priority: Callable[[Use], float] = by_recency) -> None:
        self._priority_of = priority
        self._clock = 0.0
        self._uses: dict[Key, tuple[int, float]] = {}  # and the priority
        self._pins: dict[Key, float] = {}
        self._hints: dict[Key, _Hint] = {}

    def used(self, key: Key, now: float, *, cost_s: float, nbytes: int) -> None:
        """A question uses the cache. Its pin and its hint end: this is what they waited for."""
        uses = self._uses.get(key, (0, 0.0))[0] + 1
        self._uses[key] = uses, self._priority_of(Use(now, uses, cost_s, nbytes, self._clock))
        self._pins.pop(key, None)
        self._hints.pop(key, None)

    def pin(self, key: Key, until: float) -> None:
        """The cache leaves after all others, until then."""
        self._pins[key] = until

    def hint(self, key: Key, next_use_s: float | None, now: float) -> None:
        """The next use comes in `next_use_s` seconds; None takes the hint back. A hint is void once it is
        max(`LEAST_HINT_S`, next_use_s) overdue: what was foreseen long before may come later by as much."""
        self._hints.pop(key, None)
        if next_use_s is not None:
            self._hints[key] = _Hint(now + next_use_s, now + next_use_s + max(LEAST_HINT_S, next_use_s))

    def left(self, key: Key, now: float) -> bool:
        """The cache was evicted; says whether that ended a pin early. Its hint stays, so that it may be read again."""
        _, priority = self._uses.pop(key, (0, self._clock))
        self._clock = max(self._clock, priority)
        return self._pins.pop(key, -math.inf) > now

    def forget(self, key: Key) -> None:
        """The cache is gone or replaced: nothing counts that was said about it."""
        for known in (self._uses, self._pins, self._hints):
            known.pop(key, None)

    def order(self, key: Key, now: float) -> tuple[bool, float, float, float]:
        """Sorts caches, the first to leave first. One that no question has used has the lowest priority of all that
        stay."""
        pinned = self.pinned(key, now)
        priority = self._uses.get(key, (0, self._clock))[1]
        return pinned, -self._pins[key] if pinned else 0.0, -self.wait_s(key, now), priority

    def pinned(self, key: Key, now: float) -> bool:
        return self._pins.get(key, -math.inf) > now

    def wait_s(self, key: Key, now: float) -> float:
        """Seconds until the next use by a hint that counts: 0 for an overdue one, inf without one."""
        hint = self._hints.get(key)
        return math.inf if hint is None or now > hint.void else max(0.0, hint.due - now)

    def yields(self, key: Key, to: Key, now: float) -> bool:
        """Whether one cache may leave so that another is read ahead of its use: only if it is used later."""
        return not self.pinned(key, now) and self.wait_s(key, now) > self.wait_s(to, now)

    def leaving_for(self, to: Key, unused: Mapping[Key, int], missing: int, now: float) -> list[Key] | None:
        """The caches that leave so that one is read ahead of its use, the first to leave first; None if all that yield
        to it are too few. unused: bytes of each that no question uses. missing: bytes, none if not positive."""
        leaving: list[Key] = []
        for key in sorted(unused, key=lambda key: self.order(key, now)):
            if missing <= 0 or not self.yields(key, to, now):
                break  # the order has what is used later first
            leaving.append(key)
            missing -= unused[key]
        return None if missing > 0 else leaving

    def hinted(self, now: float) -> list[tuple[float, Key]]:
        """Seconds until the next use and key of every cache with a hint that counts, the nearest first."""
        self._hints = {key: hint for key, hint in self._hints.items() if now <= hint.void}
        return sorted((self.wait_s(key, now), key) for key in self._hints)
