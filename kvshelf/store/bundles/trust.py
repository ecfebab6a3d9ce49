"""Trusted keys, and the newest bundle of each that was taken: a file that only its owner may change."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshelf.api.strict import parse_json
from kvshelf.errors import InvalidRequest
from kvshelf.store.bundles.layout import refused
from kvshelf.store.private import locked, read_owned, write_private
from kvshelf.store.private import refused as file_refused

log = logging.getLogger("kvshelf.store")

PARAM = "--trust"

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Taken(_Strict):
    """The newest bundle of one name that was taken. manifest: its digest."""

    sequence: int
    manifest: str


class _TrustedKeys(_Strict):
    """keys: public keys of Ed25519 in hex, by the owner's name. taken: by key and bundle."""

    keys: dict[KeyName, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    taken: dict[str, Taken] = Field(default_factory=dict)


class Trust:
    """A file of trusted keys. If it can only be read, this object remembers the bundles that were taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._remembered: dict[str, Taken] = {}

    def add(self, name: str, key: str) -> None:
        """Trust a key, in hex, under a name. Makes the file if it is missing. Raises `InvalidRequest` if another key
        has the name."""
        with locked(self._path, param=PARAM):
            content = self._read() if self._path.exists() else _TrustedKeys()
            if content.keys.get(name, key) != key:
                raise InvalidRequest(
                    f"{self._path} has another key of {name!r} already; take its line out first, or give another name",
                    param="NAME",
                )
            self._write(_checked(self._path, content.model_dump() | {"keys": content.keys | {name: key}}))

    def require(self, key: str) -> str:
        """The name of a key. Raises `InvalidRequest` unless it is trusted."""
        for name, trusted in self._read().keys.items():
            if trusted == key:
                return name
        raise refused("untrusted_key", f"it is signed with the key {key}, which {self._path} does not have")

    def require_newer(self, key: str, bundle: str, sequence: int, manifest: str) -> None:
        """Raise `InvalidRequest` for a bundle older than the newest that was taken, or another one of its number."""
        before = self._newest(key, bundle)
        if before is None or before.sequence < sequence or before == Taken(sequence=sequence, manifest=manifest):
            return
        older = "an older one" if before.sequence > sequence else "another one with the same number"
        raise refused(
            "rollback",
            f"of {bundle!r} number {before.sequence} was taken, and this is {older}, number {sequence}; take what its "
            "producer publishes now",
        )

    def take(self, key: str, bundle: str, sequence: int, manifest: str) -> None:
        """Remember a bundle whose caches are taken. Raises as `require_newer`."""
        self.require_newer(key, bundle, sequence, manifest)
        newest = Taken(sequence=sequence, manifest=manifest)
        if self._newest(key, bundle) == newest:
            return
        if (problem := self._read_only) is not None:
            log.warning("%s; until this process ends, bundles older than %s %d are refused", problem, bundle, sequence)
            self._remembered[_place(key, bundle)] = newest
            return
        with locked(self._path, param=PARAM):
            self.require_newer(key, bundle, sequence, manifest)
            content = self._read()
            self._write(content.model_copy(update={"taken": content.taken | {_place(key, bundle): newest}}))

    def require_takeable(self, key: str, bundle: str, sequence: int, manifest: str) -> None:
        """Raise `InvalidRequest` if this bundle could not be remembered beyond this process."""
        newest = Taken(sequence=sequence, manifest=manifest)
        if self._newest(key, bundle) != newest and (problem := self._read_only) is not None:
            raise InvalidRequest(problem, param=PARAM)

    @property
    def _read_only(self) -> str | None:
        """The problem if the file cannot be replaced. Tries it: a file system may allow less than modes say."""
        try:
            with tempfile.TemporaryFile(dir=self._path.parent):
                return None
        except OSError as error:
            return (
                f"the key file {self._path} cannot be written ({error.strerror}), and what is trusted and taken stands "
                "in it; make its folder writable, or give a copy of the file in one that is"
            )

    def _newest(self, key: str, bundle: str) -> Taken | None:
        """The newest bundle that was taken, by the file or since it could not be written."""
        place = _place(key, bundle)
        recorded = (self._read().taken.get(place), self._remembered.get(place))
        return max((entry for entry in recorded if entry), key=lambda entry: entry.sequence, default=None)

    def _read(self) -> _TrustedKeys:
        try:
            values = parse_json(read_owned(self._path, param=PARAM))
        except ValueError as error:
            raise file_refused(self._path, "it is no JSON", param=PARAM) from error
        return _checked(self._path, values)

    def _write(self, content: _TrustedKeys) -> None:
        write_private(self._path, content.model_dump_json(indent=1).encode(), param=PARAM)


def _checked(path: Path, values: object) -> _TrustedKeys:
    try:
        return _TrustedKeys.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise file_refused(path, problem, param=PARAM) from error


def _place(key: str, bundle: str) -> str:
    return f"{key}/{bundle}"
