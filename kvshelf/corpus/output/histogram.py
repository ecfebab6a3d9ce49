"""How many numbers are how large, in memory that does not grow with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FINE: Final = 16
"""Bins to each bar of the picture. Quantiles are read off the bins."""


@dataclass(frozen=True)
class Bar:
    """`count` numbers from `low` up to `high`."""

    low: float
    high: float
    count: int


class Histogram:
    """Adds up numbers in bins. Made by `doublings` or `shares`."""

    def __init__(self, bin_of: Callable[[float], int], edge: Callable[[int], float]) -> None:
        """bin_of: the bin of a number, ascending. edge: the least number of a bin; its inverse."""
        self._bin_of = bin_of
        self._edge = edge
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.low = math.inf
        self.high = -math.inf

    @classmethod
    def doublings(cls) -> Histogram:
        """For positive numbers of very different size: each bar reaches to twice where it begins, and a quantile is
        4.5 % off at most."""
        return cls(lambda x: math.floor(_FINE * math.log2(max(x, 1e-9))), lambda b: 2 ** (b / _FINE))

    @classmethod
    def shares(cls, bars: int = 20) -> Histogram:
        """For numbers from 0 to 1, which is in the last bar."""
        fine = bars * _FINE
        return cls(lambda x: min(fine - 1, max(0, math.floor(x * fine))), lambda b: b / fine)

    def add(self, number: float) -> None:
        self._counts[self._bin_of(number)] += 1
        self.count += 1
        self.total += number
        self.low = min(self.low, number)
        self.high = max(self.high, number)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The number that this share of all is not above: the middle of its bin, and never beyond the extremes."""
        rank, seen = share * self.count, 0
        for number in sorted(self._counts):
            seen += self._counts[number]
            if seen >= rank:
                middle = (self._edge(number) + self._edge(number + 1)) / 2
                return min(max(middle, self.low), self.high)
        return 0.0

    def bars(self) -> list[Bar]:
        """From the lowest to the highest number, the empty ones between them too."""
        if not self.count:
            return []
        coarse: Counter[int] = Counter()
        for number, count in self._counts.items():
            coarse[number // _FINE] += count
        return [
            Bar(self._edge(number * _FINE), self._edge((number + 1) * _FINE), coarse[number])
            for number in range(min(coarse), max(coarse) + 1)
        ]
