"""Caches that stay in memory: never answered from when the store says otherwise, never over their bytes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attachment import Attachment, PartialAttachment
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, InvalidRequest, ModelMismatch, StoreUnavailable
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Threads
from kvshelf.workers.replica.memory.residents import ResidentLimits, Residents
from tests.conftest import save_random_model
from tests.store.places import Clock

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Counting(DiskStore):
    """A disk store that counts how often a blob is opened."""

    opened = 0

    def open_cache(self, cache_id: str, *, tenant: str = "default"):  # type: ignore[no-untyped-def]
        self.opened += 1
        return super().open_cache(cache_id, tenant=tenant)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def caches(engine: Engine) -> list[CompressedCache]:
    return [engine.compress(list(range(10 + i, 200 + i)), policy="full") for i in range(4)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Counting]:
    with Counting.open(tmp_path / "home", now=clock) as store:
        yield store


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    with Threads(4) as pool:
        yield pool


def make(store: Store, engine: Engine, threads: Threads, **limits: float) -> Residents:
    limited = ResidentLimits(**limits)  # type: ignore[arg-type]
    return Residents(store, engine.attach, engine.attachments.of_part, limited, threads)


async def ask(residents: Residents, cache_id: str, tenant: str = "default") -> tuple[Attachment, bool]:
    async with residents.using(cache_id, tenant) as (resident, there):
        for layer in range(resident.document.num_layers):
            await asyncio.to_thread(resident.document.prefixes, layer)
        return resident.document, there


async def test_a_second_question_finds_the_cache_in_memory(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    residents = make(store, engine, threads)
    cache_id = store.put(caches[0]).id
    first, there = await ask(residents, cache_id)
    again, there_now = await ask(residents, cache_id)
    assert (there, there_now, store.opened) == (False, True, 1)
    assert first is again
    assert first.nbytes == residents.nbytes > 0


async def test_a_cache_stored_from_here_is_there_for_its_first_question(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    residents = make(store, engine, threads)
    made, document = store.put(caches[0]), engine.attach(caches[0])
    await residents.hold(made.id, "default", document, made.blob_digest)
    assert (await ask(residents, made.id), store.opened) == ((document, True), 0)
    assert store.delete(made.id)
    with pytest.raises(CacheNotFound):
        await ask(residents, made.id)


async def test_a_cache_stored_from_here_takes_the_room_of_unused_ones_alone(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    each = engine.attach(caches[0]).nbytes
    residents = make(store, engine, threads, max_bytes=2 * each)
    made = [store.put(cache) for cache in caches]
    async with residents.using(made[0].id, "default") as (used, _):
        await ask(residents, made[1].id)
        await residents.hold(made[2].id, "default", engine.attach(caches[2]), made[2].blob_digest)
        assert len(residents) == 2  # of the two before, the one that nobody used is gone
        assert (await ask(residents, made[2].id))[1]
        async with residents.using(made[2].id, "default"):
            await residents.hold(made[3].id, "default", engine.attach(caches[3]), made[3].blob_digest)
            assert len(residents) == 2
            assert residents.nbytes <= 2 * each
            assert (await ask(residents, made[2].id))[1]
        assert (await ask(residents, made[0].id))[0] is used.document
    assert store.opened == 2


async def test_questions_at_the_same_time_are_one_read(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    residents = make(store, engine, threads)
    cache_id = store.put(caches[0]).id
    found = await asyncio.gather(*(ask(residents, cache_id) for _ in range(20)))
    assert store.opened == 1
    assert len({id(document) for document, _ in found}) == 1


async def test_what_the_store_no_longer_has_is_not_answered_from_memory(
    store: Counting, clock: Clock, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    residents = make(store, engine, threads)
    deleted, expiring = store.put(caches[0]).id, store.put(caches[1], ttl_s=5).id
    for cache_id in (deleted, expiring):
        await ask(residents, cache_id)
    store.delete(deleted)
    with pytest.raises(CacheNotFound):
        await ask(residents, deleted)
    with pytest.raises(CacheNotFound):
        await ask(residents, expiring, tenant="somebody else")
    clock.time += 5
    with pytest.raises(CacheExpired):
        await ask(residents, expiring)


async def test_the_least_recently_used_leave_when_bytes_run_out(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    ids = [store.put(cache).id for cache in caches]
    one = store.open_cache(ids[0])
    one.close()
    residents = make(store, engine, threads, max_bytes=2 * one.nbytes + one.nbytes // 2)
    for cache_id in (ids[0], ids[1], ids[0], ids[2]):  # 1 leaves: 0 was used after it
        await ask(residents, cache_id)
        assert residents.nbytes <= residents.limits.max_bytes
    there = [(await ask(residents, cache_id))[1] for cache_id in (ids[0], ids[2], ids[1])]
    assert there == [True, True, False]


async def test_what_is_being_asked_is_not_evicted_and_others_wait_for_its_room(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    first, second = (store.put(cache).id for cache in caches[:2])
    residents = make(store, engine, threads, max_bytes=1)  # each is larger than that: one at a time
    async with residents.using(first, "default") as (resident, _):
        waiting = asyncio.ensure_future(ask(residents, second))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert len(residents) == 1
        assert resident.document is (await ask(residents, first))[0]
    document, there = await asyncio.wait_for(waiting, 30)
    assert not there
    assert document.nbytes == residents.nbytes


async def test_a_cache_that_is_deleted_while_another_question_waits_for_its_memory_answers_no_later_question(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    """A later question joins the read under way, whose manifest is older than the deletion."""
    first, deleted = (store.put(cache).id for cache in caches[:2])
    residents = make(store, engine, threads, max_bytes=1)
    async with residents.using(first, "default"):
        waiting = asyncio.ensure_future(ask(residents, deleted))
        while store.opened < 2:
            await asyncio.sleep(0.01)
        store.delete(deleted)
        later = asyncio.ensure_future(ask(residents, deleted))
        await asyncio.sleep(0.1)
        assert not waiting.done()
    with pytest.raises(CacheNotFound):
        await asyncio.wait_for(later, 30)
    await waiting  # it was asked before


async def test_idle_caches_leave(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    residents = make(store, engine, threads, idle_s=0.4)
    used, unused = (store.put(cache).id for cache in caches[:2])
    await ask(residents, unused)
    evicting = asyncio.ensure_future(residents.evict_idle_forever())
    try:
        async with residents.using(used, "default"):
            end = time.monotonic() + 10
            while len(residents) > 1 and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert len(residents) == 1  # what is being asked stays, however long it takes
            assert (await ask(residents, used))[1]
        while len(residents) and time.monotonic() < end:
            await asyncio.sleep(0.05)
    finally:
        evicting.cancel()
    assert residents.nbytes == 0


async def test_a_damaged_blob_is_an_error_and_is_not_kept(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads, tmp_path: Path
) -> None:
    residents = make(store, engine, threads)
    cache_id = store.put(caches[0]).id
    (blob,) = (tmp_path / "home" / "blobs").iterdir()
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CacheCorrupt):
        await ask(residents, cache_id)
    assert len(residents) == 0
    store.put(caches[0])
    assert not (await ask(residents, cache_id))[1]


async def test_a_cache_of_another_model_is_refused_and_takes_no_room(
    store: Counting, caches: list[CompressedCache], threads: Threads, tmp_path: Path
) -> None:
    other = Engine.load(str(save_random_model(tmp_path / "other", seed=9)), device="cpu")
    residents = make(store, other, threads)
    with pytest.raises(ModelMismatch):
        await ask(residents, store.put(caches[0]).id)
    assert len(residents) == 0


class Held(DiskStore):
    """A disk store that opens one blob only when told."""

    slow = ""
    told = threading.Event()

    def open_cache(self, cache_id: str, *, tenant: str = "default"):  # type: ignore[no-untyped-def]
        assert cache_id != self.slow or self.told.wait(60)
        return super().open_cache(cache_id, tenant=tenant)


async def test_a_question_does_not_wait_for_room_that_one_waiting_for_its_cache_holds(
    engine: Engine, caches: list[CompressedCache], threads: Threads, tmp_path: Path
) -> None:
    """A single question begins to open a cache; one with several that holds others joins the opening. Memory never has
    room for all three, so the one with several is refused, and the single one gets its room."""
    with Held.open(tmp_path / "home") as store:
        first, second, third = (store.put(cache).id for cache in caches[:3])
        store.slow = third
        nbytes = engine.attach(caches[0]).nbytes
        residents = make(store, engine, threads, max_bytes=int(2.5 * nbytes))
        single = asyncio.create_task(ask(residents, third))
        await asyncio.sleep(0)  # it has begun
        joint = asyncio.create_task(anext(aiter(held_together(residents, [first, second, third]))))
        while len(residents) < 2:
            await asyncio.sleep(0.01)
        store.told.set()
        with pytest.raises(InvalidRequest, match="of the 3 documents of this question, 2 take"):
            await asyncio.wait_for(joint, 20)
        assert (await asyncio.wait_for(single, 20))[0].identity == caches[2].identity


async def held_together(residents: Residents, cache_ids: list[str]) -> AsyncIterator[None]:
    async with residents.using_all(cache_ids, "default"):
        yield


async def test_a_cache_with_an_index_is_read_as_questions_select(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    """It is in memory for all questions, those that read all of it, too. Its file is open until it leaves."""
    residents = make(store, engine, threads)
    indexed = engine.compress(list(range(10, 200)), policy="infllm", block=16)
    first, second = store.put(indexed).id, store.put(caches[0]).id
    async with residents.using(first, "default", part=True) as (resident, there):
        document = resident.document
        assert isinstance(document, PartialAttachment)
        assert (there, resident.place, document.arrived, store.opened) == (False, "home", False, 0)
    again, there = await ask(residents, first)
    assert (again, there, document.arrived) == (document, True, True)
    async with residents.using(second, "default", part=True) as (resident, _):
        assert not isinstance(resident.document, PartialAttachment), "without an index it is read as a whole"
    assert store.opened == 1
    fresh = store.put(engine.compress(list(range(20, 210)), policy="infllm", block=16)).id
    async with residents.using(fresh, "default", part=True) as (resident, _):
        store.delete(fresh)
        with pytest.raises(CacheNotFound):
            await ask(residents, fresh)
        await asyncio.to_thread(resident.document.prefixes, 0)  # this question goes on
    residents.evict_idle(time.monotonic() + 1)
    assert len(residents) == 0
    with pytest.raises(StoreUnavailable, match="closed"):
        await asyncio.to_thread(resident.document.prefixes, 1)


async def test_caches_read_in_part_count_as_whole_ones(store: Counting, engine: Engine, threads: Threads) -> None:
    """They may be read further, so that the memory for all of each is set aside."""
    made = [engine.compress(list(range(10 + i, 200 + i)), policy="infllm", block=16) for i in range(3)]
    ids = [store.put(cache).id for cache in made]
    residents = make(store, engine, threads, max_bytes=int(2.5 * made[0].nbytes))
    for cache_id in ids:
        async with residents.using(cache_id, "default", part=True):
            assert residents.nbytes <= residents.limits.max_bytes
    assert len(residents) == 2


async def test_an_evicted_cache_is_freed_at_once(
    store: Counting, engine: Engine, caches: list[CompressedCache], threads: Threads
) -> None:
    """Not at the next garbage collection: few objects with gigabytes behind them call for none."""
    residents = make(store, engine, threads)
    cache_id = store.put(caches[0]).id
    gc.disable()
    try:
        document, _ = await ask(residents, cache_id)
        freed = weakref.ref(document)
        del document
        residents.evict_idle(time.monotonic() + 1)
        end = time.monotonic() + 10
        while freed() is not None and time.monotonic() < end:  # the reading thread lets go of it a moment later
            await asyncio.sleep(0.01)
        assert freed() is None
    finally:
        gc.enable()
