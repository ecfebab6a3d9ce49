"""`kvshelf bench retention`: one written trace for every order, and a memory that is never over its limit."""

from __future__ import annotations

import json

import pytest

from kvshelf.engine.engine import Engine
from kvshelf.workers.replica.memory.retention import by_recency
from kvshelf_bench.retention.live import SCALE, SIZE_SCALE, replay, shelf_of
from kvshelf_bench.retention.queueing import program_times
from kvshelf_bench.retention.simulation import PREFILL_S, READ_S, Simulation
from kvshelf_bench.retention.trace import LOOK_AHEAD, ORDERS, Orchestrator, Order, Program, Trace, Turn, make_trace

DIGEST = "cf8aa28b56b6dea3"
"""Of the trace of the table in docs/internals/memory.md."""


def test_the_trace_is_the_one_of_the_documentation() -> None:
    trace = make_trace(3600)
    assert trace.digest == DIGEST
    sizes, *programs = map(json.loads, trace.lines().splitlines())
    assert sizes == trace.sizes
    assert sum(len(program["turns"]) for program in programs) == trace.questions == 3508
    assert make_trace(3600, seed=1).digest != DIGEST


def turn(cache: str, *, tool: str | None = None, pause_s: float = 1.0) -> Turn:
    return Turn(cache, 1.0, tool, pause_s, pause_s)


def test_a_simulated_question_waits_for_its_read_and_for_no_read_if_its_cache_is_there() -> None:
    trace = Trace({"a": 10**9}, (Program(0.0, (turn("a"), turn("a"))),))
    found = Simulation(trace, ORDERS[0], 2 * 10**9, 1e9).run()
    assert found.waits_s == pytest.approx([READ_S + 1.0 + PREFILL_S, PREFILL_S])
    assert (found.hits, found.read_bytes, found.most_bytes) == (1, 10**9, 10**9)


def test_a_hint_hides_the_read_and_a_pin_saves_it() -> None:
    """Of two caches one fits, and of three two: what leaves, and what comes back in time, makes the difference."""
    sizes = {"a": 10**9, "b": 10**9}
    handed_over = Trace(sizes, (Program(0.0, (turn("a", pause_s=3.0), turn("b", pause_s=3.0), turn("a"))),))
    plain, hinted = (
        Simulation(handed_over, Order("", by_recency, hints=hints), 15 * 10**8, 1e9).run() for hints in (False, True)
    )
    assert (plain.hits, hinted.hits, hinted.counts["read_ahead_used"]) == (0, 2, 2)
    runs = [Program(100.0 * run, (turn("a", tool="t", pause_s=0.5), turn("a"))) for run in range(150)]
    last = [
        Program(19_990.0, (turn("b"),)),
        Program(20_000.0, (turn("a", tool="t", pause_s=0.5), turn("a"))),
        Program(20_000.05, (turn("b"),)),  # so b is used later than a, and answered before
        Program(20_001.3, (turn("c"),)),  # the next to be read, while the tool runs
    ]
    tools = Trace({**sizes, "c": 10**9}, (*runs, *last))
    recent, pinned = (Simulation(tools, Order("", by_recency, tools=on), 25 * 10**8, 1e9).run() for on in (False, True))
    assert (pinned.hits, pinned.counts["released"]) == (recent.hits + 1, 0)


def test_the_orchestrator_says_the_nearest_turn_of_all_programs() -> None:
    boss = Orchestrator(Order("", by_recency, hints=True), answer_s=2.0)

    def told(number: int, program: Program, at: int, now: float, *, answering: bool = True) -> dict[str, float | None]:
        hints = boss.foretell(number, program, at, now, answering=answering)
        return {hint.cache_id: hint.next_use_s for hint in hints}

    first = Program(0.0, (turn("a", pause_s=1.0), turn("b", pause_s=5.0), turn("a"), turn("c"), turn("d")))
    second = Program(0.0, (turn("x", pause_s=0.5), turn("b")))
    assert told(0, first, 0, 10.0) == {"b": 3.0, "a": 10.0, "c": 13.0}
    assert LOOK_AHEAD == 3, "so nothing is said of d"
    assert told(1, second, 0, 10.0) == {"b": 2.5}
    assert told(1, second, 1, 12.0) == {"b": 1.0}, "the other program still wants it"
    assert told(0, first, 4, 30.0, answering=False) == {"a": None, "b": None, "c": None}


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_every_question_is_answered_within_the_memory(order: Order) -> None:
    trace = make_trace(300, per_s=0.4)
    found = Simulation(trace, order, int(3.2e9), 1e9).run()  # asserts its memory at each step
    assert len(found.waits_s) == trace.questions
    assert max(trace.sizes.values()) <= found.most_bytes <= 3.2e9
    assert (found.counts["pinned"] > 0) == order.tools
    assert (found.counts["read_ahead"] > 0) == (order.hints or order.steps)


def test_a_step_tells_of_its_program_s_later_turns_with_its_question() -> None:
    program = Program(0.0, (turn("a", pause_s=1.0), turn("b", pause_s=5.0), turn("a")))
    for timed, seconds in ((True, [None, 10.0, 3.0]), (False, [None, 10.0, 5.0])):
        boss = Orchestrator(Order("", by_recency, steps=True, timed=timed), answer_s=2.0)
        hints = list(boss.foretell(7, program, 0, 0.0, answering=True))
        assert [(hint.cache_id, hint.next_use_s) for hint in hints] == list(zip("aab", seconds, strict=True))
        assert list(boss.foretell(7, program, 0, 0.0, answering=False)) == []


def test_a_program_that_came_first_ends_first_where_questions_name_theirs() -> None:
    """Two answers at once: two programs of two turns, and four single questions that come between these."""
    agents = [Program(0.0, (turn("a", pause_s=0.5), turn("a"))) for _ in range(2)]
    trace = Trace({"a": 1}, (*agents, *(Program(0.5, (turn("a"),)) for _ in range(4))))
    one_s = trace.programs[0].turns[0].answer_s + PREFILL_S
    by_question, by_program = (program_times(trace, 2, named=named) for named in (False, True))
    assert by_question == pytest.approx((4 * one_s, 2.5 * one_s - 0.5))
    assert by_program == pytest.approx((3 * one_s, 3 * one_s - 0.5))


@pytest.mark.slow
def test_a_replica_s_memory_takes_the_same_trace(tiny: Engine) -> None:
    trace = make_trace(60, per_s=0.4).scaled(1 / SCALE, 1 / SIZE_SCALE)
    with shelf_of(trace, tiny) as (store, ids):
        for order in (ORDERS[0], ORDERS[-1]):
            found = replay(trace, order, int(3.2e9 / SIZE_SCALE), tiny, store, ids)
            assert len(found.waits_s) == trace.questions
            assert 0 < found.most_bytes <= 3.2e9 / SIZE_SCALE
            assert (found.counts["read_ahead"] > 0) == (order.hints or order.steps)
