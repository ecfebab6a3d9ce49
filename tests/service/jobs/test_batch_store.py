"""What batches do with the store before and after their rows: read the input, wait for room, write the results."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pydantic_core
import pytest
from structlog.testing import capture_logs

from kvshelf.api.batches import RequestCounts
from kvshelf.corpus.row import Row, RowError
from kvshelf.errors import StateConflict
from kvshelf.service.jobs import batch_work
from kvshelf.service.jobs.batch_files import write_results
from kvshelf.service.jobs.batch_questions import BatchAsker
from kvshelf.service.jobs.batch_work import BatchWork, rest_reason
from kvshelf.service.jobs.batches import BatchRunner
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.routes.batches import retried
from kvshelf.service.settings import Settings
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.store.jobs.files import FileRecord
from kvshelf.store.redis import RedisStore
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from tests.store.redis.servers import PATIENT, ValkeyServer

DONE = Row("rows.jsonl", 1, "a", cache_id="kvs_1", attempts=1)
FAILED = Row("rows.jsonl", 2, "b", error=RowError("worker_crashed", "why"), attempts=3)


@pytest.fixture(autouse=True)
def _still_ready() -> None:
    """In place of the shared service's check: there is no service here."""


@contextmanager
def running(store: Store) -> Iterator[None]:
    """A runner with one place works on the batches of a store. No row of them needs an engine."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    runner = BatchRunner(store, {}, Settings(max_running_batches=1), Metrics(), {})
    loop.call_soon_threadsafe(runner.start)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def begun(
    store: Store,
    file_id: str,
    tenant: str = "me",
    *,
    lasts_s: float = 3600.0,
    priority: int = 0,
    endpoint: str = "/v1/caches",
) -> BatchRecord:
    body = {"input_file_id": file_id, "endpoint": endpoint, "window": None, "output_keep_s": 3600.0}
    body["priority"] = priority
    now = time.time()
    return store.batches.create(tenant, body, now=now, expires_at=now + lasts_s)


def finalizing(
    store: Store, results: Sequence[Row] = (DONE, FAILED), file_id: str = "file_1", endpoint: str = "/v1/caches"
) -> BatchRecord:
    """A batch of which all rows have ended, and whose files nobody has written."""
    batch = begun(store, file_id, endpoint=endpoint)
    term = store.batches.table.take(batch.id, lease_s=0.0)
    assert term is not None
    store.batches.table.append(batch.id, term, [pydantic_core.to_json(result.to_dict()) for result in results])
    # As if it had waited before: what it waits for next takes longer than the test.
    return changed(store, batch, "finalizing", counts=RequestCounts(total=len(results)), progress={"pauses": 5})


def changed(store: Store, batch: BatchRecord, state: Any, **fields: Any) -> BatchRecord:
    """Enter a state, which ends a pause."""
    return store.batches.update(
        batch.id, lambda record: record.entered(state, time.time(), **fields), tenant=batch.tenant
    )


def tried(store: Store, batch: BatchRecord, state: Any) -> BatchRecord:
    """Have it go on in a state, until it waits."""
    began = changed(store, batch, state).times[state]
    return awaited(store, batch, lambda record: record.progress.get("waits_from", 0.0) > began)


def awaited(store: Store, batch: BatchRecord, until: Callable[[BatchRecord], bool]) -> BatchRecord:
    end = time.monotonic() + 60
    while not until(record := store.batches.get(batch.id, tenant=batch.tenant)):
        assert time.monotonic() < end, record
        time.sleep(0.02)
    return record


def ended(store: Store, batch: BatchRecord) -> BatchRecord:
    return awaited(store, batch, lambda record: record.ended)


def kept(store: Store, folder: Path, data: bytes, tenant: str = "me") -> FileRecord:
    path = folder / secrets.token_hex(4)
    path.write_bytes(data)
    with path.open("rb") as file:
        return store.files.create(file, tenant=tenant, filename="rows.jsonl", purpose="batch")


def results_of(store: Store) -> list[str]:
    """The files that batches left, newest first, with those that no batch names."""
    return [file.id for file in store.files.list(tenant="me", limit=100, purpose="batch_output")[0]]


def lines(store: Store, file_id: str | None) -> list[Any]:
    assert file_id is not None
    with store.files.open(file_id, tenant="me") as opened:
        return [json.loads(line) for line in opened.file]


def bit_flipped(folder: Path) -> Iterator[tuple[Store, Callable[[FileRecord], object]]]:
    def damage(file: FileRecord) -> None:
        path = folder / "home" / "blobs" / f"{file.body.name}.kvb"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    with DiskStore.open(folder / "home", rules=Rules(keyring=Keyring([secrets.token_bytes(32)]))) as store:
        yield store, damage


def chunk_lost(folder: Path) -> Iterator[tuple[Store, Callable[[FileRecord], object]]]:
    with ValkeyServer(folder / "valkey") as server, RedisStore.open(server.url + PATIENT) as store:
        yield store, lambda file: server.client().delete(*server.client().keys(f"*{file.body.name}}}:1"))


@pytest.mark.parametrize("damaged_home", [bit_flipped, chunk_lost])
def test_an_input_that_is_damaged_ends_its_batch(damaged_home: Any, tmp_path: Path) -> None:
    """Behind its first part, which alone is looked at when it is opened."""
    with contextmanager(damaged_home)(tmp_path) as (store, damage):
        file = kept(store, tmp_path, b"{}\n" * 2_000_000)
        damage(file)
        late, batch = begun(store, file.id, lasts_s=-1.0), begun(store, file.id)
        with running(store):
            failed, expired = ended(store, batch), ended(store, late)
        assert [(problem.code, problem.param) for problem in failed.problems] == [("file_damaged", "input_file_id")]
        assert (failed.state, lines(store, failed.output_file_id)) == ("failed", [])
        assert (expired.state, expired.problems) == ("expired", ()), "nobody looked through it any more"


def test_a_free_place_goes_to_the_batch_of_the_highest_priority_of_its_tenant(tmp_path: Path) -> None:
    """There is one place. What is another tenant's takes its turn whatever its priority."""
    with DiskStore.open(tmp_path / "home") as store:
        file, theirs = (kept(store, tmp_path, b"", tenant) for tenant in ("me", "other"))
        mine = {priority: begun(store, file.id, priority=priority) for priority in (*range(-9, 0), 0, 3, 10)}
        other = begun(store, theirs.id, "other", priority=-10)
        with running(store):
            times = {priority: ended(store, batch).times["failed"] for priority, batch in mine.items()}
            others = ended(store, other).times["failed"]
        assert sorted(times, key=times.__getitem__) == sorted(mine, reverse=True)
        assert others < times[-9]


def test_results_are_written_where_the_quota_of_their_tenant_is_used_up(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "home", rules=Rules(quota=Quota(max_bytes=1000))) as store:
        kept(store, tmp_path, bytes(1000))
        batch = finalizing(store)
        with running(store):
            record = ended(store, batch)
        assert record.state == "completed"
        assert [row["cache_id"] for row in lines(store, record.output_file_id)] == ["kvs_1"]
        assert [row["line"] for row in lines(store, record.error_file_id)] == [2]


def test_results_that_find_no_room_keep_no_place_and_leave_no_file_behind(tmp_path: Path) -> None:
    """There is room for the one file and not for the other, each time that it is tried."""
    many = [Row("rows.jsonl", 3 + n, error=FAILED.error, attempts=3) for n in range(60)]
    with DiskStore.open(tmp_path / "home", rules=Rules(quota=Quota(budget_bytes=100_000))) as store:
        filler = kept(store, tmp_path, bytes(98_000), "other")
        batch = finalizing(store, [DONE, *many])
        other = begun(store, kept(store, tmp_path, b"", "other").id, "other")
        with running(store):
            waits = awaited(store, batch, lambda record: "waits_from" in record.progress)
            assert "budget" in rest_reason(waits, time.time())
            assert ended(store, other).problems[0].code == "empty_file"
            assert (results_of(store), waits.progress["pause_s"]) == ([waits.output_file_id], 160.0)
            for state in ("finalizing", "cancelling"):
                waits = tried(store, batch, state)
                assert (waits.state, results_of(store)) == (state, [waits.output_file_id])
            store.files.delete(filler.id, tenant="other")
            changed(store, batch, "finalizing")
            record = ended(store, batch)
        assert (record.state, record.counts.completed, record.counts.failed) == ("completed", 1, 60)
        assert results_of(store) == [record.error_file_id, record.output_file_id]
        assert len(lines(store, record.error_file_id)) == 60
        assert store.check() == []


def test_a_reason_to_fail_is_known_to_whoever_writes_the_results_later(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "home", rules=Rules(quota=Quota(budget_bytes=100))) as store:
        batch = begun(store, kept(store, tmp_path, b"").id)
        term = store.batches.table.take(batch.id, lease_s=0.0)
        assert term is not None
        store.batches.table.append(batch.id, term, [pydantic_core.to_json(DONE.to_dict())])  # of an earlier attempt
        with running(store):
            waits = awaited(store, batch, lambda record: "waits_from" in record.progress)
        assert waits.state == "finalizing"
    with DiskStore.open(tmp_path / "home") as store:
        changed(store, batch, "finalizing")
        with running(store):
            record = ended(store, batch)
        assert (record.state, record.problems[0].code) == ("failed", "empty_file")


@pytest.mark.parametrize(("state", "ends"), [("finalizing", "expired"), ("cancelling", "cancelled")])
@pytest.mark.parametrize("endpoint", ["/v1/caches", "/v1/chat/completions"])
def test_rows_that_were_left_undone_are_in_the_error_file(state: str, ends: str, endpoint: str, tmp_path: Path) -> None:
    """Of five lines two have ended. Without the input, which its tenant may delete, nobody knows the others."""
    data = "\n".join([*(json.dumps({"custom_id": name, "document": "x"}) for name in "abcd"), "no JSON"]).encode()
    with DiskStore.open(tmp_path / "home") as store:
        file, gone = kept(store, tmp_path, data), kept(store, tmp_path, data)
        store.files.delete(gone.id, tenant="me")
        for input_id, undone in ((file.id, ["c", "d", None]), (gone.id, [])):
            batch = finalizing(store, [DONE, FAILED], input_id, endpoint)
            changed(store, batch, state, counts=RequestCounts(total=5))
            with running(store):
                record = ended(store, batch)
            assert (record.state, record.counts) == (ends, RequestCounts(total=5, completed=1, failed=1))
            failed, *others = lines(store, record.error_file_id)
            assert (failed["custom_id"], [line["custom_id"] for line in others]) == ("b", undone)
            assert all(line["error"].keys() == {"code", "message"} for line in others)
            assert {line["error"]["code"] for line in others} <= {f"batch_{ends}"}
            if endpoint == "/v1/chat/completions":
                assert all(line["response"] is None for line in others)


def test_who_has_lost_the_batch_leaves_no_file_behind(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "home") as store:
        batch = finalizing(store)
        mine, theirs = (store.batches.table.take(batch.id, lease_s=0.0) for _ in range(2))
        assert mine is not None
        assert theirs is not None
        write_results(store, batch, theirs)
        written = store.batches.get(batch.id, tenant="me")
        with pytest.raises(StateConflict):
            write_results(store, batch, mine)
        assert results_of(store) == [written.error_file_id, written.output_file_id]
        assert store.batches.get(batch.id, tenant="me") == written


def test_a_bug_in_renewing_a_lease_is_logged_and_keeps_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(BatchWork):
        async def _advance(self) -> None:
            await asyncio.sleep(60)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    with DiskStore.open(tmp_path / "home") as store:
        batch = begun(store, "file_1")
        term = store.batches.table.take(batch.id, lease_s=60.0)
        assert term is not None
        monkeypatch.setattr(batch_work, "LEASE_S", 0.01)
        monkeypatch.setattr(store.batches.table, "renew", broken)
        with capture_logs() as said:
            asyncio.run(
                Waiting(batch, term, store, {}, Settings(), Metrics(), BatchAsker({}), lambda: False, lambda: "").run()
            )
        assert [line["event"] for line in said] == ["a batch failed unexpectedly"]
        assert store.batches.table.take(batch.id, lease_s=1.0) is None, "another process would take it up at once"


def test_each_retry_gives_a_batch_one_completion_window() -> None:
    body = {"completion_window": "24h"}
    times: dict[Any, float] = {"failed": 0.0}
    record = BatchRecord(id="b", tenant="me", body=body, state="failed", times=times, created_at=0.0, expires_at=9.0)
    for _ in range(2):
        record = retried(record, now=time.time()).entered("failed", time.time())
        assert record.expires_at == pytest.approx(time.time() + 86400, abs=10)
