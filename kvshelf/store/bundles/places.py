"""Where bundles lie: a folder, or a prefix of object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import obstore

from kvshelf import atomic
from kvshelf.errors import InvalidRequest, StorageFull
from kvshelf.store.objects.address import SCHEMES, parse
from kvshelf.store.objects.blobs import connect
from kvshelf.store.objects.faults import translated


class BundlePlace(Protocol):
    """Files by name. A file appears whole or not at all."""

    def read(self, name: str, most: int) -> bytes | None:
        """The bytes of a file, None if it is not there. Raises `InvalidRequest` beyond `most` bytes."""
        ...

    def write(self, name: str, data: bytes) -> None: ...


def place_at(where: str) -> BundlePlace:
    """The place of a path, or of a URL such as s3://bucket/prefix. Raises `InvalidRequest`."""
    scheme, separator, _ = where.partition("://")
    if separator and scheme not in SCHEMES:
        raise InvalidRequest(
            f"a bundle lies in a folder or at {', '.join(f'{name}://' for name in SCHEMES)}, not at {scheme[:40]}://",
            param="PLACE",
        )
    return Bucket(where) if separator else BundleFolder(Path(where))


class BundleFolder:
    """A folder on disk. Raises `InvalidRequest` if a file cannot be read, `StorageFull` if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str, most: int) -> bytes | None:
        path = self._path / name
        try:
            with path.open("rb") as file:
                return _bounded(file.read(most + 1), most, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="PLACE") from error

    def write(self, name: str, data: bytes) -> None:
        path = self._path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.written(path) as file:
                file.write(data)
        except OSError as error:
            raise StorageFull(f"cannot write {path}: {error.strerror}") from error


class Bucket:
    """A prefix in object storage. Raises as `translated`."""

    def __init__(self, url: str) -> None:
        self._place = parse(url)
        self._store = connect(self._place)

    def read(self, name: str, most: int) -> bytes | None:
        try:
            with translated(self._place):
                stored = obstore.get(self._store, name)
                if stored.meta["size"] > most:
                    raise _too_long(name, most)
                return _bounded(bytes(stored.bytes()), most, name)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        with translated(self._place):
            obstore.put(self._store, name, data)


def _bounded(data: bytes, most: int, name: str) -> bytes:
    if len(data) > most:
        raise _too_long(name, most)
    return data


def _too_long(name: str, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"the bundle is refused: {name} has more than {most} bytes", param="SOURCE", reason="malformed"
    )
