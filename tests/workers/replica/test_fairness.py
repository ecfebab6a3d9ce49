"""Tenants take turns on threads, for room and for the passes of a model: many of one are one wait for the next."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from itertools import pairwise

import pytest

from kvshelf.workers.replica.calls import Computing, ReplicaThreads, Threads, tenant_at_work
from kvshelf.workers.replica.fair_queue import FairCondition, LoopTurns
from kvshelf.workers.replica.queues import Passing, Queues, SchedulerLimits
from kvshelf.workers.replica.ticket import Ticket


@contextmanager
def working_for(tenant: str) -> Iterator[None]:
    token = tenant_at_work.set(tenant)
    try:
        yield
    finally:
        tenant_at_work.reset(token)


def test_a_thread_does_the_work_of_each_tenant_in_turn() -> None:
    done: list[str] = []
    go = threading.Event()
    with Threads(1) as threads:
        threads.submit(go.wait)
        for tenant, count in (("many", 20), ("few", 2), ("one", 1)):
            with working_for(tenant):
                for _ in range(count):
                    threads.submit(done.append, tenant)
        go.set()
    assert done == ["many", "few", "one", "many", "few", *["many"] * 18]


def test_one_tenant_leaves_threads_to_the_next() -> None:
    """However long its work is: the next tenant's does not wait for the end of any of it."""
    go = threading.Event()
    with Threads(4) as threads:
        with working_for("many"):
            begun = [threading.Event() for _ in range(9)]
            waiting = [threads.submit(lambda one: one.set() or go.wait(60), event) for event in begun]
        for event in begun[:2]:
            assert event.wait(60)
        with working_for("next"):
            assert threads.submit(lambda: tenant_at_work.get()).result(60) == ""
        assert [event.is_set() for event in begun] == [True] * 2 + [False] * 7
        go.set()
        assert all(each.result(60) for each in waiting)


def test_what_computes_leaves_processors_to_the_others_and_to_the_model() -> None:
    """Four threads that tokenize on two processors made another tenant's question wait for five of their texts."""

    async def work() -> None:
        go, begun = threading.Event(), list[str]()
        most = max(1, len(os.sched_getaffinity(0)) // 2)

        def compute(tenant: str) -> None:
            begun.append(tenant)
            go.wait(60)

        with ReplicaThreads() as threads:
            with working_for("many"):
                many = [asyncio.ensure_future(threads.compute(compute, "many")) for _ in range(most + 5)]
                await asyncio.sleep(0.2)
                assert begun == ["many"] * most
                assert await threads.run(lambda: "a store") == "a store"
            with working_for("next"):
                following = asyncio.ensure_future(threads.compute(compute, "next"))
                await asyncio.sleep(0.2)
            assert begun == ["many"] * most + ["next"]
            go.set()
            await asyncio.gather(*many, following)

    asyncio.run(work())


def test_a_thread_that_computes_beside_a_loop_pauses_as_long_as_it_has_computed() -> None:
    """Else many bodies of one tenant would hold the interpreter while another's request goes through the loop."""
    spans: list[tuple[float, float]] = []

    def compute() -> None:
        began, until = time.monotonic(), time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        spans.append((began, time.monotonic()))

    with Computing() as threads, working_for("many"):
        for each in [threads.submit(compute) for _ in range(4)]:
            each.result(60)
    pauses = [after[0] - before[1] for before, after in pairwise(spans)]
    assert min(pauses) >= 0.05, "one at a time, and as long a pause"


def test_a_thread_that_waits_beside_a_loop_does_not_pause() -> None:
    with Computing() as threads, working_for("many"):
        began = time.monotonic()
        for each in [threads.submit(time.sleep, 0.05) for _ in range(8)]:
            each.result(60)
        assert time.monotonic() - began < 0.75


async def _begun_in_turn() -> list[str]:
    """Requests that each take the loop for some time, and one more that arrives while the first one does."""
    turns, begun = LoopTurns(), list[str]()

    async def request(tenant: str) -> None:
        await turns.turn(tenant)
        begun.append(tenant)
        if len(begun) == 1:
            tasks.append(asyncio.ensure_future(request("next")))

    tasks = [asyncio.ensure_future(request("many")) for _ in range(20)]
    gone = asyncio.ensure_future(request("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    while len(begun) < 21:
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    begun.append("again")
    await turns.turn("next")
    return begun


def test_requests_begin_on_a_loop_in_turns_of_tenants() -> None:
    begun = asyncio.run(asyncio.wait_for(_begun_in_turn(), 60))
    assert begun.index("next") <= 3, "behind 20 of another tenant"
    assert begun.count("many") == 20


def test_work_that_nobody_waits_for_is_not_begun() -> None:
    go, done = threading.Event(), []
    with Threads(1) as threads:
        held = threads.submit(go.wait)
        left, kept = threads.submit(done.append, "left"), threads.submit(done.append, "kept")
        assert left.cancel()
        go.set()
        kept.result(60)
        assert (held.result(), done) == (True, ["kept"])
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 / 0).result(60)


def test_what_waits_when_threads_shut_down_is_cancelled() -> None:
    go = threading.Event()
    threads = Threads(1)
    held, waits = threads.submit(go.wait), threads.submit(print)
    threads.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert held.result(60)
    with pytest.raises(CancelledError):
        waits.result(60)


async def _woken() -> list[str]:
    condition, woken = FairCondition(), []

    async def wait(tenant: str) -> None:
        async with condition:
            await condition.wait(tenant)
            woken.append(tenant)

    tasks = [asyncio.ensure_future(wait(tenant)) for tenant in [*["many"] * 5, "next"]]
    gone = asyncio.ensure_future(wait("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    async with condition:
        condition.notify_all()
    await asyncio.gather(*tasks)
    return woken


def test_those_who_wait_for_room_are_woken_in_turn() -> None:
    assert asyncio.run(_woken()) == ["many", "next", *["many"] * 4]


def test_a_step_waits_for_one_pass_of_each_tenant() -> None:
    queues = Queues("model", SchedulerLimits())
    queues.accepting = True
    for tenant in [*["many"] * 60, "next"]:
        queues.add_pass(Passing(Ticket(None), lambda: None, tenant))
    assert [work.tenant for work in queues.take_passes()] == ["many", "next"]
    assert queues.has_passes
    assert [work.tenant for work in queues.take_passes()] == ["many"]
