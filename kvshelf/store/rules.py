"""Rules for every cache of a home: expiry, quota, encryption."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvshelf.errors import InvalidRequest
from kvshelf.store.checks import require_expiry
from kvshelf.store.index import Quota
from kvshelf.store.sealing.keyring import Keyring


@dataclass(frozen=True)
class Rules:
    """Limits on time and space, and the keys that seal blobs (None: blobs are stored in plain). default_ttl_s: for a
    cache without an expiry; `max_ttl_s` if that is shorter or set alone. quota: of each tenant, and the budget of the
    home."""

    default_ttl_s: float | None = None
    max_ttl_s: float | None = None
    quota: Quota = field(default_factory=Quota)
    keyring: Keyring | None = None

    def expiry(self, ttl_s: float | None, expires_at: float | None, now: float) -> float | None:
        """When a cache put now expires (Unix seconds, None: never). Raises `InvalidRequest`."""
        if ttl_s is None and expires_at is None:
            limits = [seconds for seconds in (self.default_ttl_s, self.max_ttl_s) if seconds is not None]
            return now + min(limits) if limits else None
        return self.changed_expiry(ttl_s, expires_at, now)

    def renewal(self, ttl_renew_s: float | None) -> float | None:
        """The seconds by which uses prolong a cache, None: they do not. Raises `InvalidRequest`."""
        if ttl_renew_s is not None:
            self.changed_expiry(ttl_renew_s, None, 0.0)
        return ttl_renew_s

    def changed_expiry(self, ttl_s: float | None, expires_at: float | None, now: float) -> float | None:
        """As `expiry`, but None for both means no expiry."""
        at = require_expiry(ttl_s, expires_at, now)
        if self.max_ttl_s is not None and (at is None or at > now + self.max_ttl_s):
            param = "expires_at" if expires_at is not None else "ttl_s"
            wish = "no expiry" if at is None else f"{at - now:g} s from now"
            raise InvalidRequest(f"{param}: caches are kept for {self.max_ttl_s:g} s at most, not {wish}", param=param)
        return at
