"""Connections before a request is known: how many there may be, how long they may be silent, how long their headers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES: Final = 64 << 10
"""Request line and headers together. uvicorn's faster parser (httptools) has no such limit."""

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 27\r\n\r\ntoo many connections; retry"
)


@dataclass
class ConnectionLimits:
    """At most `most` connections, and `most_per_address` from one address. Each must send the headers of its first
    request, and of any request that it has begun, within `headers_s` seconds."""

    most: int
    most_per_address: int
    headers_s: float
    by_address: Counter[str] = field(default_factory=Counter)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, within `ConnectionLimits`."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._address = ""
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        limits, self._address = self._limits, self.client[0] if self.client else ""
        limits.by_address[self._address] += 1
        if limits.by_address.total() > limits.most or limits.by_address[self._address] > limits.most_per_address:
            transport.write(_BUSY)
            transport.close()
            return
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._expect_nothing()
        elif self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._limits.by_address[self._address] -= 1
        if not self._limits.by_address[self._address]:
            del self._limits.by_address[self._address]
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._late = self.loop.call_later(self._limits.headers_s, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
