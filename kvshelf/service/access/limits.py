"""Limits of one tenant: requests per minute, tokens per minute, open requests and the memory of their bodies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvshelf.api import Allowance
from kvshelf.errors import RateLimited, ServiceBusy

_RETRY_S = 1.0


class RateLimiter:
    """One token bucket per tenant. It holds one minute's allowance and refills evenly.

    An idle tenant may therefore use a minute's allowance at once. Tenants come from the key file, which bounds the
    number of buckets.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str) -> float:
        """Takes one request out of the bucket. Returns 0, or if it is empty the seconds until one is available."""
        level = self._level(tenant)
        if level < 1:
            return (1 - level) * 60 / self.per_minute
        self._levels[tenant] = (level - 1, self._clock())
        return 0.0

    def spend(self, tenant: str, amount: int) -> None:
        """Takes out an amount that has already been used; the bucket may go below zero."""
        self._levels[tenant] = (self._level(tenant) - amount, self._clock())

    def debt_s(self, tenant: str) -> float:
        """The seconds until the bucket is back at zero; 0 if it is not below."""
        return max(0.0, -self._level(tenant)) * 60 / self.per_minute

    def left(self, tenant: str) -> tuple[int, float]:
        """The content of the bucket, and the seconds until it is full."""
        level = self._level(tenant)
        return max(0, int(level)), (self.per_minute - level) * 60 / self.per_minute

    def _level(self, tenant: str) -> float:
        level, then = self._levels.get(tenant, (float(self.per_minute), 0.0))
        return min(self.per_minute, level + (self._clock() - then) * self.per_minute / 60)


class TenantLimits:
    """The limits that apply to requests before they are parsed.

    The token cost of a request is known only after its work. Only then do its tokens leave the bucket, which may go
    below zero; while the bucket is below zero, no work that costs tokens starts. Reserving the maximum beforehand would
    refuse requests that fit, because answers are rarely as long as allowed.
    """

    def __init__(
        self,
        max_concurrent: int,
        requests_per_minute: int | None,
        tokens_per_minute: int | None = None,
        *,
        max_held_bytes: int,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_held_bytes = max_held_bytes
        self._body_bytes: Counter[str] = Counter()
        self._rate = None if requests_per_minute is None else RateLimiter(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else RateLimiter(tokens_per_minute)
        self._open: Counter[str] = Counter()

    @contextmanager
    def request(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Wraps one request, from its first byte to the last of its answer. Raises `RateLimited`.

        Gives the function that `_hold` describes, for the body of this request.
        """
        if self._open[tenant] >= self._max_concurrent:
            raise RateLimited(
                f"this tenant has {self._max_concurrent} open requests, the maximum; wait for some to end",
                retry_after_s=_RETRY_S,
            )
        if self._rate is not None and (wait_s := self._rate.take(tenant)):
            raise RateLimited(
                f"this tenant may send {self._rate.per_minute} requests a minute; the next one in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        self._open[tenant] += 1
        held_bytes = 0

        def hold(nbytes: int) -> None:
            nonlocal held_bytes
            self._hold(tenant, nbytes)
            held_bytes += nbytes

        try:
            yield hold
        finally:
            self._open[tenant] -= 1
            self._body_bytes[tenant] -= held_bytes

    def _hold(self, tenant: str, nbytes: int) -> None:
        """Count bytes of a body until its request ends. Raises `ServiceBusy` beyond `max_held_bytes`.

        A tenant may take half of it, so that one alone cannot shut out the others.
        """
        if (
            self._body_bytes[tenant] + nbytes > self._max_held_bytes // 2
            or self._body_bytes.total() + nbytes > self._max_held_bytes
        ):
            raise ServiceBusy(
                f"there is no room for {nbytes} bytes of this body: the bodies of open requests may hold "
                f"{self._max_held_bytes} bytes, those of one tenant half of it, and this tenant's hold "
                f"{self._body_bytes[tenant]}. Try again later, or raise the service's max_held_bytes",
                retry_after_s=_RETRY_S,
            )
        self._body_bytes[tenant] += nbytes

    def require_tokens(self, tenant: str) -> None:
        """Raises `RateLimited` while the tenant has used more tokens than allowed."""
        if self._tokens is not None and (wait_s := self._tokens.debt_s(tenant)):
            raise RateLimited(
                f"this tenant may use {self._tokens.per_minute} tokens a minute and has used more; new work in "
                f"{wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def spend_tokens(self, tenant: str, tokens: int) -> None:
        """Charges the tenant for tokens that a model has prefilled or generated."""
        if self._tokens is not None:
            self._tokens.spend(tenant, tokens)

    def open_requests(self, tenant: str) -> Allowance:
        return allowance(self._max_concurrent, self._open[tenant])

    def request_rate(self, tenant: str) -> Allowance:
        """Requests per minute; not counted without a limit."""
        return _of_a_minute(self._rate, tenant)

    def token_rate(self, tenant: str) -> Allowance:
        """Tokens per minute; not counted without a limit."""
        return _of_a_minute(self._tokens, tenant)

    def headers(self, tenant: str) -> dict[str, str]:
        """OpenAI's rate limit headers, if a rate is set."""
        return _headers("requests", self._rate, tenant) | _headers("tokens", self._tokens, tenant)


def _of_a_minute(limiter: RateLimiter | None, tenant: str) -> Allowance:
    if limiter is None:
        return allowance(None, None)
    return allowance(limiter.per_minute, limiter.per_minute - limiter.left(tenant)[0])


def _headers(kind: str, limiter: RateLimiter | None, tenant: str) -> dict[str, str]:
    """The headers of one rate. `reset` is the time in seconds until the bucket is full."""
    if limiter is None:
        return {}
    remaining, reset_s = limiter.left(tenant)
    return {
        f"x-ratelimit-limit-{kind}": str(limiter.per_minute),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": f"{reset_s:.3f}s",
    }


def allowance(limit: int | None, used: int | None) -> Allowance:
    """An allowance. `limit` None: unlimited; `used` None: unknown."""
    left = None if limit is None or used is None else max(0, limit - used)
    return Allowance(limit=limit, used=used, left=left)
