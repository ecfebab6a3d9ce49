"""The base of `Window` and `Chunk` records in a blob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvshelf.artifact.blob.kinds.record import Arrays, Dims, RecordArrays, RecordHeader, Target, inconsistent, ints
from kvshelf.artifact.shape import tokens_seen

if TYPE_CHECKING:
    from kvshelf.artifact.records import Recent


class RecentHeader(RecordHeader):
    """One `Recent` record."""

    verbatim: ClassVar[bool] = True

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        if self.rope_mode != "baked":
            raise inconsistent(f"{where} has a {self.kind} whose keys carry no rotation")
        visible = tokens_seen(num_tokens, *self.sees)
        if set(self.lengths) != {visible}:
            raise inconsistent(
                f"{where} has {self.kind}s of {min(self.lengths)} to {max(self.lengths)} entries; the document's "
                f"{num_tokens} tokens leave {visible} in a {self.kind} of {getattr(self, self.kind)}"
            )

    def read(self, source: RecordArrays) -> dict[str, Any]:  # noqa: ARG002
        return {self.kind: getattr(self, self.kind)}

    @staticmethod
    def write(record: Recent, target: Target) -> tuple[dict[str, Any], Arrays]:  # noqa: ARG004
        return {record.kind: getattr(record, record.kind)}, {}

    @staticmethod
    def require_sound(where: str, record: Recent, num_tokens: int) -> None:
        """Its tokens are the document's last."""
        last = np.arange(num_tokens - record.lengths[0], num_tokens)
        if not all(np.array_equal(ints(head), last) for head in record.positions):
            raise inconsistent(f"{where} has a {record.kind} of other tokens than the document's last")
