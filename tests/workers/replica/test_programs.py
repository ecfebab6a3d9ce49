"""A program's first question gives its later ones their place, within the turns of its tenant."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.errors import QueueFull
from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.queues import (
    MOST_PROGRAMS,
    PROGRAM_S,
    Answering,
    AnswerOrder,
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


def test_a_program_begins_anew_after_a_while_and_of_too_many_the_oldest_is_forgotten() -> None:
    programs = Programs()
    assert programs.since("a", "p", 0.0) == 0.0
    assert programs.first("a", "p", 1.0) == 0.0
    assert programs.first("a", "q", 1.0) == 1.0
    assert programs.since("a", "q", 2.0) == 2.0, "who only looked has no place"
    assert programs.since("a", "p", PROGRAM_S) == 0.0, "it asked within the time"
    assert programs.since("b", "p", PROGRAM_S) == PROGRAM_S, "another tenant's"
    assert programs.since("a", "p", PROGRAM_S + 1) == PROGRAM_S + 1, "however often it asks"
    for number in range(MOST_PROGRAMS - 1):
        programs.since("a", f"p{number}", PROGRAM_S + 3)
    assert programs.since("a", "p", PROGRAM_S + 4) == PROGRAM_S + 1
    assert programs.since("a", "q", PROGRAM_S + 4) == PROGRAM_S + 4, "which forgets p"
    assert programs.since("a", "p", PROGRAM_S + 5) == PROGRAM_S + 5


def test_tenants_that_are_silent_are_forgotten() -> None:
    programs = Programs()
    for number in range(100):
        programs.since(f"tenant-{number}", "p", float(number))
    before = len(pickle.dumps(programs))
    programs.since("other", "p", 3 * PROGRAM_S)
    assert len(pickle.dumps(programs)) < before / 10


def test_one_name_for_all_questions_keeps_none_without_a_name_waiting_for_ever() -> None:
    """A queue that is full of one program's, which asks again whenever one of its questions is taken."""
    rounds: Rounds[str] = Rounds()
    programs = Programs()
    for now in range(10):
        rounds.add("a", "always", programs.since("a", "always", float(now)))
    rounds.add("a", "once", programs.since("a", None, 10.0))
    for now in range(11, int(PROGRAM_S) + 20):
        if rounds.take() == "once":
            break
        rounds.add("a", "always", programs.since("a", "always", float(now)))
    assert PROGRAM_S <= now < PROGRAM_S + 15


def test_a_full_queue_of_a_program_makes_room_for_an_older_program_s() -> None:
    async def test() -> None:
        queue = FairQueue("questions", 1, 1)

        async def ask(program: str | None) -> None:
            async with queue.turn("a", 60.0, program):
                pass

        await ask("old")
        async with queue.turn("a", 60.0):
            new = asyncio.ensure_future(ask("new"))
            await asyncio.sleep(0)
            old = asyncio.ensure_future(ask("old"))
            with pytest.raises(QueueFull):
                await new
            with pytest.raises(QueueFull):
                await ask("new")
            with pytest.raises(QueueFull):
                await ask(None)
        await old

    asyncio.run(test())


def test_a_program_that_is_refused_has_no_place() -> None:
    async def test() -> list[str]:
        queue, began = FairQueue("questions", 1, 1), list[str]()

        async def ask(name: str, program: str | None) -> None:
            async with queue.turn("a", 60.0, program):
                began.append(name)

        async with queue.turn("a", 60.0):
            first = asyncio.ensure_future(ask("first", None))
            await asyncio.sleep(0.001)
            with pytest.raises(QueueFull):
                await ask("refused", "p")
            first.cancel()
            await asyncio.sleep(0.001)
            second = asyncio.ensure_future(ask("second", None))
            await asyncio.sleep(0.001)
            with pytest.raises(QueueFull):
                await ask("again", "p")  # it would go before the second, if it were as old as its first question
        await second
        return began

    assert asyncio.run(test()) == ["second"]


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
        work = Answering(Ticket(None), generation, AnswerOrder(tenant, program=program), 1)
        names[work] = number
        queues.add_question(work)
    taken = [names[work] for _ in asked for work in queues.take_questions([])]
    assert taken == [0, 3, 4, 1, 2]
