"""When the trace's programs end before a replica that makes few answers at once."""

from __future__ import annotations

import heapq
import itertools
from statistics import fmean
from typing import NamedTuple

from kvshelf.workers.replica.queues import Programs, Rounds
from kvshelf_bench.retention.simulation import PREFILL_S
from kvshelf_bench.retention.trace import Trace

_TENANT = "default"


class ProgramTimes(NamedTuple):
    """Mean seconds from a program's first question to its last answer's end: of several turns, and of one question."""

    several_s: float
    single_s: float


def program_times(trace: Trace, slots: int, *, named: bool) -> ProgramTimes:
    """In the replica's own queue, where an answer takes its place for its time and the prefill of its question.

    slots: answers at once. named: whether questions name their program, and wait in the order of the programs'
    arrivals (Continuum's program-level first come, first served) in place of their own.
    """
    queue: Rounds[tuple[int, int]] = Rounds()
    programs, order = Programs(), itertools.count()
    events = [(program.start_s, next(order), True, number, 0) for number, program in enumerate(trace.programs)]
    ends: tuple[list[float], list[float]] = [], []
    while events:
        now, _, arrives, number, at = heapq.heappop(events)
        turns = trace.programs[number].turns
        if arrives:
            queue.add(_TENANT, (number, at), programs.since(_TENANT, str(number) if named else None, now))
        else:
            slots += 1
            if at + 1 < len(turns):
                heapq.heappush(events, (now + turns[at].pause_s, next(order), True, number, at + 1))
            else:
                ends[len(turns) == 1].append(now - trace.programs[number].start_s)
        while slots and len(queue):
            number, at = queue.take()
            slots -= 1
            end_s = now + PREFILL_S + trace.programs[number].turns[at].answer_s
            heapq.heappush(events, (end_s, next(order), False, number, at))
    return ProgramTimes(*map(fmean, ends))
