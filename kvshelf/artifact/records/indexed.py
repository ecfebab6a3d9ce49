"""Entries with an index of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.packed import Packed
from kvshelf.artifact.records.kept import Kept


@dataclass(frozen=True, eq=False)
class Indexed(Packed):
    """The first tokens of a document, the same in every head, and an index of them: a summary of each `block` tokens.

    The last block may be shorter. What a summary is, the policy that made it says. summaries: `[blocks, W]` bf16.
    A blob stores the index before the rows, and each block with a digest of its own, so that a question reads the
    blocks that it chooses by the index.
    """

    kind: ClassVar[str] = "indexed"

    block: int = field(kw_only=True)
    summaries: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.uniform
        assert self.summaries.shape[0] == -(-self.lengths[0] // self.block)
        assert self.summaries.dtype == torch.bfloat16

    def select(self, chosen: Tensor) -> Kept | Indexed:
        """See `Packed.select`. The index stays with the first tokens; other entries have none."""
        selected = self.selected(chosen)
        if not bool(chosen[0]):
            return Kept(**selected)
        blocks = -(-selected["offsets"][1] // self.block)
        return Indexed(**selected, block=self.block, summaries=self.summaries[:blocks])

    def require_codec(self, codec: Codec) -> None:
        codec.require_blocks(self.block)

    @staticmethod
    def own_joined(records: Sequence[Any]) -> dict[str, Any]:
        """A summary has a part of each query head."""
        return {"summaries": torch.cat([record.summaries for record in records], dim=1)}

    def _tensors(self) -> tuple[str, ...]:
        return (*super()._tensors(), "summaries")
