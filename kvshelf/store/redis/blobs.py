"""Bytes in Redis: chunks of 4 MiB under one name, in one slot of a cluster.

    {<prefix>/<name>}:<n>          chunk n, from 0; the last one is shorter, and no bytes at all are one empty chunk
    {<prefix>/<name>}:aside:<n>    the same, set aside
    {<prefix>/<name>}:readers      sorted set: a reader's token -> the end of its lease, in ms by the server's clock

A blob is not one value, because Redis takes at most 512 MB and reads large values slowly. Every chunk has an expiry
from the start, so that leftovers of dead writers and readers expire by themselves.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Final

from kvshelf.errors import BlobError, StoreUnavailable
from kvshelf.store.blobs import MARGIN_S, READ_LEASE_S, WRITE_LEASE_S, Blobs, Health, Step, StoredFile, is_name
from kvshelf.store.redis.file import ChunkPiece, RedisFile, ends_of
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.wire import Command, Garbled, Part, RedisRefusal, Reply, Wire

CHUNK: Final = 4 << 20
"""Bytes. Part of the format: another size does not find existing chunks."""

_UNANSWERED: Final = 2  # chunks sent before waiting for the answer to the first

_SCRIPT: Final = resources.files(__package__).joinpath("blobs.lua").read_text()


class RedisBlobs(Blobs):
    """See `Blobs` for the contract. A reader that reads nothing for `read_lease_s` loses its lease."""

    home = "redis"
    walk_every_s = None  # what nobody knows expires
    read_ahead = False

    def __init__(
        self, link: RedisLink, prefix: str, write_lease_s: float = WRITE_LEASE_S, read_lease_s: float = READ_LEASE_S
    ) -> None:
        """prefix: the prefix of every key. The caller closes the link."""
        self.link = link
        self._prefix = prefix
        self._write_lease_s = write_lease_s
        self._read_lease_s = read_lease_s
        self._chunk_key = re.compile(rf"\{{{re.escape(self._prefix)}/([^}}]*)\}}:(?:aside:)?[0-9]+")

    def write(self, name: str, buffers: Iterable[memoryview], nbytes: int, *, on_step: Step) -> None:
        keys = self._chunks(name, nbytes)
        if self.link.call("EXISTS", keys[0]):
            raise StoreUnavailable(f"{name} is in the Redis store already; a name is written once")
        loan = self.link.borrow(keys[0])
        on_step("created")
        with self.link.talking(loan) as wire:
            writer = _Writer(wire, keys, nbytes, self._write_lease_s)
            for buffer in buffers:
                writer.write(memoryview(buffer).cast("B"))
            writer.end()
        loan.give_back()
        on_step("written")
        on_step("synced")  # the server's own settings decide when Redis writes to disk

    def renew(self, name: str, nbytes: int) -> None:
        self._run("renew", self._chunks(name, nbytes), _ms(self._write_lease_s))

    def open(self, name: str, nbytes: int, *, once: bool = False) -> StoredFile | None:
        token = secrets.token_hex(8)
        keys = [self._key(name, "readers"), *self._chunks(name, nbytes)]
        pieces = [ChunkPiece(key, size) for key, size in zip(keys[1:], _sizes(nbytes), strict=True)]
        lease = ("lease", token, _ms(self._read_lease_s))
        reads = [end.bounded_command for end in ends_of(pieces)]
        exists, *ends = self.link.script_and_read(_SCRIPT, keys, lease, reads)
        if not exists:
            return None
        return RedisFile(
            self.link,
            pieces,
            ends,
            lease_s=self._read_lease_s,
            renew=lambda: self.link.script(_SCRIPT, keys, lease),
            release=("ZREM", keys[0], token),
            once=once,
        )

    def beginning(self, name: str, nbytes: int, count: int) -> bytes | None:
        key = self._chunks(name, nbytes)[0]
        exists, data = self.link.pipeline([("EXISTS", key), ("GETRANGE", key, 0, count - 1)])
        return data if exists else None

    def holds(self, name: str, nbytes: int) -> bool:
        return self.hold_each([(name, nbytes)])[0]

    def hold_each(self, names: Sequence[tuple[str, int]]) -> list[bool]:
        """In one round trip."""
        commands: list[Command] = []
        for name, nbytes in names:
            keys = self._chunks(name, nbytes)
            commands += [("EXISTS", keys[0]), *(("STRLEN", key) for key in keys)]
        replies = iter(self.link.pipeline(commands))
        return [[next(replies) for _ in range(1 + _count(nbytes))] == [1, *_sizes(nbytes)] for _, nbytes in names]

    def keep_until(self, name: str, nbytes: int, expires_at: float | None) -> None:
        until = "" if expires_at is None else _ms(expires_at + MARGIN_S)
        if not self._run("keep", [self._key(name, "readers"), *self._chunks(name, nbytes)], until, *_sizes(nbytes)):
            raise BlobError(f"not all chunks of {name} are in Redis any more", reason="missing")

    def remove(self, name: str, nbytes: int) -> bool:
        keys = [self._key(name, "readers"), *self._chunks(name, nbytes), *self._chunks(name, nbytes, "aside:")]
        self._run("remove", keys)
        return True

    def set_aside(self, name: str, nbytes: int) -> None:
        both = zip(self._chunks(name, nbytes), self._chunks(name, nbytes, "aside:"), strict=True)
        self._run("set_aside", [key for pair in both for key in pair])

    def is_read(self, name: str) -> bool:
        return bool(self._run("readers", [self._key(name, "readers")]))

    def walk(self) -> Iterator[tuple[str, float]]:
        """Times are seconds since a chunk was last written or read: Redis records no other time."""
        names: set[str] = set()
        for keys in self.link.scan(f"{{{self._prefix}/*}}:*"):
            fresh: dict[str, bytes] = {}
            for key in keys:
                match = self._chunk_key.fullmatch(key.decode(errors="replace"))
                if match is not None and is_name(match[1]) and match[1] not in names:
                    fresh[match[1]] = key
            names.update(fresh)
            idle = self.link.pipeline([("OBJECT", "IDLETIME", key) for key in fresh.values()])
            for name, seconds in zip(fresh, idle, strict=True):
                if seconds is not None:  # None: the key is gone since the scan
                    yield name, float(seconds)

    def problems(self) -> list[str]:
        return list(self.health().faults)

    def health(self) -> Health:
        servers = self.link.facts()
        return Health(
            faults=tuple(text for server in servers for text in server.problems()),
            full=tuple(server.full for server in servers if server.full),
            warnings=tuple(text for server in servers for text in server.warnings()),
        )

    def close(self) -> None:
        """Holds nothing; the caller closes the link."""

    def _run(self, operation: str, keys: Sequence[str], *args: Part) -> Reply:
        return self.link.script(_SCRIPT, keys, [operation, *args])

    def _key(self, name: str, part: str) -> str:
        if not is_name(name):
            raise StoreUnavailable(f"{name!r:.80} is not the name of bytes in a store; its index was tampered with")
        return f"{{{self._prefix}/{name}}}:{part}"

    def _chunks(self, name: str, nbytes: int, place: str = "") -> list[str]:
        return [self._key(name, f"{place}{index}") for index in range(_count(nbytes))]


class _Writer:
    """Cuts bytes into chunks on their way to the server."""

    def __init__(self, wire: Wire, keys: Sequence[str], nbytes: int, lease_s: float) -> None:
        self._wire = wire
        self._keys = keys
        self._left = nbytes  # of the whole
        self._begun = self._answered = 0  # chunks
        self._lease_s = lease_s
        self._begin()

    def write(self, data: memoryview) -> None:
        while data:
            if not self._room:
                self._next()
            piece = data[: self._room]
            self._wire.put(piece)
            self._room -= len(piece)
            data = data[len(piece) :]

    def end(self) -> None:
        if self._room or self._left:
            raise ValueError(f"{self._room + self._left} bytes fewer were given to write than announced")
        self._wire.end_value()
        while self._answered < self._begun:
            self._expect_ok()

    def _begin(self) -> None:
        self._room = min(CHUNK, self._left)
        self._left -= self._room
        self._wire.begin_value(("PSETEX", self._keys[self._begun], _ms(self._lease_s)), self._room)
        self._begun += 1

    def _next(self) -> None:
        if not self._left:
            raise ValueError("more bytes were given to write than announced")
        self._wire.end_value()
        if self._begun - self._answered >= _UNANSWERED:
            self._expect_ok()
        self._begin()

    def _expect_ok(self) -> None:
        reply = self._wire.receive()
        if isinstance(reply, RedisRefusal):
            raise reply
        if reply != b"OK":
            raise Garbled(f"{reply!r:.80} came where OK was expected")
        self._answered += 1


def _count(nbytes: int) -> int:
    return max(1, math.ceil(nbytes / CHUNK))


def _sizes(nbytes: int) -> list[int]:
    count = _count(nbytes)
    return [CHUNK] * (count - 1) + [nbytes - CHUNK * (count - 1)]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
