"""`Pruned` records in a blob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from kvshelf.artifact.blob.kinds.record import (
    Arrays,
    Dims,
    RecordArrays,
    RecordHeader,
    Size,
    Target,
    inconsistent,
    ints,
)
from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from kvshelf.artifact.records import Pruned

_CHANNEL_BYTES: Final = 2
"""Of the number of a channel, an int16."""


class PrunedHeader(RecordHeader):
    """One `Pruned` record. channels: D', those that the keys of each head have."""

    transformable: ClassVar[bool] = False

    kind: Literal["pruned"]
    channels: Size

    def key_dim(self, dims: Dims) -> int:  # noqa: ARG002
        return self.channels

    def own_sizes(self) -> dict[str, int | None]:
        return {"channels": len(self.lengths) * self.channels * _CHANNEL_BYTES}

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise inconsistent(f"{where} has pruned keys that carry no rotation")
        if self.channels > dims.key_dim:
            raise inconsistent(f"{where} has pruned keys of {self.channels} channels, of {dims.key_dim}")

    def read(self, source: RecordArrays) -> dict[str, Any]:
        channels = source.tensor("channels", "int16", len(self.lengths), self.channels)
        return {"channels": channels, "full_dim": source.dims.key_dim}

    @staticmethod
    def write(record: Pruned, target: Target) -> tuple[dict[str, Any], Arrays]:
        return {"channels": record.channels.shape[1]}, {"channels": target.raw(record.channels)}

    @staticmethod
    def require_sound(where: str, record: Pruned, num_tokens: int) -> None:  # noqa: ARG004
        """Every channel is one of the key's, and they ascend."""
        channels = ints(record.channels)  # [kv_heads, D']
        outside = (channels < 0) | (channels >= record.full_dim)
        if outside.any():
            raise BlobError(
                f"{where} has pruned keys with channel {channels[outside][0]}, of {record.full_dim}",
                reason="channel_out_of_range",
            )
        if (np.diff(channels, axis=1) <= 0).any():
            raise inconsistent(f"{where} has the channels of pruned keys out of order, or one twice")
