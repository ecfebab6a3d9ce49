"""`Latents` records in a blob."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvshelf.artifact.blob.kinds.record import Dims, RecordHeader, inconsistent


class LatentsHeader(RecordHeader):
    in_runs: ClassVar[bool] = True
    latent: ClassVar[bool] = True
    transformable: ClassVar[bool] = False

    kind: Literal["latents"]

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise inconsistent(f"{where} has latents whose rotated parts carry no rotation")
        if len(self.lengths) != 1:
            raise inconsistent(f"{where} has latents of {len(self.lengths)} heads; they have one")
