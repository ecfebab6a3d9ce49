"""`Merged` records in a blob."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvshelf.artifact.blob.kinds.record import (
    Arrays,
    Dims,
    Lengths,
    RecordArrays,
    RecordHeader,
    Target,
    check_lengths,
    inconsistent,
    ints,
)
from kvshelf.artifact.positions import Encoding
from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from kvshelf.artifact.records import Merged


class MergedHeader(RecordHeader):
    """One `Merged` record. slot_lengths: slots of each KV head."""

    kind: Literal["merged"]
    slot_lengths: Lengths
    slot_position_encoding: Encoding

    @property
    def column_lengths(self) -> list[int]:
        return self.slot_lengths

    def own_sizes(self) -> dict[str, int | None]:
        slots = sum(self.slot_lengths)
        return {"slot_positions": None, "slot_classes": slots * _class_bytes(self.lengths), "slot_scales": slots * 4}

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        super().check(where, dims, num_tokens)
        check_lengths(where, "slots", self.slot_lengths, num_tokens)
        if len(self.slot_lengths) != len(self.lengths):
            raise inconsistent(
                f"{where} has slots in {len(self.slot_lengths)} heads and classes in {len(self.lengths)}"
            )

    def read(self, source: RecordArrays) -> dict[str, Any]:
        slots = sum(self.slot_lengths)
        return {
            "slot_scales": source.tensor("slot_scales", "float32", slots),
            "slot_classes": source.tensor("slot_classes", f"uint{8 * _class_bytes(self.lengths)}", slots).int(),
            "slot_positions": source.positions("slot_positions", self.slot_position_encoding, self.slot_lengths)(),
            "slot_offsets": tuple(accumulate(self.slot_lengths, initial=0)),
        }

    @staticmethod
    def write(record: Merged, target: Target) -> tuple[dict[str, Any], Arrays]:
        encoding, slot_positions = target.positions(record.slot_positions, record.slot_lengths)
        classes = ints(record.slot_classes).astype(f"<u{_class_bytes(record.lengths)}")
        return {"slot_lengths": record.slot_lengths, "slot_position_encoding": encoding}, {
            "slot_positions": slot_positions,
            "slot_classes": memoryview(classes.tobytes()),
            "slot_scales": target.raw(record.slot_scales.float()),
        }

    @staticmethod
    def require_sound(where: str, record: Merged, num_tokens: int) -> None:  # noqa: ARG004
        """Every slot names a class of its head, every class has a slot, and every scale is finite."""
        classes, lengths = ints(record.slot_classes), record.lengths
        counts = np.repeat(np.asarray(lengths, np.int64), record.slot_lengths)  # classes of each slot's head
        outside = (classes < 0) | (classes >= counts)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise BlobError(
                f"slot {first} names class {int(classes[first])} of a head of {int(counts[first])}",
                reason="class_out_of_range",
            )
        starts = np.repeat(np.asarray(record.offsets[:-1], np.int64), record.slot_lengths)
        if not np.bincount(classes + starts, minlength=sum(lengths)).all():
            raise BlobError("a class has no slot, so that nothing could ever read it", reason="class_without_slot")
        if not bool(record.slot_scales.isfinite().all()):
            raise BlobError(f"{where} has a slot whose scale is not finite", reason="not_finite")


def _class_bytes(lengths: Sequence[int]) -> int:
    """Bytes of one class index: two, unless a head has more classes than two bytes can count."""
    return 2 if max(lengths) <= 1 << 16 else 4
