"""`Chunk` records in a blob."""

from __future__ import annotations

from typing import Literal

from kvshelf.artifact.blob.kinds.recent import RecentHeader
from kvshelf.artifact.blob.kinds.record import Size


class ChunkHeader(RecentHeader):
    kind: Literal["chunk"]
    chunk: Size

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return None, self.chunk
