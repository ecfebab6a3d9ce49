"""Which cache goes first when a budget is full: the one whose loss costs least for the room it gives.

GreedyDual-Size-Frequency (Cherkasova, HP Labs TR 98-69): priority = clock + uses * cost / size. The clock is the
priority of the last one evicted, so a cache that nobody asks grows old however costly it was, and one that is asked
again is lifted above all that have gone. With equal costs and sizes this is least frequently used with ageing.
"""

from __future__ import annotations

from typing import Final

LEAST_COST_S: Final = 1e-3
"""Of a cache that tells no time of making: imported, or stored by a program that did not measure."""


def cost_s(prefill_s: float, compress_s: float) -> float:
    """What it takes to make a cache again, in seconds."""
    return max(prefill_s + compress_s, LEAST_COST_S)


def priority(clock: float, uses: int, cost_s: float, nbytes: int) -> float:
    """Seconds of work per MB, times uses, above the clock. `uses` counts the making as the first."""
    return clock + uses * cost_s / (nbytes / 1e6)
