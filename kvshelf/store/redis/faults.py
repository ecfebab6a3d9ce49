"""Errors of redis-py, of sockets and of the server, translated into ours. The only place that does so."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis.exceptions import MaxConnectionsError, RedisError

from kvshelf.errors import StorageFull, StoreError, StoreUnavailable
from kvshelf.store.redis.address import RedisAddress
from kvshelf.store.redis.wire import Garbled, RedisRefusal

_FULL: Final = {
    "OOM": "its memory is full. Delete caches, or raise its maxmemory",
    "MISCONF": "it cannot save to its disk. Free space there",
}
_ADVICE: Final = {
    "NOAUTH": "Put user:password@ into the URL of the store",
    "WRONGPASS": "Check user and password in the URL of the store",
    "NOPERM": "Allow the user these commands and keys with ACL SETUSER",
    "READONLY": "It is a replica; give the address of the primary, or of the Sentinels",
    "LOADING": "It is loading its data; try again",
}


class Resting(Exception):
    """The circuit breaker of a server is open; the text says how the server failed."""


class NoServer(Exception):
    """No server is known for the key."""


REFUSALS: Final = (RedisError, OSError, RedisRefusal, Garbled, Resting, NoServer)
"""Every error that an exchange can raise."""


def is_unreachable(error: BaseException) -> bool:
    """Whether this error opens the server's circuit breaker."""
    return isinstance(error, (RedisError, OSError)) and not isinstance(error, MaxConnectionsError)


@contextmanager
def translated(address: RedisAddress) -> Iterator[None]:
    """Turns errors in the block into `StoreUnavailable` or `StorageFull`."""
    try:
        yield
    except REFUSALS as error:
        raise _translate(error, str(address)) from error


def _translate(error: Exception, shown: str) -> StoreError:
    if isinstance(error, RedisRefusal):
        # Redis 6.2 wraps the refusal of a command in a script: "ERR Error running script ...: -OOM command ..."
        code = next((code for code in _FULL if error.code == code or f"-{code} " in str(error)), None)
        if code is not None:
            return StorageFull(f"the shelf at {shown} takes nothing more: {_FULL[code]}. It says: {error!s:.200}")
        advice = _ADVICE.get(error.code, "Try again")
        return StoreUnavailable(f"the shelf at {shown} refused a command: {error!s:.200}. {advice}.")
    if isinstance(error, Garbled):
        return StoreUnavailable(f"the server at {shown} does not speak the Redis protocol: {error}. Check the address.")
    if isinstance(error, NoServer):
        return StoreUnavailable(
            f"no server has the shelf at {shown} at the moment: {error}. A running service goes on once one has it."
        )
    if isinstance(error, MaxConnectionsError):
        return StoreUnavailable(f"too many connections to the shelf at {shown} are in use at once; try again.")
    if isinstance(error, ssl.SSLError) or "certificate verify failed" in str(error):
        return StoreUnavailable(
            f"the shelf at {shown} has no certificate that is trusted: {error}. Give the file of its authority as ca=."
        )
    reason = str(error).rstrip(".") or type(error).__name__
    return StoreUnavailable(
        f"the shelf at {shown} cannot be reached: {reason}. Start its Redis server, or correct the URL of the store; a "
        "running service goes on once the server answers."
    )
