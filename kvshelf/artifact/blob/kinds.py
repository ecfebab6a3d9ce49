"""The kinds of records in a blob, without torch, because stores read headers without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field, GetPydanticSchema

from kvshelf.artifact.blob.record import (
    Arrays,
    Dims,
    Lengths,
    RecordArrays,
    RecordHeader,
    Size,
    Target,
    check_lengths,
    inconsistent,
    ints,
)
from kvshelf.artifact.codecs import CODED
from kvshelf.artifact.positions import Encoding
from kvshelf.artifact.shape import ITEM_BYTES, tokens_seen
from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from kvshelf.artifact.records import Indexed, Merged, Pruned, Recent, Residuals

_CHANNEL_BYTES: Final = 2
"""Of the number of a channel, an int16."""


class KeptHeader(RecordHeader):
    in_runs: ClassVar[bool] = True

    kind: Literal["kept"]


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


class RecentHeader(RecordHeader):
    """Base of `WindowHeader` and `ChunkHeader`: one `Recent` record."""

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


class WindowHeader(RecentHeader):
    kind: Literal["window"]
    window: Size

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return self.window, None


class ChunkHeader(RecentHeader):
    kind: Literal["chunk"]
    chunk: Size

    @property
    def sees(self) -> tuple[int | None, int | None]:
        return None, self.chunk


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


KINDS: Final[Mapping[str, type[RecordHeader]]] = {
    "kept": KeptHeader,
    "pruned": PrunedHeader,
    "indexed": IndexedHeader,
    "window": WindowHeader,
    "chunk": ChunkHeader,
    "latents": LatentsHeader,
    "residuals": ResidualsHeader,
    "merged": MergedHeader,
}
"""Messages about an unknown kind name them in this order."""

_Any: Any = Annotated[reduce(or_, KINDS.values()), Field(discriminator="kind")]

AnyHeader = Annotated[RecordHeader, GetPydanticSchema(lambda _, handler: handler(_Any))]
"""A header of any of these kinds."""
