"""The homes that the same tests run on: a folder, and a real server. Each can be opened, damaged, and looked into."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from kvshelf.store import housekeeping
from kvshelf.store.blobs import READ_LEASE_S, WRITE_LEASE_S
from kvshelf.store.disk import DiskStore
from kvshelf.store.manifest import Manifest
from kvshelf.store.objects import address
from kvshelf.store.objects.blobs import ObjectBlobs
from kvshelf.store.redis import RedisStore
from kvshelf.store.shelf import Shelf
from tests.store.objects.servers import BUCKET, S3Server
from tests.store.processes import Child, start_child
from tests.store.redis.servers import ValkeyServer


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def __call__(self) -> float:
        return self.time


class Place(abc.ABC):
    """Where one shelf is, whether it is open or not."""

    kind: str

    @abc.abstractmethod
    def open(self, **options: Any) -> Shelf:
        """A store on this place; options of `DiskStore.open` that all homes have."""

    def start(self, work: Callable[[], None]) -> Child:
        """Do `work` in a child process, which must open a store of its own."""
        return start_child(work)

    @abc.abstractmethod
    def names(self) -> set[str]:
        """The names of all bytes that lie here and can be read."""

    @abc.abstractmethod
    def contents(self) -> Iterator[bytes]:
        """All bytes that lie here: of caches, of the index, of jobs."""

    @abc.abstractmethod
    def change(self, manifest: Manifest, how: Callable[[bytearray], bytearray | None]) -> None:
        """Change the stored bytes of a cache behind the store's back; None removes them. A source is left alone."""

    @abc.abstractmethod
    def let_leases_run_out(self, clock: Clock) -> None:
        """Of all writers that are silent now."""


class DiskPlace(Place):
    kind = "disk"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, **options: Any) -> Shelf:
        return DiskStore.open(self.folder, **options)

    def names(self) -> set[str]:
        return {path.stem for path in (self.folder / "blobs").iterdir()}

    def contents(self) -> Iterator[bytes]:
        return (path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def change(self, manifest: Manifest, how: Callable[[bytearray], bytearray | None]) -> None:
        files = (self.folder / "blobs").glob(f"{manifest.id.removeprefix('kvs_')}-*")
        path = max(files, key=lambda file: file.stat().st_size)
        changed = how(bytearray(path.read_bytes()))
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)

    def let_leases_run_out(self, clock: Clock) -> None:
        clock.time += WRITE_LEASE_S + 1


class RedisPlace(Place):
    """A shelf of its own on a server that others may use."""

    kind = "redis"

    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.prefix = f"test-{secrets.token_hex(8)}"

    def open(self, **options: Any) -> Shelf:
        # A long timeout: these tests are about other things than a machine that is busy.
        url = f"{self.server.url}?prefix={self.prefix}&timeout_s=10"
        return RedisStore.open(url, **options)

    def names(self) -> set[str]:
        """Without those that go by themselves: of dead writers, and what dead readers had open."""
        client = self.server.client()
        keys = client.keys(f"{{{self.prefix}/*}}:[0-9]*")
        stay = [key for key in keys if not _goes_by_itself(client, key)]
        return {key.decode().partition("/")[2].partition("}")[0] for key in stay}

    def contents(self) -> Iterator[bytes]:
        client = self.server.client()
        for key in client.keys(f"{{{self.prefix}[/}}]*"):
            match client.type(key):
                case b"string":
                    yield client.get(key)
                case b"hash":
                    yield b"".join(client.hvals(key))
                case b"list":
                    yield b"".join(client.lrange(key, 0, -1))
                case b"zset":
                    yield b"".join(client.zrange(key, 0, -1))
                case b"set":
                    yield b"".join(client.smembers(key))
                case other:
                    raise AssertionError(f"a key of type {other!r}")

    def change(self, manifest: Manifest, how: Callable[[bytearray], bytearray | None]) -> None:
        """The cache's bytes must fit into one chunk."""
        client = self.server.client()
        keys = client.keys(f"{{{self.prefix}/{manifest.id.removeprefix('kvs_')}-*}}:0")
        key = max(keys, key=client.strlen)
        changed = how(bytearray(client.get(key)))
        if changed is None:
            client.delete(key)
        else:
            client.set(key, bytes(changed), keepttl=True)

    def let_leases_run_out(self, clock: Clock) -> None:  # noqa: ARG002 - of another kind
        """The server's clock is real. So what a minute would end there is ended: short leases would run out on busy
        writers, too."""
        client = self.server.client()
        writes, over = f"{{{self.prefix}}}:writes", 1
        for name in client.zrangebyscore(writes, over, (time.time() + WRITE_LEASE_S) * 1000):
            client.zadd(writes, {name: over})
        for key in client.keys(f"{{{self.prefix}/*}}:*"):
            if _goes_by_itself(client, key):
                client.delete(key)


class ObjectsPlace(Place):
    """Blobs under a prefix of their own on a server that others may use; the index is that of another place."""

    kind = "objects"

    def __init__(self, index: Place, server: S3Server, start: Callable[[Callable[[], None]], Child]) -> None:
        """start: see `Place.start`; by something other than a fork of this process, which may have used the server."""
        self.index = index
        self.server = server
        self._start = start
        self.prefix = f"test-{secrets.token_hex(8)}"
        self.address = address.parse(server.url(self.prefix))

    def __getstate__(self) -> dict[str, Any]:  # a child opens stores, and starts no processes
        return {name: value for name, value in vars(self).items() if name in ("index", "prefix", "address")}

    def start(self, work: Callable[[], None]) -> Child:
        return self._start(work)

    def open(self, **options: Any) -> Shelf:
        return self.index.open(blobs=partial(ObjectBlobs.open_at, self.address), **options)

    def names(self) -> set[str]:
        return {Path(key).stem for key in self.server.keys(self.prefix) if key.endswith(".kvb")}

    def contents(self) -> Iterator[bytes]:
        yield from self.index.contents()
        for key in self.server.keys(self.prefix):
            yield self._read(key)

    def change(self, manifest: Manifest, how: Callable[[bytearray], bytearray | None]) -> None:
        own = manifest.id.removeprefix("kvs_")
        blobs = {key: self._read(key) for key in self.server.keys(self.prefix) if f"/{own}-" in key}
        key = max(blobs, key=lambda name: len(blobs[name]))
        changed = how(bytearray(blobs[key]))
        if changed is None:
            self.server.client().delete_object(Bucket=BUCKET, Key=key)
        else:
            self.server.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(changed))

    def let_leases_run_out(self, clock: Clock) -> None:
        self.index.let_leases_run_out(clock)

    def _read(self, key: str) -> bytes:
        data: bytes = self.server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data


def _goes_by_itself(client: redis.Redis, key: bytes) -> bool:
    """Within the time of a lease, a writer's or a reader's."""
    return bool(0 <= client.pttl(key) <= READ_LEASE_S * 1000)


def remove_late_arrivals(store: Shelf) -> None:
    """Remove what requests of a killed writer wrote after its bytes were swept; a sweep does so after an hour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(housekeeping, "ORPHAN_GRACE_S", -60.0)  # the server's clock has whole seconds
        housekeeping.remove_orphans(store.index, store.blobs)


def flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


def cut(data: bytearray) -> bytearray:
    return data[:-1]


def gone(data: bytearray) -> None:  # noqa: ARG001 - a way to change bytes
    return None
