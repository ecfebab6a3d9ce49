"""The trace against a replica's memory and its rules, where reads and answers take a computed time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.workers.replica.memory.residents import ResidentLimits
from kvshelf.workers.replica.memory.retention import Key, Retention
from kvshelf.workers.replica.memory.tools import Tools
from kvshelf_bench.retention.trace import Orchestrator, Order, Trace

PREFILL_S: Final = 0.1
READ_S: Final = 0.005

_AHEAD_S: Final = ResidentLimits().ahead_s
_IDLE_S: Final = ResidentLimits().idle_s
_TENANT: Final = "default"


@dataclass
class ReplayOutcome:
    """waits_s: seconds to the first token of each question. hits: questions whose cache was in memory and read.
    read_bytes: of all reads. counts: as `Residents.take_counts`. most_bytes: in memory at any step."""

    waits_s: list[float] = field(default_factory=list)
    hits: int = 0
    read_bytes: int = 0
    most_bytes: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: {"pinned": 0, "released": 0, "read_ahead": 0, "read_ahead_used": 0}
    )

    @property
    def hit_share(self) -> float:
        return self.hits / len(self.waits_s)

    @property
    def mean_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s)


@dataclass
class _Resident:
    ready_at: float
    users: int = 0
    last_used: float = 0.0
    ahead: bool = False


@dataclass
class _Waiting:
    program: int
    turn: int
    at: float


class Simulation:
    """One run of a trace under one order. max_bytes: the memory for caches. read_bytes_s: the rate of reads.

    A read takes `READ_S` and its bytes at this rate, one read after the other; it begins when memory has room for the
    cache. The first token follows `PREFILL_S` after it. Answers do not slow each other down.
    """

    def __init__(self, trace: Trace, order: Order, max_bytes: int, read_bytes_s: float) -> None:
        self._trace = trace
        self._order = order
        self._max_bytes = max_bytes
        self._byte_s = 1 / read_bytes_s
        self._retention, self._tools, self._orchestrator = Retention(order.priority), Tools(), Orchestrator(order)
        self._residents: dict[str, _Resident] = {}
        self._short: list[_Waiting] = []  # questions that wait for room, in their order
        self._room_s = self._room_count = 0.0
        self._disk_free_at = self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = itertools.count()
        self.outcome = ReplayOutcome()

    def run(self) -> ReplayOutcome:
        for number, program in enumerate(self._trace.programs):
            self._at(program.start_s, self._ask, number, 0)
        while self._events:
            self._now, _, act, args = heapq.heappop(self._events)
            act(*args)
            self._read_ahead()
            most = self.outcome.most_bytes = max(self.outcome.most_bytes, self._nbytes)
            assert most <= self._max_bytes, f"{most} bytes in a memory of {self._max_bytes}"
        return self.outcome

    def _at(self, at: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at, next(self._ids), act, args))

    def _ask(self, program: int, turn: int) -> None:
        question = _Waiting(program, turn, self._now)
        self._tools.note_question(_TENANT, self._cache(question), self._now)
        if not self._begin(question):
            self._short.append(question)

    def _begin(self, question: _Waiting) -> bool:
        """Answer a question if its cache is in memory or room can be made for it."""
        cache = self._cache(question)
        if (resident := self._residents.get(cache)) is None:
            if not self._make_room(self._trace.sizes[cache]):
                return False
            self._room_s, self._room_count = self._room_s + self._now - question.at, self._room_count + 1
            resident = self._read(cache)
        elif resident.ready_at <= self._now:
            self.outcome.hits += 1
        self._retention.used(_key(cache), self._now, cost_s=self._reload_s(cache), nbytes=self._trace.sizes[cache])
        self.outcome.counts["read_ahead_used"] += resident.ahead
        resident.ahead, resident.users = False, resident.users + 1
        first_at = max(self._now, resident.ready_at) + PREFILL_S
        self.outcome.waits_s.append(first_at - question.at)
        answer_s = self._trace.programs[question.program].turns[question.turn].answer_s
        self._foretell(question, answering=True)
        self._at(first_at + answer_s, self._answered, question)
        return True

    def _answered(self, question: _Waiting) -> None:
        cache, turns = self._cache(question), self._trace.programs[question.program].turns
        turn = turns[question.turn]
        resident = self._residents[cache]
        resident.users, resident.last_used = resident.users - 1, self._now
        tool = turn.tool if self._order.tools else None
        self._tools.note_answer(_TENANT, cache, tool, self._now)
        if tool is not None:
            wait_s = self._room_s / self._room_count if self._room_count else 0.0
            stay_s = self._tools.stay_s(_TENANT, tool, wait_s=wait_s, reload_s=self._reload_s(cache))
            if stay_s > 0:
                self._retention.pin(_key(cache), self._now + stay_s)
                self.outcome.counts["pinned"] += 1
        if question.turn + 1 < len(turns):
            self._at(self._now + turn.pause_s, self._ask, question.program, question.turn + 1)
        self._foretell(question, answering=False)
        self._short = [waiting for waiting in self._short if not self._begin(waiting)]

    def _foretell(self, question: _Waiting, *, answering: bool) -> None:
        program = self._trace.programs[question.program]
        number, turn = question.program, question.turn
        for hint in self._orchestrator.foretell(number, program, turn, self._now, answering=answering):
            self._retention.hint(hint, _TENANT, self._now)
            if hint.next_use_s is not None and hint.least_s < _AHEAD_S < hint.next_use_s:
                self._at(self._now + hint.next_use_s - _AHEAD_S, lambda: None)  # an event, which looks at the hints

    def _read_ahead(self) -> None:
        if self._short or self._disk_free_at > self._now:
            return
        for wait_s, (_, cache) in self._retention.hinted(self._now):
            if cache in self._residents or wait_s > _IDLE_S:
                continue
            near = self._retention.presses(_key(cache), _AHEAD_S, self._now)
            unused = self._unused() if near else {}
            missing = self._nbytes + self._trace.sizes[cache] - self._max_bytes
            leaving = self._retention.leaving_for(_key(cache), unused, missing, self._now)
            if leaving is not None:
                for key in leaving:
                    self._evict(key)
                self._read(cache).ahead = True
                self.outcome.counts["read_ahead"] += 1
                return  # the next once this one is read

    def _read(self, cache: str) -> _Resident:
        self._disk_free_at = max(self._now, self._disk_free_at) + self._reload_s(cache)
        self.outcome.read_bytes += self._trace.sizes[cache]
        resident = self._residents[cache] = _Resident(self._disk_free_at)
        self._at(self._disk_free_at, lambda: None)
        return resident

    def _make_room(self, nbytes: int) -> bool:
        while self._nbytes + nbytes > self._max_bytes:
            unused = self._unused()
            if not unused:
                return False
            self._evict(min(unused, key=lambda key: self._retention.order(key, self._now)))
        return True

    def _evict(self, key: Key) -> None:
        self.outcome.counts["released"] += self._retention.left(key, self._now)
        del self._residents[key[1]]

    def _unused(self) -> dict[Key, int]:
        return {
            _key(cache): self._trace.sizes[cache] for cache, resident in self._residents.items() if not resident.users
        }

    @property
    def _nbytes(self) -> int:
        return sum(self._trace.sizes[cache] for cache in self._residents)

    def _reload_s(self, cache: str) -> float:
        return READ_S + self._trace.sizes[cache] * self._byte_s

    def _cache(self, question: _Waiting) -> str:
        return self._trace.programs[question.program].turns[question.turn].cache


def _key(cache: str) -> Key:
    return _TENANT, cache
