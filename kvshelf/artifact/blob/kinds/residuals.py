"""`Residuals` records in a blob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from kvshelf.artifact.codecs import CODED
from kvshelf.artifact.shape import ITEM_BYTES

if TYPE_CHECKING:
    from kvshelf.artifact.records import Residuals


class ResidualsHeader(RecordHeader):
    """One `Residuals` record. width: channels of a residual, of which each token has one, whatever the heads."""

    transformable: ClassVar[bool] = False
    row_names: ClassVar[tuple[str, ...]] = ("keys",)

    kind: Literal["residuals"]
    width: Size

    @property
    def residual_width(self) -> int:
        return self.width

    @property
    def row_lengths(self) -> list[int]:
        return self.lengths[:1]

    def key_dim(self, dims: Dims) -> int:  # noqa: ARG002
        return self.width

    def unpacked_bytes(self, dims: Dims) -> int:
        rows = sum(self.row_lengths) * self.width * ITEM_BYTES[dims.dtype]
        return rows - self.sizes[0] if self.codec in CODED else 0

    def made_bytes(self, dims: Dims) -> tuple[int, int]:
        rows = self.sizes[: list(self.array_sizes(dims)).index("positions")]
        made = sum(self.lengths) * (dims.key_dim + dims.value_dim) * ITEM_BYTES[dims.dtype]
        return made, sum(rows) + self.unpacked_bytes(dims)

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise inconsistent(f"{where} has residuals of keys that carry no rotation")
        if len(set(self.lengths)) != 1:
            raise inconsistent(
                f"{where} has residuals of heads of {min(self.lengths)} to {max(self.lengths)} entries; they are alike"
            )

    def read(self, source: RecordArrays) -> dict[str, Any]:
        return {"full_dims": (source.dims.key_dim, source.dims.value_dim)}

    @staticmethod
    def write(record: Residuals, target: Target) -> tuple[dict[str, Any], Arrays]:  # noqa: ARG004
        return {"width": record.keys.shape[1]}, {}

    @staticmethod
    def require_sound(where: str, record: Residuals, num_tokens: int) -> None:  # noqa: ARG004
        """Its tokens are the same in every head."""
        first, *others = (ints(head) for head in record.positions)
        if not all(np.array_equal(first, other) for other in others):
            raise inconsistent(f"{where} has residuals of other tokens in each head")
