"""Which failures a request of the job table has only a few of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvshelf.errors import DocumentTooLong, KvshelfError, OutOfMemory, StorageFull, StoreUnavailable
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota
from kvshelf.store.rules import Rules
from kvshelf.workers.replica.attempts import Attempts
from kvshelf.workers.replica.calls import Threads
from tests.store.caches import make_cache

pytestmark = pytest.mark.anyio


@pytest.fixture
async def attempted(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    """Does some work as an attempt at a request; returns how the request stands then."""
    with DiskStore.open(tmp_path / "jobs") as store, Threads() as threads:
        attempts = Attempts(store.requests, "w", threads)
        store.requests.open("req_1", tenant="me", body=b"")

        async def attempt(work: Callable[[], object], error: type[KvshelfError]) -> tuple[str, int]:
            with pytest.raises(error):
                async with attempts.counted("req_1", "me"):
                    await threads.run(work)
            record = store.requests.get("req_1", tenant="me")
            return record.state, record.tries

        yield attempt


async def test_a_document_that_a_store_does_not_keep_is_given_up(attempted: Callable[..., object], home: Path) -> None:
    """It would be prefilled for ever."""

    def lose_a_bit(step: str) -> None:
        if step == "synced":
            (path,) = (home / "blobs").iterdir()
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    with DiskStore.open(home, on_step=lose_a_bit) as store:
        seen = [await attempted(lambda: store.put(make_cache()), StoreUnavailable) for _ in range(3)]
    assert seen == [("queued", 1), ("queued", 2), ("failed", 3)]


async def test_a_full_store_costs_no_attempt_and_one_that_is_too_small_ends_the_request(
    attempted: Callable[..., object], home: Path
) -> None:
    size = len(make_cache().to_bytes())
    with DiskStore.open(home, rules=Rules(quota=Quota(budget_bytes=size))) as store:
        store.put(make_cache(0), pinned=True)
        for _ in range(4):
            assert await attempted(lambda: store.put(make_cache(1)), StorageFull) == ("queued", 0)
    with DiskStore.open(home, rules=Rules(quota=Quota(budget_bytes=size - 1))) as store:
        assert await attempted(lambda: store.put(make_cache(1)), StorageFull) == ("failed", 1)


async def test_a_store_that_is_away_costs_no_attempt(attempted: Callable[..., object], home: Path) -> None:
    with DiskStore.open(home) as store:
        (home / "shelf.sqlite3").unlink()
        for _ in range(4):
            assert await attempted(lambda: store.put(make_cache()), StoreUnavailable) == ("queued", 0)


async def test_memory_that_ran_out_is_tried_again_and_a_document_without_room_is_not(
    attempted: Callable[..., object],
) -> None:
    def fail(error: KvshelfError) -> None:
        raise error

    assert [await attempted(lambda: fail(OutOfMemory("x")), OutOfMemory) for _ in range(2)] == [
        ("queued", 1),
        ("queued", 2),
    ]
    assert await attempted(lambda: fail(DocumentTooLong("x")), DocumentTooLong) == ("failed", 3)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
