"""How often numbers occur, and what a decoder looks up."""

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
    """Some runs with the same channels. data: `[bytes]` uint8 on the CPU, the runs; sizes: bytes of each, multiples of
    4; rows: of each; order: the table of each channel."""

    data: Tensor
    sizes: Sequence[int]
    rows: Sequence[int]
    order: Sequence[int]


@dataclass(frozen=True, eq=False)
class Tables:
    """How often numbers occur. Table t gives `frequencies[t]`: int32 of the numbers -K to K, then of the escape."""

    frequencies: Sequence[Ints]

    def __post_init__(self) -> None:
        for found in self.frequencies:
            assert len(found) % 2 == 0
            assert found.min() > 0
            assert found.sum() == 1 << BITS

    def reach(self, table: int) -> int:
        """K: the largest number in a table."""
        return len(self.frequencies[table]) // 2 - 1

    @cache  # noqa: B019 - as many entries as there are tables, as long as these live
    def bits(self, table: int, largest: int) -> Any:
        """`[largest + 1]` fp64: the bits that numbers of each size take, an escape's own bytes among them."""
        frequencies = self.frequencies[table]
        reach = self.reach(table)
        taken = np.full(largest + 1, BITS - np.log2(frequencies[-1]))
        taken += np.where(np.arange(largest + 1) < 64, 8, 16)
        within = min(reach, largest) + 1
        taken[:within] = BITS - np.log2(frequencies[reach : reach + within])
        return taken

    @cached_property
    def entropies(self) -> list[float]:
        """Bits that a number of each table takes in the mean."""
        shares = (found / (1 << BITS) for found in self.frequencies)
        return [float(-(share * np.log2(share)).sum() + share[-1] * 8) for share in shares]

    @cached_property
    def slots(self) -> Tensor:
        """`[tables, 2^BITS, 2]` int32: the number that each slot stands for, and its frequency << 16 | the slots of the
        same number before it."""
        return torch.from_numpy(np.stack([_slots(found) for found in self.frequencies]))

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
