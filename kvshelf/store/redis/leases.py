"""Leases of readers in Redis, for bytes that lie elsewhere. In one slot of a cluster with the index."""

from __future__ import annotations

from typing import Final

from kvshelf.store.blobs import READ_LEASE_S, TAKEN, TAKEN_S, Leases
from kvshelf.store.redis.link import RedisLink

_LEASES_SCRIPT: Final = """
-- KEYS[1]: sorted set, a reader's token -> the end of its lease in ms of the server's clock. ARGV: the operation, a
-- token, the duration of a lease in ms, the token of a taken name.
local call, key, operation, token = redis.call, KEYS[1], ARGV[1], ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
call('ZREMRANGEBYSCORE', key, '-inf', now)
local taken = call('ZSCORE', key, ARGV[4]) and 1 or 0
local readers = call('ZCARD', key) - taken
if operation == 'held' then return readers end
if operation == 'release' then return call('ZREM', key, token) end
if operation == 'hold' and taken == 1 then return 0 end
if operation == 'take' and readers > 0 then return 0 end
call('ZADD', key, now + ARGV[3], token)
call('PEXPIRE', key, math.max(call('PTTL', key), tonumber(ARGV[3])))
return 1
"""


class RedisLeases(Leases):
    """See `Leases`. Ends of leases are on the server's clock."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        """prefix: that of the index. The caller closes the link."""
        self._link = link
        self._prefix = prefix

    def hold(self, name: str, token: str) -> bool:
        return self._run("hold", name, token, READ_LEASE_S)

    def release(self, name: str, token: str) -> None:
        self._run("release", name, token)

    def has_readers(self, name: str) -> bool:
        return self._run("held", name)

    def take(self, name: str) -> bool:
        return self._run("take", name, TAKEN, TAKEN_S)

    def _run(self, operation: str, name: str, token: str = "", lease_s: float = 0.0) -> bool:
        key = f"{{{self._prefix}}}:readers:{name}"
        return bool(self._link.script(_LEASES_SCRIPT, [key], [operation, token, round(lease_s * 1000), TAKEN]))
