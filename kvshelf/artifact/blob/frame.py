"""The frame of a blob: the bytes before and after the segments, and their check."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blake3 import blake3

from kvshelf.artifact.blob.header import HEADER_LIMIT, Header, parse_header
from kvshelf.artifact.blob.layer import aligned
from kvshelf.errors import BlobError

FORMAT_MAJOR = 1
FORMAT_MINOR = 0

MAGIC = b"KVSHELF\n"
"""Eight bytes; the line feed shows damage by a text-mode transfer at once."""

FIXED = struct.Struct("<8sHHI")
TRAILER = struct.Struct("<Q32s")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BlobSummary:
    """The verified header of a blob, with its root digest."""

    header: Header
    root: bytes
    nbytes: int


def close_frame(packed_header: bytes, body: int) -> tuple[bytes, bytes]:
    """The bytes before and after a body of `body` bytes."""
    fixed = FIXED.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, len(packed_header)) + packed_header
    head = fixed.ljust(aligned(len(fixed)), b"\0")
    total = len(head) + body + TRAILER.size
    return head, TRAILER.pack(total, _root(head, total))


def body_offset(fixed: Buffer, size: int) -> int:
    """Where the body begins, from the fixed part of a blob of `size` bytes."""
    if bytes(fixed[: len(MAGIC)]) != MAGIC[: len(fixed)]:
        raise BlobError(f"these bytes are not a kvshelf blob: they begin with {bytes(fixed[:8])!r}", reason="bad_magic")
    if size < FIXED.size + TRAILER.size:
        raise BlobError(f"the blob is cut off: it has {size} bytes", reason="truncated")
    _, major, minor, length = FIXED.unpack(fixed)
    if major != FORMAT_MAJOR or minor > FORMAT_MINOR:
        newer = "newer_major" if major > FORMAT_MAJOR else "newer_minor" if major == FORMAT_MAJOR else "unknown_major"
        raise BlobError(
            f"the blob has format {major}.{minor}; this version of kvshelf reads {FORMAT_MAJOR}.{FORMAT_MINOR}. "
            "Upgrade kvshelf, or compress the document again.",
            reason=newer,
        )
    if length > HEADER_LIMIT:
        raise BlobError(
            f"the header claims {length} bytes, the format allows {HEADER_LIMIT}", reason="header_too_large"
        )
    body = aligned(FIXED.size + length)
    if size < body + TRAILER.size:
        raise BlobError(f"the blob is cut off within its header: it has {size} bytes", reason="truncated")
    return body


def open_frame(head: Buffer, trailer: Buffer, size: int) -> BlobSummary:
    """Check the root digest of a blob of `size` bytes, then read its header."""
    total, root = TRAILER.unpack(trailer)
    *_, length = FIXED.unpack(head[: FIXED.size])
    end = FIXED.size + length
    packed = bytes(head[FIXED.size : end])
    if _root(head, total) != root:
        raise _damaged(packed, len(head), size)
    header = parse_header(packed)
    if any(head[end:]):
        raise BlobError("the padding after the header is not zero", reason="nonzero_padding")
    _require_size(len(head) + header.body_bytes + TRAILER.size, size)
    if total != size:
        raise BlobError(f"the trailer says {total} bytes, the blob has {size}", reason="length_mismatch")
    return BlobSummary(header, root, size)


def _damaged(packed_header: bytes, body: int, size: int) -> BlobError:
    """Why the root digest differs. A readable header tells a cut or extended blob from a changed one."""
    try:
        _require_size(body + parse_header(packed_header).body_bytes + TRAILER.size, size)
    except BlobError as error:
        if error.reason in ("truncated", "trailing_bytes"):
            return error
    return BlobError(
        "the blob's header or trailer is not what was written: its digest differs", reason="digest_mismatch"
    )


def _require_size(expected: int, size: int) -> None:
    if size < expected:
        raise BlobError(f"the blob is cut off: it has {size} of {expected} bytes", reason="truncated")
    if size > expected:
        raise BlobError(f"{size - expected} bytes follow the end of the blob", reason="trailing_bytes")


def _root(head: Buffer, total: int) -> bytes:
    return blake3(head).update(total.to_bytes(8, "little")).digest()
