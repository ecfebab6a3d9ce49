"""Latents of tokens, for all heads together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.packed import HeadView, Packed, Rotate
from kvshelf.kernels.prefix_attention.prefixes import PackedPrefix, Prefix, StreamedPrefix


@dataclass(frozen=True, eq=False)
class Latents(Packed):
    """Some tokens of a layer with latent attention (MLA, arXiv 2405.04434, section 2.1), for all its heads together.

    keys: the latents `[entries, rank]`, of which the model makes the keys and values of each head by one product.
    values: the part of a token's key that all heads share, rotated to the token's position, `[entries, rope]`. There is
    one head.

    Nothing is expanded: queries are brought into the latent space instead (`Absorbed`), where a token has the key
    `[latent, rotated]` and the value `latent`.
    """

    kind: ClassVar[str] = "latents"
    continues: ClassVar[bool] = True
    latent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.kv_heads == 1
        assert self.rope_mode == "baked"

    @classmethod
    def of(cls, record: Packed) -> Latents:
        """From a record of one head, whose keys are latents and whose values are rotated parts."""
        return cls(**{each.name: getattr(record, each.name) for each in fields(Packed)})

    @property
    def joined_bytes(self) -> int:
        """The copy has latents and rotated parts side by side; quantized rows are read in place."""
        return 0 if self.quantized else self.entries * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:  # noqa: ARG002
        """See `Packed.prefixes`. Keys `[entries, rank + rope]`; values are their first `rank` channels, not a copy."""
        latents, rotated = self.rows
        if isinstance(latents, Tensor) and isinstance(rotated, Tensor):
            joined = torch.cat([latents, rotated], dim=1)
            return (PackedPrefix(joined, joined[:, : self.key_dim], (self.entries,)),)
        return (StreamedPrefix((self.entries,), partial(_joined_block, self.views(), self.key_dim)),)


def _joined_block(views: Sequence[HeadView], rank: int, head: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some latents, dequantized."""
    view = views[head]
    joined = torch.cat([view.keys[start:stop], view.values[start:stop]], dim=1)
    return joined, joined[:, :rank]
