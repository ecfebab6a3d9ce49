"""Numbers and tables for entropy coding."""

from __future__ import annotations

import numpy as np

from kvshelf.kernels import ans
from kvshelf.kernels.ans.tables import Ints


def table(deviation: float) -> Ints:
    """Frequencies of a two-sided exponential distribution, and one slot for the escape."""
    reach = max(1, int(5 * deviation))
    shares = np.exp(-np.abs(np.arange(-reach, reach + 1)) * 1.4 / deviation)
    frequencies = np.maximum(1, np.round(shares / shares.sum() * 4000)).astype(np.int32)
    frequencies[reach] += 4095 - frequencies.sum()
    return np.append(frequencies, 1).astype(np.int32)


DEVIATIONS = (0.1, 0.5, 2.0, 9.0)
TABLES = ans.Tables([table(deviation) for deviation in DEVIATIONS])


def drawn(order: list[int], rows: int, seed: int = 0, spread: float = 1.0) -> Ints:
    draw = np.random.default_rng(seed)
    sizes = [draw.laplace(0, spread * DEVIATIONS[table] / 1.4, rows) for table in order]
    return np.round(np.stack(sizes)).astype(np.int32) if sizes else np.zeros((0, rows), np.int32)
