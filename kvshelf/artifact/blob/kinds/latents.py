"""`Latents` records in a blob."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from kvshelf.artifact.blob.kinds.record import Dims, RecordHeader
from kvshelf.artifact.codecs import Codec, Precision
from kvshelf.errors import BlobError


class LatentsHeader(RecordHeader):
    """One `Latents` record."""

    in_runs: ClassVar[bool] = True
    latent: ClassVar[bool] = True

    kind: Literal["latents"]

    @property
    def joined_entries(self) -> int:
        return sum(self.lengths) if self.codec == "none" else 0

    def precisions(self, codec: Codec) -> Collection[tuple[Precision, int]]:
        """None under klt: its transforms are those of whole keys without their rotation, which these are not."""
        return () if codec.name == "klt" else codec.precisions

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise BlobError(f"{where} has latents whose rotated parts carry no rotation", reason="inconsistent")
        if len(self.lengths) != 1:
            raise BlobError(f"{where} has latents of {len(self.lengths)} heads; they have one", reason="inconsistent")
