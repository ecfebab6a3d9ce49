"""`Indexed` records in a blob."""

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
from kvshelf.artifact.shape import ITEM_BYTES
from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from kvshelf.artifact.records import Indexed


class IndexedHeader(RecordHeader):
    """One `Indexed` record. width: W, numbers of a block's summary."""

    in_runs: ClassVar[bool] = True

    kind: Literal["indexed"]
    block: Size
    width: Size

    @property
    def run_rows(self) -> int:
        return self.block

    @property
    def blocks(self) -> int:
        """Of each head."""
        return -(-max(self.lengths) // self.block)

    def own_sizes(self) -> dict[str, int | None]:
        return {"summaries": self.blocks * self.width * ITEM_BYTES["bfloat16"]}

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if len(set(self.lengths)) != 1 or not self.lengths[0]:
            raise inconsistent(
                f"{where} has indexed heads of {min(self.lengths)} to {max(self.lengths)} entries; each has as many as "
                "the others, and one at least"
            )
        if self.group and self.block % self.group:
            raise inconsistent(
                f"{where} has an index of blocks of {self.block} entries, and {self.group} share a scale; the blocks "
                "must be a multiple"
            )

    def read(self, source: RecordArrays) -> dict[str, Any]:
        return {"block": self.block, "summaries": source.tensor("summaries", "bfloat16", self.blocks, self.width)}

    @staticmethod
    def write(record: Indexed, target: Target) -> tuple[dict[str, Any], Arrays]:
        return {"block": record.block, "width": record.summaries.shape[1]}, {"summaries": target.raw(record.summaries)}

    @staticmethod
    def require_sound(where: str, record: Indexed, num_tokens: int) -> None:  # noqa: ARG004
        """Its tokens are the document's first, and its summaries are finite."""
        first = np.arange(record.lengths[0])
        if not all(np.array_equal(ints(head), first) for head in record.positions):
            raise inconsistent(f"{where} has an index of other tokens than the document's first")
        if not bool(record.summaries.isfinite().all()):
            raise BlobError(f"{where} has a summary that is not finite", reason="not_finite")
