"""The master keys of a home that seals its blobs (`kvshelf.store.sealing`)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvshelf.artifact.identity import digest
from kvshelf.errors import InvalidRequest, StoreUnavailable
from kvshelf.store.private import read_private, refused

KEY_BYTES: Final = 32

_PARAM: Final = "encryption_key_file"
_FORM: Final = "64 hex digits, as `openssl rand -hex 32` makes them, or base64 of 32 bytes"
_refused = partial(refused, param=_PARAM)
_HEX = re.compile(rb"[0-9a-fA-F]{64}")


class Keyring:
    """Master keys by id: the first one seals, all of them open. Only derived keys leave the keyring. To rotate, put a
    new key first and keep the old one for as long as blobs are sealed with it. An id does not reveal its key, and does
    not depend on the key's place in the file."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """`keys`: 32 random bytes each. Raises `InvalidRequest` for no key, another length, or a repeated key."""
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise InvalidRequest(f"a keyring needs keys of {KEY_BYTES} bytes, at least one", param=_PARAM)
        self._keys = {digest("kvshelf.key", key)[:16]: key for key in keys}
        if len(self._keys) != len(keys):
            raise InvalidRequest("the keyring has a key twice", param=_PARAM)
        self.ids: tuple[str, ...] = tuple(self._keys)
        """Ids of all keys, in their order."""
        self.sealing_id: str = self.ids[0]
        """Id of the key that seals."""

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """A text file with a key on each line: 64 hex digits, or base64 of 32 bytes. What follows a # is a comment.
        Only its owner may have access to the file. Raises `InvalidRequest` for a file that is missing, open to others,
        or not of this form; no message repeats any part of a line."""
        lines = read_private(Path(path), param=_PARAM).splitlines()
        keys: dict[bytes, int] = {}
        for number, line in enumerate(lines, 1):
            text = line.partition(b"#")[0].strip()
            if not text:
                continue
            key = _key(text)
            if key is None:
                raise _refused(path, f"line {number} is no key, which is {_FORM}")
            if key in keys:
                raise _refused(path, f"line {number} repeats the key of line {keys[key]}")
            keys[key] = number
        if not keys:
            raise _refused(path, f"it has no key; a line of it is {_FORM}")
        return cls(list(keys))

    def derive(self, key_id: str, salt: bytes, *context: str) -> bytes:
        """32 bytes that belong to a key, a random salt and a context: HKDF-SHA256 (RFC 5869). Raises `StoreUnavailable`
        for a key that is not in the ring: a missing key does not make its blobs corrupt."""
        if key_id not in self._keys:
            raise StoreUnavailable(
                f"this cache is sealed with the key {key_id}, which the key file does not have (it has "
                f"{', '.join(self.ids)}); add that key to the file, on a line after the first",
                key_id=key_id,
            )
        info = framed(*(part.encode() for part in context))
        return HKDF(SHA256(), KEY_BYTES, salt, info).derive(self._keys[key_id])

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self.ids)})"


def framed(*parts: bytes) -> bytes:
    """The parts, each preceded by its length, so that ("ab", "c") and ("a", "bc") differ."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _key(text: bytes) -> bytes | None:
    if _HEX.fullmatch(text):
        return binascii.unhexlify(text)
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return key if len(key) == KEY_BYTES else None
