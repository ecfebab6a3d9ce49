from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvshelf.store.objects import address
from kvshelf.store.objects.blobs import ObjectBlobs
from kvshelf.store.shelf import Shelf
from tests.store.objects.faulty import FaultyProxy
from tests.store.objects.servers import S3Server, SeaweedServer
from tests.store.places import DiskPlace, Place, RedisPlace

OpenShelf = Callable[..., Shelf]


@pytest.fixture
def proxy(shared_s3: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(shared_s3) as proxy:
        yield proxy


@pytest.fixture(params=["disk", "redis"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where the index lies."""
    return (
        DiskPlace(tmp_path / "home")
        if request.param == "disk"
        else RedisPlace(request.getfixturevalue("shared_valkey"))
    )


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, for tests that do not stop it."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def open_shelf() -> Iterator[OpenShelf]:
    """Opens shelves with their blobs at a URL of object storage, closed when the test ends."""
    with ExitStack() as stack:

        def open_shelf(index: Place, url: str, *, patient: bool = False, **options: Any) -> Shelf:
            blobs = partial(ObjectBlobs.open_at, address.parse(url), patient=patient)
            return stack.enter_context(index.open(blobs=blobs, **options))

        yield open_shelf
