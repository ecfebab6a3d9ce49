"""What one tenant may ask of the service: so many requests a minute, so many at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvshelf.client.types import Allowance
from kvshelf.errors import RateLimited

_RETRY_S = 1.0


class RateLimiter:
    """A token bucket for each tenant: full it holds a minute's requests, and it fills evenly.

    So a tenant that was quiet may send its minute's requests at once, and then one at a time. Tenants come from the
    file of keys, so there are not more buckets than it has had.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str) -> float:
        """Take one request out of the bucket. 0, or the seconds until there will be one to take."""
        level = self._level(tenant)
        if level < 1:
            return (1 - level) * 60 / self.per_minute
        self._levels[tenant] = (level - 1, self._clock())
        return 0.0

    def left(self, tenant: str) -> tuple[int, float]:
        """How many requests the bucket holds, and the seconds until it is full."""
        level = self._level(tenant)
        return int(level), (self.per_minute - level) * 60 / self.per_minute

    def _level(self, tenant: str) -> float:
        level, then = self._levels.get(tenant, (float(self.per_minute), 0.0))
        return min(self.per_minute, level + (self._clock() - then) * self.per_minute / 60)


class TenantLimits:
    """The limits that every request meets before it is looked at."""

    def __init__(self, max_concurrent: int, requests_per_minute: int | None) -> None:
        self._max_concurrent = max_concurrent
        self._rate = None if requests_per_minute is None else RateLimiter(requests_per_minute)
        self._open: Counter[str] = Counter()

    @contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """The time that one request takes, from its first byte to the last of its answer. Raises `RateLimited`."""
        if self._open[tenant] >= self._max_concurrent:
            raise RateLimited(
                f"{self._max_concurrent} requests of this tenant are open, as many as may; wait for some to end",
                retry_after_s=_RETRY_S,
            )
        if self._rate is not None and (wait_s := self._rate.take(tenant)):
            raise RateLimited(
                f"this tenant may send {self._rate.per_minute} requests a minute; the next one in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1

    def open_requests(self, tenant: str) -> Allowance:
        return allowance(self._max_concurrent, self._open[tenant])

    def rate(self, tenant: str) -> Allowance:
        """Requests a minute; without such a limit they are not counted."""
        if self._rate is None:
            return allowance(None, None)
        return allowance(self._rate.per_minute, self._rate.per_minute - self._rate.left(tenant)[0])

    def headers(self, tenant: str) -> dict[str, str]:
        """OpenAI's headers, where a rate is set; the time until the bucket is full is a duration in seconds."""
        if self._rate is None:
            return {}
        remaining, reset_s = self._rate.left(tenant)
        return {
            "x-ratelimit-limit-requests": str(self._rate.per_minute),
            "x-ratelimit-remaining-requests": str(remaining),
            "x-ratelimit-reset-requests": f"{reset_s:.3f}s",
        }


def allowance(limit: int | None, used: int | None) -> Allowance:
    """None: any number, or not known."""
    left = None if limit is None or used is None else max(0, limit - used)
    return Allowance(limit=limit, used=used, left=left)
