"""Runs whose shelf is in Redis while Redis is dead, full, or at a tenant's quota."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvshelf.corpus.run.progress import RunState, Summary
from kvshelf.corpus.run.run import BatchRun
from kvshelf.store.url import StoreConfig
from tests.amounts import amount
from tests.corpus.conftest import RunCluster
from tests.corpus.hostile import SLOW, Remembered, document, vulnerable
from tests.corpus.runs import begun, ended, options, require_order, until, until_waiting
from tests.store.redis.servers import PATIENT, ValkeyServer

pytestmark = pytest.mark.timeout(amount(600, 3600))

MEMORY = "512mb"


@pytest.fixture(scope="module")
def count(soak: bool) -> int:
    return 200 if soak else 12


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """It keeps what it has acknowledged."""
    kept = {"appendonly": "yes", "appendfsync": "always"}
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), maxmemory=MEMORY, **kept) as server:
        yield server


@pytest.fixture(scope="module")
def afar(run_cluster: RunCluster, valkey: ValkeyServer, tiny_folder: Path, count: int) -> Iterator[RunCluster]:
    """Another replica on the Ray of `run_cluster`, whose shelf is in Redis. A tenant has room for twice `count` caches
    there: what was being written when Redis died is held for its writer for a minute."""
    from kvshelf.workers.cluster import deployment

    del run_cluster
    store = StoreConfig(valkey.url + PATIENT, tenant_max_caches=2 * count)
    config = deployment.ReplicaConfig(str(tiny_folder), store, threads=1, begin=vulnerable)
    engines = deployment.deploy([config])
    deployment.await_running(engines.values(), deadline_s=200)
    yield RunCluster(engines, store)
    deployment.undeploy(engines.values())


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Some of them are long enough for something to happen meanwhile, in a short run also the last ones."""
    return [document(first + n, kind=None if n % (2 if count < 100 else 20) else SLOW) for n in range(count)]


def require_all(run_cluster: RunCluster, summary: Summary, journal: Remembered, count: int, tenant: str) -> None:
    """Every row ends once, and an outage counts as no row's attempt."""
    assert (summary.state, summary.done, summary.failed) == (RunState.COMPLETED, count, 0)
    assert len(journal.results) == journal.appended == count
    assert {result.attempts for result in journal.results.values()} == {1}
    require_order(run_cluster, tenant)
    with run_cluster.store.open() as shelf:
        ids = {result.cache_id for result in journal.results.values()}
        assert ids == {manifest.id for manifest in shelf.list(tenant=tenant, limit=1000).data}
        for cache_id in ids:
            shelf.get(cache_id or "", tenant=tenant)


@contextmanager
def dead(server: ValkeyServer) -> Iterator[str]:
    """kill -9, and a restart with all acknowledged writes."""
    server.kill()
    yield "cannot be reached"
    server.start()


@contextmanager
def full(server: ValkeyServer) -> Iterator[str]:
    client = server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
    yield "its memory is full"
    client.config_set("maxmemory", MEMORY)


def outlast(run: BatchRun, trouble: AbstractContextManager[str], *, begins_at: int) -> None:
    """Cause trouble after so many rows, and return when the run reports it."""
    until(lambda: run.progress().done >= begins_at)
    with trouble as reason:
        until_waiting(run, reason)
        time.sleep(1)
    until(lambda: run.progress().state is not RunState.WAITING)


@pytest.mark.faults
def test_a_run_waits_for_a_redis_that_is_dead_or_full_and_loses_nothing(
    afar: RunCluster, valkey: ValkeyServer, count: int, soak: bool
) -> None:
    journal = Remembered()
    run = begun(afar, rows(50_000, count), journal, options(tenant="waits"))
    for number, trouble in enumerate([dead, full] * (8 if soak else 1), 1):
        outlast(run, trouble(valkey), begins_at=2 * number)
    require_all(afar, ended(run), journal, count, "waits")


@pytest.mark.faults
def test_a_tenant_s_room_is_used_up_until_something_is_deleted(afar: RunCluster, count: int, soak: bool) -> None:
    if not soak:
        pytest.skip("test_caller.py has it without Ray; this takes 15 seconds")
    room = 2 * count
    journal = Remembered()
    run = begun(afar, [document(70_000 + n) for n in range(room + 3)], journal, options(tenant="cramped"))
    until(lambda: run.progress().done == room)
    until_waiting(run, f"{room} caches")
    with afar.store.open() as shelf:
        assert list(shelf.check()) == []
        for result in list(journal.results.values())[:3]:
            shelf.delete(result.cache_id or "", tenant="cramped")
    summary = ended(run)
    assert (summary.state, summary.done, summary.failed) == (RunState.COMPLETED, room + 3, 0)
    assert len(journal.results) == journal.appended == room + 3
    require_order(afar, "cramped")
