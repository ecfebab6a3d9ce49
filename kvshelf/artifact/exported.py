"""An exported cache: its blob, and behind it what a shelf knew about it (docs/internals/format.md)."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvshelf.errors import BlobError

MAGIC: Final = b"KVABOUT\n"
ABOUT_LIMIT: Final = 1 << 20
"""Most bytes of what is known about a cache, its source not counted."""

_TRAILER: Final = struct.Struct("<QQ32s8s")
_ROOT_BYTES: Final = 32  # a blob ends with its root digest


class Exported(NamedTuple):
    """The parts of an export. `about`: UTF-8 JSON. `source`: the document's text as UTF-8. Either may be empty."""

    blob: memoryview
    about: bytes
    source: bytes


def about_part(root: bytes, about: bytes, source: bytes) -> bytes:
    """What follows the blob with this root digest in an export; its digest covers the root."""
    return about + source + _TRAILER.pack(len(about), len(source), _digest(root, about, source), MAGIC)


def split(data: bytes | bytearray | memoryview) -> Exported:
    """The parts of an export. The digest of what follows the blob is checked, the blob is not. Raises `BlobError`."""
    view = memoryview(data).cast("B")
    if bytes(view[-len(MAGIC) :]) != MAGIC:
        return Exported(view, b"", b"")
    end = len(view) - _TRAILER.size
    if end < _ROOT_BYTES:
        raise BlobError("the export is shorter than its trailer", reason="truncated")
    about_bytes, source_bytes, expected, _ = _TRAILER.unpack(view[end:])
    blob_end = end - about_bytes - source_bytes
    if blob_end < _ROOT_BYTES:
        raise BlobError("the export is shorter than its trailer says", reason="truncated")
    if about_bytes > ABOUT_LIMIT:
        raise BlobError(
            f"the export says {about_bytes} bytes about its cache; at most {ABOUT_LIMIT} are read",
            reason="header_too_large",
        )
    about, source = bytes(view[blob_end : blob_end + about_bytes]), bytes(view[blob_end + about_bytes : end])
    if _digest(bytes(view[blob_end - _ROOT_BYTES : blob_end]), about, source) != expected:
        raise BlobError("what the export says about its cache does not match its digest", reason="digest_mismatch")
    return Exported(view[:blob_end], about, source)


def _digest(root: bytes, about: bytes, source: bytes) -> bytes:
    from blake3 import blake3  # here: the command line reads `MAGIC` without the extra serve

    hasher = blake3(root)
    for part in (about, source):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
