"""Which cache leaves a full memory first: one order of pins, hints and past uses.

From the first to leave to the last:

    no pin and no hint     by past use: the least recent, or the least priority by GDSF (`kvshelf.store.eviction`)
    a hint                 the farthest next use first (KVFlow, arXiv 2507.07400); of several the nearest
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

LEAST_STEP_S: Final = 600.0
"""As `LEAST_HINT_S`, of a hint by the step of a workflow, which the next step's question replaces. For what is overdue
by more than `LEAST_HINT_S`, no cache makes room any more."""

MOST_LATE_S: Final = 3600.0
"""How long a hint counts at most after the time it named."""

MOST_HINTS: Final = 1000
"""Of a tenant, the latest."""

MOST_HINTS_EACH: Final = 8
"""Of a cache, the nearest: of several only the nearest counts."""

AHEAD_S: Final = 5.0
"""From how long before the next use on others make room."""


class Hint(NamedTuple):
    """The next use of a cache comes in `next_use_s` seconds, None takes the hint back; it counts down to `least_s`.
    step: whose use that is, in a run of a workflow; a hint replaces the one of the same step. "": a question's."""

    cache_id: str
    next_use_s: float | None
    least_s: float = 0.0
    step: str = ""


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


class _Due(NamedTuple):
    """presses: until when others make room."""

    at: float
    presses: float
    void: float
    least_s: float

    def wait_s(self, now: float) -> float:
        return max(self.least_s, self.at - now)


class Retention:
    """The order of the caches in one memory; see the module. Not thread-safe."""

    def __init__(self, priority: Callable[[Use], float] = by_recency) -> None:
        self._priority_of = priority
        self._clock = 0.0
        self._uses: dict[Key, tuple[int, float]] = {}  # and the priority
        self._pins: dict[Key, float] = {}
        self._hints: dict[Key, dict[str, _Due]] = {}  # by step
        self._latest: dict[str, dict[tuple[Key, str], None]] = {}  # of each tenant, the oldest hint first

    def used(self, key: Key, now: float, *, cost_s: float, nbytes: int) -> None:
        """A question uses the cache. Its pin and its hint end: this is what they waited for. Hints by steps end with
        their workflow's own question."""
        uses = self._uses.get(key, (0, 0.0))[0] + 1
        self._uses[key] = uses, self._priority_of(Use(now, uses, cost_s, nbytes, self._clock))
        self._pins.pop(key, None)
        self._take_back(key, "")

    def pin(self, key: Key, until: float) -> None:
        """The cache leaves after all others, until then."""
        self._pins[key] = until

    def hint(self, hint: Hint, tenant: str, now: float) -> None:
        """A hint is void once what counts down of it is overdue by as long as that was, at least `LEAST_HINT_S` and at
        most `MOST_LATE_S`: what was foreseen long before may come later by as much."""
        key, next_use_s = (tenant, hint.cache_id), hint.next_use_s
        self._take_back(key, hint.step)
        if next_use_s is None:
            return
        counts_s = next_use_s - hint.least_s
        late_s = min(max(LEAST_HINT_S, counts_s), MOST_LATE_S)
        over, stays_s = now + counts_s, max(LEAST_STEP_S, late_s) if hint.step else late_s
        presses = over + (LEAST_HINT_S if hint.step else late_s)
        self._hints.setdefault(key, {})[hint.step] = _Due(now + next_use_s, presses, over + stays_s, hint.least_s)
        dues = self._hints[key]
        latest = self._latest.setdefault(tenant, {})
        latest[key, hint.step] = None
        if len(dues) > MOST_HINTS_EACH:
            self._take_back(key, max(dues, key=lambda step: dues[step].at))
        if len(latest) > MOST_HINTS:
            self._take_back(*next(iter(latest)))

    def _take_back(self, key: Key, step: str) -> None:
        steps, latest = self._hints.get(key, {}), self._latest.get(key[0], {})
        if steps.pop(step, None) is not None:
            del latest[key, step]
            if not steps:
                del self._hints[key]
            if not latest:
                del self._latest[key[0]]

    def left(self, key: Key, now: float) -> bool:
        """The cache was evicted; says whether that ended a pin early. Its hint stays, so that it may be read again."""
        _, priority = self._uses.pop(key, (0, self._clock))
        self._clock = max(self._clock, priority)
        return self._pins.pop(key, -math.inf) > now

    def forget(self, key: Key) -> None:
        """The cache is gone or replaced: nothing counts that was said about it."""
        self._uses.pop(key, None)
        self._pins.pop(key, None)
        for step in list(self._hints.get(key, ())):
            self._take_back(key, step)

    def order(self, key: Key, now: float) -> tuple[bool, float, float, float]:
        """Sorts caches, the first to leave first. One that no question has used has the lowest priority of all that
        stay."""
        pinned = self.pinned(key, now)
        priority = self._uses.get(key, (0, self._clock))[1]
        return pinned, -self._pins[key] if pinned else 0.0, -self.wait_s(key, now), priority

    def pinned(self, key: Key, now: float) -> bool:
        return self._pins.get(key, -math.inf) > now

    def wait_s(self, key: Key, now: float) -> float:
        """Seconds until the next use by the nearest hint that counts: 0 for an overdue one, inf without one."""
        dues = self._hints.get(key, {}).values()
        return min((due.wait_s(now) for due in dues if now <= due.void), default=math.inf)

    def presses(self, key: Key, limit_s: float, now: float) -> bool:
        """Whether others make room for the cache: by a hint that counts down to less than `limit_s`, is as near, and is
        not long overdue."""
        dues = self._hints.get(key, {}).values()
        return any(due.least_s < limit_s and due.at - now <= limit_s and now <= due.presses for due in dues)

    def nears_in(self, limit_s: float, now: float) -> float:
        """Seconds until the next hint that counts down is `limit_s` from its use; inf if none will be."""
        dues = (due for steps in self._hints.values() for due in steps.values())
        waits = (due.at - now - limit_s for due in dues if due.least_s < limit_s)
        return min((wait_s for wait_s in waits if wait_s > 0), default=math.inf)

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
        void = [(key, step) for key, steps in self._hints.items() for step, due in steps.items() if now > due.void]
        for key, step in void:
            self._take_back(key, step)
        return sorted((self.wait_s(key, now), key) for key in self._hints)
