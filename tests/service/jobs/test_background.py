"""Who works off what was accepted, and how much of it there may be. No service is started here: the workers are stood
in for, the shelf and its requests are real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from structlog.testing import capture_logs

from kvshelf import open_store
from kvshelf.api import CreateCache
from kvshelf.artifact.identity import canonical_msgpack
from kvshelf.errors import NoWorker, QueueFull, StorageFull, StoreUnavailable, WorkerCrashed
from kvshelf.service.jobs.background import Background
from kvshelf.service.loops import repeat
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestRecord, RequestTable
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS, Standing, give_up


@pytest.fixture(autouse=True)
def _still_ready() -> None:
    """In place of the shared service's, which is not needed here."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"disk://{tmp_path}/shelf") as shelf:
        yield shelf


class Workers:
    """Stand for those of one model: finish what they are asked for, or raise what they were given."""

    def __init__(self, store: Store, *failures: Exception) -> None:
        self._requests = store.requests
        self.failures = list(failures)
        self.asked: list[str | None] = []

    async def create(self, spec: CreateCache, *, request_id: str, **_: Any) -> Created:
        self.asked.append(spec.document)
        if self.failures:
            raise self.failures.pop()
        attempt = self._requests.start(request_id, worker="test", lease_s=9)
        self._requests.finish(request_id, attempt, cache_ids=())
        return Created(())


class Deserted(Workers):
    """Those of a model that has none."""

    async def create(self, spec: CreateCache, **_: Any) -> Created:
        self.asked.append(spec.document)
        raise NoWorker("nobody is there", retry_after_s=0.05)


def background(store: Store, engines: Mapping[str, object], *, max_unfinished: int = 99, **more: Any) -> Background:
    workers = cast(Mapping[str, RemoteEngine], engines)
    return Background(store, workers, deadline_s=9, max_unfinished=max_unfinished, **more)


def spec(document: str, model: str = "m") -> CreateCache:
    return CreateCache(model=model, document=document)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.02)


def test_a_request_for_a_model_that_another_front_end_serves_is_left_to_it(store: Store) -> None:
    async def test() -> None:
        here, there = Workers(store), Workers(store)
        ours, theirs = background(store, {"ours": here}), background(store, {"theirs": there})
        accepted = await theirs.submit(spec("a", "theirs"), "acme")
        await background(store, {"ours": here}).submit(spec("b", "ours"), "acme")  # an earlier process
        ours.start()
        await until(lambda: here.asked == ["b"])  # which was opened after the other one
        await ours.stop()
        left = store.requests.get(accepted.id, tenant="acme")
        assert (left.state, left.attempts, left.error) == ("queued", 0, None)
        theirs.start()
        await until(lambda: there.asked == ["a"])
        await theirs.stop()

    run(test())


class Watched:
    """Requests whose reads `seen` hears of before the reader has them, so that it can act as others do meanwhile."""

    def __init__(self, requests: RequestTable, seen: Callable[[object], None]) -> None:
        self._requests = requests
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    def body(self, request_id: str) -> bytes:
        body = self._requests.body(request_id)
        self._seen(body)
        return body

    def get(self, request_id: str, *, tenant: str) -> RequestRecord:
        record = self._requests.get(request_id, tenant=tenant)
        self._seen(record)
        return record


def watched(store: Store, seen: Callable[[object], None]) -> Store:
    requests = Watched(store.requests, seen)
    return cast(Store, SimpleNamespace(requests=requests, stat=store.stat, admit=store.admit, now=store.now))


def test_what_nobody_takes_is_read_once_and_refused_in_the_end(store: Store) -> None:
    async def test() -> None:
        lost = await background(store, {"gone": Workers(store)}).submit(spec("a", "gone"), "acme")
        read: list[object] = []
        ours = background(
            watched(store, read.append), {"m": Workers(store)}, unclaimed_s=2.5
        )  # it looks every two seconds
        ours.start()
        await until(lambda: store.requests.get(lost.id, tenant="acme").state == "failed")
        await ours.stop()
        ended = store.requests.get(lost.id, tenant="acme")
        assert ended.error is not None
        assert (ended.error.code, ended.error.param) == ("invalid_request", "model")
        assert "'gone'" in ended.error.message
        assert ended.updated_at - ended.created_at > 2.5
        default = {"policy": "full", "codec": "int8"}  # as it was when the creation came
        assert read == [canonical_msgpack({"document": "a", "model": "gone"} | default)]

    run(test())


def test_a_model_without_workers_holds_up_no_other(store: Store) -> None:
    async def test() -> None:
        gone, here = Deserted(store), Workers(store)
        both = background(store, {"gone": gone, "m": here})
        for number in range(5):
            await both.submit(spec(f"lost {number}", "gone"), "acme")
        await both.submit(spec("a"), "acme")
        both.start()
        await until(lambda: here.asked == ["a"] and len(gone.asked) > 9)
        assert both.counts == {"queued": 3, "running": 2}
        await both.stop()

    run(test())


def test_what_another_front_end_gave_up_first_is_let_go(store: Store) -> None:
    async def test() -> None:
        def overtake(record: object) -> None:
            if isinstance(record, RequestRecord) and Standing.of(record, store.now()) is Standing.SPENT:
                give_up(store.requests, record)

        workers = Workers(store)
        ours = background(watched(store, overtake), {"m": workers})
        accepted = await ours.submit(spec("a"), "acme")
        for _ in range(MAX_ATTEMPTS):
            store.requests.start(accepted.id, worker="dead", lease_s=0)
        with capture_logs() as logged:
            ours.start()
            await until(lambda: ours.counts == {"queued": 0, "running": 0})
        assert logged == []  # nothing unexpected has happened
        assert store.requests.get(accepted.id, tenant="acme").state == "failed"
        await ours.submit(spec("a"), "acme")
        await until(lambda: workers.asked == ["a"])
        await ours.stop()

    run(test())


def test_what_failed_by_a_bug_is_let_go_and_done_when_it_is_asked_for_again(store: Store) -> None:
    async def test() -> None:
        workers = Workers(store, ZeroDivisionError("a bug"))
        ours = background(store, {"m": workers})
        ours.start()
        accepted = await ours.submit(spec("a"), "acme")
        await until(lambda: workers.asked == ["a"] and ours.counts == {"queued": 0, "running": 0})
        assert store.requests.get(accepted.id, tenant="acme").state == "queued"
        await ours.submit(spec("a"), "acme")
        await until(lambda: store.requests.get(accepted.id, tenant="acme").state == "done")
        await ours.stop()

    run(test())


def test_a_request_that_cannot_be_read_holds_up_no_other(store: Store) -> None:
    async def test() -> None:
        store.requests.open("req_bad", tenant="acme", body=b'{"document":"a"}')  # not as this version writes it
        await background(store, {"m": Workers(store)}).submit(spec("a"), "acme")  # an earlier process
        workers = Workers(store)
        ours = background(store, {"m": workers})
        ours.start()
        await until(lambda: workers.asked == ["a"])
        await ours.stop()

    run(test())


def test_attempts_that_the_store_never_heard_of_are_counted_too(store: Store) -> None:
    async def test() -> None:
        workers = Workers(store, *[WorkerCrashed("it died")] * 9)
        ours = background(store, {"m": workers})
        accepted = await ours.submit(spec("a"), "acme")
        ours.start()
        await until(lambda: store.requests.get(accepted.id, tenant="acme").state == "failed")
        await ours.stop()
        ended = store.requests.get(accepted.id, tenant="acme")
        assert ended.error is not None
        assert (ended.error.code, len(workers.asked)) == ("worker_crashed", MAX_ATTEMPTS)

    run(test())


def test_an_attempt_that_went_with_the_store_is_not_counted(store: Store) -> None:
    class Lost(Workers):
        async def create(self, spec: CreateCache, *, request_id: str, **more: Any) -> Created:
            if not self.asked:
                self._requests.start(request_id, worker="test", lease_s=3600)  # nobody could wait for its end
                self.asked.append(spec.document)
                raise StoreUnavailable("away")
            return await super().create(spec, request_id=request_id, **more)

    async def test() -> None:
        ours = background(store, {"m": Lost(store)})
        accepted = await ours.submit(spec("a"), "acme")
        ours.start()
        await until(lambda: store.requests.get(accepted.id, tenant="acme").state == "done")
        await ours.stop()
        assert store.requests.get(accepted.id, tenant="acme").tries == 1

    run(test())


def test_a_request_whose_body_is_no_creation_fails(store: Store) -> None:
    """As after an upgrade to a version that refuses what an earlier one accepted."""

    async def test() -> None:
        store.requests.open("req_old", tenant="acme", body=msgpack.packb({"document": "a", "model": "m", "gone": 1}))
        workers = Workers(store)
        ours = background(store, {"m": workers})
        ours.start()
        await until(lambda: store.requests.get("req_old", tenant="acme").state == "failed")
        await ours.stop()
        ended = store.requests.get("req_old", tenant="acme")
        assert ended.error is not None
        assert (ended.error.code, ended.error.param, workers.asked) == ("invalid_request", "gone", [])

    run(test())


def test_what_the_service_repeats_goes_on_after_a_failure_and_a_bug() -> None:
    failures = [StoreUnavailable("away"), ZeroDivisionError("a bug")]

    async def test() -> None:
        done = asyncio.Event()

        async def work() -> None:
            if failures:
                raise failures.pop(0)
            done.set()

        loop = asyncio.create_task(repeat("work", work, partial(asyncio.sleep, 0)))
        await done.wait()
        loop.cancel()

    with capture_logs() as said:
        run(test())
    assert [(line["event"], line["log_level"]) for line in said] == [
        ("work failed", "warning"),
        ("work failed unexpectedly", "error"),
    ]


@pytest.mark.slow
def test_a_full_shelf_is_tried_less_and_less_often(store: Store) -> None:
    """Each attempt is a prefill."""
    at: list[float] = []

    class Full(Workers):
        async def create(self, spec: CreateCache, *, request_id: str, **more: Any) -> Created:
            at.append(asyncio.get_running_loop().time())
            return await super().create(spec, request_id=request_id, **more)

    async def test() -> None:
        ours = background(store, {"m": Full(store, StorageFull("full"), StorageFull("full"))})
        accepted = await ours.submit(spec("a"), "acme")
        ours.start()
        await until(lambda: store.requests.get(accepted.id, tenant="acme").state == "done")
        await ours.stop()
        assert at[1] - at[0] >= 2
        assert at[2] - at[1] >= 4

    run(test())


def test_of_each_tenant_and_model_so_many_are_accepted(store: Store) -> None:
    async def test() -> None:
        ours = background(store, {"m": Workers(store), "n": Workers(store)}, max_unfinished=3)
        asked = [ours.submit(spec(str(number)), "acme") for number in range(10)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        refused = [error for error in told if isinstance(error, QueueFull)]
        assert [error.details["retry_after_s"] > 0 for error in refused] == [True] * 7
        accepted = [str(number) for number, record in enumerate(told) if isinstance(record, RequestRecord)]
        assert len(store.requests.unfinished()) == 3

        for document in accepted:  # the same again is no new one
            assert (await ours.submit(spec(document), "acme")).state == "queued"
        await ours.submit(spec("x"), "other")
        await ours.submit(spec("x", "n"), "acme")
        with pytest.raises(QueueFull):
            await ours.submit(spec("x"), "acme")
        ours.start()
        await until(lambda: ours.counts == {"queued": 0, "running": 0})
        assert (await ours.submit(spec("x"), "acme")).state == "queued"
        await ours.stop()

    run(test())
