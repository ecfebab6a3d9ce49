"""A shelf in Redis: Lua scripts that keep the index, and chunks of a few MB that hold the bytes.

The whole index lies in one hash slot, so that a script is a transaction; the chunks are spread over a cluster. The
server must not evict (`maxmemory-policy noeviction`), and is durable only with an append-only file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from kvshelf.store.blobs import WRITE_LEASE_S, Blobs, Step
from kvshelf.store.index import MakeBlobs
from kvshelf.store.jobs.clock import uptime_s
from kvshelf.store.redis import address
from kvshelf.store.redis.blobs import RedisBlobs
from kvshelf.store.redis.clock import RedisClock
from kvshelf.store.redis.index import RedisIndex
from kvshelf.store.redis.leases import RedisLeases
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf


class RedisStore(Shelf):
    """See `Store` for the contract. Made by `open`."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        rules: Rules | None = None,
        key: bytes | None = None,
        write_lease_s: float = WRITE_LEASE_S,
        now: Callable[[], float] | None = None,
        elapsed: Callable[[], float] | None = None,
        on_step: Step = lambda _: None,
        blobs: MakeBlobs | None = None,
    ) -> Self:
        """Open the shelf at a URL (`kvshelf.store.redis.address`), or create it. key: the key of content addresses for
        an empty home (32 bytes; random if None). write_lease_s: how long a writer may be silent. now, elapsed: of a
        test; None: the server's clock, and this machine's uptime. blobs: opens the place of the blobs, if it is not
        this Redis. Open it after forking. Raises `InvalidRequest`, `StoreUnavailable`."""
        place = address.parse(url)
        link = RedisLink(place)
        elapsed = elapsed or now or uptime_s
        now = now or RedisClock(link, f"{{{place.prefix}}}:home", elapsed)
        try:
            index = RedisIndex.open(link, place.prefix, key, write_lease_s=write_lease_s, blobs=blobs)
            if blobs is None:
                opened: Blobs = RedisBlobs(link, place.prefix, write_lease_s)
            else:
                opened = blobs(index, RedisLeases(link, place.prefix))
        except BaseException:
            link.close()
            raise
        return cls(index, opened, rules=rules, now=now, elapsed=elapsed, on_step=on_step)
