"""Rows under the codec `lossless`: the numbers as they are, byte plane by byte plane, each plane entropy-coded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import zstandard
from torch import Tensor

from kvshelf.artifact.coded import ByteRows, malformed

_UNSIGNED: Final = {2: "<u2", 4: "<u4"}
_SIZE_BYTES: Final = 8
_BLOCK: Final = 1 << 17
"""Numbers whose planes are split and joined at once: they fit into a processor's cache."""
_SAMPLE: Final = 1 << 15
"""Bytes of a plane that say whether it is worth coding: trying all of a fraction's bytes takes four times as long."""
_WORTH: Final = 0.97

_ENTROPY: Final = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)
"""As little search for repetitions as Zstandard allows, which leaves its Huffman coder. SmolLM2 in bfloat16, the plane
with the exponents alone: 1.7 GB/s of the cache, and 3 % fewer bytes than level 1, which takes 2.3 times as long. Level
19 has 17 % fewer again (tried on 8 of the 60 arrays), at 9 MB/s."""


@dataclass(frozen=True, eq=False)
class PlaneRows(ByteRows):
    """The keys or the values of a record, as bytes: `entries` rows of `num_channels` numbers.

    data: `[bytes]` uint8, the array of a blob. dtype: of the rows once decoded.
    """

    data: Tensor
    entries: int
    num_channels: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.entries, self.num_channels

    def require_sound(self, where: str) -> None:
        """Raise `BlobError` unless the planes have the stated sizes and a byte for each number. Decodes nothing."""
        count, head = self.entries * self.num_channels, self.dtype.itemsize * _SIZE_BYTES
        if self.nbytes < head:
            raise malformed(where, "is too short for the sizes of its planes")
        sizes = self._sizes
        if any(size > count for size in sizes) or head + sum(sizes) != self.nbytes:
            raise malformed(where, f"has planes of {sizes} bytes in {self.nbytes - head}, for {count} numbers")
        for plane in self._planes():
            if len(plane) == count:
                continue
            try:
                content_size = zstandard.frame_content_size(bytes(plane[:18]))  # the longest header of a frame
            except zstandard.ZstdError as error:
                raise malformed(where, f"has a plane that is no Zstandard frame ({error})") from error
            if content_size != count:
                raise malformed(where, f"has a plane that is not of its {count} numbers")

    def decode(self) -> Tensor:
        """`[entries, num_channels]` in `dtype`, bit by bit what was encoded. Raises `BlobError` for a damaged frame."""
        out = torch.empty(self.shape, dtype=self.dtype)
        if not self.entries:
            return out
        numbers = _numbers(out)
        planes = [_unpacked(plane, len(numbers)) for plane in self._planes()]
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            np.copyto(block, planes[-1][start : start + _BLOCK])
            for plane in planes[-2::-1]:
                block <<= 8
                block |= plane[start : start + _BLOCK]
        return out

    @property
    def _sizes(self) -> list[int]:
        head = self.data[: self.dtype.itemsize * _SIZE_BYTES].numpy().tobytes()
        return [int(size) for size in np.frombuffer(head, "<u8")]

    def _planes(self) -> Iterator[memoryview]:
        """The planes as stored, the least significant first."""
        data = self.data.numpy().data
        at = self.dtype.itemsize * _SIZE_BYTES
        for size in self._sizes:
            yield data[at : at + size]
            at += size


def encode_planes(rows: Tensor) -> PlaneRows:
    """Rows `[entries, D]` of any dtype of two or four bytes, on any device. NaN and infinity keep their bits, too.

    The byte of a float with its sign and most of its exponent has some 2.7 bits of information in a cache (SmolLM2 in
    bfloat16), those of its fraction have eight: so Zstandard codes the first kind and leaves the others as they are.
    """
    rows = rows.detach().cpu().contiguous()
    numbers = _numbers(rows) if rows.numel() else np.empty(0, _UNSIGNED[rows.itemsize])
    planes = np.empty((rows.itemsize, len(numbers)), np.uint8)
    for start in range(0, len(numbers), _BLOCK):
        block = numbers[start : start + _BLOCK]
        for place, plane in enumerate(planes):
            np.copyto(plane[start : start + _BLOCK], block >> (8 * place), casting="unsafe")
    stored = [_packed(plane) for plane in planes]
    head = np.array([len(plane) for plane in stored], "<u8").tobytes()
    data = torch.frombuffer(bytearray(b"".join([head, *stored])), dtype=torch.uint8)
    return PlaneRows(data, rows.shape[0], rows.shape[1], rows.dtype)


def _numbers(rows: Tensor) -> Any:
    """The bits of contiguous rows as unsigned integers `[n]`, sharing their memory."""
    return rows.view(-1).view(torch.uint8).numpy().view(_UNSIGNED[rows.itemsize])


def _packed(plane: Any) -> bytes | memoryview:
    """A plane as stored: a frame where that takes fewer bytes."""
    coder = zstandard.ZstdCompressor(compression_params=_ENTROPY)
    middle = max(0, len(plane) - _SAMPLE) // 2
    sample = plane[middle : middle + _SAMPLE]
    if len(coder.compress(sample.data)) > _WORTH * len(sample):
        return memoryview(plane)
    frame = coder.compress(plane.data)
    return frame if len(frame) < len(plane) else memoryview(plane)


def _unpacked(plane: memoryview, count: int) -> Any:
    if len(plane) == count:
        return np.frombuffer(plane, np.uint8)
    try:
        plain = zstandard.ZstdDecompressor().decompress(plane, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed("a plane", f"is no Zstandard frame ({error})") from error
    if len(plain) != count:
        raise malformed("a plane", f"has {len(plain)} bytes for {count} numbers")
    return np.frombuffer(plain, np.uint8)
