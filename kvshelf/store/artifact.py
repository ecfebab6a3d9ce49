"""The artifact: what remains of a document's KV cache after compression.

A `CompressedCache` is immutable and knows no tenant and no store. Its layers are typed records; format 1 has `Kept`
(some of the entries, unchanged, ragged by head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.store.identity import Identity

RopeMode = Literal["baked", "pre"]


@dataclass(frozen=True, eq=False)
class Kept:
    """Some of a layer's entries, unchanged. Head h owns rows `offsets[h]` to `offsets[h + 1]` of the packed tensors.

    Packed by head instead of padded: heads that keep different numbers of entries cost no fake keys, on disk or in
    memory, and equal heads can still be viewed as `[kv_heads, kept, D]` without a copy.

    keys: `[entries, D]` and values: `[entries, Dv]`, in the model's dtype, contiguous, each head's rows in ascending
    position. entry_positions: `[entries]` int32, original positions in the document. `rope_mode` says whether the
    rotation of RoPE is in the keys ("baked") or still to be applied ("pre").
    """

    kind: ClassVar[Literal["kept"]] = "kept"

    keys: Tensor
    values: Tensor
    entry_positions: Tensor
    offsets: tuple[int, ...]
    rope_mode: RopeMode = "baked"

    def __post_init__(self) -> None:
        entries = self.offsets[-1]
        # Internal invariants; bytes from outside are checked by the blob reader, with named errors.
        assert self.offsets[0] == 0
        assert list(self.offsets) == sorted(self.offsets)
        assert self.keys.shape[0] == self.values.shape[0] == self.entry_positions.shape[0] == entries

    @classmethod
    def from_heads(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        positions: Sequence[Tensor],
        rope_mode: RopeMode = "baked",
    ) -> Kept:
        """Pack one tensor per KV head: keys `[kept_h, D]`, values `[kept_h, Dv]`, positions `[kept_h]`."""
        offsets = [0]
        for head in positions:
            offsets.append(offsets[-1] + head.shape[0])
        return cls(
            keys=torch.cat(list(keys)),
            values=torch.cat(list(values)),
            entry_positions=torch.cat(list(positions)).to(torch.int32),
            offsets=tuple(offsets),
            rope_mode=rope_mode,
        )

    @property
    def kv_heads(self) -> int:
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        """Stored entries over all heads: what a budget counts."""
        return self.offsets[-1]

    @cached_property
    def uniform(self) -> bool:
        """Whether every head keeps the same number of entries."""
        return len({end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)}) <= 1

    @property
    def positions(self) -> list[Tensor]:
        """One ascending int tensor of original positions per KV head."""
        return list(torch.split(self.entry_positions, self._lengths()))

    @property
    def nbytes(self) -> int:
        """Bytes held in memory: keys, values and positions."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, self.entry_positions))

    def heads(self) -> list[tuple[Tensor, Tensor]]:
        """Keys `[kept_h, D]` and values `[kept_h, Dv]` of each KV head, as views."""
        lengths = self._lengths()
        return list(zip(torch.split(self.keys, lengths), torch.split(self.values, lengths), strict=True))

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[kv_heads, max_kept, D]`, values `[kv_heads, max_kept, Dv]`, and valid `[kv_heads, max_kept]` bool.

        Rows past a head's own length are zero and not valid. For inspection; attention never pads.
        """
        lengths = self._lengths()
        widest = max(lengths)
        keys = self.keys.new_zeros(self.kv_heads, widest, self.keys.shape[1])
        values = self.values.new_zeros(self.kv_heads, widest, self.values.shape[1])
        valid = torch.zeros(self.kv_heads, widest, dtype=torch.bool, device=self.keys.device)
        for head, (head_keys, head_values) in enumerate(self.heads()):
            keys[head, : lengths[head]] = head_keys
            values[head, : lengths[head]] = head_values
            valid[head, : lengths[head]] = True
        return keys, values, valid

    def to(self, device: torch.device | str) -> Kept:
        """The same record on another device; itself when it is there already."""
        if self.keys.device == torch.device(device):
            return self
        return Kept(
            keys=self.keys.to(device),
            values=self.values.to(device),
            entry_positions=self.entry_positions.to(device),
            offsets=self.offsets,
            rope_mode=self.rope_mode,
        )

    def _lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False)]


LayerRecord = Kept
"""Every kind of layer record. Attention, blob and export each handle all of them and refuse others by name."""


@dataclass(frozen=True, eq=False)
class CompressedCache:
    """A document's reduced KV cache, ready to be attached to the model it was made under.

    `next_position` is where the first query token stands: the document's length, not the number of entries kept.
    """

    layers: tuple[LayerRecord, ...]
    num_tokens: int
    next_position: int
    identity: Identity

    @property
    def nbytes(self) -> int:
        """Bytes held in memory by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def kept_tokens(self) -> int:
        """Entries kept per layer and KV head, the mean rounded to the nearest integer."""
        heads = sum(layer.kv_heads for layer in self.layers)
        return round(sum(layer.entries for layer in self.layers) / heads)

    def to(self, device: torch.device | str) -> CompressedCache:
        """The same cache on another device."""
        layers = tuple(layer.to(device) for layer in self.layers)
        return CompressedCache(layers, self.num_tokens, self.next_position, self.identity)

    def to_bytes(self, codec: str | None = None) -> bytes:
        """The blob of docs/format.md. `codec` None keeps the encoding the cache has; equal caches give equal bytes."""
        from kvshelf.store import blob  # the blob reader builds artifacts: imported here to keep the cycle open

        if codec not in (None, *blob.CODECS):
            raise InvalidRequest(f"unknown codec {codec!r}; this version has {', '.join(blob.CODECS)}", param="codec")
        return blob.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> CompressedCache:
        """Read a blob. Every digest is checked before a tensor is made; raises `BlobError` for any other bytes."""
        from kvshelf.store import blob

        return blob.decode(data)
