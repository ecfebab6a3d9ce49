"""Which server has a key: the only one, the one the Sentinels name, or one of a cluster.

redis-py has clients for Sentinels and clusters too, but they ask one server after the other, each with its own timeout,
behind one lock: with three hanging servers, twenty threads wait half a minute. The questions are small, so this module
asks them itself, within one timeout, and skips servers that failed a moment ago.
"""

from __future__ import annotations

import abc
import threading
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvshelf.store.redis.address import RedisAddress
from kvshelf.store.redis.faults import NoServer
from kvshelf.store.redis.server import Server, connection_options, first_answer
from kvshelf.store.redis.wire import Garbled, RedisRefusal, Reply


class Route(abc.ABC):
    """Thread-safe. Raises an error of `faults.REFUSALS` when it has to ask and no server answers."""

    def __init__(self, address: RedisAddress, *, primary: bool = False) -> None:
        """primary: refuse a server that is a replica."""
        self._address = address
        self._options = connection_options(address, primary=primary)
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], Server] = {}

    @abc.abstractmethod
    def server(self, key: bytes) -> Server:
        """The server that a key is on."""

    @abc.abstractmethod
    def primaries(self) -> list[Server]:
        """All servers that hold keys, once each."""

    @abc.abstractmethod
    def doubt(self) -> None:
        """A server failed or is not the right one: look it up again before the next use."""

    def at(self, host: str, port: int) -> Server:
        """The server at an address, such as one that another server named."""
        with self._lock:
            if (host, port) not in self._known:
                self._known[host, port] = Server(host, port, self._options, self._address.timeout_s)
            return self._known[host, port]

    def close(self) -> None:
        for server in self._known.values():
            server.close()


def route(address: RedisAddress) -> Route:
    routes: dict[str, type[SingleRoute | SentinelRoute | ClusterRoute]] = {
        "single": SingleRoute,
        "sentinel": SentinelRoute,
        "cluster": ClusterRoute,
    }
    return routes[address.kind](address)


class SingleRoute(Route):
    def __init__(self, address: RedisAddress) -> None:
        super().__init__(address)
        self._server = super().at(*address.hosts[0])

    def server(self, key: bytes) -> Server:  # noqa: ARG002
        return self._server

    def primaries(self) -> list[Server]:
        return [self._server]

    def doubt(self) -> None:
        """Nothing to look up: there is only one server."""

    def at(self, host: str, port: int) -> Server:
        raise NoServer(f"it sends us on to {host}:{port}, as a cluster does; use redis-cluster://")


class SentinelRoute(Route):
    def __init__(self, address: RedisAddress) -> None:
        super().__init__(address, primary=True)
        self._primary: Server | None = None
        self._authenticates = False  # until a NOAUTH: a Sentinel without a password refuses ours
        self._sentinels = self._connect(connection_options(address, credentials=False))

    def server(self, key: bytes) -> Server:  # noqa: ARG002
        primary = self._primary
        if primary is None:
            primary = self._primary = self.at(*self._ask())
        return primary

    def primaries(self) -> list[Server]:
        return [self.server(b"")]

    def doubt(self) -> None:
        self._primary = None

    def close(self) -> None:
        super().close()
        for sentinel in self._sentinels:
            sentinel.close()

    def _connect(self, options: dict[str, Any]) -> list[Server]:
        return [Server(host, port, options, self._address.timeout_s) for host, port in self._address.hosts]

    def _ask(self) -> tuple[str, int]:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        sentinel, reply = first_answer(self._sentinels, command, self._address.timeout_s)
        if isinstance(reply, RedisRefusal):
            if reply.code != "NOAUTH" or self._authenticates:
                raise reply
            self._authenticates = True
            self._sentinels = self._connect(connection_options(self._address) | {"db": 0})
            return self._ask()
        if reply is None:
            raise NoServer(f"the Sentinel {sentinel.name} knows no service {self._address.service!r}")
        return _place(reply, sentinel)


class ClusterRoute(Route):
    def __init__(self, address: RedisAddress) -> None:
        super().__init__(address)
        self._slots: list[Server | None] = []
        self._is_stale = True
        self._nodes = [self.at(*host) for host in address.hosts]

    def server(self, key: bytes) -> Server:
        if self._is_stale:
            self._refresh()
        server = self._slots[key_slot(key)]
        if server is None:
            self._is_stale = True
            raise NoServer("no node of the cluster has this part of the keys")
        return server

    def primaries(self) -> list[Server]:
        if self._is_stale:
            self._refresh()
        return list(dict.fromkeys(server for server in self._slots if server is not None))

    def doubt(self) -> None:
        self._is_stale = True

    def _refresh(self) -> None:
        source, ranges = first_answer(self._nodes, ("CLUSTER", "SLOTS"), self._address.timeout_s)
        if isinstance(ranges, RedisRefusal):
            raise ranges
        if not isinstance(ranges, list):
            raise Garbled(f"{ranges!r:.80} came where a list was expected")
        slots: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, server in (self._range(entry, source) for entry in ranges):
            slots[first : last + 1] = [server] * (last + 1 - first)
        primaries = dict.fromkeys(server for server in slots if server is not None)
        with self._lock:
            self._nodes = list(dict.fromkeys([*self._nodes, *primaries]))
            self._slots, self._is_stale = slots, False

    def _range(self, reply: Reply, source: Server) -> tuple[int, int, Server]:
        match reply:
            case [int(first), int(last), [*place], *_] if 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                return first, last, self.at(*_place(place[:2], source))
        raise Garbled(f"{source.name} describes its cluster as {reply!r:.80}")


_UNNAMED: Final = (b"", b"?", None)
"""Names of a server that does not know its own address: it is the one we asked."""


def _place(reply: Reply, source: Server) -> tuple[str, int]:
    match reply:
        case [bytes() | None as host, bytes() | int() as port] if str(int(port)) and 1 <= int(port) <= 65535:
            return source.host if host in _UNNAMED else host.decode(errors="replace"), int(port)
    raise Garbled(f"{source.name} names a server as {reply!r:.80}")
