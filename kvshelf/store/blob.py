"""Blob format 1: a compressed cache as bytes. docs/format.md describes it byte by byte, with the reasons.

    fixed part   magic, major, minor, header length                          16 bytes
    header       msgpack, then zeros up to a multiple of 64
    body         one segment per layer: keys, values, positions, each aligned to 64 and padded with zeros
    trailer      total length, root digest                                   40 bytes

Each segment's digest lies in the header, and the root digest covers the fixed part, the header, its padding and the
total length. So every byte is covered, and hashed once; hashing the whole blob again would double the time of a read.
The digests also let a layer be used before the next one has arrived.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store import blob_frame, blob_header, positions
from kvshelf.store.artifact import CompressedCache, Kept, LayerRecord
from kvshelf.store.blob_frame import (
    FIXED,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    TRAILER,
    BlobSummary,
    Buffer,
    body_offset,
    open_frame,
)
from kvshelf.store.blob_header import DtypeName, Header, IdentityHeader, LayerHeader, Part, aligned

__all__ = [
    "CODECS",
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "BlobSummary",
    "Buffer",
    "PackedBlob",
    "decode",
    "encode",
    "inspect",
    "pack",
    "root",
    "verify_file",
]

CODECS = ("none",)
"""Codecs of segments. The header names the codec of each layer, so that more can come without a new major version."""

_DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK = 1 << 20  # stays in the cache between reading and hashing


@dataclass(frozen=True)
class PackedBlob:
    """A blob as the buffers it consists of, not yet joined: a writer hands them to the file one after the other.

    The buffers share memory with the cache's tensors wherever these are contiguous and on the CPU.
    """

    buffers: tuple[memoryview, ...]
    nbytes: int
    root: bytes
    header: Header


def encode(cache: CompressedCache) -> bytes:
    """The blob of a cache. Equal caches give equal bytes: there is no time and no nonce in it.

    Raises `InvalidRequest` for a cache that the format cannot hold (a dtype that is not float32, bfloat16 or float16,
    or a header over 256 KiB).
    """
    return b"".join(pack(cache).buffers)


def decode(data: Buffer) -> CompressedCache:
    """Read a blob. Raises `BlobError` for any bytes but those `encode` writes; checks all digests before a tensor is
    made.

    The tensors are views of `data`, which they keep alive and which must not change afterwards; they must not be
    written to either.
    """
    view = _view(data)
    body = body_offset(view[: FIXED.size], len(view))
    header = open_frame(view[:body], view[-TRAILER.size :], len(view)).header
    segments = [view[body + layer.offset : body + layer.offset + layer.nbytes] for layer in header.layers]
    for index, (layer, segment) in enumerate(zip(header.layers, segments, strict=True)):
        _require_digest(f"segment {index}", blake3(segment).digest(), layer.digest)
        _require_zeros(index, layer, segment)
    storage = _as_tensor(view)
    layers = []
    for layer, segment in zip(header.layers, segments, strict=True):
        start = body + layer.offset
        layers.append(_layer(layer, segment, storage[start : start + layer.nbytes], header.num_tokens))
    return CompressedCache(tuple(layers), header.num_tokens, header.next_position, header.to_identity())


def root(data: Buffer) -> bytes:
    """The root digest that a blob claims; true once `decode` or `inspect` has taken the blob."""
    return bytes(_view(data)[-TRAILER.size :][8:])


def inspect(data: Buffer) -> BlobSummary:
    """The header of a blob, its root digest checked; the segments are not read. Raises `BlobError`."""
    view = _view(data)
    body = body_offset(view[: FIXED.size], len(view))
    return open_frame(view[:body], view[-TRAILER.size :], len(view))


def verify_file(file: BinaryIO, size: int) -> BlobSummary:
    """Check every digest of a blob in a seekable file of `size` bytes, in constant memory. Raises `BlobError`."""
    end = file.seek(0, os.SEEK_END)
    if end != size:
        raise BlobError(
            f"the file has {end} bytes, {size} were written", reason="truncated" if end < size else "trailing_bytes"
        )
    body = body_offset(_read_at(file, 0, min(size, FIXED.size)), size)
    summary = open_frame(_read_at(file, 0, body), _read_at(file, size - TRAILER.size, TRAILER.size), size)
    buffer = bytearray(_CHUNK)
    for index, layer in enumerate(summary.header.layers):
        file.seek(body + layer.offset)
        digest = blake3()
        for chunk in _chunks(file, buffer, layer.nbytes):
            digest.update(chunk)
        _require_digest(f"segment {index}", digest.digest(), layer.digest)
    return summary


def pack(cache: CompressedCache) -> PackedBlob:
    """Lay a cache out as a blob and compute its digests. Raises as `encode` does."""
    layers: list[LayerHeader] = []
    body: list[memoryview] = []
    offset = 0
    for record in cache.layers:
        layer, buffers = _segment(record, cache.num_tokens, offset)
        layers.append(layer)
        body.extend(buffers)
        offset += layer.nbytes
    header, packed = _header(cache, layers)
    head, trailer = blob_frame.close(packed, offset)
    nbytes = len(head) + offset + len(trailer)
    return PackedBlob((memoryview(head), *body, memoryview(trailer)), nbytes, root(trailer), header)


def _header(cache: CompressedCache, layers: list[LayerHeader]) -> tuple[Header, bytes]:
    """The header and its bytes, read back once: what is written can be read, or is refused before it is stored."""
    try:
        header = Header(
            identity=IdentityHeader.model_validate(cache.identity.to_dict()),
            num_tokens=cache.num_tokens,
            next_position=cache.next_position,
            layers=layers,
        )
        packed = blob_header.pack(header)
        blob_header.parse(packed)
    except (ValueError, OverflowError, BlobError) as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    if len(packed) > blob_header.HEADER_LIMIT:
        raise InvalidRequest(
            f"the cache's description takes {len(packed)} bytes, the format allows {blob_header.HEADER_LIMIT}; shorten "
            "the policy parameters, the probe text or the expected questions"
        )
    return header, packed


def _view(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InvalidRequest(f"a blob is a run of bytes, not {type(data).__name__}", param="blob") from error


def _segment(record: LayerRecord, num_tokens: int, offset: int) -> tuple[LayerHeader, list[memoryview]]:
    """One layer's header and the buffers of its segment, padding included."""
    if record.keys.dtype not in _DTYPE_NAMES or record.values.dtype != record.keys.dtype:
        raise InvalidRequest(
            f"keys are {record.keys.dtype} and values {record.values.dtype}; a blob holds one of "
            f"{', '.join(_DTYPES)} for both"
        )
    lengths = [head.shape[0] for head in record.positions]
    entry_positions = record.entry_positions.cpu().numpy().astype(np.int64)
    encoding, position_bytes = positions.encode(entry_positions, lengths, num_tokens)
    buffers: list[memoryview] = []
    parts: list[Part] = []
    end = 0
    for data in (_raw(record.keys), _raw(record.values), memoryview(position_bytes)):
        parts.append(Part(offset=end, nbytes=len(data)))
        padding = aligned(len(data)) - len(data)
        buffers.extend((data, memoryview(bytes(padding))))
        end += len(data) + padding
    digest = blake3()
    for data in buffers:
        digest.update(data)
    layer = LayerHeader(
        kind=record.kind,
        rope_mode=record.rope_mode,
        codec="none",
        dtype=_DTYPE_NAMES[record.keys.dtype],
        key_dim=record.keys.shape[1],
        value_dim=record.values.shape[1],
        lengths=lengths,
        position_encoding=encoding,
        offset=offset,
        nbytes=end,
        keys=parts[0],
        values=parts[1],
        positions=parts[2],
        digest=digest.digest(),
    )
    return layer, buffers


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _require_digest(what: str, actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise BlobError(f"{what} is not what was written: its digest differs", reason="digest_mismatch")


def _require_zeros(index: int, layer: LayerHeader, segment: memoryview) -> None:
    for _, part in layer.parts():
        end = part.offset + part.nbytes
        if any(segment[end : aligned(end)]):
            raise BlobError(f"padding in segment {index} is not zero", reason="nonzero_padding")


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise BlobError(f"the file ended {size - len(data)} bytes early while it was read", reason="truncated")
    return data


def _chunks(file: BinaryIO, buffer: bytearray, size: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while size:
        count = file.readinto(view[: min(size, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise BlobError(f"the file ended {size} bytes early while it was read", reason="truncated")
        yield view[:count]
        size -= count


class _SharedBytes:
    """Presents bytes to numpy as an array that torch takes without a copy.

    torch warns when it is handed read-only memory, once per process and in the caller's face; copying the blob instead
    would cost more than verifying it. The tensors are documented as not to be written to.
    """

    def __init__(self, data: memoryview) -> None:
        array = np.frombuffer(data, np.uint8)
        self._owner = array  # keeps the memory alive for as long as a tensor views it
        address = int(array.__array_interface__["data"][0])
        self.__array_interface__ = {"version": 3, "shape": array.shape, "typestr": "|u1", "data": (address, False)}


def _as_tensor(view: memoryview) -> Tensor:
    """`[bytes]` uint8, sharing memory with `view`."""
    return torch.from_numpy(np.asarray(_SharedBytes(view)))


def _layer(layer: LayerHeader, segment: memoryview, storage: Tensor, num_tokens: int) -> Kept:
    part = layer.positions
    encoded = segment[part.offset : part.offset + part.nbytes]
    entry_positions = positions.decode(layer.position_encoding, encoded, layer.lengths, num_tokens)
    offsets = (0, *np.cumsum(layer.lengths).tolist())
    return Kept(
        keys=_tensor(layer, layer.keys, storage, layer.key_dim),
        values=_tensor(layer, layer.values, storage, layer.value_dim),
        entry_positions=torch.from_numpy(entry_positions.astype(np.int32)),
        offsets=offsets,
        rope_mode=layer.rope_mode,
    )


def _tensor(layer: LayerHeader, part: Part, storage: Tensor, dim: int) -> Tensor:
    flat = storage[part.offset : part.offset + part.nbytes]
    dtype = _DTYPES[layer.dtype]
    if flat.data_ptr() % dtype.itemsize:
        # Bytes that lie at an odd address (a slice of a larger message) cannot be viewed as numbers.
        flat = flat.clone()
    return flat.view(dtype).view(layer.entries, dim)
