"""Steps to execution against an execution of the graph, and what they do to a replica's memory."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.api.workflows import Workflow
from kvshelf.engine.engine import Engine
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Threads
from kvshelf.workers.replica.memory.residents import ResidentLimits, Residents
from kvshelf.workers.replica.memory.retention import (
    AHEAD_S,
    LEAST_HINT_S,
    LEAST_STEP_S,
    MOST_HINTS,
    MOST_HINTS_EACH,
    MOST_LATE_S,
    Hint,
    Retention,
)
from kvshelf.workers.replica.memory.steps import FARTHEST_S, STEP_S, hints_of, steps_ahead


@st.composite
def graphs(draw: st.DrawFn, timed: bool = True) -> Workflow:
    """Edges lead from a lower number to a higher one, and names are shuffled, so that their order tells nothing."""
    count = draw(st.integers(1, 8))
    names = draw(st.permutations([f"s{at}" for at in range(count)]))
    durations = st.none() | st.integers(1, 9).map(float) if timed else st.none()
    steps: dict[str, Any] = {}
    for at in range(count):
        later = [names[after] for after in range(at + 1, count) if draw(st.booleans())]
        caches = draw(st.lists(st.sampled_from(["kvs_a", "kvs_b", "kvs_c", "kvs_d"]), max_size=2, unique=True))
        join = draw(st.sampled_from(["any", "all"]))
        steps[names[at]] = {"next": later, "cache_ids": caches, "join": join, "duration_s": draw(durations)}
    return Workflow(steps={name: steps[name] for name in sorted(steps)})


def followers(graph: Workflow, step: str) -> set[str]:
    return {step}.union(*(followers(graph, after) for after in graph.steps[step].next))


def executed(graph: Workflow, start: str) -> dict[str, int]:
    """The round in which each step runs, if in each round all run that can: after any step before them, or after all
    of those that run at all."""
    reached = followers(graph, start)
    rounds = {start: 0}
    for number in range(1, len(graph.steps) + 1):
        earlier = dict(rounds)
        for name in reached - rounds.keys():
            before = [one for one in reached if name in graph.steps[one].next]
            runs = any if graph.steps[name].join == "any" else all
            if runs(one in earlier for one in before):
                rounds[name] = number
    return rounds


def waited(graph: Workflow, start: str, name: str) -> float:
    """Seconds from the question of one step to that of another, by what is before it."""
    if name == start:
        return 0.0
    before = [one for one in followers(graph, start) if name in graph.steps[one].next]
    times = [waited(graph, start, one) + (graph.steps[one].duration_s or STEP_S) for one in before]
    return min(times) if graph.steps[name].join == "any" else max(times)


@given(graphs())
def test_steps_and_seconds_are_those_of_an_execution(graph: Workflow) -> None:
    for start in graph.steps:
        ahead = steps_ahead(graph, start)
        assert {name: far.steps for name, far in ahead.items()} == executed(graph, start)
        assert {name: far.seconds for name, far in ahead.items()} == {
            name: pytest.approx(waited(graph, start, name)) for name in ahead
        }


def order(retention: Retention, now: float) -> list[str]:
    keys = [("tenant", f"kvs_{name}") for name in "abcd"]
    return [id for _, id in sorted(keys, key=lambda key: retention.order(key, now))]


@given(graphs(timed=False), st.floats(0, LEAST_STEP_S))
def test_what_is_most_steps_ahead_leaves_first_until_the_next_question_however_long_that_takes(
    graph: Workflow, later_s: float
) -> None:
    """A cache of several steps counts as the nearest of them, and one of no step that follows as none."""
    for start in graph.steps:
        retention = Retention()
        for at, name in enumerate("abcd"):
            retention.used(("tenant", f"kvs_{name}"), float(at), cost_s=1.0, nbytes=1)
        for hint in hints_of(graph, start, "w/"):
            retention.hint(hint, "tenant", 10.0)
        rounds = executed(graph, start)
        nearest = dict.fromkeys(("kvs_a", "kvs_b", "kvs_c", "kvs_d"), math.inf)
        for name, number in rounds.items():
            for cache_id in graph.steps[name].cache_ids if number else ():
                nearest[cache_id] = min(nearest[cache_id], number)
        farthest_first = sorted(nearest, key=lambda cache_id: -nearest[cache_id])  # the oldest of equal ones
        assert order(retention, 10.0 + later_s) == farthest_first


def test_a_question_replaces_what_was_told_of_its_own_run_and_no_other() -> None:
    graph = Workflow.model_validate(
        {
            "steps": {
                "plan": {"cache_ids": ["kvs_a"], "next": ["left", "right"]},
                "left": {"cache_ids": ["kvs_b"], "next": ["end"]},
                "right": {"cache_ids": ["kvs_c"], "next": ["end"]},
                "end": {"cache_ids": ["kvs_a", "kvs_d"], "join": "all"},
            }
        }
    )
    retention = Retention()

    def ask(step: str, run: str, now: float) -> dict[str, float]:
        for hint in hints_of(graph, step, run):
            retention.hint(hint, "tenant", now)
        return {key[1][-1]: wait_s for wait_s, key in retention.hinted(now)}

    assert ask("plan", "w/1", 0.0) == {"a": 10.0, "b": 5.0, "c": 5.0, "d": 10.0}
    assert ask("left", "w/1", 1.0) == {"a": 5.0, "c": 4.0, "d": 5.0}, "the other branch runs beside"
    assert ask("plan", "w/2", 1.0) == {"a": 5.0, "b": 5.0, "c": 4.0, "d": 5.0}, "the nearest of two runs"
    assert ask("end", "w/1", 2.0) == {"a": 9.0, "b": 4.0, "c": 4.0, "d": 9.0}, "of the other run"
    retention.used(("tenant", "kvs_b"), 2.0, cost_s=1.0, nbytes=1)
    assert ask("left", "w/1", 2.0)["b"] == 4.0, "a question of no step ends no step's hint"
    assert ask("end", "w/1", 3.0) == {"a": 8.0, "b": 3.0, "c": 3.0, "d": 8.0}
    assert ask("end", "w/2", 3.0) == {}, "both branches have run"


def test_branches_that_are_not_taken_are_wanted_no_more_and_those_that_a_join_waits_for_are() -> None:
    """By hand: of search and recall one runs, beside translate, and write waits for translate and what they found."""
    graph = Workflow.model_validate(
        {
            "steps": {
                "plan": {"cache_ids": ["kvs_p"], "next": ["search", "recall", "read"]},
                "search": {"cache_ids": ["kvs_s"], "next": ["sum"]},
                "recall": {"cache_ids": ["kvs_r"], "next": ["sum"]},
                "sum": {"cache_ids": ["kvs_u"], "next": ["write"]},
                "read": {"cache_ids": ["kvs_d"], "next": ["translate"]},
                "translate": {"cache_ids": ["kvs_t"], "next": ["write"]},
                "write": {"cache_ids": ["kvs_w"], "join": "all"},
            }
        }
    )
    retention = Retention()
    asked = {
        "plan": {"s": 5.0, "r": 5.0, "d": 5.0, "u": 10.0, "t": 10.0, "w": 15.0},
        "search": {"u": 5.0, "d": 5.0, "t": 10.0, "w": 10.0},
        "sum": {"d": 5.0, "t": 10.0, "w": 5.0},
        "read": {"t": 5.0, "w": 10.0},
        "translate": {"w": 5.0},
        "write": {},
    }
    for step, waits in asked.items():
        for hint in hints_of(graph, step, "w/"):
            retention.hint(hint, "tenant", 0.0)
        assert {key[1][-1]: wait_s for wait_s, key in retention.hinted(0.0)} == waits, step


def test_nothing_is_told_of_what_is_farther_than_a_day_and_no_hint_outlives_its_time_by_more_than_an_hour() -> None:
    names = ["a", "b", "c"]
    steps = {name: {"cache_ids": [f"kvs_{name}"], "next": names[at + 1 : at + 2]} for at, name in enumerate(names)}
    graph = Workflow.model_validate({"steps": {name: step | {"duration_s": 86400} for name, step in steps.items()}})
    retention = Retention()
    for hint in hints_of(graph, "a", "w/"):
        retention.hint(hint, "tenant", 0.0)
    assert retention.hinted(0.0) == [(FARTHEST_S, ("tenant", "kvs_b"))]
    assert retention.hinted(FARTHEST_S + MOST_LATE_S) != []
    assert retention.hinted(FARTHEST_S + MOST_LATE_S + 1) == []


def test_the_step_behind_the_next_makes_no_room_however_long_the_step_takes_that_runs() -> None:
    """And the next one's does from its question on, until it is late."""
    names = ["a", "b", "c"]
    steps = {name: {"cache_ids": [f"kvs_{name}"], "next": names[at + 1 : at + 2]} for at, name in enumerate(names)}
    retention = Retention()
    for hint in hints_of(Workflow.model_validate({"steps": steps}), "a", "w/"):
        retention.hint(hint, "tenant", 0.0)
    for now in (0.0, 4.0, STEP_S + 0.5 * LEAST_HINT_S, STEP_S + 2 * LEAST_HINT_S, LEAST_STEP_S):
        presses = {id: retention.presses(("tenant", f"kvs_{id}"), AHEAD_S, now) for id in "bc"}
        assert presses == {"b": now < STEP_S + LEAST_HINT_S, "c": False}, now
        assert retention.nears_in(AHEAD_S, now) == math.inf


def test_hints_of_a_tenant_have_an_end_the_oldest_goes() -> None:
    retention = Retention()
    retention.hint(Hint("kvs_other", 1.0), "other", 0.0)
    for number in range(MOST_HINTS + 1):
        retention.hint(Hint(f"kvs_{number}", 1.0, step="w//s"), "tenant", 0.0)
    known = {key for _, key in retention.hinted(0.0)}
    assert len(known) == MOST_HINTS + 1
    assert ("tenant", "kvs_0") not in known
    assert ("other", "kvs_other") in known


def test_of_the_hints_of_a_workflow_the_farthest_are_the_first_to_go() -> None:
    names = [f"s{at}" for at in range(200)]
    steps = {name: {"cache_ids": [f"kvs_{at}"], "next": names[at + 1 : at + 2]} for at, name in enumerate(names)}
    retention = Retention()
    for hint in hints_of(Workflow.model_validate({"steps": steps}), "s0", "w/"):
        retention.hint(hint, "tenant", 0.0)
    for number in range(MOST_HINTS - 99):
        retention.hint(Hint(f"kvs_other_{number}", 1.0), "tenant", 0.0)
    kept = {id for _, (_, id) in retention.hinted(0.0) if "other" not in id}
    assert kept == {f"kvs_{at}" for at in range(1, 100)}


def test_of_many_runs_that_ask_one_cache_the_nearest_count() -> None:
    retention = Retention()
    for number in reversed(range(3 * MOST_HINTS_EACH)):
        retention.hint(Hint("kvs_a", 5.0 + number, step=f"w/{number}/s"), "tenant", 0.0)
    for number in range(MOST_HINTS_EACH):
        assert retention.wait_s(("tenant", "kvs_a"), 0.0) == 5.0 + number
        retention.hint(Hint("kvs_a", None, step=f"w/{number}/s"), "tenant", 0.0)
    assert retention.hinted(0.0) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=6), st.floats(0, 100))
def test_a_memory_looks_again_when_a_hint_comes_near_and_at_no_other_time(
    waits: list[tuple[float, float]], limit_s: float
) -> None:
    retention = Retention()
    for number, (wait_s, least_s) in enumerate(waits):
        retention.hint(Hint(f"kvs_{number}", wait_s, least_s=min(wait_s, least_s)), "tenant", 0.0)
    nears = [wait_s - limit_s for wait_s, least_s in waits if min(wait_s, least_s) < limit_s < wait_s]
    assert retention.nears_in(limit_s, 0.0) == min(nears, default=math.inf)


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_next_step_s_caches_are_read_and_those_far_away_leave_for_them(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """A memory of three caches, and four steps of two each, of which all share one."""
    engine = Engine.load(str(tiny_folder), device="cpu")
    with DiskStore.open(tmp_path / "shelf") as store, Threads(4) as threads:
        made = [engine.compress(list(range(10 + at, 200 + at)), policy="full") for at in range(6)]
        shared, *ids = [store.put(cache).id for cache in made]
        names = ["plan", "search", "write", "check"]
        graph = Workflow.model_validate(
            {
                "steps": {
                    name: {"cache_ids": [shared, id], "next": names[at + 1 : at + 2]}
                    for at, (name, id) in enumerate(zip(names, ids[:4], strict=True))
                }
            }
        )
        with store.open_cache(shared) as one:
            limits = ResidentLimits(max_bytes=int(3.5 * one.attached_bytes))
        residents = Residents(store, engine.attach, engine.attachments.of_part, limits, threads)
        reading = asyncio.ensure_future(residents.read_ahead_forever())
        for step, following in itertools.pairwise(names):
            at = names.index(step)
            async with residents.using_all([shared, ids[at]], "default") as caches:
                for resident, _ in caches:
                    await asyncio.to_thread(resident.document.prefixes, resident.document.num_layers - 1)
                for hint in hints_of(graph, step, "w/"):
                    residents.hint(hint, "default")
                async with asyncio.timeout(20):
                    while ("default", ids[at + 1]) not in residents.caches:
                        await asyncio.sleep(0.01)
            async with residents.using(ids[4], "default"):  # a reader between the steps
                pass
            assert {("default", shared), ("default", ids[at + 1])} <= residents.caches.keys(), following
        reading.cancel()
        residents.close()
