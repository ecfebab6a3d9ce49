"""The file of API keys: their tenants, scopes and digests. The keys themselves are never written."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshelf.api.strict import described
from kvshelf.errors import InvalidRequest, Unauthorized
from kvshelf.store.private import locked, read_private, refused, write_private

Scope = Literal["read", "write", "admin"]

SCOPES: Final[tuple[Scope, ...]] = ("read", "write", "admin")
"""`read`: list, show, download, ask. `write`: create, change, delete, import, verify. `admin`: the service itself."""

PARAM: Final = "api_key_file"

_KEY = re.compile(r"kvsk_([0-9a-f]{16})_([0-9a-f]{64})")
_NO_DIGEST: Final = "0" * 64


class KeyRecord(BaseModel):
    """One key in the file. Times are Unix seconds.

    A plain SHA-256 is enough: the secret is 32 random bytes, so it cannot be guessed, and a slow hash would only slow
    down every request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    name: str = Field("", max_length=200)
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: float
    expires_at: float | None = None


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    version: Literal[1] = 1
    keys: tuple[KeyRecord, ...] = ()


class Keys:
    """Identifies callers among a set of keys."""

    def __init__(self, records: Iterable[KeyRecord], *, clock: Callable[[], float] = time.time) -> None:
        self._records = {record.id: record for record in records}
        self._clock = clock

    def identify(self, key: str) -> KeyRecord:
        """The record of a key. Raises `Unauthorized`, without any part of the key.

        Also compares digests for an unknown id, so that it takes as long as a wrong secret.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise Unauthorized("this is not a kvshelf API key; keys look like kvsk_<id>_<secret>")
        record = self._records.get(match[1])
        expected = _NO_DIGEST if record is None else record.sha256
        right = hmac.compare_digest(_digest(match[2]), expected)
        if record is None or not right:
            raise Unauthorized("this API key is not valid here; it may have been revoked")
        if record.expires_at is not None and record.expires_at <= self._clock():
            raise Unauthorized(f"the API key {record.id} has expired; ask for a new one")
        return record


class KeyFile:
    """A JSON file of key records that only its owner may read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()

    def read(self) -> tuple[KeyRecord, ...]:
        """All records. Raises `InvalidRequest` if the file is missing, readable by others, or malformed."""
        try:
            records = _Content.model_validate_json(read_private(self.path, param=PARAM)).keys
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise refused(self.path, f"{where}: {first['msg']}", param=PARAM) from error
        if len({record.id for record in records}) != len(records):
            raise refused(self.path, "it has an id twice", param=PARAM)
        return records

    def create(
        self, tenant: str, scopes: Iterable[str], *, name: str = "", ttl_s: float | None = None
    ) -> tuple[KeyRecord, str]:
        """Adds a key to the file and creates the file if it is missing. Raises `InvalidRequest`.

        Returns the record and the key itself, which cannot be recovered later.
        """
        secret, now = secrets.token_hex(32), time.time()
        try:
            record = KeyRecord(
                id=secrets.token_hex(8),
                tenant=tenant,
                name=name,
                scopes=tuple(dict.fromkeys(scopes)),  # pydantic checks them
                sha256=_digest(secret),
                created_at=now,
                expires_at=None if ttl_s is None else now + ttl_s,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequest(f"{first['loc'][0]}: {described(first)[1]}", param=str(first["loc"][0])) from error
        with locked(self.path, param=PARAM):
            records = self.read() if self.path.exists() else ()
            self._write((*records, record))
        return record, f"kvsk_{record.id}_{secret}"

    def revoke(self, key_id: str) -> KeyRecord:
        """Removes a key from the file. Raises `InvalidRequest` if it is not there."""
        with locked(self.path, param=PARAM):
            records = self.read()
            revoked = next((record for record in records if record.id == key_id), None)
            if revoked is None:
                raise InvalidRequest(f"the key file {self.path} has no key with the id {key_id!r:.80}", param="id")
            self._write(tuple(record for record in records if record is not revoked))
        return revoked

    def _write(self, records: tuple[KeyRecord, ...]) -> None:
        content = _Content(keys=records).model_dump_json(indent=2)
        write_private(self.path, content.encode() + b"\n", param=PARAM)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
