"""Which cache is evicted first when a budget is full: the one that costs least to make again per byte it frees.

GreedyDual-Size-Frequency (Cherkasova, HP Labs TR 98-69): priority = clock + uses * cost / size. The clock is the
priority of the last evicted cache. So an unused cache ages however costly it was, and each use lifts a cache above all
evicted ones. With equal costs and sizes this is least frequently used with ageing.
"""

from __future__ import annotations

from typing import Final

LEAST_COST_S: Final = 1e-3
"""The cost of a cache without timings: imported, or stored by a program that did not measure."""


def cost_s(prefill_s: float, compress_s: float) -> float:
    """Seconds to make a cache again."""
    return max(prefill_s + compress_s, LEAST_COST_S)


def priority(clock: float, uses: int, cost_s: float, nbytes: int) -> float:
    """Seconds of work per MB, times uses, above the clock. `uses` counts the making as the first."""
    return clock + uses * cost_s / (nbytes / 1e6)
