"""What the results of a batch add up to, read once and held in memory that does not grow with them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kvshelf.corpus.output.histogram import Histogram
from kvshelf.corpus.output.results import Result

EXAMPLES: Final = 3
"""Failed rows that are shown of each code."""

EXTREMES: Final = 10
"""Documents that are shown as the slowest, and as the worst in quality."""


class Extremes:
    """The results with the highest score, as many as are shown; earlier ones first among equals."""

    def __init__(self) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, Result]] = []

    def add(self, score: float, result: Result) -> None:
        entry = (score, -next(self._order), result)
        if len(self._heap) < EXTREMES:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def results(self) -> list[Result]:
        return [result for _, _, result in sorted(self._heap, reverse=True)]


@dataclass
class Failures:
    """Rows that ended with one error code."""

    count: int = 0
    examples: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(result)


@dataclass
class Findings:
    """Made by `find`. tokens and seconds tell of documents; stored is the share of the full bytes that was stored.

    new_tokens, new_s: of the documents that were compressed, reused ones left out. repeated: those of them that took
    more than one attempt.
    """

    tokens: Histogram = field(default_factory=Histogram.doublings)
    seconds: Histogram = field(default_factory=Histogram.doublings)
    stored: Histogram = field(default_factory=Histogram.shares)
    agreement: Histogram = field(default_factory=Histogram.shares)
    failures: dict[str, Failures] = field(default_factory=dict)
    slowest: Extremes = field(default_factory=Extremes)
    worst: Extremes = field(default_factory=Extremes)
    reused_tokens: int = 0
    new_tokens: int = 0
    new_s: float = 0.0
    repeated: int = 0

    def add(self, result: Result) -> None:
        if result.error is not None:
            self.failures.setdefault(result.error.code, Failures()).add(result)
            return
        self.tokens.add(result.tokens)
        if result.bytes_full:
            self.stored.add(result.bytes_stored / result.bytes_full)
        if result.quality is not None:
            self.agreement.add(result.quality["agreement"])
            self.worst.add(-result.quality["agreement"], result)
        if result.reused:
            self.reused_tokens += result.tokens
            return
        self.new_tokens += result.tokens
        self.new_s += result.seconds
        self.seconds.add(result.seconds)
        self.slowest.add(result.seconds, result)
        self.repeated += result.attempts > 1


def find(results: Iterable[Result]) -> Findings:
    """Read all results, once."""
    findings = Findings()
    for result in results:
        findings.add(result)
    return findings
