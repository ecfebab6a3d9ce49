"""One Redis server: its connections, and whether it is worth asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.retry import Retry

from kvshelf.store.redis.address import RedisAddress, location
from kvshelf.store.redis.faults import REFUSALS, Resting, is_unreachable
from kvshelf.store.redis.wire import Command, Garbled, Reply, Wire

REST_S: Final = 1.0
"""How long a server that failed is left alone."""

_CONNECTIONS: Final = 512
"""At most so many at once; a service has far fewer threads."""


class Breaker:
    """Keeps callers from a server that failed, for `REST_S`; then one of them tries, and its success lets all in."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: how long one try can take."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._resting_until: float | None = None
        self._reason = ""

    def enter(self) -> None:
        """Raises `Resting` for all but those who may try."""
        with self._lock:
            if self._resting_until is None:
                return
            if time.monotonic() < self._resting_until:
                raise Resting(f"{self._reason}, a moment ago")
            # We try; the others keep out meanwhile, and one of them tries next if we never come back.
            self._resting_until = time.monotonic() + REST_S + self._patience_s

    @property
    def is_closed(self) -> bool:
        return self._resting_until is None

    def succeeded(self) -> None:
        self._resting_until = None

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self._resting_until = time.monotonic() + REST_S
            self._reason = str(error) or type(error).__name__


class Server:
    """A server and a pool of connections to it. Raises what `faults.REFUSALS` lists."""

    def __init__(self, host: str, port: int, options: dict[str, Any], timeout_s: float) -> None:
        self.host = host
        self.port = port
        self.name = location(host, port)
        self._pool = ConnectionPool(host=host, port=port, max_connections=_CONNECTIONS, **options)
        self._breaker = Breaker(2 * timeout_s)

    def borrow(self) -> Loan:
        """A connection, opened if none is idle. The pool finds out which of the idle ones the server has closed
        before anything is sent on them, so nothing need ever be sent twice."""
        self._breaker.enter()
        try:
            return Loan(self, self._pool.get_connection())
        except ValueError as error:  # redis-py's reader on garbage while it opens a connection
            raise Garbled(str(error)) from error
        except BaseException as error:
            self._note(error)
            raise

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one go; their answers, errors of the server among them."""
        loan = self.borrow()
        try:
            loan.wire.send(*commands)
            replies = [loan.wire.receive() for _ in commands]
        except BaseException as error:
            loan.drop(error)
            raise
        loan.give_back()
        return replies

    @property
    def is_well(self) -> bool:
        """Whether the last that is known of it is not a failure."""
        return self._breaker.is_closed

    def close(self) -> None:
        self._pool.disconnect()

    def take_back(self, connection: Connection) -> None:
        self._breaker.succeeded()
        self._pool.release(connection)

    def discard(self, connection: Connection, error: BaseException | None) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]
        self._pool.release(connection)
        if error is not None:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        if is_unreachable(error):
            self._breaker.failed(error)
            self._pool.disconnect(inuse_connections=False)  # they lead to where this one led


class Loan:
    """A connection of a server, lent to one thread: give it back when all that was asked has been answered, else drop
    it."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self.server = server
        # redis-py offers no name for the socket without an underscore. Its reader has taken all that came: nothing is
        # asked at the moment, and in RESP2 a server does not speak first.
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
        """error: what went wrong with it; it counts against the server if it is unreachable."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self.server.discard(connection, error)


def connection_options(address: RedisAddress, *, credentials: bool = True, primary: bool = False) -> dict[str, Any]:
    """How redis-py connects. credentials: whether to authenticate. primary: refuse a server that is a replica."""
    options: dict[str, Any] = {
        "connection_class": SSLConnection if address.tls else Connection,
        "socket_timeout": address.timeout_s,
        "socket_connect_timeout": address.timeout_s,
        "retry": Retry(NoBackoff(), 0),  # its default: ten times, with pauses that grow to a second
        "protocol": 2,
        "driver_info": None,  # two round trips for telling the server the name of a library
    }
    if credentials:
        options |= {"username": address.user, "password": address.password, "db": address.db}
    if address.tls:
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": address.ca}
    if primary:
        options["redis_connect_func"] = _connect_to_primary
    return options


def _connect_to_primary(connection: Connection) -> None:
    """Sentinels may be behind, and a primary that comes back as a replica still takes reads."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("ROLE")  # type: ignore[no-untyped-call]
    role = connection.read_response()
    if not isinstance(role, list) or not role or role[0] != b"master":
        raise redis.ConnectionError(f"{location(connection.host, connection.port)} is no primary at the moment")


def first_answer(servers: Sequence[Server], command: Command, patience_s: float) -> tuple[Server, Reply]:
    """The first server that answers, and what. Those that failed last time come last; those after one that hung are
    left for the next time.

    Raises what the last one failed with.
    """
    ends_at = time.monotonic() + patience_s
    failure: Exception = Resting("no server is known")
    for server in sorted(servers, key=lambda each: not each.is_well):
        try:
            return server, server.exchange([command])[0]
        except REFUSALS as error:
            failure = error
        if time.monotonic() >= ends_at:
            break
    raise failure
