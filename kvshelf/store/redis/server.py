"""One Redis server: its connections and its circuit breaker."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.retry import Retry

from kvshelf.store.redis.address import RedisAddress, location
from kvshelf.store.redis.faults import REFUSALS, NoServer, Resting, is_unreachable
from kvshelf.store.redis.wire import Command, RedisRefusal, Reply, Wire

REST_S: Final = 1.0
"""How long a server is left alone after a failure."""

_CONNECTIONS: Final = 512
"""Most connections at once; a service has far fewer threads."""


class ServerBreaker:
    """A circuit breaker: refuses calls for `REST_S` after a failure, then lets one call try; its success closes it."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: how long one try can take."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self.resting_until: float | None = None
        self._reason = ""

    def enter(self) -> None:
        """Raises `Resting` while the breaker is open, except for the one call that may try."""
        with self._lock:
            if self.resting_until is None:
                return
            if time.monotonic() < self.resting_until:
                raise Resting(f"{self._reason}, a moment ago")
            # This call tries; other calls are refused meanwhile. If this call never returns, a later call tries.
            self.resting_until = time.monotonic() + REST_S + self._patience_s

    def succeeded(self) -> None:
        self.resting_until = None

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self.resting_until = time.monotonic() + REST_S
            self._reason = str(error) or type(error).__name__


class Server:
    """A server and a pool of connections to it. Raises what `faults.REFUSALS` lists."""

    def __init__(self, host: str, port: int, options: dict[str, Any], timeout_s: float) -> None:
        self.host = host
        self.port = port
        self.name = location(host, port)
        self._pool = ConnectionPool(host=host, port=port, max_connections=_CONNECTIONS, **options)
        self.breaker = ServerBreaker(2 * timeout_s)

    def borrow(self) -> Loan:
        """A connection, opened if none is idle. The pool detects idle connections that the server has closed before
        anything is sent on them, so nothing needs to be sent twice."""
        self.breaker.enter()
        try:
            return Loan(self, self._pool.get_connection())
        except BaseException as error:
            self._note(error)
            raise

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands at once; returns their answers, including errors of the server."""
        loan = self.borrow()
        try:
            loan.wire.send(*commands)
            replies = [loan.wire.receive() for _ in commands]
        except BaseException as error:
            loan.drop(error)
            raise
        # A server that is no primary any more says so; new connections find out if it is one again.
        if any(isinstance(reply, RedisRefusal) and reply.code == "READONLY" for reply in replies):
            loan.drop()
        loan.give_back()
        return replies

    def close(self) -> None:
        self._pool.disconnect()

    def take_back(self, connection: Connection) -> None:
        self.breaker.succeeded()
        self._pool.release(connection)

    def discard(self, connection: Connection, error: BaseException | None) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]
        self._pool.release(connection)
        if error is not None:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        if is_unreachable(error):
            self.breaker.failed(error)
            self._pool.disconnect(inuse_connections=False)  # idle connections lead to the same failed server


class Loan:
    """A connection lent to one thread. Give it back after the last answer has arrived, or drop it. The first of these
    calls decides; later ones do nothing."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self.server = server
        # redis-py offers no name for the socket without an underscore.
        self.wire = Wire(connection._sock)  # type: ignore[arg-type]
        self._connection: Connection | None = connection

    @property
    def is_whole(self) -> bool:
        """Whether it can still be used: neither dropped nor given back."""
        return self._connection is not None

    def give_back(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self.server.take_back(connection)

    def drop(self, error: BaseException | None = None) -> None:
        """error: the reason; it counts against the server if the server is unreachable."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self.server.discard(connection, error)


class _Greeting:
    """Makes redis-py open and check connections through `Wire`. redis-py's own reader trusts any length a peer claims,
    and with hiredis allocates memory for it."""

    def __init__(self, *, primary: bool = False, **options: Any) -> None:
        self._primary = primary
        super().__init__(**options)

    def on_connect_check_health(self: Any, check_health: bool = True) -> None:  # noqa: ARG002
        try:
            wire = Wire(self._sock)
            for command in self._greetings():
                wire.send(command)
                reply = wire.receive()
                if isinstance(reply, RedisRefusal) and command[0] != "PING":  # a user may lack the right to PING
                    raise reply
            if self._primary and (not isinstance(reply, list) or reply[:1] != [b"master"]):
                raise NoServer(f"{location(self.host, self.port)} is no primary")
        except BaseException:
            self.disconnect()  # redis-py would keep the connection in the pool, not authenticated
            raise

    def _greetings(self: Any) -> Iterator[Command]:
        if self.password is not None:
            yield ("AUTH", self.password) if self.username is None else ("AUTH", self.username, self.password)
        if self.db:
            yield "SELECT", self.db
        # At least one round trip: after it TLS has nothing more to say, so any readable bytes are a reason to close.
        # ROLE, because Sentinels may be outdated, and a former primary that returns as a replica still answers reads.
        yield ("ROLE",) if self._primary else ("PING",)

    def can_read(self: Any, timeout: float = 0) -> bool:
        """Whether the server has closed the connection, or speaks without having been asked."""
        return bool(select.select([self._sock], [], [], timeout)[0])


class _PlainConnection(_Greeting, Connection):
    pass


class _TlsConnection(_Greeting, SSLConnection):
    pass


def connection_options(address: RedisAddress, *, credentials: bool = True, primary: bool = False) -> dict[str, Any]:
    """How redis-py connects. credentials: whether to authenticate. primary: refuse a server that is a replica."""
    options: dict[str, Any] = {
        "connection_class": _TlsConnection if address.tls else _PlainConnection,
        "socket_timeout": address.timeout_s,
        "socket_connect_timeout": address.timeout_s,
        "retry": Retry(NoBackoff(), 0),  # by default redis-py retries ten times, with pauses of up to a second
        "protocol": 2,
        "primary": primary,
    }
    if credentials:
        options |= {"username": address.user, "password": address.password, "db": address.db}
    if address.tls:
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": address.ca}
    return options


def first_answer(servers: Sequence[Server], command: Command, patience_s: float) -> tuple[Server, Reply]:
    """The first server that answers, and its answer. Servers that failed last time are asked last. After `patience_s`
    no further server is asked. Raises the error of the last one asked."""
    ends_at = time.monotonic() + patience_s
    failure: Exception = Resting("no server is known")
    for server in sorted(servers, key=lambda candidate: candidate.breaker.resting_until is not None):
        try:
            return server, server.exchange([command])[0]
        except REFUSALS as error:
            failure = error
        if time.monotonic() >= ends_at:
            break
    raise failure
