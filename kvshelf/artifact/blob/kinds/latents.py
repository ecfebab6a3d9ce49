"""`Latents` records in a blob."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvshelf.artifact.blob.kinds.record import Dims, RecordHeader
from kvshelf.errors import BlobError


class LatentsHeader(RecordHeader):
    """One `Latents` record."""

    in_runs: ClassVar[bool] = True
    latent: ClassVar[bool] = True
    transformable: ClassVar[bool] = False

    kind: Literal["latents"]

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise BlobError(f"{where} has latents whose rotated parts carry no rotation", reason="inconsistent")
        if len(self.lengths) != 1:
            raise BlobError(f"{where} has latents of {len(self.lengths)} heads; they have one", reason="inconsistent")
