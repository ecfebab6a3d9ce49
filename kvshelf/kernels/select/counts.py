"""How many entries each head keeps, where the device decides it and nobody has asked yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueuedCounts:
    """counts: of each head, `[heads]` int64 on the device. total: what they add up to, which the host knows."""

    counts: Tensor
    total: int

    @cached_property
    def heads(self) -> Tensor:
        """The head of each entry, `[total]` int64, in the order in which entries are packed."""
        heads = torch.arange(len(self.counts), device=self.counts.device)
        return heads.repeat_interleave(self.counts, output_size=self.total)

    def known(self) -> list[int]:
        """The counts. Waits for the device."""
        counts: list[int] = self.counts.tolist()
        return counts


Counts = Sequence[int] | QueuedCounts


def total_of(counts: Counts) -> int:
    """Entries of all heads."""
    return counts.total if isinstance(counts, QueuedCounts) else sum(counts)
