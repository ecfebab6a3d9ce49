"""Several records of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.packed import Packed, Rotate, padded
from kvshelf.kernels.prefix_attention.prefixes import Prefix


@dataclass(frozen=True, eq=False)
class Parts:
    """One layer as several records with the same heads and disjoint tokens. Attention sums over all of them."""

    kind: ClassVar[str] = "parts"

    parts: tuple[Packed, ...]

    def __post_init__(self) -> None:
        assert len(self.parts) > 1
        assert len({(part.kv_heads, part.key_dim, part.value_dim, part.dtype) for part in self.parts}) == 1

    @property
    def kv_heads(self) -> int:
        return self.parts[0].kv_heads

    @property
    def key_dim(self) -> int:
        return self.parts[0].key_dim

    @property
    def value_dim(self) -> int:
        return self.parts[0].value_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def entries(self) -> int:
        """Stored entries over all heads and parts."""
        return sum(part.entries for part in self.parts)

    @cached_property
    def uniform(self) -> bool:
        """Whether every head keeps the same number of entries, all parts together."""
        return len({sum(lengths) for lengths in zip(*(part.lengths for part in self.parts), strict=True)}) <= 1

    @property
    def positions(self) -> list[Tensor]:
        """One ascending int tensor of original positions per KV head, merged over the parts."""
        return [head.sort().values for head in self._together([part.positions for part in self.parts])]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory by all parts."""
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `Packed.dense`, with the entries of all parts in ascending position."""
        order = [head.argsort() for head in self._together([part.positions for part in self.parts])]
        keys = self._together([part.plain_heads()[0] for part in self.parts])
        values = self._together([part.plain_heads()[1] for part in self.parts])
        return padded(
            [head[index] for head, index in zip(keys, order, strict=True)],
            [head[index] for head, index in zip(values, order, strict=True)],
        )

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:
        """The prefixes of all parts, for attention. See `Packed.prefixes`."""
        return tuple(prefix for part in self.parts for prefix in part.prefixes(rotate))

    def to(self, device: torch.device | str) -> Parts:
        """The same record on another device; itself when it is there already."""
        moved = tuple(part.to(device) for part in self.parts)
        return self if all(a is b for a, b in zip(moved, self.parts, strict=True)) else Parts(moved)

    @staticmethod
    def _together(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Concatenate the parts' tensors, head by head."""
        return [torch.cat(heads) for heads in zip(*parts, strict=True)]
