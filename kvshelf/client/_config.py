"""How the clients connect: where, for how long, and how often."""

from __future__ import annotations

import functools
import math
import os
import ssl
from dataclasses import dataclass
from typing import Any

import httpx

from kvshelf.backoff import backoff_s
from kvshelf.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8765"
"""The address of `kvshelf serve` by default."""

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that say whose certificates are trusted."""

_SPREAD = 0.25

# httpx's own number of connections, but all of them may idle: where only 20 may, httpcore can close one that another
# thread has just begun to use (https://github.com/encode/httpcore/issues/1110).
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=None)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each phase of an exchange may last, in seconds; None is for ever.

    `connect_s`: until the connection stands. `read_s`: between two pieces of the response; it covers the prefill of the
    document, so it is long. `write_s`: between two pieces of the request. `pool_s`: until a connection is free.
    """

    connect_s: float | None = 5.0
    read_s: float | None = 600.0
    write_s: float | None = 60.0
    pool_s: float | None = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}; it must be more than 0 seconds, or None", param=name)

    def to_httpx(self, *, extra_read_s: float = 0.0) -> httpx.Timeout:
        """The same as an httpx object. extra_read_s: how long the service waits before it answers."""
        read_s = None if self.read_s is None else self.read_s + extra_read_s
        return httpx.Timeout(connect=self.connect_s, read=read_s, write=self.write_s, pool=self.pool_s)


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a call that met a busy or unreachable service is repeated.

    `max_retries` counts the repeats. The pause before repeat n is `backoff_s * 2**n`, at most `max_backoff_s`, of which
    a random part up to a quarter is taken off, so that many clients do not come back at once. A Retry-After header
    replaces the pause; when it asks for more than `max_wait_s`, the error is raised instead.
    """

    max_retries: int = 2
    backoff_s: float = 0.5
    max_backoff_s: float = 8.0
    max_wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value >= 0 and math.isfinite(value)):
                raise InvalidRequest(f"{name} is {value!r}; it must be a number from 0", param=name)

    def pause_s(self, repeat: int) -> float:
        """The pause in seconds before repeat number `repeat`, counted from 0."""
        return backoff_s(repeat, self.backoff_s, self.max_backoff_s, spread=_SPREAD)


@dataclass(frozen=True)
class Connection:
    """The settings that both clients hand to httpx."""

    base_url: httpx.URL
    headers: dict[str, str]
    timeouts: Timeouts
    retries: Retries

    @classmethod
    def resolve(
        cls, url: str | None, api_key: str | None, timeouts: Timeouts | None, retries: Retries | None
    ) -> Connection:
        """`url` falls back to KVSHELF_URL and the local default port, `api_key` to KVSHELF_API_KEY; "" is no key."""
        key = os.environ.get("KVSHELF_API_KEY") if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable()):  # not shown: it is a secret
            raise InvalidRequest(
                "the API key has a line break or another character that no key has; give it as `kvshelf keys create` "
                "printed it (KVSHELF_API_KEY, api_key)",
                param="api_key",
            )
        return cls(
            base_url=_parse_url(url or os.environ.get("KVSHELF_URL") or DEFAULT_URL),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeouts=timeouts or Timeouts(),
            retries=retries or Retries(),
        )

    def httpx_options(self) -> dict[str, Any]:
        trusts = self.base_url.host not in _LOOPBACK
        return {
            "base_url": self.base_url,
            "headers": self.headers,
            "timeout": self.timeouts.to_httpx(),
            "limits": _LIMITS,
            "verify": _tls(trusts, *map(os.environ.get, _AUTHORITIES)),
            # A proxy of the environment cannot reach this machine's own loopback address.
            "trust_env": trusts,
        }


@functools.cache
def _tls(trusts_environment: bool, *_authorities: str | None) -> ssl.SSLContext:
    """One for all clients of a process: to read the authorities of the world takes 0.1 s of processor time."""
    return httpx.create_ssl_context(trust_env=trusts_environment)


def _parse_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{text!r} is not a URL: {error}", param="url") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequest(f"{text!r} is not the URL of a service; it should look like {DEFAULT_URL}", param="url")
    return url
