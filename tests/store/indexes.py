"""Homes of both kinds, for tests of what all homes promise: an index, bytes, and a clock that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from kvshelf.store.blobs import WRITE_LEASE_S, Blobs, new_name
from kvshelf.store.disk.database import Database
from kvshelf.store.disk.folder import Folder
from kvshelf.store.disk.index import SqliteIndex
from kvshelf.store.index import Entry, Index, Quota, Writing
from kvshelf.store.manifest import Manifest
from kvshelf.store.redis import address
from kvshelf.store.redis.blobs import RedisBlobs
from kvshelf.store.redis.index import RedisIndex
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.shelf import Shelf
from tests.store.redis.servers import ValkeyServer

NOW = time.time() + 1e6
"""The time of callers in these tests, ahead of the server's, so that nothing ends there before a test has ended it."""


@dataclass(frozen=True)
class Home:
    """connect: to the home, for writes with leases of so many seconds. now: its clock. wait: lets that go on by so many
    ticks, whose length is tick_s."""

    connect: Callable[[float], Index]
    blobs: Callable[[], Blobs]
    now: Callable[[], float]
    wait: Callable[[float], None]
    tick_s: float

    def open(self, lease_ticks: float = 1000) -> Index:
        """As often as wanted. Who does not wait for leases gets long ones: the machine may be busy."""
        return self.connect(lease_ticks * self.tick_s)

    def shelf(self, **options: Any) -> Shelf:
        return Shelf(self.open(), self.blobs(), now=self.now, **options)


class Clock:
    def __init__(self) -> None:
        self.time = NOW

    def __call__(self) -> float:
        return self.time

    def wait(self, ticks: float) -> None:
        self.time += ticks


def disk_home(folder: Path) -> Home:
    clock = Clock()

    def connect(lease_s: float) -> Index:
        folder.mkdir(parents=True, exist_ok=True)
        database = Database(folder, 30.0)
        return SqliteIndex(database, database.create(None)[0], clock, lease_s)

    return Home(connect, lambda: Folder.open_in(folder), clock, clock.wait, 1.0)


def redis_home(url: str, tick_s: float = 0.2) -> Home:
    def connect(lease_s: float) -> Index:
        place = address.parse(url)
        return RedisIndex.open(RedisLink(place), place.prefix, write_lease_s=lease_s)

    def blobs() -> Blobs:
        place = address.parse(url)
        return RedisBlobs(RedisLink(place), place.prefix, WRITE_LEASE_S)

    return Home(connect, blobs, time.time, lambda ticks: time.sleep(ticks * tick_s), tick_s)


def empty_redis_home(server: ValkeyServer) -> Home:
    server.client().flushall()
    return redis_home(f"{server.url}?timeout_s=10")


def cache_id(number: int) -> str:
    return f"kvs_{number:040x}"


def manifest(number: int = 1, **fields: Any) -> Manifest:
    """The manifest of a cache that there never was."""
    values: dict[str, Any] = {
        "id": cache_id(number),
        "document_id": "doc_1",
        "tenant": "me",
        "identity": {"text": 'quotes " and ünïcode 漢'},
        "model": "llama",
        "layout": "chat",
        "policy": "keydiff",
        "policy_params": {},
        "compression_ratio": 0.5,
        "codec": "none",
        "num_tokens": 100,
        "kept_tokens": 50,
        "bytes_full": 2000,
        "bytes_stored": 1000,
        "blob_digest": "00" * 32,
        "segment_digests": ("11" * 32,),
        "created_at": NOW,
    }
    return Manifest.model_validate(values | fields)


def writing(number: int = 1, nbytes: int = 1000, tenant: str = "me") -> Writing:
    own = cache_id(number)
    return Writing(new_name(own), own, tenant, nbytes)


def of_no_cache(number: int = 1, nbytes: int = 9) -> Writing:
    """A write of bytes that an item of the job table is to hold."""
    return replace(writing(number, nbytes), of_cache=False)


def put(
    index: Index,
    number: int = 1,
    *,
    nbytes: int = 1000,
    over: Entry | None = None,
    cost_s: float = 1.0,
    now: float = NOW,
    **fields: Any,
) -> Entry:
    """Begin, publish, find."""
    made = manifest(number, **fields)
    write = writing(number, nbytes, made.tenant)
    index.begin(write, Quota())
    published, _ = index.publish(write, made, over=over, cost_s=cost_s, now=now)
    assert published
    return entry_of(index, number, made.tenant)


def entry_of(index: Index, number: int = 1, tenant: str = "me") -> Entry:
    entry = index.find(cache_id(number), tenant)
    assert entry is not None
    return entry


def fill(client: redis.Redis) -> None:
    """Use up the memory of a server that has a limit. Deleting "filler" gives it back."""
    with suppress(redis.exceptions.OutOfMemoryError):
        while True:
            client.append("filler", "x" * 1000)
