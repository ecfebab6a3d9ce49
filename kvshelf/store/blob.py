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

import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store import blob_header, positions
from kvshelf.store.artifact import CompressedCache, Kept, LayerRecord
from kvshelf.store.blob_header import DtypeName, Header, IdentityHeader, LayerHeader, Part, aligned

CODECS = ("none",)
FORMAT_MAJOR = 1
FORMAT_MINOR = 0

MAGIC = b"KVSHELF\n"
"""Eight bytes; the line feed shows damage by a text-mode transfer at once."""

_FIXED = struct.Struct("<8sHHI")
_TRAILER = struct.Struct("<Q32s")
_DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK = 1 << 20  # stays in the cache between reading and hashing

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class PackedBlob:
    """A blob as the buffers it consists of, not yet joined: a writer hands them to the file one after the other.

    The buffers share memory with the cache's tensors wherever these are contiguous and on the CPU.
    """

    buffers: tuple[memoryview, ...]
    nbytes: int
    root: bytes
    header: Header


@dataclass(frozen=True)
class BlobSummary:
    """What a verified blob says about itself. `root` is its root digest."""

    header: Header
    root: bytes
    nbytes: int


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
    view = memoryview(data).cast("B")
    body = _body_offset(view[: _FIXED.size], len(view))
    header = _open(view[:body], view[-_TRAILER.size :], len(view)).header
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


def inspect(data: Buffer) -> BlobSummary:
    """The header of a blob, its root digest checked; the segments are not read. Raises `BlobError`."""
    view = memoryview(data).cast("B")
    body = _body_offset(view[: _FIXED.size], len(view))
    return _open(view[:body], view[-_TRAILER.size :], len(view))


def verify_file(file: BinaryIO, size: int) -> BlobSummary:
    """Check every digest of a blob in a seekable file of `size` bytes, in constant memory. Raises `BlobError`."""
    file.seek(0)
    fixed = file.read(_FIXED.size)
    body = _body_offset(fixed, size)
    head = fixed + file.read(body - len(fixed))
    file.seek(size - _TRAILER.size)
    summary = _open(head, file.read(_TRAILER.size), size)
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
    fixed = _FIXED.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, len(packed)) + packed
    head = fixed.ljust(aligned(len(fixed)), b"\0")
    total = len(head) + offset + _TRAILER.size
    trailer = _TRAILER.pack(total, _root(head, total))
    return PackedBlob((memoryview(head), *body, memoryview(trailer)), total, trailer[8:], header)


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
    except (ValueError, BlobError) as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    if len(packed) > blob_header.HEADER_LIMIT:
        raise InvalidRequest(
            f"the cache's description takes {len(packed)} bytes, the format allows {blob_header.HEADER_LIMIT}; shorten "
            "the policy parameters, the probe text or the expected questions"
        )
    return header, packed


def _root(head: Buffer, total: int) -> bytes:
    return blake3(head).update(total.to_bytes(8, "little")).digest()


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


def _body_offset(fixed: Buffer, size: int) -> int:
    """Where the body begins, from the fixed part of a blob of `size` bytes."""
    if bytes(fixed[: len(MAGIC)]) != MAGIC[: len(fixed)]:
        raise BlobError(f"these bytes are not a kvshelf blob: they begin with {bytes(fixed[:8])!r}", reason="bad_magic")
    if size < _FIXED.size + _TRAILER.size:
        raise BlobError(f"the blob is cut off: it has {size} bytes", reason="truncated")
    _, major, minor, length = _FIXED.unpack(fixed)
    if major != FORMAT_MAJOR or minor > FORMAT_MINOR:
        newer = "newer_major" if major > FORMAT_MAJOR else "newer_minor" if major == FORMAT_MAJOR else "unknown_major"
        raise BlobError(
            f"the blob has format {major}.{minor}; this version of kvshelf reads 1.0 to {FORMAT_MAJOR}.{FORMAT_MINOR}. "
            "Upgrade kvshelf, or compress the document again.",
            reason=newer,
        )
    if length > blob_header.HEADER_LIMIT:
        raise BlobError(
            f"the header claims {length} bytes, the format allows {blob_header.HEADER_LIMIT}", reason="header_too_large"
        )
    body = aligned(_FIXED.size + length)
    if size < body + _TRAILER.size:
        raise BlobError(f"the blob is cut off within its header: it has {size} bytes", reason="truncated")
    return body


def _open(head: Buffer, trailer: Buffer, size: int) -> BlobSummary:
    """Check the root digest of a blob of `size` bytes, then read its header."""
    total, root = _TRAILER.unpack(trailer)
    if not hmac.compare_digest(_root(head, total), root):
        raise _damaged(head, size)
    length = _FIXED.unpack(head[: _FIXED.size])[3]
    end = _FIXED.size + length
    header = blob_header.parse(bytes(head[_FIXED.size : end]))
    if any(head[end:]):
        raise BlobError("the padding after the header is not zero", reason="nonzero_padding")
    _require_size(len(head) + header.body_bytes + _TRAILER.size, size)
    if total != size:
        raise BlobError(f"the trailer says {total} bytes, the blob has {size}", reason="length_mismatch")
    return BlobSummary(header, root, size)


def _damaged(head: Buffer, size: int) -> BlobError:
    """Why the root digest differs. A readable header tells a cut or extended blob from a changed one."""
    length = _FIXED.unpack(head[: _FIXED.size])[3]
    try:
        header = blob_header.parse(bytes(head[_FIXED.size : _FIXED.size + length]))
        _require_size(len(head) + header.body_bytes + _TRAILER.size, size)
    except BlobError as error:
        if error.reason in ("truncated", "trailing_bytes"):
            return error
    return BlobError("the blob's header is not what was written: its digest differs", reason="digest_mismatch")


def _require_size(expected: int, size: int) -> None:
    if size < expected:
        raise BlobError(f"the blob is cut off: it has {size} of {expected} bytes", reason="truncated")
    if size > expected:
        raise BlobError(f"{size - expected} bytes follow the end of the blob", reason="trailing_bytes")


def _require_digest(what: str, actual: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(actual, expected):
        raise BlobError(f"{what} is not what was written: its digest differs", reason="digest_mismatch")


def _require_zeros(index: int, layer: LayerHeader, segment: memoryview) -> None:
    for _, part in layer.parts():
        end = part.offset + part.nbytes
        if any(segment[end : aligned(end)]):
            raise BlobError(f"padding in segment {index} is not zero", reason="nonzero_padding")


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
