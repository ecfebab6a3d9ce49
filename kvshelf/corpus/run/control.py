"""Control of a run's callers, which are other processes: orders go to them, reports come back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

STALE_S: Final = 5.0
"""A caller silent for this long is taken for dead."""


class Order(StrEnum):
    """Orders to callers about their rows: begin them; begin no more; stop them at once."""

    GO = "go"
    HOLD = "hold"
    STOP = "stop"


@dataclass(frozen=True)
class Report:
    """State of callers. at_work: rows they have begun. trouble: the problem that keeps those rows waiting, or ""."""

    at_work: int = 0
    trouble: str = ""


class Control:
    """One actor per run. It may die: the run repeats its order, and callers that cannot reach it keep the last one."""

    def __init__(self) -> None:
        self._order = Order.HOLD
        self._reports: dict[str, tuple[float, Report]] = {}

    def give(self, order: Order) -> Report:
        """Set the order; returns the recent reports of all callers, added up."""
        self._order = order
        now = time.monotonic()
        self._reports = {name: (at, report) for name, (at, report) in self._reports.items() if now - at < STALE_S}
        reports = [report for _, report in self._reports.values()]
        trouble = next((report.trouble for report in reports if report.trouble), "")
        return Report(sum(report.at_work for report in reports), trouble)

    def take(self, caller: str, report: Report) -> Order:
        """Take a caller's report; returns the current order."""
        self._reports[caller] = (time.monotonic(), report)
        return self._order
