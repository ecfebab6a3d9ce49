"""The connection to Redis, with a limit on every wait and one family of errors.

- A command is sent once. Idle connections that the server has closed are detected before they are used; a command sent
  on a connection that then breaks may have been executed, so it is not sent again. Only commands that the server itself
  declares not executed are repeated: their key moved in a cluster, or the server forgot the script.
- Every wait on a socket ends after `timeout_s` without progress. After that the server's circuit breaker is open for a
  second, in which every call fails at once; then one caller tries, and its success closes the breaker.
- A connection on which anything went wrong is closed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from kvshelf.errors import StoreUnavailable
from kvshelf.store.redis.address import RedisAddress
from kvshelf.store.redis.faults import REFUSALS, translated
from kvshelf.store.redis.routes import Route, route
from kvshelf.store.redis.server import Loan, Server
from kvshelf.store.redis.wire import Command, Garbled, Part, RedisRefusal, Reply, Wire

Value = str | bytes | int | float | None

_REDIRECTS: Final = 3
_ASK_AGAIN: Final = {"MOVED", "READONLY", "MASTERDOWN", "CLUSTERDOWN"}
"""Answers of a server that is no longer the right one."""

_KEY_AT: Final = {"OBJECT": 2}
"""Index of the key in commands where it is not the second word."""


FULL_SHARE: Final = 0.99


@dataclass(frozen=True)
class ServerFacts:
    """Facts from a server's INFO. maxmemory: bytes, 0 for no limit. used_memory: bytes."""

    name: str
    maxmemory_policy: str
    maxmemory: int
    aof_enabled: bool
    used_memory: int = 0

    def problems(self) -> list[str]:
        """Why caches are not safe there: one sentence each."""
        if self.maxmemory_policy == "noeviction":
            return []
        return [
            f"the Redis server {self.name} may drop parts of caches: its maxmemory-policy is "
            f"{self.maxmemory_policy!r}. Set it to noeviction"
        ]

    @property
    def full(self) -> str:
        """The sentence that says so if its memory is full, else ""."""
        if not self.maxmemory or self.used_memory < FULL_SHARE * self.maxmemory:
            return ""
        share = self.used_memory / self.maxmemory
        return f"the Redis server {self.name} is full: it uses {share:.1%} of its maxmemory, more than {FULL_SHARE:.0%}"

    def warnings(self) -> list[str]:
        """Warnings for the operator, one sentence each."""
        warnings = []
        if not self.aof_enabled:
            warnings.append(
                f"the Redis server {self.name} loses caches when it restarts. Set appendonly yes to keep them"
            )
        if self.maxmemory == 0:
            warnings.append(
                f"the Redis server {self.name} has no memory limit and may be killed when the machine's is used up. "
                "Set maxmemory"
            )
        return warnings


class RedisLink:
    """Commands to the Redis of an address. For several threads; not across a fork. Replies are as the server gives
    them: bytes, int, None and lists of these. Every method raises `StoreUnavailable` (unreachable, refused, garbage)
    and `StorageFull`, and nothing else."""

    def __init__(self, address: RedisAddress) -> None:
        """Does not connect yet."""
        self.address = address
        self.route: Route = route(address)

    def call(self, *command: Part) -> Reply:
        """One command. In a cluster its second word is the key."""
        with self._translated():
            return _accepted(self._follow_all(self.route.server(_key(command)), [command]))[0]

    def pipeline(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one round trip (in a cluster, one per node); returns their answers in order. This is not a
        transaction: if a command is refused, its error is raised, and the others have been executed."""
        with self._translated():
            groups: dict[Server, list[int]] = {}
            for index, command in enumerate(commands):
                groups.setdefault(self.route.server(_key(command)), []).append(index)
            replies: list[Reply] = [None] * len(commands)
            for server, indexes in groups.items():
                answers = self._follow_all(server, [commands[index] for index in indexes])
                for index, answer in zip(indexes, answers, strict=True):
                    replies[index] = answer
            return _accepted(replies)

    def script(self, source: str, keys: Sequence[str], args: Sequence[Part]) -> Reply:
        """Run a Lua script; `keys`, at least one, must lie in one slot. After `StoreUnavailable` it may have run once
        or not at all."""
        return self.script_and_read(source, keys, args, [])[0]

    def script_and_read(
        self, source: str, keys: Sequence[str], args: Sequence[Part], reads: Sequence[Command]
    ) -> list[Reply]:
        """Run `script`, then commands that read keys in its slot, in one round trip; returns all replies in order. The
        reply of a refused command is a `RedisRefusal`; a caller that needs it asks again and gets the error."""
        tail = (len(keys), *keys, *args)
        with self._translated():
            server = self.route.server(keys[0].encode())
            replies = self._follow_all(server, [("EVALSHA", _script_name(source), *tail), *reads])
            if isinstance(replies[0], RedisRefusal) and replies[0].code == "NOSCRIPT":
                server = self.route.server(keys[0].encode())
                replies = self._follow_all(server, [("EVAL", source, *tail), *reads])
            return _accepted(replies[:1]) + replies[1:]

    def scan(self, pattern: str) -> Iterator[list[bytes]]:
        """Keys that match a pattern, in portions, some twice. Keys added or removed meanwhile may be missed."""
        with self._translated():
            servers = self.route.primaries()
        for server in servers:
            cursor = b"0"
            while True:
                with self._translated():
                    (reply,) = _accepted(server.exchange([("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)]))
                    cursor, keys = _scanned(reply)
                yield keys
                if cursor == b"0":
                    break

    def facts(self) -> list[ServerFacts]:
        with self._translated():
            servers = self.route.primaries()
            return [_facts(server.name, _accepted(server.exchange([("INFO",)]))[0]) for server in servers]

    def borrow(self, key: str) -> Loan:
        """A connection to the server of a key, for exclusive use within `talking`."""
        with self._translated():
            return self.route.server(key.encode()).borrow()

    @contextmanager
    def talking(self, loan: Loan) -> Iterator[Wire]:
        """Inside the block the wire of a loan may be used. After any error the connection is dropped."""
        try:
            yield loan.wire
        except BaseException as error:
            loan.drop(error)
            with self._translated():  # only on errors, to save time: a large cache is read in many blocks
                raise

    def close(self) -> None:
        self.route.close()

    def _follow_all(self, server: Server, commands: Sequence[Command]) -> list[Reply]:
        replies = server.exchange(commands)
        return [self._follow(command, reply) for command, reply in zip(commands, replies, strict=True)]

    def _follow(self, command: Command, reply: Reply) -> Reply:
        """Follow redirections: in a cluster, keys move from node to node."""
        for _ in range(_REDIRECTS):
            if not isinstance(reply, RedisRefusal) or reply.code not in ("MOVED", "ASK"):
                break
            host, _, port = str(reply).rpartition(" ")[2].rpartition(":")  # of MOVED <slot> <host>:<port>
            if not host or not port.isdigit():
                raise Garbled(f"{str(reply)!r:.80} names no server")
            server = self.route.at(host, int(port))
            if reply.code == "MOVED":
                self.route.doubt()
                reply = server.exchange([command])[0]
            else:
                reply = server.exchange([("ASKING",), command])[1]
        return reply

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translated(self.address):
            try:
                yield
            except REFUSALS as error:
                if not isinstance(error, RedisRefusal) or error.code in _ASK_AGAIN:
                    self.route.doubt()
                raise


class Script:
    """A Lua file as a set of operations on keys in the slot of `key`, each of which the server runs as one atomic step.
    Each takes some words, then names and values in turn. The first word of its reply names the kind of reply."""

    def __init__(self, link: RedisLink, file: str, key: str, replies: Mapping[str, int]) -> None:
        """file: in this module's folder. replies: the first word of each kind of reply, and how many parts follow."""
        self._link = link
        self._source = resources.files(__package__).joinpath(file).read_text()
        self._key = key
        self._replies = replies

    def run(self, *words: str, **values: Value) -> list[Any]:
        """The reply of an operation; its first word is text. Leaves out values that are None. Also raises
        `StoreUnavailable` for a reply of an unknown form."""
        args: list[Part] = [*words]
        for name, value in values.items():
            if isinstance(value, bool):
                args += (name, str(int(value)))
            elif value is not None:
                args += (name, value if isinstance(value, str | bytes) else repr(value))
        match self._link.script(self._source, [self._key], args):
            case [bytes(first), *rest] if self._replies.get(first.decode(errors="replace")) == len(rest):
                return [first.decode(), *rest]
        raise StoreUnavailable(
            f"the server of {self._key} does not reply as Redis does; check the address of the store"
        )


@cache
def _script_name(source: str) -> str:
    # SHA-1 is how the server names scripts; it protects nothing.
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _key(command: Command) -> bytes:
    at = _KEY_AT.get(str(command[0]), 1)
    if at >= len(command):
        return b""  # any server will do
    key = command[at]
    return key if isinstance(key, bytes) else str(key).encode()


def _accepted(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, RedisRefusal):
            raise reply
    return replies


def _scanned(reply: Reply) -> tuple[bytes, list[bytes]]:
    match reply:
        case [bytes(cursor), [*keys]] if all(isinstance(key, bytes) for key in keys):
            return cursor, keys
    raise Garbled(f"{reply!r:.80} came where keys were expected")


def _facts(name: str, reply: Reply) -> ServerFacts:
    if not isinstance(reply, bytes):
        raise Garbled(f"{reply!r:.80} came where text was expected")
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    facts: dict[str, Any] = {key: value for key, _, value in lines}
    return ServerFacts(
        name=name,
        maxmemory_policy=facts.get("maxmemory_policy", "unknown"),
        maxmemory=int(facts.get("maxmemory", 0)),
        aof_enabled=facts.get("aof_enabled") == "1",
        used_memory=int(facts.get("used_memory", 0)),
    )
