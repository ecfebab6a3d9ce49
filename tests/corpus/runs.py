"""Helpers that start, await and inspect runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from kvshelf.corpus.row import Row
from kvshelf.corpus.run.progress import RunOptions, RunState, Summary
from kvshelf.corpus.run.run import BatchRun
from kvshelf.store.base import Store
from tests.conftest import _descendants, _title
from tests.corpus.conftest import RunCluster
from tests.corpus.hostile import Remembered, shards


def options(*, tenant: str = "me", **fields: Any) -> RunOptions:
    """Options of a new batch."""
    return RunOptions(tenant, f"batch_{time.time_ns()}", **fields)


def begun(run_cluster: RunCluster, lines: list[Any], journal: Remembered, how: RunOptions, **source: Any) -> BatchRun:
    run = BatchRun(shards(lines, **source), run_cluster.engines, run_cluster.store, journal, how)
    run.start()
    return run


def ended(run: BatchRun) -> Summary:
    summary = run.wait(7000)
    assert summary is not None
    return summary


def whole(run_cluster: RunCluster, lines: list[Any], how: RunOptions, **source: Any) -> tuple[Summary, Remembered]:
    journal = Remembered()
    return ended(begun(run_cluster, lines, journal, how, **source)), journal


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def until_waiting(run: BatchRun, reason: str) -> None:
    """Until one snapshot has both the state waiting and the reason; the next snapshot may differ."""
    until(lambda: (now := run.progress()).state is RunState.WAITING and reason in now.reason)


def until_at_rest(shelf: Store, tenant: str, seconds: float = 3) -> None:
    """Until no row of a tenant has been at work for `seconds`, in which callers would have begun the next row."""
    since = time.monotonic()

    def at_rest() -> bool:
        nonlocal since
        if any(record.tenant == tenant for record in shelf.requests.unfinished()):
            since = time.monotonic()
        return time.monotonic() - since > seconds

    until(at_rest)


def processes(title: str) -> list[int]:
    return [pid for pid in _descendants(os.getpid()) if title in _title(pid)]


def digests(run_cluster: RunCluster, results: list[Row]) -> dict[str, tuple[str, ...]]:
    """The segment digests of the results' caches by cache id; a tenth of the caches is read."""
    with run_cluster.store.open() as shelf:
        ids = [result.cache_id for result in results if result.cache_id]
        for cache_id in ids[:: max(1, len(ids) // 10)]:
            shelf.get(cache_id, tenant="me")
        return {cache_id: shelf.stat(cache_id, tenant="me").segment_digests for cache_id in ids}


def require_order(run_cluster: RunCluster, tenant: str = "me") -> None:
    """The shelf has no damage, and the job table no unfinished request."""
    with run_cluster.store.open() as shelf:
        assert list(shelf.check()) == []
        assert [record for record in shelf.requests.unfinished() if record.tenant == tenant] == []
