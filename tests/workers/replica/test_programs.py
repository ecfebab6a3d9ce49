"""A program's first question gives its later ones their place, within the turns of its tenant."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.queues import (
    MOST_PROGRAMS,
    PROGRAM_S,
    Answering,
    Programs,
    Queues,
    Rounds,
    SchedulerLimits,
)
from kvshelf.workers.replica.ticket import Ticket

EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["p", "q", "r", None]), st.booleans()), max_size=40)


@given(EVENTS)
def test_programs_go_in_the_order_of_their_first_questions(events: list[tuple[str, str | None, bool]]) -> None:
    """Against a list that is searched: tenants in turn, and of one's questions that of the oldest program."""
    rounds: Rounds[int] = Rounds()
    programs = Programs()
    first: dict[tuple[str, Any], int] = {}
    waiting: list[tuple[str, int, int]] = []  # tenant, the time of its program's first question, its own
    turns: list[str] = []
    for now, (tenant, program, takes) in enumerate(events):
        since = first.setdefault((tenant, now if program is None else program), now)
        rounds.add(tenant, now, programs.since(tenant, program, float(now)))
        waiting.append((tenant, since, now))
        if tenant not in turns:
            turns.append(tenant)
        while takes and waiting:
            turn = turns.pop(0)
            of_tenant = min((since, number) for owner, since, number in waiting if owner == turn)
            assert rounds.next == rounds.take() == of_tenant[1]
            waiting.remove((turn, *of_tenant))
            if any(owner == turn for owner, _, _ in waiting):
                turns.append(turn)
            takes = len(waiting) > 3
    assert len(rounds) == len(waiting)


def test_a_program_is_forgotten_after_a_while_and_of_too_many_the_one_that_was_silent_longest() -> None:
    programs = Programs()
    assert programs.since("a", "p", 0.0) == 0.0
    assert programs.since("a", "p", PROGRAM_S) == 0.0, "it asked within the time"
    assert programs.since("b", "p", PROGRAM_S) == PROGRAM_S, "another tenant's"
    assert programs.since("a", "p", 2.1 * PROGRAM_S) == 2.1 * PROGRAM_S, "it begins anew"
    for number in range(MOST_PROGRAMS):
        programs.since("a", f"p{number}", 2.2 * PROGRAM_S)
    assert programs.since("a", "p1", 2.3 * PROGRAM_S) == 2.2 * PROGRAM_S
    assert programs.since("a", "p", 2.3 * PROGRAM_S) == 2.3 * PROGRAM_S


def test_a_slot_goes_to_the_oldest_program_of_the_tenant_whose_turn_it_is() -> None:
    async def held() -> list[str]:
        queue, began = FairQueue("questions", 1, 100), list[str]()

        async def ask(name: str, program: str | None) -> None:
            async with queue.turn(name[0], 60.0, program):
                began.append(name)

        await ask("a-old-1", "old")
        async with queue.turn("x", 60.0):
            tasks = []
            for name, program in (
                ("a-new-1", "new"),
                ("a-alone", None),
                ("b-1", "old"),
                ("a-old-2", "old"),
                ("b-2", None),
            ):
                await asyncio.sleep(0.001)
                tasks.append(asyncio.ensure_future(ask(name, program)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        return began

    assert asyncio.run(held()) == ["a-old-1", "a-old-2", "b-1", "a-new-1", "b-2", "a-alone"]


def test_a_replica_takes_questions_in_the_same_order() -> None:
    queues = Queues("tiny", SchedulerLimits(max_open=1))
    queues.accepting = True
    asked = [("a", "old"), ("a", "new"), ("a", "new"), ("b", None), ("a", "old")]
    names = {}
    for number, (tenant, program) in enumerate(asked):
        generation: Any = None  # which nothing here begins
        work = Answering(Ticket(None), generation, lambda _: None, 1, tenant, program=program)
        names[work] = number
        queues.add_question(work)
    taken = [names[work] for _ in asked for work in queues.take_questions([])]
    assert taken == [0, 3, 4, 1, 2]
