"""The frequencies of numbers, and the tables that a decoder looks up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BITS = 12
"""The frequencies of a table add up to 2^BITS, so that a table of as many slots decodes a symbol in one look-up."""

ESCAPE = -(1 << 31)
"""The value of a slot whose number is among the escapes."""

Ints = npt.NDArray[np.int32]

ENTRY_ROWS = 512
"""Rows from which a run has entries. They take 16 bytes each: of a run of 1,024 rows at a bit a number 0.4 percent."""

ENTRIES = 1 << 31
"""The bit of a run's first word that says that it has entries."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs with the same channels. data: `[bytes]` uint8 on the CPU, run after run. sizes: bytes of each run, multiples
    of 4. rows: of each run. order: the table of each channel."""

    data: Tensor
    sizes: Sequence[int]
    rows: Sequence[int]
    order: Sequence[int]


@dataclass(frozen=True, eq=False)
class Tables:
    """`frequencies[t]`: how often table t gives the numbers -K to K, and then the escape, int32."""

    frequencies: Sequence[Ints]

    def __post_init__(self) -> None:
        for frequencies in self.frequencies:
            assert len(frequencies) % 2 == 0
            assert frequencies.min() > 0
            assert frequencies.sum() == 1 << BITS

    def reach(self, table: int) -> int:
        """K: the largest number in a table."""
        return len(self.frequencies[table]) // 2 - 1

    @cache  # noqa: B019 - as many entries as there are tables, as long as these live
    def bits(self, table: int, largest: int) -> Any:
        """`[largest + 1]` fp64: the bits of a number of each magnitude, an escape's own bytes among them."""
        frequencies = self.frequencies[table]
        reach = self.reach(table)
        costs = np.full(largest + 1, BITS - np.log2(frequencies[-1]))
        costs += np.where(np.arange(largest + 1) < 64, 8, 16)
        within = min(reach, largest) + 1
        costs[:within] = BITS - np.log2(frequencies[reach : reach + within])
        return costs

    @cached_property
    def entropies(self) -> list[float]:
        """The mean bits of a number, of each table."""
        shares = (frequencies / (1 << BITS) for frequencies in self.frequencies)
        return [float(-(share * np.log2(share)).sum() + share[-1] * 8) for share in shares]

    @cached_property
    def slots(self) -> Tensor:
        """`[tables, 2^BITS, 2]` int32: the number of each slot, and its frequency << 16 | how many slots before this
        one have the same number."""
        return torch.from_numpy(np.stack([_slots(frequencies) for frequencies in self.frequencies]))

    @cache  # noqa: B019 - a copy a device, as long as the tables live
    def slots_on(self, device: torch.device) -> Tensor:
        """`slots` on a device."""
        return self.slots.to(device)


def _slots(frequencies: Ints) -> Ints:
    reach = len(frequencies) // 2 - 1
    values = np.append(np.arange(-reach, reach + 1), ESCAPE)
    starts = np.cumsum(frequencies) - frequencies
    before = np.arange(1 << BITS) - np.repeat(starts, frequencies)
    shares = np.repeat(frequencies, frequencies) << 16 | before
    return np.stack([np.repeat(values, frequencies), shares], axis=1).astype(np.int32)
