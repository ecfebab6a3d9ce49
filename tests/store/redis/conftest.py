from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvshelf.store.redis import address
from kvshelf.store.redis.link import RedisLink
from tests.store.redis.servers import ValkeyServer


@pytest.fixture
def valkey(shared_valkey: ValkeyServer) -> ValkeyServer:
    """A server that several tests use one after the other, empty. It must not be killed or paused."""
    shared_valkey.client().flushall()
    return shared_valkey


@pytest.fixture
def start_valkey(tmp_path: Path) -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers of the test's own; the arguments are settings of the server."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(ValkeyServer(tmp_path, **settings))


@pytest.fixture
def connect() -> Iterator[Callable[[str], RedisLink]]:
    """Makes links, closed when the test ends."""
    with ExitStack() as stack:

        def connect(url: str) -> RedisLink:
            link = RedisLink(address.parse(url))
            stack.callback(link.close)
            return link

        yield connect
