"""Shelves of the bench's own, and the same bytes on the same medium without kvshelf."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from blake3 import blake3

from kvshelf.artifact.blob import PackedBlob
from kvshelf.errors import InvalidRequest
from kvshelf.store.blobs import Blobs
from kvshelf.store.disk.database import Database
from kvshelf.store.disk.folder import Folder
from kvshelf.store.disk.index import SqliteIndex
from kvshelf.store.disk.leases import SqliteLeases
from kvshelf.store.index import Index, MakeBlobs, blobs_place

if TYPE_CHECKING:
    import socket

    import redis
    from obstore.store import ObjectStore

Ways = dict[str, Callable[[], object]]

_BUSY_S: Final = 10.0  # of SQLite; nobody else uses the shelf
_PATIENCE_S: Final = 30.0  # of redis-py's sockets: one value of 256 MB takes seconds on a busy machine
_VALUE_LIMIT: Final = 512 << 20  # bytes; what Redis takes as one value
_DRAIN: Final = 1000  # keys that are removed at once


@contextmanager
def made_in(url: str | None) -> Iterator[Home]:
    """A home in the place of a URL, `disk:///folder` or `redis://host`, also with `?blobs=s3://bucket/prefix`.

    Without a URL, in a temporary folder.

    It is removed when the block ends; everything else in the place stays. Raises `InvalidRequest`.
    """
    home = DiskHome(Path(tempfile.gettempdir())) if url is None else _home(url)
    with home.translated():
        try:
            yield home
        finally:
            home.remove()


def _home(url: str) -> Home:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if (blobs := query.pop("blobs", None)) is not None:
        return ObjectsHome(parts._replace(query=urlencode(query)).geturl(), blobs)
    return _index_home(url)


def _index_home(url: str) -> DiskHome | RedisHome:
    parts = urlsplit(url)
    if parts.scheme == "disk":
        return DiskHome(Path(unquote(parts.path)))
    if parts.scheme in ("redis", "rediss"):
        return RedisHome(url)
    raise InvalidRequest(
        f"--store: {parts.scheme!r:.40} is no home that can be measured; give disk:///folder or redis://host:6379/0, "
        "also with ?blobs=s3://bucket/prefix",
        param="store",
    )


class DiskHome:
    """A shelf of the bench's own in a folder: `url` opens it, `bare` writes the same bytes next to it.

    index_url: names the place of its index alone.
    """

    name = "disk"

    def __init__(self, place: Path) -> None:
        if not place.is_dir():
            raise InvalidRequest(f"--store: there is no folder {str(place)!r} to make a shelf in", param="store")
        self._folder = Path(tempfile.mkdtemp(prefix="kvshelf-bench-", dir=place.absolute()))
        self.url = self.index_url = f"disk://{quote(str(self._folder / 'shelf'))}"

    def open(self, blobs: MakeBlobs | None = None) -> tuple[Index, Blobs]:
        """The two halves of a `Shelf`, to publish manifests without writing caches. blobs: as of `DiskStore.open`."""
        shelf = self._folder / "shelf"
        shelf.mkdir(mode=0o700, exist_ok=True)
        database = Database(shelf, _BUSY_S)
        index = SqliteIndex(database, database.create(None, blobs_place(blobs))[0], time.time)
        return index, Folder.open_in(shelf) if blobs is None else blobs(index, SqliteLeases(database, time.time))

    def bare(self, packed: PackedBlob) -> Bare:
        return BareFile(self._folder / "bare", packed)

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def translated(self) -> AbstractContextManager[None]:
        """Inside the block, errors of a client are raised as errors of a store."""
        return nullcontext()


class BareFile:
    """The bytes of a blob as a file, just written and so read from the page cache.

    `writes` and `reads` are ways without kvshelf. The speed of reading through kvshelf is given as a share of the way
    `limit`; `peer`, if any, is what one would use instead of kvshelf. `remove` runs before each of `writes`, untimed,
    because `put` is also timed without the cache on the shelf.
    """

    limit = "file into a reused buffer, digest"
    peer = None

    def __init__(self, path: Path, packed: PackedBlob) -> None:
        self.path = path
        self._buffers = list(packed.buffers)
        self._sizes = [sum(map(len, part)) for part in packed.parts]  # a shelf reads and digests one at a time
        self.reused = memoryview(bytearray(packed.nbytes))
        self._write()
        self.writes: Ways = {"file, fsync": self._write}
        self.reads: Ways = {
            self.limit: lambda: self._read(self.reused),
            "file into a fresh buffer, digest": lambda: self._read(memoryview(bytearray(packed.nbytes))),
            "file into a reused buffer": lambda: self._read(self.reused, digest=False),
        }

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        with self.path.open("wb", buffering=0) as file:
            for buffer in self._buffers:
                file.write(buffer)
            os.fsync(file.fileno())

    def _read(self, buffer: memoryview, *, digest: bool = True) -> memoryview:
        with self.path.open("rb", buffering=0) as file:
            rest = buffer
            for size in self._sizes:
                part, rest = rest[:size], rest[size:]
                _fill(file.readinto, part)
                if digest:
                    blake3(part).digest()
        return buffer


class RedisHome:
    """As `DiskHome`, under a prefix of a Redis."""

    name = "redis"

    def __init__(self, url: str) -> None:
        from kvshelf.store.redis import address

        self._prefix = f"kvshelf-bench-{secrets.token_hex(4)}"
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query)) | {"prefix": self._prefix}
        self.url = self.index_url = parts._replace(query=urlencode(query)).geturl()
        address.parse(url)  # check the given URL: the changes above must not hide its errors
        self._address = address.parse(self.url)
        self._client = self._connected()

    def open(self, blobs: MakeBlobs | None = None) -> tuple[Index, Blobs]:
        from kvshelf.store.redis.blobs import RedisBlobs
        from kvshelf.store.redis.index import RedisIndex
        from kvshelf.store.redis.leases import RedisLeases
        from kvshelf.store.redis.link import RedisLink

        link = RedisLink(self._address)
        index = RedisIndex.open(link, self._prefix, None, blobs=blobs)
        if blobs is None:
            return index, RedisBlobs(link, self._prefix)
        return index, blobs(index, RedisLeases(link, self._prefix))

    def bare(self, packed: PackedBlob) -> Bare:
        return BareValues(self._client, f"{{{self._prefix}}}:bare", packed)

    def remove(self) -> None:
        stored = self._client.scan_iter(match=f"{{{self._prefix}*", count=_DRAIN)
        while keys := list(islice(stored, _DRAIN)):
            self._client.unlink(*keys)
        self._client.close()

    def translated(self) -> AbstractContextManager[None]:
        from kvshelf.store.redis.faults import translated

        return translated(self._address)

    def _connected(self) -> redis.Redis:
        """A plain client of redis-py, as written without kvshelf."""
        import redis

        place = self._address
        ((host, port),) = place.hosts
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": place.ca} if place.tls else {}
        client = redis.Redis(
            host, port, place.db, place.password, username=place.user, socket_timeout=_PATIENCE_S, **tls
        )
        with self.translated():
            client.ping()
        return client


class BareValues:
    """As `BareFile`, with the bytes in chunks of the shelf's size, and as one value if Redis accepts that size."""

    limit = "raw socket GETs of the chunks into a reused buffer, digest"
    peer: str | None = None

    def __init__(self, client: redis.Redis, key: str, packed: PackedBlob) -> None:
        from kvshelf.store.redis.blobs import CHUNK

        self.client = client
        self.key = key
        self._whole = b"".join(packed.buffers)
        self.reused = memoryview(bytearray(packed.nbytes))
        starts = range(0, packed.nbytes, CHUNK)
        self._chunks = {f"{key}:{start}": self._whole[start : start + CHUNK] for start in starts}
        for name, chunk in self._chunks.items():
            client.set(name, chunk)
        self.writes: Ways = {}
        self.reads: Ways = {
            self.limit: self._read,
            "redis-py get of the chunks": lambda: [client.get(name) for name in self._chunks],
        }
        if packed.nbytes < _VALUE_LIMIT:
            client.set(key, self._whole)
            self.peer = "redis-py get of one value"
            self.reads[self.peer] = lambda: client.get(key)
            self.writes["redis-py set of one value"] = lambda: client.set(key, self._whole)

    def remove(self) -> None:
        self.client.delete(self.key)

    def _read(self) -> None:
        """Asks for all chunks at once and digests each as it arrives: the best that a client can do."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            # redis-py connects and authenticates; only a private name gives its socket.
            sock: socket.socket = connection._sock  # type: ignore[assignment]
            sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(k), k.encode()) for k in self._chunks))
            rest = self.reused
            for chunk in self._chunks.values():
                part, rest = rest[: len(chunk)], rest[len(chunk) :]
                _expect(sock, b"$%d\r\n" % len(chunk))
                _fill(sock.recv_into, part)
                _expect(sock, b"\r\n")
                blake3(part).digest()
        finally:
            pool.release(connection)


def _expect(sock: socket.socket, text: bytes) -> None:
    received = memoryview(bytearray(len(text)))
    _fill(sock.recv_into, received)
    if received != text:
        raise RuntimeError(f"{bytes(received)!r} came from Redis where {text!r} was expected")


def _fill(receive: Callable[[memoryview], int], buffer: memoryview) -> None:
    while buffer:
        count = receive(buffer)
        if not count:
            raise RuntimeError(f"{len(buffer)} bytes fewer came than were written")
        buffer = buffer[count:]


class ObjectsHome:
    """As `DiskHome`, with its index in a home of another kind, and its blobs under a prefix of a bucket."""

    def __init__(self, index_url: str, objects_url: str) -> None:
        from kvshelf.store.objects import address

        address.parse(objects_url)  # before the index is made
        place, mark, query = objects_url.partition("?")
        url = f"{place.rstrip('/')}/kvshelf-bench-{secrets.token_hex(4)}{mark}{query}"
        self._address = address.parse(url)
        self._store = self._connected()
        self._index = _index_home(index_url)
        self.name = f"objects, index in {self._index.name}"
        self.index_url = self._index.url
        self.url = f"{self.index_url}{'&' if '?' in self.index_url else '?'}{urlencode({'blobs': url})}"

    def open(self) -> tuple[Index, Blobs]:
        from kvshelf.store.objects.blobs import ObjectBlobs

        return self._index.open(partial(ObjectBlobs.open_at, self._address))

    def bare(self, packed: PackedBlob) -> Bare:
        return BareObject(self._store, packed)

    def remove(self) -> None:
        import obstore

        try:
            for chunk in obstore.list(self._store):
                obstore.delete(self._store, [entry["path"] for entry in chunk])
        finally:
            self._index.remove()

    @contextmanager
    def translated(self) -> Iterator[None]:
        from kvshelf.store.objects.faults import translated

        with self._index.translated(), translated(self._address):
            yield

    def _connected(self) -> ObjectStore:
        """A plain client of obstore, as written without kvshelf. Credentials come from the environment."""
        from obstore.store import from_url

        options = {"endpoint": self._address.endpoint, "region": self._address.region}
        config: Any = {name: value for name, value in options.items() if value is not None}
        store: ObjectStore = from_url(str(self._address), config=config, client_options={"allow_http": True})
        return store


class BareObject:
    """As `BareFile`, with the bytes as one object: in one request as they are read, in parts as they are written."""

    limit = "obstore get, digest"
    peer = "obstore get"

    def __init__(self, store: ObjectStore, packed: PackedBlob) -> None:
        import obstore

        self.store = store
        whole = b"".join(packed.buffers)
        self.writes: Ways = {"obstore put": lambda: obstore.put(store, "bare", whole)}
        self.reads: Ways = {self.limit: lambda: self._read(digest=True), self.peer: self._read}
        obstore.put(store, "bare", whole)

    def remove(self) -> None:
        import obstore

        obstore.delete(self.store, "bare")

    def _read(self, *, digest: bool = False) -> memoryview:
        import obstore

        data = memoryview(obstore.get(self.store, "bare").bytes())
        if digest:
            blake3(data).digest()
        return data


Home = DiskHome | RedisHome | ObjectsHome
Bare = BareFile | BareValues | BareObject
