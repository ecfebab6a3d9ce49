"""Encryption at rest: a blob sealed with AES-256-GCM, part by part. docs/internals/format.md describes the bytes.

    fixed part   magic, version, flags, key id, salt, number of parts       56 bytes
    lengths      of each part, plain                                        8 bytes each
    parts        ciphertext and tag, without holes                          plain length + 16 bytes each

A part is the unit of reading: the head of a blob, a segment, or the trailer. So a layer can be used as soon as its own
tag is checked, as in a plain blob once its own digest is checked.

Every blob has its own key, derived from the master key, a random salt and the tenant (`Keyring.derive`). A nonce is the
number of a part: it cannot repeat under one key, however many blobs there are, and no writer needs a counter. Each tag
also covers the header, the tenant and the subject, which names what the blob belongs to. So parts that are changed, cut
off, left out, put in another order, or taken from another blob do not open, and neither does a whole blob under the
name of another cache or tenant.

Protected: a reader of a disk, a backup or the memory of Redis learns nothing of the content of a cache, and a writer
there cannot make a sealed blob that opens. Not protected: manifests in the index are not sealed (labels, names, policy
parameters, times); the lengths of parts are visible; a deleted blob can be put back under its id; the key file, or the
memory of a process that uses it, gives access to everything.
"""

from __future__ import annotations

import os
import secrets
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from itertools import accumulate
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from kvshelf.artifact.memory import fill, fresh_memory
from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store.blobs import SeekableFile
from kvshelf.store.sealing.keyring import Keyring, framed

MAGIC: Final = b"KVSEALED"
VERSION: Final = 1

PART_LIMIT: Final = 2**36 - 32
"""Bytes that AES-GCM can encrypt under one nonce (NIST SP 800-38D, 5.2.1.1)."""

PARTS_LIMIT: Final = 4096 + 2
"""The layers that a blob's header can hold, its head and its trailer."""

_FIXED = struct.Struct("<8sHH8s32sI")

HEADER_BYTES: Final = _FIXED.size
"""How many first bytes of a blob `is_sealed` and `key_id_of` need."""

_SALT_BYTES = 32
_TAG_BYTES = 16
_PIECE = 1 << 18  # bytes per step: stays in the cache between reading and decrypting, 1.2 times as fast as 1 MiB


@dataclass(frozen=True)
class SealedParts:
    """A sealed blob that is still to be encrypted, `nbytes` long. `buffers` gives its bytes in order, encrypted piece
    by piece as they are asked for: so a cache is never in memory a second time. It can be iterated once; seal again to
    write again. No buffer is used again for the next piece."""

    buffers: Iterator[memoryview]
    nbytes: int


def is_sealed(first: bytes) -> bool:
    """Whether a run of bytes that begins with `first` is a sealed blob, or claims to be one."""
    return first.startswith(MAGIC)


def key_id_of(header: bytes) -> str:
    """The id of the key that a blob is sealed with, from its first `HEADER_BYTES`. Not verified. Raises `BlobError`."""
    return _fixed_part(header)[0]


def seal(keyring: Keyring, tenant: str, subject: str, parts: Sequence[Sequence[memoryview]]) -> SealedParts:
    """Seal parts, each of which may consist of several buffers of bytes; empty parts are left out. The content of the
    buffers must not change until it has been encrypted. Raises `InvalidRequest` for parts that the format cannot hold:
    more than `PARTS_LIMIT`, one of more than `PART_LIMIT` bytes, or no bytes at all."""
    parts = [part for part in parts if any(map(len, part))]
    lengths = tuple(sum(map(len, part)) for part in parts)
    if not 0 < len(parts) <= PARTS_LIMIT or max(lengths) > PART_LIMIT:
        raise InvalidRequest(
            f"{len(parts)} parts of up to {max(lengths, default=0)} bytes cannot be sealed; the format holds 1 to "
            f"{PARTS_LIMIT} parts of at most {PART_LIMIT} bytes"
        )
    header = _Header(keyring.sealing_id, secrets.token_bytes(_SALT_BYTES), lengths)
    return SealedParts(_encrypted(header, _Ciphers(keyring, header, tenant, subject), parts), header.nbytes)


def unseal(keyring: Keyring, tenant: str, subject: str, file: RawIOBase, nbytes: int) -> SealedFile:
    """The plain bytes of a sealed blob of `nbytes` bytes in a seekable file, which the result takes over. Raises
    `BlobError` if the file is not a whole sealed blob (`bad_magic`, `newer_major`, `unknown_major`, `header_too_large`,
    `field_malformed`, `truncated`, `trailing_bytes`), and `StoreUnavailable` if the keyring lacks the blob's key. After
    an error the file stays open. A damaged part is found when it is read."""
    header = _read_header(file, nbytes)
    return SealedFile(file, header, _Ciphers(keyring, header, tenant, subject))


class SealedFile(SeekableFile):
    """The plain bytes of a sealed blob. Closing it closes the file below.

    No byte is handed out before the tag of its part is checked. A read that takes a whole part decrypts it straight
    into the caller's buffer, and wipes the buffer if the tag is wrong. For smaller reads, the part last read is kept in
    memory, which is also wiped if the tag is wrong.

    Reading raises `BlobError`: `sealed_damaged` for a part that is not what was sealed for this tenant and subject,
    `truncated` if the file ends too early. It also raises any error of the file below.
    """

    def __init__(self, file: RawIOBase, header: _Header, ciphers: _Ciphers) -> None:
        self._file = file
        self._ciphers = ciphers
        self._lengths = header.lengths
        self._starts = list(accumulate(header.lengths[:-1], initial=0))  # of the parts, counted in plain bytes
        self._body = header.offset
        self._memory_part: int | None = None  # the one in `_memory`
        self._memory = memoryview(b"")
        self.nbytes = sum(header.lengths)
        """Plain bytes, by the header. Checking a part's tag also verifies the lengths in the header."""

    def close(self) -> None:
        self._memory_part, self._memory = None, memoryview(b"")
        self._file.close()
        super().close()

    def _read_some(self, view: memoryview) -> int:
        """Read on to the end of the current part or of `view`. Returns how many bytes that was."""
        part = bisect_right(self._starts, self._position) - 1
        start, length = self._position - self._starts[part], self._lengths[part]
        if start == 0 and len(view) >= length and part != self._memory_part:
            self._decrypt(part, view[:length])
            return length
        if part != self._memory_part:
            self._hold(part)
        count = min(len(view), length - start)
        view[:count] = self._memory[start : start + count]
        return count

    def _hold(self, part: int) -> None:
        length = self._lengths[part]
        self._memory_part = None
        if len(self._memory) < length:
            self._memory = memoryview(b"")  # frees the old memory before the new is allocated
            self._memory = fresh_memory(length)
        self._decrypt(part, self._memory[:length])
        self._memory_part = part

    def _decrypt(self, part: int, into: memoryview) -> None:
        try:
            self._decrypt_and_check(part, into)
        except InvalidTag as error:
            _wipe(into)
            raise BlobError(
                f"part {part} of the sealed blob does not open: it is damaged, or sealed for another cache or tenant",
                reason="sealed_damaged",
            ) from error
        except BaseException:  # after any error, no unverified bytes may stay
            _wipe(into)
            raise

    def _decrypt_and_check(self, part: int, into: memoryview) -> None:
        """Decrypts piece by piece: one call for the whole part needs memory for the ciphertext, and is no faster."""
        decryptor = self._ciphers.decryptor(part)
        self._file.seek(self._body + self._starts[part] + part * _TAG_BYTES)
        piece = memoryview(bytearray(min(_PIECE, len(into))))
        for start in range(0, len(into), len(piece)):
            plain = into[start : start + len(piece)]
            sealed = piece[: len(plain)]
            fill(self._file, sealed)
            decryptor.update_into(sealed, plain)
        tag = bytearray(_TAG_BYTES)
        fill(self._file, memoryview(tag))
        decryptor.finalize_with_tag(bytes(tag))


@dataclass(frozen=True)
class _Header:
    """All that stands before the parts. `lengths` are plain, at least 1 byte each."""

    key_id: str
    salt: bytes
    lengths: tuple[int, ...]

    @property
    def offset(self) -> int:
        """Where the first part begins."""
        return _FIXED.size + 8 * len(self.lengths)

    @property
    def nbytes(self) -> int:
        return self.offset + sum(self.lengths) + len(self.lengths) * _TAG_BYTES

    def pack(self) -> bytes:
        key_id, count = bytes.fromhex(self.key_id), len(self.lengths)
        return _FIXED.pack(MAGIC, VERSION, 0, key_id, self.salt, count) + struct.pack(f"<{count}Q", *self.lengths)


class _Ciphers:
    """The ciphers of a blob's parts: one key, a nonce for each part, the same associated data for all. The associated
    data need not hold the number of a part, because that is its nonce, nor whether a part is the last: they hold the
    header, which has the number of parts."""

    def __init__(self, keyring: Keyring, header: _Header, tenant: str, subject: str) -> None:
        self._key = AES(keyring.derive(header.key_id, header.salt, "kvshelf.seal", tenant))
        self._associated = framed(header.pack(), tenant.encode(), subject.encode())

    def encryptor(self, part: int) -> AEADEncryptionContext:
        context = self._cipher(part).encryptor()
        context.authenticate_additional_data(self._associated)
        return context

    def decryptor(self, part: int) -> AEADDecryptionContext:
        context = self._cipher(part).decryptor()
        context.authenticate_additional_data(self._associated)
        return context

    def _cipher(self, part: int) -> Cipher[GCM]:
        return Cipher(self._key, GCM(part.to_bytes(12, "little")))


def _encrypted(header: _Header, ciphers: _Ciphers, parts: Sequence[Sequence[memoryview]]) -> Iterator[memoryview]:
    yield memoryview(header.pack())
    for index, part in enumerate(parts):
        encryptor = ciphers.encryptor(index)
        for buffer in part:
            for start in range(0, len(buffer), _PIECE):
                yield memoryview(encryptor.update(buffer[start : start + _PIECE]))
        encryptor.finalize()
        yield memoryview(encryptor.tag)


def _read_header(file: RawIOBase, nbytes: int) -> _Header:
    """The header of a sealed blob of `nbytes` bytes, with parts that fill it. Nothing is verified yet."""
    _require_size(file.seek(0, os.SEEK_END), nbytes)
    file.seek(0)
    key_id, salt, count = _fixed_part(_read(file, min(nbytes, _FIXED.size)))
    lengths = struct.unpack(f"<{count}Q", _read(file, 8 * count))
    if any(not 0 < length <= PART_LIMIT for length in lengths):
        raise BlobError(f"the sealed blob claims a part of 0 or over {PART_LIMIT} bytes", reason="field_malformed")
    header = _Header(key_id, salt, lengths)
    _require_size(nbytes, header.nbytes)
    return header


def _fixed_part(data: bytes) -> tuple[str, bytes, int]:
    """Key id, salt and number of parts."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise BlobError(f"these bytes are not a sealed blob: they begin with {data[:8]!r}", reason="bad_magic")
    if len(data) < _FIXED.size:
        raise BlobError(f"the sealed blob is cut off: it has {len(data)} bytes", reason="truncated")
    _, version, flags, key_id, salt, count = _FIXED.unpack(data[: _FIXED.size])
    if version != VERSION:
        raise BlobError(
            f"the blob is sealed in version {version}; this version of kvshelf opens {VERSION}. Upgrade kvshelf, or "
            "compress the document again.",
            reason="newer_major" if version > VERSION else "unknown_major",
        )
    if flags or not count:
        raise BlobError(f"the sealed blob has flags {flags} and {count} parts", reason="field_malformed")
    if count > PARTS_LIMIT:
        raise BlobError(
            f"the sealed blob claims {count} parts, the format allows {PARTS_LIMIT}", reason="header_too_large"
        )
    return key_id.hex(), salt, count


def _require_size(nbytes: int, expected: int) -> None:
    if nbytes != expected:
        raise BlobError(
            f"the sealed blob has {nbytes} bytes, not {expected}",
            reason="truncated" if nbytes < expected else "trailing_bytes",
        )


def _read(file: RawIOBase, size: int) -> bytes:
    data = bytearray(size)
    fill(file, memoryview(data))
    return bytes(data)


def _wipe(memory: memoryview) -> None:
    np.asarray(memory).fill(0)
