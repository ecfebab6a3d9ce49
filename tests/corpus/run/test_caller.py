"""A row's way to its end, without Ray: real replicas in this process, a real shelf and its job table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import CreateCache
from kvshelf.corpus.input.rows import read_row
from kvshelf.corpus.row import Row
from kvshelf.corpus.run.caller import PREFIX, RowCaller
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.corpus.run.runner import Pauses
from kvshelf.engine.engine import Engine
from kvshelf.errors import NoWorker, QuotaExceeded, StorageFull, StoreUnavailable, WorkerCrashed
from kvshelf.store.base import Store
from kvshelf.store.manifest import StoredUsage
from kvshelf.store.url import StoreConfig
from kvshelf.workers.replica import attempts
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.corpus.hostile import document

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


QUICK = Pauses(poll_s=0.01, first_s=0.05, most_s=0.1)
"""No test waits as long as a batch may."""


class Flaky:
    """A replica's engine as callers see it; `fails` are raised in turn before the replica hears of a row."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.running = 1
        self.fails: list[Exception] = []
        self.calls = 0
        self.at_once = 0
        self.most_at_once = 0

    async def call(self, method: Callable[..., Any], spec: Any, **options: Any) -> Any:
        assert method is ReplicaApi.create
        self.calls += 1
        if self.fails:
            raise self.fails.pop(0)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._replica.create(spec, **options)
        finally:
            self.at_once -= 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return StoreConfig(f"disk://{tmp_path}/home").open()


@contextmanager
def served(engine: Engine, store: Store) -> Iterator[Flaky]:
    replica = Replica(engine, store, Scheduler(engine))
    replica.start()
    try:
        yield Flaky(replica)
    finally:
        replica.stop()


@pytest.fixture
async def engine(store: Store, tiny: Engine) -> AsyncIterator[Flaky]:
    with served(tiny, store) as served_engine:
        yield served_engine


def caller(
    engine: Flaky,
    store: Store,
    *,
    others: Mapping[str, Flaky] | None = None,
    began: float | None = None,
    slots: int = 4,
    **options: Any,
) -> RowCaller:
    made = RowCaller(
        {"kvshelf-tiny": engine, **(others or {})},  # type: ignore[dict-item]  # all that callers ask of `RemoteEngine`
        store,
        RunOptions("me", "batch_1", **options),
        began=time.time() if began is None else began,
        slots=slots,
        pauses=QUICK,
    )
    made.going.set()
    return made


def creation(row: Row) -> CreateCache:
    assert row.spec is not None
    return row.spec


def row(number: int = 1, **fields: Any) -> Row:
    return read_row({**document(number), **fields}, {}, source="in.jsonl", line=number, nbytes=10)


def code(result: Row) -> str | None:
    return None if result.error is None else result.error.code


async def test_a_row_gets_a_cache_and_its_end_is_in_the_job_table(engine: Flaky, store: Store) -> None:
    result = await caller(engine, store).settle(row(quality="fast"))
    assert code(result) is None
    assert result.cache_id is not None
    manifest = store.stat(result.cache_id, tenant="me")
    assert (result.tokens, result.kept, result.attempts) == (manifest.num_tokens, manifest.kept_tokens, 1)
    assert (result.reused, result.policy) == (False, "full")
    assert manifest.quality is not None
    assert result.quality == manifest.quality.model_dump()
    assert result.seconds > 0
    assert result.worker
    assert store.requests.unfinished() == []


async def test_a_row_with_an_error_costs_nothing(engine: Flaky, store: Store) -> None:
    result = await caller(engine, store).settle(row(foo=1))
    assert code(result) == "invalid_request"
    assert (engine.calls, result.attempts) == (0, 0)


async def test_what_the_engine_refuses_is_final_after_one_attempt(engine: Flaky, store: Store) -> None:
    unknown = await caller(engine, store).settle(row(policy="none-such"))
    assert (code(unknown), unknown.attempts) == ("invalid_request", 1)
    elsewhere = await caller(engine, store).settle(row(model="another"))
    assert code(elsewhere) == "invalid_request"
    assert engine.calls == 1


async def test_a_row_with_levels_has_all_their_caches(engine: Flaky, store: Store) -> None:
    levelled = row(levels=[0.5, 0.75])
    result = await caller(engine, store).settle(levelled)
    assert [level["compression_ratio"] for level in result.levels] == [0.5, 0.75]
    assert result.cache_id == result.levels[0]["cache_id"]
    again = await caller(engine, store, began=time.time() + 1).settle(levelled)
    assert (again.reused, again.levels) == (True, result.levels)


async def test_a_later_run_finds_the_end_in_the_job_table_and_asks_no_replica(engine: Flaky, store: Store) -> None:
    first = await caller(engine, store).settle(row())
    again = await caller(engine, store, began=time.time() + 1).settle(row())
    assert (again.cache_id, again.reused, again.seconds, again.attempts) == (first.cache_id, True, 0.0, 1)
    repeated = await caller(engine, store, began=time.time() - 60).settle(row())
    assert (repeated.reused, repeated.seconds > 0) == (False, True)  # the same run, whose process had died
    assert engine.calls == 1


async def test_what_has_left_the_shelf_is_made_again(engine: Flaky, store: Store) -> None:
    first = await caller(engine, store).settle(row())
    assert first.cache_id is not None
    store.delete(first.cache_id, tenant="me")
    again = await caller(engine, store).settle(row())
    assert (again.cache_id, again.reused, engine.calls) == (first.cache_id, False, 2)


async def test_a_document_that_another_row_has_made_is_reused(engine: Flaky, store: Store) -> None:
    first = await caller(engine, store).settle(row(1))
    twin = await caller(engine, store).settle(read_row(document(1), {}, source="in.jsonl", line=2, nbytes=1))
    assert (twin.cache_id, twin.reused, twin.seconds > first.seconds) == (first.cache_id, True, False)


async def test_a_line_that_was_mended_is_another_row(engine: Flaky, store: Store) -> None:
    assert code(await caller(engine, store).settle(row(policy="none-such"))) == "invalid_request"
    assert code(await caller(engine, store).settle(row(policy="knorm"))) is None


async def test_failed_rows_are_tried_again_only_when_asked(engine: Flaky, store: Store) -> None:
    bad = row(policy="none-such")
    await caller(engine, store).settle(bad)
    again = await caller(engine, store).settle(bad)
    assert (code(again), engine.calls) == ("invalid_request", 1)
    retried = await caller(engine, store, retry_failed=True).settle(bad)
    assert (code(retried), engine.calls) == ("invalid_request", 2)


async def test_a_missing_worker_is_waited_for(engine: Flaky, store: Store) -> None:
    engine.fails = [NoWorker("none", retry_after_s=0.01)] * 20
    result = await caller(engine, store).settle(row())
    assert (code(result), result.attempts) == (None, 1)


async def test_a_caller_says_that_no_worker_runs_as_long_as_its_rows_want_one(engine: Flaky, store: Store) -> None:
    engine.running = 0
    engine.fails = [NoWorker("none", retry_after_s=0.01)] * 20
    one = caller(engine, store)
    assert one.trouble == "", "no row wants one"
    work = asyncio.create_task(one.settle(row()))
    while engine.calls < 2:
        await asyncio.sleep(0.01)
    assert "no worker of kvshelf-tiny runs" in one.trouble
    engine.running = 1
    assert one.trouble == ""
    assert code(await work) is None
    engine.running = 0
    assert (one.at_work, one.trouble) == (0, "")


async def test_rows_of_one_model_wait_for_a_worker_while_those_of_another_go_on(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Flaky(engine._replica)
    gone.running, gone.fails = 0, [NoWorker("none", retry_after_s=0.01)] * 1000
    monkeypatch.setattr(engine._replica, "create", _forever)
    one = caller(engine, store, others={"gone": gone})
    work = [asyncio.create_task(one.settle(first_row)) for first_row in (row(1), row(2, model="gone"))]
    while not (engine.calls and gone.calls):
        await asyncio.sleep(0.01)
    assert (one.at_work, one.trouble) == (2, "")
    work[0].cancel()
    while one.at_work == 2:
        await asyncio.sleep(0.01)
    assert "no worker of gone runs" in one.trouble
    work[1].cancel()
    await asyncio.gather(*work, return_exceptions=True)


async def test_deaths_that_the_job_table_never_heard_of_are_counted_too(engine: Flaky, store: Store) -> None:
    engine.fails = [WorkerCrashed("it died")] * 9
    result = await caller(engine, store).settle(row())
    assert (code(result), engine.calls) == ("worker_crashed", 3)
    assert code(await caller(engine, store).settle(row())) == "worker_crashed"
    assert engine.calls == 3


async def test_attempts_that_ended_without_a_word_are_given_up(engine: Flaky, store: Store) -> None:
    """The job table has three attempts whose worker died; nobody tries a fourth one."""
    one = caller(engine, store)
    request = one.job(row(), creation(row())).id
    assert request.startswith(PREFIX)
    store.requests.open(request, tenant="me", body=b"")
    for _ in range(3):
        store.requests.start(request, worker="w", lease_s=0.001)
        await asyncio.sleep(0.01)
    result = await one.settle(row())
    assert (code(result), result.attempts, engine.calls) == ("worker_crashed", 3, 0)


@pytest.mark.parametrize("trouble", [StorageFull("full"), StoreUnavailable("away")], ids=["full", "away"])
async def test_trouble_with_the_store_costs_no_attempt(engine: Flaky, store: Store, trouble: Exception) -> None:
    """Rows wait, one of them tries now and then, and all end well when the trouble is over."""
    engine.fails = [trouble] * 8
    one = caller(engine, store)
    work = [asyncio.create_task(one.settle(row(number))) for number in range(1, 5)]
    while engine.calls < 6:
        await asyncio.sleep(0.01)
    assert str(trouble) == one.trouble
    results = await asyncio.gather(*work)
    assert [(code(result), result.attempts) for result in results] == [(None, 1)] * 4
    assert one.trouble == ""
    assert engine.calls == 12


async def test_a_full_shelf_is_seen_by_the_replica_and_not_counted(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = store.put

    def full(*_: Any, **__: Any) -> Any:
        raise StorageFull("the disk is full")

    monkeypatch.setattr(store, "put", full)
    one = caller(engine, store)
    work = asyncio.create_task(one.settle(row()))
    while engine.calls < 4:
        await asyncio.sleep(0.02)
    assert one.trouble == "the disk is full"
    monkeypatch.setattr(store, "put", room)
    result = await work
    assert (code(result), result.attempts) == (None, 1)


async def test_a_document_that_no_shelf_would_hold_is_a_row_s_own_error(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise StorageFull("9 bytes do not fit into 5", fits=False)

    monkeypatch.setattr(store, "put", never)
    result = await caller(engine, store).settle(row())
    assert (code(result), result.attempts) == ("storage_full", 1)


async def test_an_attempt_that_went_with_the_store_is_not_counted(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: the replica cannot tell the job table of it, and the row is free as soon as the store is back."""
    requests, put, fail = store.requests, store.put, store.requests.fail

    def gone(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(requests, "fail", still_gone)
        raise StoreUnavailable("away")

    def still_gone(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(requests, "fail", fail)
        raise StoreUnavailable("away")

    monkeypatch.setattr(attempts, "LEASE_S", 3600)  # nobody could wait for its end
    monkeypatch.setattr(store, "put", gone)
    work = asyncio.create_task(caller(engine, store).settle(row()))
    while engine.calls < 5:
        await asyncio.sleep(0.02)
    monkeypatch.setattr(store, "put", put)
    result = await asyncio.wait_for(work, 60)
    assert (code(result), result.attempts) == (None, 1)


async def test_an_attempt_after_one_that_went_with_the_store_counts(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away before the first attempt began; the worker of the next one dies."""
    create = engine._replica.create

    async def dies(_: CreateCache, *, request_id: str, **__: Any) -> None:
        monkeypatch.setattr(engine._replica, "create", create)
        store.requests.start(request_id, worker="w", lease_s=0.2)
        raise WorkerCrashed("it died")

    engine.fails = [StoreUnavailable("away")]
    monkeypatch.setattr(engine._replica, "create", dies)
    result = await caller(engine, store).settle(row())
    assert (code(result), result.attempts) == (None, 2)


async def test_a_quota_is_waited_for(store: Store, tiny: Engine, tmp_path: Path) -> None:
    """A tenant with room for two caches and four rows: two of them wait, and end as soon as others are deleted."""
    limited = StoreConfig(f"disk://{tmp_path}/home", tenant_max_caches=2).open()
    with served(tiny, limited) as engine:
        one = caller(engine, limited)
        work = [asyncio.create_task(one.settle(row(number))) for number in range(1, 5)]
        while not one.trouble or sum(task.done() for task in work) < 2:
            await asyncio.sleep(0.02)
        assert "2 caches" in one.trouble
        await asyncio.sleep(0.3)
        first = [task.result() for task in work if task.done()]
        assert len(first) == 2
        for result in first:
            store.delete(result.cache_id or "", tenant="me")
        results = await asyncio.gather(*work)
    assert [(code(result), result.attempts) for result in results] == [(None, 1)] * 4
    assert one.trouble == ""
    assert store.requests.unfinished() == []


async def test_what_no_quota_was_left_for_is_no_error_of_the_next_run(engine: Flaky, store: Store) -> None:
    """Who waited for room has died: the job table has a failure, and nobody has to ask for another try."""
    one = caller(engine, store)
    job = one.job(row(), creation(row()))
    store.requests.open(job.id, tenant="me", body=b"")
    attempt = store.requests.start(job.id, worker="w", lease_s=9)
    store.requests.fail(job.id, attempt, code=QuotaExceeded.code, message="no room", final=True)
    assert code(await one.settle(row())) is None


async def test_a_document_beyond_its_tenant_s_quota_is_a_row_s_own_error(tiny: Engine, tmp_path: Path) -> None:
    limited = StoreConfig(f"disk://{tmp_path}/home", tenant_max_bytes=1000).open()
    with served(tiny, limited) as engine:
        result = await asyncio.wait_for(caller(engine, limited).settle(row()), 60)
    assert (code(result), result.attempts, engine.calls) == ("quota_exceeded", 1, 1)


async def test_rows_that_failed_once_are_tried_one_at_a_time(engine: Flaky, store: Store) -> None:
    one = caller(engine, store)
    rows = [row(number) for number in range(1, 5)]
    for one_row in rows:
        job = one.job(one_row, creation(one_row))
        store.requests.open(job.id, tenant="me", body=b"")
        store.requests.start(job.id, worker="w", lease_s=0.001)
    await asyncio.sleep(0.01)
    results = await asyncio.gather(*(one.settle(one_row) for one_row in rows))
    assert [(code(result), result.attempts) for result in results] == [(None, 2)] * 4
    assert engine.most_at_once == 1


async def test_rows_begin_only_while_they_may_and_only_so_many(engine: Flaky, store: Store) -> None:
    one = caller(engine, store, slots=2)
    one.going.clear()
    work = [asyncio.create_task(one.settle(row(number))) for number in range(1, 7)]
    await asyncio.sleep(0.05)
    assert engine.calls == 0
    one.going.set()
    await asyncio.gather(*work)
    assert engine.most_at_once <= 2


async def test_a_cancelled_row_is_ended_in_the_job_table_and_begun_again_later(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._replica, "create", _forever)
    one = caller(engine, store)
    work = asyncio.create_task(one.settle(row()))
    while engine.calls == 0:
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert store.requests.unfinished() == []
    monkeypatch.undo()
    result = await caller(engine, store).settle(row())
    assert (code(result), result.attempts) == (None, 1)


async def test_a_row_that_is_done_when_it_is_cancelled_is_no_earlier_one_s(
    engine: Flaky, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica has written the end down, and the answer is on its way."""
    create = engine._replica.create

    async def slow_to_answer(*args: Any, **options: Any) -> Any:
        await create(*args, **options)
        answered.set()
        await asyncio.sleep(60)

    answered = asyncio.Event()
    monkeypatch.setattr(engine._replica, "create", slow_to_answer)
    work = asyncio.create_task(caller(engine, store).settle(row()))
    await answered.wait()
    work.cancel()
    result = await work
    assert (code(result), result.reused, result.attempts) == (None, False, 1)
    assert result.cache_id is not None


async def _forever(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(60)


async def test_a_bug_is_one_row_s_error(engine: Flaky, store: Store) -> None:
    engine.fails = [ZeroDivisionError("oops")]
    assert code(await caller(engine, store).settle(row(1))) == "internal"
    assert code(await caller(engine, store).settle(row(2))) is None
    assert isinstance(store.usage(tenant="me"), StoredUsage)
