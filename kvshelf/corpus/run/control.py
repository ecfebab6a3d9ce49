"""Between a run and its callers, which are other processes: may they begin rows, and how do they get on?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STALE_S: Final = 5.0
"""A caller that was silent for so long is taken for gone."""


class Order(StrEnum):
    """What callers are to do with rows: begin them; begin no more; end them where they are."""

    GO = "go"
    HOLD = "hold"
    STOP = "stop"


@dataclass(frozen=True)
class Report:
    """What callers say. at_work: rows they have begun. trouble: what keeps all of those waiting, or ""."""

    at_work: int = 0
    trouble: str = ""


class Gate:
    """One for each run, in a process of its own. It may die: the run gives its order again and again, and callers that
    do not reach it keep the last one."""

    def __init__(self) -> None:
        self._order = Order.HOLD
        self._reports: dict[str, tuple[float, Report]] = {}

    def give(self, order: Order) -> Report:
        """The run's order; what the callers have said lately, taken together."""
        self._order = order
        now = time.monotonic()
        self._reports = {name: (at, said) for name, (at, said) in self._reports.items() if now - at < STALE_S}
        reports = [said for _, said in self._reports.values()]
        trouble = next((said.trouble for said in reports if said.trouble), "")
        return Report(sum(said.at_work for said in reports), trouble)

    def take(self, caller: str, report: Report) -> Order:
        """A caller's report, for the order as it is."""
        self._reports[caller] = (time.monotonic(), report)
        return self._order
