"""How long a cache is worth its memory while a tool runs whose result the next question brings (Continuum).

After an answer that calls a tool, the cache stays for tau* = argmax over tau of P(tau) * (T * eta + reload) - tau
(arXiv 2511.02230): P is the share of the tool's runs that took at most tau, T the mean wait for memory, reload the time
to read the cache again, and eta says how surely an old program has few turns left. A question waits for the model
whether its cache is in memory or not, so that wait is no part of T.

Nothing here reads a clock: times are seconds of one clock, passed as `now`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

ENOUGH: Final = 100
"""Runs of a tool, and programs for eta, from which their distribution counts."""

KEPT: Final = 1000
"""Runs of each tool, of each tenant, and programs that are remembered, the latest."""

TOOLS: Final = 64
"""Tools of a tenant that are remembered, those that ran last."""

PROGRAMS: Final = 1000
"""Of a tenant whose tools run, or whose answers are made, at the same time; the oldest ends."""

LONGEST_S: Final = 3600.0
"""A tool that runs longer counts as never returned: its program has ended."""

_MOST_TURNS: Final = 1000


@dataclass
class _Program:
    """Turns of one tenant on one cache, each but the last of which called a tool. tool: that runs now; None while an
    answer is made."""

    turns: int
    tool: str | None
    since: float


_Key = tuple[str, str | None]  # cache, and the program's name


class Tools:
    """The durations of tools: from the end of an answer that named one to the next question of the same tenant on the
    same cache, and of the same program where questions name theirs. Two without a name that share a cache at the same
    time count as one. The pin itself is of the cache: any question on it ends it. Not thread-safe."""

    def __init__(self) -> None:
        self.programs: dict[str, OrderedDict[_Key, _Program]] = {}  # by tenant, oldest first
        self.runs: dict[str, OrderedDict[str, deque[float]]] = {}
        self.all_runs: dict[str, deque[float]] = {}
        self.lengths: deque[int] = deque(maxlen=KEPT)
        self.eta = 1.0

    def note_question(self, tenant: str, cache_id: str, now: float, name: str | None = None) -> None:
        """A question came, which ends the run of a tool. name: of its program."""
        for of_tenant, programs in list(self.programs.items()):
            while programs and now - (oldest := next(iter(programs.values()))).since > LONGEST_S:
                programs.popitem(last=False)
                self._ended(oldest.turns)
            if not programs:
                del self.programs[of_tenant]
        key = (cache_id, name)
        program = self.programs.get(tenant, OrderedDict()).get(key)
        if program is None or program.tool is None:
            return
        tools = self.runs.setdefault(tenant, OrderedDict())
        runs = tools.setdefault(program.tool, deque(maxlen=KEPT))
        tools.move_to_end(program.tool)
        if len(tools) > TOOLS:
            tools.popitem(last=False)
        for kept in (runs, self.all_runs.setdefault(tenant, deque(maxlen=KEPT))):
            kept.append(now - program.since)
        self._go_on(tenant, key, _Program(program.turns, None, now))

    def note_answer(self, tenant: str, cache_id: str, tool: str | None, now: float, name: str | None = None) -> None:
        """An answer ended that calls a tool, or none: then its program has ended. name: of its program."""
        key = (cache_id, name)
        program = self.programs.get(tenant, OrderedDict()).pop(key, None)
        turns = 1 + (program.turns if program else 0)
        if tool is not None:
            self._go_on(tenant, key, _Program(turns, tool, now))
        elif program is not None:
            self._ended(turns)

    def stay_s(self, tenant: str, tool: str, *, wait_s: float, reload_s: float) -> float:
        """tau* by the tool's runs if there are `ENOUGH`, else by those of all tools of the tenant, else by Exp(1 s)
        with an eta of 1. wait_s: T."""
        of_tool = self.runs.get(tenant, OrderedDict()).get(tool)
        for known in (of_tool, self.all_runs.get(tenant)):
            if known is not None and len(known) >= ENOUGH:
                return best_stay_s(known, wait_s * self.eta + reload_s)
        return math.log(max(1.0, wait_s + reload_s))  # where the derivative of (1 - exp(-tau)) * gain - tau is 0

    def _go_on(self, tenant: str, key: _Key, program: _Program) -> None:
        programs = self.programs.setdefault(tenant, OrderedDict())
        programs[key] = program
        programs.move_to_end(key)
        if len(programs) > PROGRAMS:
            self._ended(programs.popitem(last=False)[1].turns)

    def _ended(self, turns: int) -> None:
        self.lengths.append(min(turns, _MOST_TURNS))
        if len(self.lengths) >= ENOUGH:
            self.eta = turns_left(self.lengths)


def best_stay_s(runs: Sequence[float], gain_s: float) -> float:
    """argmax over tau of P(tau) * gain_s - tau, P being the distribution of these durations. The maximum lies at one
    of them, or at 0; of equal ones the shortest counts."""
    taus = np.sort(np.asarray(runs, dtype=np.float64))
    worth = np.arange(1, len(taus) + 1) / len(taus) * gain_s - taus
    best = int(np.argmax(worth))
    return float(taus[best]) if worth[best] > 0 else 0.0


def turns_left(lengths: Sequence[int]) -> float:
    """eta = -Corr(k, N - k) over all turns k of programs of N turns, at least 0; 1 where it is not defined, as for
    programs of one turn."""
    totals = np.asarray(lengths)
    total = np.repeat(totals, totals)
    turn = np.arange(len(total)) - np.repeat(np.cumsum(totals) - totals, totals) + 1
    remaining = total - turn
    if turn.std() == 0 or remaining.std() == 0:
        return 1.0
    return max(0.0, -float(np.corrcoef(turn, remaining)[0, 1]))
