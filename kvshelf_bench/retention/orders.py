"""The orders of leaving that are compared, and the orchestrator that gives hints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvshelf.workers.replica.memory.retention import Use, by_gdsf, by_recency
from kvshelf_bench.retention.trace import ANSWER_S, Program

LOOK_AHEAD: Final = 3
"""Turns of its program that an orchestrator foretells."""


@dataclass(frozen=True)
class Order:
    """tools: whether questions name the tools that their answers call. hints: whether an orchestrator gives hints."""

    name: str
    priority: Callable[[Use], float]
    tools: bool = False
    hints: bool = False


ORDERS: Final = (
    Order("LRU", by_recency),
    Order("GDSF", by_gdsf),
    Order("Continuum", by_recency, tools=True),
    Order("KVFlow", by_recency, hints=True),
    Order("both", by_recency, tools=True, hints=True),
)


@dataclass
class Orchestrator:
    """Knows the turns of its programs and the mean lengths of answers and pauses, not the lengths that come. A cache's
    next use is the nearest of all programs. answer_s: mean seconds of an answer."""

    answer_s: float = ANSWER_S
    _due: dict[str, dict[int, float]] = field(default_factory=dict)  # by cache and program

    def foretell(
        self, number: int, program: Program, turn: int, now: float, *, answering: bool
    ) -> Iterator[tuple[str, float | None]]:
        """The hints, caches with seconds or None, that follow from a program's turn: its answer begins, or has ended
        (then what it waits for has begun)."""
        changed = {cache for cache, due in self._due.items() if due.pop(number, None) is not None}
        at = now
        for index, one in enumerate(program.turns[turn : turn + 1 + LOOK_AHEAD]):
            if index:
                self._due.setdefault(one.cache, {}).setdefault(number, at)
                changed.add(one.cache)
            at += one.mean_pause_s + (self.answer_s if index or answering else 0.0)
        for cache in sorted(changed):
            due = self._due[cache]
            yield cache, max(0.0, min(due.values()) - now) if due else None
