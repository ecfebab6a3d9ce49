"""The order in which caches leave memory, by its formulas, and the memory itself under pins, hints and pressure."""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheNotFound, InvalidRequest
from kvshelf.store import eviction
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Threads
from kvshelf.workers.replica.memory.residents import ResidentLimits, Residents
from kvshelf.workers.replica.memory.retention import LEAST_HINT_S, MOST_LATE_S, Hint, Key, Retention, by_gdsf
from kvshelf.workers.replica.memory.tools import (
    ENOUGH,
    KEPT,
    LONGEST_S,
    PROGRAMS,
    TOOLS,
    Tools,
    best_stay_s,
    turns_left,
)
from tests.amounts import amount


def key(number: int) -> Key:
    return "tenant", f"kvs_{number}"


def hint(retention: Retention, number: int, next_use_s: float | None, now: float) -> None:
    retention.hint(Hint(key(number)[1], next_use_s), "tenant", now)


def order(retention: Retention, count: int, now: float) -> list[int]:
    return sorted(range(count), key=lambda number: retention.order(key(number), now))


# The order

SECONDS = st.floats(0, 1e5, allow_nan=False)


@given(st.permutations(range(6)))
def test_without_hints_and_tools_the_least_recently_used_leaves_first(uses: list[int]) -> None:
    retention = Retention()
    for at, number in enumerate([*range(6), *uses]):
        retention.used(key(number), at, cost_s=1.0 + number, nbytes=10**6 * (7 - number))
    assert order(retention, 6, 100.0) == uses


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_without_hints_and_tools_gdsf_is_the_formula(steps: list[tuple[int, bool]]) -> None:
    """Against a copy of the paper's own bookkeeping: clock, uses, cost and size."""
    retention, clock = Retention(by_gdsf), 0.0
    uses: dict[int, int] = {}
    priority: dict[int, float] = {}
    for at, (number, evict) in enumerate(steps):
        if evict and priority:
            first = min(priority, key=lambda held: priority[held])
            assert min(priority, key=lambda held: retention.order(key(held), at)) == first
            retention.left(key(first), at)
            clock = max(clock, priority.pop(first))
            del uses[first]
        else:
            uses[number] = uses.get(number, 0) + 1
            cost_s, nbytes = 0.1 * (1 + number), 10**6 * (1 + number * number)
            priority[number] = clock + uses[number] * cost_s / (nbytes / 1e6)
            retention.used(key(number), at, cost_s=cost_s, nbytes=nbytes)


@given(st.lists(st.integers(0, 10**5), min_size=2, max_size=8, unique=True))
def test_the_farthest_next_use_leaves_first_and_after_all_without_a_hint(waits: list[int]) -> None:
    retention = Retention()
    for number in range(len(waits) + 2):
        retention.used(key(number), float(number), cost_s=1.0, nbytes=1)
    for number, wait_s in enumerate(waits):
        hint(retention, number, wait_s, 100.0)
    farthest = sorted(range(len(waits)), key=lambda number: -waits[number])
    assert order(retention, len(waits) + 2, 100.0) == [len(waits), len(waits) + 1, *farthest]
    assert [found for _, found in retention.hinted(100.0)] == [key(number) for number in reversed(farthest)]


@given(SECONDS)
def test_a_hint_counts_down_and_is_void_when_it_is_long_overdue(wait_s: float) -> None:
    retention = Retention()
    for number in range(3):
        retention.used(key(number), float(number), cost_s=1.0, nbytes=1)
    hint(retention, 0, wait_s, 10.0)
    assert retention.wait_s(key(0), 10.0 + wait_s / 2) == pytest.approx(wait_s / 2)
    void = 10.0 + wait_s + min(max(LEAST_HINT_S, wait_s), MOST_LATE_S)
    assert retention.wait_s(key(0), void) == 0.0
    assert order(retention, 3, void) == [1, 2, 0]
    assert math.isinf(retention.wait_s(key(0), void * 1.001))
    assert order(retention, 3, void * 1.001) == [0, 1, 2], "the order of past uses is back"
    assert retention.hinted(void * 1.001) == []


def test_a_hint_ends_with_its_question_with_null_and_with_its_cache() -> None:
    ends: list[Callable[[Retention], None]] = [
        lambda retention: retention.used(key(0), 2.0, cost_s=1.0, nbytes=1),
        lambda retention: hint(retention, 0, None, 2.0),
        lambda retention: retention.forget(key(0)),
    ]
    for end in ends:
        retention = Retention()
        hint(retention, 0, 5.0, 1.0)
        end(retention)
        assert retention.hinted(2.0) == []
    retention = Retention()
    retention.used(key(0), 0.0, cost_s=1.0, nbytes=1)
    hint(retention, 0, 5.0, 1.0)
    retention.left(key(0), 2.0)
    assert retention.hinted(2.0) == [(4.0, key(0))], "what was evicted is still wanted"


def test_pins_leave_last_the_latest_end_first_and_end_in_time() -> None:
    retention = Retention()
    for number in range(4):
        retention.used(key(number), float(number), cost_s=1.0, nbytes=1)
    hint(retention, 3, 0.0, 10.0)
    retention.pin(key(0), 20.0)
    retention.pin(key(1), 15.0)
    assert order(retention, 4, 10.0) == [2, 3, 0, 1]
    assert order(retention, 4, 16.0) == [1, 2, 3, 0], "a pin that has ended counts no more"
    assert retention.left(key(0), 16.0), "it was released early"
    assert not retention.left(key(1), 16.0)
    retention.used(key(0), 17.0, cost_s=1.0, nbytes=1)
    assert not retention.pinned(key(0), 17.5), "its question has come"


@given(st.lists(st.none() | SECONDS, min_size=2, max_size=8), st.sets(st.integers(0, 7)))
def test_nothing_nearer_and_nothing_pinned_leaves_for_a_cache_that_is_read_ahead(
    waits: list[float | None], pinned: set[int]
) -> None:
    retention = Retention()
    for number, wait_s in enumerate(waits):
        hint(retention, number, wait_s, 0.0)
    for number in pinned:
        retention.pin(key(number), 1.0)
    wanted, held = 0, range(1, len(waits))
    until = [math.inf if wait_s is None else wait_s for wait_s in waits]
    for number in held:
        may_leave = number not in pinned and until[number] > until[wanted]
        assert retention.yields(key(number), key(wanted), 0.0) == may_leave
        leaving = retention.leaving_for(key(wanted), {key(number): 1}, 1, 0.0)
        assert leaving == ([key(number)] if may_leave else None)
    ordered = sorted(held, key=lambda number: retention.order(key(number), 0.0))
    yields = [retention.yields(key(number), key(wanted), 0.0) for number in ordered]
    assert yields == sorted(yields, reverse=True), "what may leave comes first"


# The time that a tool is waited for


def test_a_constant_duration_is_waited_for_if_reading_takes_longer() -> None:
    assert best_stay_s([2.0] * 200, 2.1) == 2.0
    assert best_stay_s([2.0] * 200, 1.9) == 0.0
    assert best_stay_s([2.0] * 200, 0.0) == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0, 200))
def test_the_stay_is_the_best_of_all_times(runs: list[float], gain_s: float) -> None:
    def worth(tau: float) -> float:
        return sum(run <= tau for run in runs) / len(runs) * gain_s - tau

    stay_s = best_stay_s(runs, gain_s)
    for tau in (0.0, *runs, *np.linspace(0, 120, 50)):
        assert worth(stay_s) >= worth(float(tau)) - 1e-9


def run(tools: Tools, tool: str, seconds: float, *, at: float, tenant: str = "a", cache_id: str = "kvs") -> None:
    tools.note_answer(tenant, cache_id, tool, at)
    tools.note_question(tenant, cache_id, at + seconds)


def test_a_tool_s_own_runs_count_from_a_hundred_on_then_the_tenant_s_then_an_exponential() -> None:
    tools = Tools()
    assert tools.stay_s("a", "search", wait_s=0.0, reload_s=0.0) == 0.0
    assert tools.stay_s("a", "search", wait_s=1.0, reload_s=2.0) == pytest.approx(math.log(3.0))
    for number in range(ENOUGH - 1):
        run(tools, "slow", 5.0, at=10.0 * number)
    assert tools.stay_s("a", "slow", wait_s=0.0, reload_s=9.0) == pytest.approx(math.log(9.0))
    run(tools, "search", 1.0, at=5000.0)
    assert tools.stay_s("a", "search", wait_s=0.0, reload_s=900.0) == 5.0, "of all tools of the tenant"
    assert tools.stay_s("b", "search", wait_s=0.0, reload_s=900.0) == pytest.approx(math.log(900.0)), "of nobody else"
    for number in range(ENOUGH):
        run(tools, "search", 1.0, at=6000.0 + 10.0 * number)
    assert tools.stay_s("a", "search", wait_s=0.0, reload_s=900.0) == 1.0
    assert tools.stay_s("a", "search", wait_s=0.0, reload_s=0.5) == 0.0
    assert tools.stay_s("a", "search", wait_s=2.0, reload_s=0.0) == 1.0, "waiting for memory counts as reading does"


def test_runs_are_counted_from_an_answer_to_the_next_question_of_the_tenant_on_the_cache() -> None:
    tools = Tools()
    tools.note_answer("a", "kvs", "search", 10.0)
    tools.note_question("b", "kvs", 11.0)
    tools.note_question("a", "other", 12.0)
    tools.note_question("a", "kvs", 13.0)
    tools.note_question("a", "kvs", 15.0)  # the run has ended
    tools.note_answer("a", "kvs", "search", 20.0)
    tools.note_question("a", "kvs", 20.0 + 2 * LONGEST_S)  # it never returned
    assert {tool: list(runs) for tool, runs in tools.runs["a"].items()} == {"search": [3.0]}
    assert list(tools.all_runs["a"]) == [3.0]


def test_what_is_remembered_is_bounded() -> None:
    tools = Tools()
    for number in range(2 * TOOLS):
        run(tools, f"tool-{number}", 1.0, at=10.0 * number)
    for number in range(2 * KEPT):
        run(tools, "search", float(number % 7), at=2e4 + 10.0 * number)
    assert len(tools.runs["a"]) == TOOLS
    assert len(tools.runs["a"]["search"]) == len(tools.all_runs["a"]) == KEPT
    for number in range(50):
        tools.note_answer("a", f"kvs-{number}", "search", 1e6 + number)
    tools.note_question("a", "kvs", 1e6 + 2 * LONGEST_S)
    assert len(tools.programs) == 0, "programs that went away are forgotten"
    for number in range(2 * PROGRAMS):
        tools.note_answer("a", "kvs", "search", 2e6, f"program-{number}")
    tools.note_answer("b", "kvs", "search", 2e6, "program-0")
    assert {tenant: len(programs) for tenant, programs in tools.programs.items()} == {"a": PROGRAMS, "b": 1}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_eta_is_the_correlation_of_turns_done_and_turns_left(lengths: list[int]) -> None:
    pairs = [(turn, length - turn) for length in lengths for turn in range(1, length + 1)]
    done, left = zip(*pairs, strict=True)
    if len(set(done)) == 1 or len(set(left)) == 1:
        assert turns_left(lengths) == 1.0
    else:
        assert turns_left(lengths) == pytest.approx(max(0.0, -statistics.correlation(done, left)), abs=1e-9)


def test_eta_counts_once_a_hundred_programs_have_ended() -> None:
    tools = Tools()
    for number in range(ENOUGH):
        assert tools.eta == 1.0
        for _ in range(number % 3 and 6):
            run(tools, "search", 1.0, at=100.0 * number)
        tools.note_answer("a", "kvs", None, 100.0 * number + 50)
    lengths = [7 for number in range(ENOUGH) if number % 3]
    assert list(tools.lengths) == lengths, "an answer that neither follows nor calls a tool is no program"


# The memory

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def shelf(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[DiskStore, list[str]]:
    store = DiskStore.open(tmp_path_factory.mktemp("home") / "shelf")
    made = [engine.compress(list(range(10 + i, 200 + i)), policy="full") for i in range(6)]
    return store, [store.put(cache).id for cache in made]


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    with Threads(4) as pool:
        yield pool


def of(shelf: DiskStore, engine: Engine, threads: Threads, fits: float, **limits: float) -> Residents:
    """A memory that holds `fits` of the caches, which are of equal size."""
    with shelf.open_cache(shelf.list().data[0].id) as one:
        nbytes = one.attached_bytes
    limited = ResidentLimits(max_bytes=int(fits * nbytes), **limits)
    return Residents(shelf, engine.attach, engine.attachments.of_part, limited, threads)


async def ask(residents: Residents, cache_id: str, tool: str | None = None) -> bool:
    async with residents.using(cache_id, "default", tool=tool) as (resident, there):
        await asyncio.to_thread(resident.document.prefixes, resident.document.num_layers - 1)
        return there


async def held(residents: Residents, cache_id: str) -> None:
    async with asyncio.timeout(20):
        while ("default", cache_id) not in residents.caches:
            await asyncio.sleep(0.01)


async def test_a_cache_with_a_hint_is_in_memory_before_its_question(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    reading = asyncio.ensure_future(residents.read_ahead_forever())
    residents.hint(Hint(ids[0], 60.0), "default")  # far, but there is room
    await held(residents, ids[0])
    assert await ask(residents, ids[0])
    assert residents.take_counts() == {"read_ahead": 1, "read_ahead_used": 1}
    for cache_id in ids[1:3]:
        await ask(residents, cache_id)
    residents.hint(Hint(ids[3], 0.0), "default")  # the least recently used makes room
    await held(residents, ids[3])
    assert ("default", ids[1]) not in residents.caches
    reading.cancel()


async def test_reading_ahead_evicts_nothing_that_is_used_before_or_pinned_and_nothing_long_before(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5, ahead_s=5.0)
    reading = asyncio.ensure_future(residents.read_ahead_forever())
    near, pinned, wanted, other = ids[:4]
    residents.retention.pin(("default", pinned), math.inf)
    for cache_id in (near, pinned):
        await ask(residents, cache_id)
    residents.retention.pin(("default", pinned), math.inf)
    residents.hint(Hint(near, 3.0), "default")
    residents.hint(Hint(wanted, 4.0), "default")
    await asyncio.sleep(0.3)
    assert {cache_id for _, cache_id in residents.caches} == {near, pinned}
    residents.hint(Hint(near, None), "default")
    await held(residents, wanted)
    assert {cache_id for _, cache_id in residents.caches} == {wanted, pinned}
    residents.hint(Hint(wanted, 100.0), "default")
    residents.hint(Hint(other, 50.0), "default")  # nearer, but nobody makes room so early
    await asyncio.sleep(0.3)
    assert ("default", other) not in residents.caches
    reading.cancel()


async def test_what_a_waiting_question_asks_leaves_for_no_cache_that_is_read_ahead(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    for cache_id in ids[:2]:
        await ask(residents, cache_id)
    reading = asyncio.ensure_future(residents.read_ahead_forever())
    goes_on, stat = threading.Event(), store.stat

    def slow(cache_id: str, *, tenant: str) -> Any:
        goes_on.wait(60)
        return stat(cache_id, tenant=tenant)

    async def both() -> list[bool]:
        async with residents.using_all(ids[:2], "default") as caches:
            return [there for _, there in caches]

    monkeypatch.setattr(store, "stat", slow)
    asking = asyncio.ensure_future(both())
    await asyncio.sleep(0)
    residents.hint(Hint(ids[2], 0.0), "default")
    await asyncio.sleep(0.3)
    assert ("default", ids[2]) not in residents.caches
    goes_on.set()
    assert await asking == [True, True]
    await held(residents, ids[2])
    reading.cancel()


async def test_a_far_hint_makes_room_once_it_is_near(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=1.5, ahead_s=0.5)
    reading = asyncio.ensure_future(residents.read_ahead_forever())
    await ask(residents, ids[0])
    began = time.monotonic()
    residents.hint(Hint(ids[1], 1.0), "default")
    await held(residents, ids[1])
    assert 0.4 < time.monotonic() - began < 5.0
    reading.cancel()


async def test_a_hint_for_a_cache_that_is_gone_is_dropped_and_stops_nothing(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    reading = asyncio.ensure_future(residents.read_ahead_forever())
    residents.hint(Hint("kvs_" + "0" * 40, 0.0), "default")
    residents.hint(Hint(ids[0], 1.0), "default")
    await held(residents, ids[0])
    assert [key for _, key in residents.retention.hinted(time.monotonic())] == [("default", ids[0])]
    with pytest.raises(CacheNotFound):
        await ask(residents, "kvs_" + "0" * 40)
    reading.cancel()


async def test_a_cache_stays_while_its_tool_runs_and_is_released_when_a_question_needs_its_room(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    residents.read_pace.seconds = 1.0  # a second per byte: slow enough that any tool is worth a pin
    residents.read_pace.record = lambda *_: None  # type: ignore[method-assign]
    await ask(residents, ids[0], tool="search")
    for cache_id in ids[1:4]:
        await ask(residents, cache_id)
    assert await ask(residents, ids[0], tool="search"), "the least recently used, and pinned"
    await ask(residents, ids[1], tool="search")
    await ask(residents, ids[2])
    assert await ask(residents, ids[0]), "both were pinned, and the one that ends later has left"
    assert residents.take_counts()["released"] == 1


async def test_an_answer_that_failed_pins_nothing(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    residents.read_pace.seconds = 1.0
    with suppress(ZeroDivisionError):
        async with residents.using(ids[0], "default", tool="search"):
            raise ZeroDivisionError
    assert "pinned" not in residents.take_counts()


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["ask", "call", "hint", "clear"]), st.floats(0, 20)),
    min_size=5,
    max_size=30,
)


@given(STEPS)
@settings(max_examples=amount(10, 200))
def test_memory_is_never_over_its_limit(
    shelf: tuple[DiskStore, list[str]], engine: Engine, steps: list[tuple[int, str, float]]
) -> None:
    """Whatever is asked, called and foretold at the same time."""
    store, ids = shelf

    async def check() -> None:
        with Threads(4) as threads:
            residents = of(store, engine, threads, fits=2.5)
            residents.read_pace.seconds = 1.0
            limit = residents.limits.max_bytes
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, residents.nbytes)
                    await asyncio.sleep(0)

            beside = [asyncio.ensure_future(watch()), asyncio.ensure_future(residents.read_ahead_forever())]
            asked = []
            for number, act, seconds in steps:
                if act in ("ask", "call"):
                    asked.append(asyncio.ensure_future(ask(residents, ids[number], "t" if act == "call" else None)))
                else:
                    residents.hint(Hint(ids[number], seconds if act == "hint" else None), "default")
                await asyncio.sleep(0.001)
            async with asyncio.timeout(60):
                await asyncio.gather(*asked)
            for task in beside:
                task.cancel()
            assert 0 < most <= limit or not asked
            residents.close()

    asyncio.run(check())


def test_the_cost_of_gdsf_is_at_least_that_of_the_shelf() -> None:
    retention = Retention(by_gdsf)
    retention.used(key(0), 0.0, cost_s=0.0, nbytes=10**6)
    assert retention.order(key(0), 1.0)[-1] == eviction.LEAST_COST_S


async def test_warm_caches_are_in_memory_and_stay_before_all_that_nobody_waits_for(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=3.5)
    await ask(residents, ids[0])
    one = residents.nbytes
    warmed = await residents.warm([("default", cache_id) for cache_id in (*ids[:2], ids[0])])
    assert warmed == (2, 2 * one, one, []), "one was there, and twice is once"
    for cache_id in ids[2:5]:
        await ask(residents, cache_id)
    assert await ask(residents, ids[0]), "two others went"
    assert await ask(residents, ids[1])
    assert residents.evict_idle(time.monotonic()) == 3, "their questions came"
    again = await residents.warm([("default", ids[1])])
    assert again == (1, one, one, [])
    assert residents.evict_idle(time.monotonic()) == 0, "not before it would be idle"


async def test_what_does_not_fit_is_refused_by_name_before_anything_is_read(
    shelf: tuple[DiskStore, list[str]], engine: Engine, threads: Threads
) -> None:
    store, ids = shelf
    residents = of(store, engine, threads, fits=2.5)
    with pytest.raises(InvalidRequest, match=f"{ids[2]} does not fit.*would be in memory, and a worker holds"):
        await residents.warm([("default", cache_id) for cache_id in ids[:4]])
    for unknown in (("default", "kvs_" + "0" * 40), ("another", ids[0])):
        with pytest.raises(CacheNotFound):
            await residents.warm([("default", ids[0]), unknown])
    assert len(residents) == 0
    async with residents.using(ids[0], "default"), residents.using(ids[1], "default"):
        warmed = await residents.warm([("default", ids[2]), ("default", ids[0])])
        assert (warmed.caches, warmed.left_out) == (1, [ids[2]]), "questions go first"
