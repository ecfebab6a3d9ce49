"""Keys without some of their channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.packed import HeadView, Packed, Rotate
from kvshelf.kernels.prefix_attention.prefixes import PackedPrefix, Prefix


@dataclass(frozen=True, eq=False)
class Pruned(Packed):
    """Some tokens whose keys have D' of the D channels, others in each head (ThinK, arXiv 2407.21018): a query reads
    them with the same channels of its own.

    keys: `[entries, D']`. channels: `[kv_heads, D']` int16, ascending. full_dim: D. Keys carry their rotation: another
    one would mix channels of which some are gone. Where keys are asked for as numbers they have D channels, with zeros.
    """

    kind: ClassVar[str] = "pruned"

    channels: Tensor = field(kw_only=True)
    full_dim: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.rope_mode == "baked"
        assert self.channels.shape == (self.kv_heads, self.keys.shape[1])
        assert self.channels.dtype == torch.int16

    @property
    def key_dim(self) -> int:
        return self.full_dim

    def views(self) -> list[HeadView]:
        return [view._replace(keys=self._widened(head, view.keys[:])) for head, view in enumerate(super().views())]

    def plain_heads(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = super().plain_heads()
        return [self._widened(head, rows) for head, rows in enumerate(keys)], values

    def prefixes(self, rotate: Rotate | None = None) -> tuple[Prefix, ...]:  # noqa: ARG002
        """See `Packed.prefixes`."""
        return (PackedPrefix(*self.rows, tuple(self.lengths), self.channels.to(torch.int32)),)

    def require_codec(self, codec: Codec) -> None:
        codec.require_pruned()

    def own_cut(self, first: int, last: int) -> dict[str, Any]:
        return {"channels": self.channels[first:last].clone()}

    @staticmethod
    def own_joined(records: Sequence[Any]) -> dict[str, Any]:
        return {"channels": torch.cat([record.channels for record in records])}

    def _widened(self, head: int, keys: Tensor) -> Tensor:
        """`[kept_h, D']` as `[kept_h, D]`."""
        whole = keys.new_zeros(len(keys), self.full_dim)
        whole[:, self.channels[head].long()] = keys
        return whole

    def _tensors(self) -> tuple[str, ...]:
        return (*super()._tensors(), "channels")
