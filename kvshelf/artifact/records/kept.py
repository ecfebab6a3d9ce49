"""Entries as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.artifact.packed import Packed


@dataclass(frozen=True, eq=False)
class Kept(Packed):
    """Some of a layer's entries, unchanged but for the codec. An entry is a token. See `Packed` for the fields."""

    kind: ClassVar[str] = "kept"
    continues: ClassVar[bool] = True

    def select(self, chosen: Tensor) -> Kept:
        return Kept(**self.selected(chosen))
