"""A written trace: programs of agents that ask caches turn by turn, and single questions about other documents.

    agents      2 to 8 turns on one document, each but the last of which calls a tool and waits for its result
    workflows   2 to 4 rounds over the same three agents, one after the other, each with its own cache; no tools
    readers     one question about any document

The trace is the same for every order of leaving; only when a turn begins depends on how long the one before it waited.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from kvshelf.api.workflows import Workflow, WorkflowStep
from kvshelf.workers.replica.memory.retention import Hint, Use, by_gdsf, by_recency
from kvshelf.workers.replica.memory.steps import STEP_S, hints_of

SEED: Final = 20261126

AGENT_DOCUMENTS: Final = 60
WORKFLOW_AGENTS: Final = 12

TOOLS: Final = {
    "database": (0.3, 0.0),
    "search": (0.8, 0.4),
    "code": (4.0, 1.0),
    "browse": (12.0, 0.6),
    "person": (45.0, 1.0),
}
"""Median seconds of each tool, and the standard deviation of their logarithm."""

ANSWER_S: Final = 1.5
HAND_OVER_S: Final = 0.5


@dataclass(frozen=True)
class Turn:
    """A question on a cache, whose answer takes `answer_s` from its first token on. tool: what it calls. The next turn
    comes `pause_s` after its end; `mean_pause_s` is what an orchestrator expects."""

    cache: str
    answer_s: float
    tool: str | None
    pause_s: float
    mean_pause_s: float


@dataclass(frozen=True)
class Program:
    """Turns one after the other, the first at `start_s`."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Trace:
    """sizes: bytes of each cache."""

    sizes: dict[str, int]
    programs: tuple[Program, ...]

    def lines(self) -> str:
        """As JSON lines: the sizes, then a program in each line."""
        return "".join(json.dumps(line) + "\n" for line in (self.sizes, *map(asdict, self.programs)))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.lines().encode()).hexdigest()[:16]

    @property
    def questions(self) -> int:
        return sum(len(program.turns) for program in self.programs)

    def scaled(self, seconds: float, size: float) -> Trace:
        """The trace with all times and sizes multiplied."""

        def turn(one: Turn) -> Turn:
            times = one.answer_s, one.pause_s, one.mean_pause_s
            answer_s, pause_s, mean_pause_s = (seconds * time for time in times)
            return replace(one, answer_s=answer_s, pause_s=pause_s, mean_pause_s=mean_pause_s)

        programs = (Program(seconds * one.start_s, tuple(map(turn, one.turns))) for one in self.programs)
        return Trace({cache: int(nbytes * size) for cache, nbytes in self.sizes.items()}, tuple(programs))


def make_trace(seconds: float, per_s: float = 0.2, seed: int = SEED) -> Trace:
    """Programs that start within so many seconds, `per_s` in each: half agents, a quarter workflows, a quarter
    readers."""
    draw = random.Random(seed)
    documents = [f"document-{number}" for number in range(AGENT_DOCUMENTS)]
    agents = [f"agent-{number}" for number in range(WORKFLOW_AGENTS)]
    sizes = {name: int(1e9 * min(3.0, draw.lognormvariate(-0.5, 0.7))) for name in documents}
    sizes |= {name: int(1e9 * draw.uniform(0.3, 1.0)) for name in agents}
    popularity = [1 / (rank + 1) for rank in range(AGENT_DOCUMENTS)]
    programs: list[Program] = []
    start_s = draw.expovariate(per_s)
    while start_s < seconds:
        kind = draw.random()
        if kind < 0.5:
            turns = _agent(draw, draw.choices(documents, popularity)[0])
        elif kind < 0.75:
            first = 3 * draw.randrange(WORKFLOW_AGENTS // 3)
            order = agents[first : first + 3] * draw.randint(2, 4)
            turns = [_turn(draw, agent, None, HAND_OVER_S, 0.5) for agent in order]
        else:
            turns = [Turn(draw.choice(documents), _answer_s(draw), None, 0.0, 0.0)]
        programs.append(Program(start_s, tuple(turns)))
        start_s += draw.expovariate(per_s)
    return Trace(sizes, tuple(programs))


def _agent(draw: random.Random, document: str) -> list[Turn]:
    count = draw.randint(2, 8)
    habit = draw.sample(list(TOOLS), 2)  # an agent calls few tools again and again
    turns = []
    for number in range(count):
        tool = draw.choice(habit) if number < count - 1 else None
        turns.append(_turn(draw, document, tool, *(TOOLS[tool] if tool else (0.0, 0.0))))
    return turns


def _turn(draw: random.Random, cache: str, tool: str | None, median_s: float, spread: float) -> Turn:
    pause_s = draw.lognormvariate(math.log(median_s), spread) if median_s else 0.0
    return Turn(cache, _answer_s(draw), tool, pause_s, median_s * math.exp(spread * spread / 2))


def _answer_s(draw: random.Random) -> float:
    return 0.2 + draw.expovariate(1 / (ANSWER_S - 0.2))


LOOK_AHEAD: Final = 3
"""Turns of its program that an orchestrator foretells."""


@dataclass(frozen=True)
class Order:
    """tools: whether questions name the tools that their answers call. hints: whether an orchestrator gives hints.
    steps: whether questions name their step of a workflow, a chain of the program's turns; timed: with durations."""

    name: str
    priority: Callable[[Use], float]
    tools: bool = False
    hints: bool = False
    steps: bool = False
    timed: bool = False


ORDERS: Final = (
    Order("LRU", by_recency),
    Order("GDSF", by_gdsf),
    Order("Continuum", by_recency, tools=True),
    Order("hints", by_recency, hints=True),
    Order("both", by_recency, tools=True, hints=True),
    Order("steps", by_recency, steps=True),
    Order("timed steps", by_recency, steps=True, timed=True),
)


@dataclass
class Orchestrator:
    """Knows the turns of its programs and the mean lengths of answers and pauses, not the lengths that come. A cache's
    next use is the nearest of all programs. answer_s: mean seconds of an answer. step_s: of a step without one."""

    order: Order
    answer_s: float = ANSWER_S
    step_s: float = STEP_S
    _due: dict[str, dict[int, float]] = field(default_factory=dict)  # by cache and program

    def foretell(self, number: int, program: Program, turn: int, now: float, *, answering: bool) -> Iterable[Hint]:
        """The hints that follow from a program's turn: its answer begins, or has ended (then what it waits for has
        begun). A step is told with the question, and not again."""
        if self.order.hints:
            return list(self._by_time(number, program, turn, now, answering=answering))
        if self.order.steps and answering:
            return hints_of(self._workflow(program), f"s{turn}", str(number))
        return []

    def _workflow(self, program: Program) -> Workflow:
        steps = {}
        for at, one in enumerate(program.turns):
            duration_s = self.answer_s + one.mean_pause_s if self.order.timed else self.step_s
            following = [f"s{at + 1}"] if at + 1 < len(program.turns) else []
            steps[f"s{at}"] = WorkflowStep(cache_ids=[one.cache], next=following, duration_s=duration_s)
        return Workflow(steps=steps)

    def _by_time(self, number: int, program: Program, turn: int, now: float, *, answering: bool) -> Iterator[Hint]:
        changed = {cache for cache, due in self._due.items() if due.pop(number, None) is not None}
        at = now
        for index, one in enumerate(program.turns[turn : turn + 1 + LOOK_AHEAD]):
            if index:
                self._due.setdefault(one.cache, {}).setdefault(number, at)
                changed.add(one.cache)
            at += one.mean_pause_s + (self.answer_s if index or answering else 0.0)
        for cache in sorted(changed):
            due = self._due[cache]
            yield Hint(cache, max(0.0, min(due.values()) - now) if due else None)
