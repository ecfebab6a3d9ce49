from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.store.disk import DiskStore
from tests.store.objects.servers import S3Server
from tests.store.places import Clock, DiskPlace, ObjectsPlace, Place, RedisPlace
from tests.store.redis.servers import ValkeyServer
from tests.store.zygote import Zygote


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path, clock: Clock) -> Iterator[DiskStore]:
    """A shelf in a folder of its own, found sound when the test ends."""
    with DiskStore.open(home, now=clock) as store:
        yield store
        assert store.check() == []


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A server for all tests that neither stop nor fill it."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def zygote(shared_s3: S3Server) -> Iterator[Zygote]:  # noqa: ARG001 - it has the credentials from the environment
    with Zygote() as zygote:
        yield zygote


@pytest.fixture(params=["disk", "redis", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place for a shelf, of every kind of home."""
    if request.param == "redis":
        return RedisPlace(request.getfixturevalue("shared_valkey"))
    disk = DiskPlace(tmp_path / "home")
    if request.param == "disk":
        return disk
    return ObjectsPlace(disk, request.getfixturevalue("shared_s3"), request.getfixturevalue("zygote").start)
