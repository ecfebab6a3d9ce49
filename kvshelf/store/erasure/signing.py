"""Receipts of erasures: a digest over what one says, and a signature of the digest where a key is set."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from kvshelf.api.caches import Erasure
from kvshelf.artifact.identity import canonical_json
from kvshelf.errors import InvalidRequest
from kvshelf.store.private import read_private, refused

_SAID_OF_IT: Final = {"digest", "public_key", "signature"}
_HOW: Final = "openssl genpkey -algorithm ed25519 -out erasures.pem"


class Signer:
    """Signs receipts with a private key of Ed25519."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def read(cls, path: str | Path, *, param: str = "erasure_key_file") -> Signer:
        """The key in a PEM file that only its owner can read. Raises `InvalidRequest`."""
        path = Path(path)
        try:
            key = load_pem_private_key(read_private(path, param=param), password=None)
        except (ValueError, TypeError) as error:
            raise refused(path, f"it is no PEM without a password; make one: {_HOW}", param=param) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise refused(path, f"it is no key of Ed25519; make one: {_HOW}", param=param)
        return cls(key)

    def signature(self, text: str) -> dict[str, str]:
        """The signature of a text, such as the digest of a receipt, with the public key, both in hex."""
        public = self._key.public_key().public_bytes_raw()
        return {"public_key": public.hex(), "signature": self._key.sign(text.encode()).hex()}


def signed_by(key: str, signature: str, text: str) -> bool:
    """Whether this is the signature of a text by a public key, both in hex."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), text.encode())
    except (InvalidSignature, ValueError):  # a key that is no point of the curve
        return False
    return True


def public_key(path: Path, *, param: str = "--public-key") -> str:
    """The public key in a PEM file, in hex. Raises `InvalidRequest`."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} is no public key in PEM: {error}", param=param) from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidRequest(f"{path} is no key of Ed25519", param=param)
    return key.public_bytes_raw().hex()


def digest_of(receipt: Erasure) -> str:
    return blake3(canonical_json(receipt.model_dump(mode="json", exclude=_SAID_OF_IT)).encode()).hexdigest()


def sealed(receipt: Erasure, signer: Signer | None) -> Erasure:
    """The receipt with its digest, and its signature if there is a key."""
    digest = digest_of(receipt)
    signature = {} if signer is None else signer.signature(digest)
    return receipt.model_copy(update={"digest": digest, **signature})


def verify(receipt: Erasure, key_file: Path | None) -> str:
    """Check a receipt; returns what was proven. key_file: PEM of the service's key, None: that of the receipt itself,
    which proves no more than that nobody changed the receipt without a key. Raises `InvalidRequest`."""
    if digest_of(receipt) != receipt.digest:
        raise InvalidRequest("the receipt was changed: its digest is that of another one", param="FILE")
    if receipt.signature is None or receipt.public_key is None:
        if key_file is not None:
            raise InvalidRequest("the receipt is not signed", param="FILE")
        return "the digest is right; the receipt is not signed"
    key = receipt.public_key if key_file is None else public_key(key_file)
    if not signed_by(key, receipt.signature, receipt.digest):
        raise InvalidRequest("the signature is not of this key", param="FILE")
    by = "this key" if key_file is not None else f"a key {receipt.public_key}, which only the receipt names"
    return f"the digest is right, and signed with {by}"
