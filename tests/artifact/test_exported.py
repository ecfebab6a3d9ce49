"""The part of an export behind its blob: split off whole, or refused."""

from __future__ import annotations

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.exported import ABOUT_LIMIT, Exported, about_part, split
from kvshelf.errors import BlobError
from tests.store.caches import make_identity, make_layer

ABOUT, SOURCE = b'{"name":"n"}', "The document. ü".encode()


@pytest.fixture(scope="module")
def blob() -> bytes:
    layer = make_layer([3, 2], 8, generator=torch.Generator().manual_seed(0))
    return CompressedCache((layer,), 8, 8, make_identity(8)).to_bytes()


@pytest.mark.parametrize(("about", "source"), [(ABOUT, SOURCE), (ABOUT, b""), (b"", b"")])
def test_what_was_put_behind_a_blob_is_split_off(blob: bytes, about: bytes, source: bytes) -> None:
    export = blob + about_part(blob[-32:], about, source)
    assert split(export) == Exported(memoryview(blob), about, source)
    assert split(bytearray(export)).blob == blob
    assert CompressedCache.from_bytes(export).to_bytes() == blob
    assert split(blob) == Exported(memoryview(blob), b"", b"")


def test_every_other_byte_is_refused(blob: bytes) -> None:
    export = blob + about_part(blob[-32:], ABOUT, SOURCE)
    for at in range(len(blob) - 32, len(export)):
        changed = bytearray(export)
        changed[at] ^= 1
        with pytest.raises(BlobError):
            CompressedCache.from_bytes(bytes(changed))
    for end in range(len(export)):
        if end != len(blob):
            with pytest.raises(BlobError):
                CompressedCache.from_bytes(export[:end])
            with pytest.raises(BlobError):
                CompressedCache.from_bytes(export[len(export) - end :])


def test_a_part_behind_a_part_is_refused(blob: bytes) -> None:
    once = blob + about_part(blob[-32:], ABOUT, SOURCE)
    with pytest.raises(BlobError):
        CompressedCache.from_bytes(once + about_part(once[-32:], ABOUT, SOURCE))


def test_no_more_is_read_about_a_cache_than_allowed(blob: bytes) -> None:
    split(blob + about_part(blob[-32:], b" " * ABOUT_LIMIT, b""))
    with pytest.raises(BlobError, match="at most"):
        split(blob + about_part(blob[-32:], b" " * (ABOUT_LIMIT + 1), b""))
