"""Bytes as objects: each name is one object, which the server publishes whole or not at all."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import obstore
from blake3 import blake3
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url

from kvshelf.errors import BlobError, InvalidRequest, StoreError, StoreUnavailable
from kvshelf.store.blobs import Blobs, Health, Leases, Step, StoredFile, is_name
from kvshelf.store.index import Index
from kvshelf.store.objects.address import ObjectPlace
from kvshelf.store.objects.faults import EmptyObject, translated
from kvshelf.store.objects.file import HEAD, TAIL, Ends, Lease, ObjectFile

if TYPE_CHECKING:
    from obstore import GetOptions

_SUFFIX: Final = ".kvb"
_MARKER: Final = "shelf"
_MARKED: Final = b"A kvshelf store keeps its blobs beside this object, by which it knows them. Leave it here.\n"

_PART: Final = 16 << 20
"""Bytes of a part of a multipart upload. Shorter content is one conditional request."""

_PARTS: Final = 10_000  # S3 takes no more
_UPLOADS: Final = 4  # parts on their way at once
_REQUESTS: Final = 16  # of all readers at once
_RETRIES: Final = 10


class ObjectBlobs(Blobs):
    """See `Blobs` for the contract. Made by `open_at`. Object storage does not know who reads an object, so readers
    have `Leases` in the home of the index. Bytes that a reader still has when they are removed go with a later
    sweep."""

    home = "objects"
    walk_every_s = 3600.0  # a listing costs one request per thousand objects
    read_ahead = False

    _threads_of: ClassVar[int | None] = None  # the process in which obstore has its threads: a fork of it has none

    def __init__(self, place: ObjectPlace, index: Index, leases: Leases) -> None:
        if ObjectBlobs._threads_of not in (None, os.getpid()):
            raise StoreUnavailable("object storage cannot be used in a fork of a process that used it: spawn instead")
        ObjectBlobs._threads_of = os.getpid()
        self._place = place
        self._index = index
        self.leases = leases
        self._store = connect(place)
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="kvshelf-objects")
        self._checked: tuple[str, str] | None = None  # the index's incarnation, and its namespace that has the marker

    @classmethod
    def open_at(cls, place: ObjectPlace, index: Index, leases: Leases, *, patient: bool = False) -> Self:
        """Raises `StoreUnavailable` if the bucket is missing, refuses access, or has the blobs of another index.
        patient: check an unreachable place at its first use instead, because a tier before it answers meanwhile."""
        blobs = cls(place, index, leases)
        try:
            blobs._namespace()
        except StoreError:
            if not patient:
                blobs.close()
                raise
        return blobs

    def write(self, name: str, buffers: Iterable[memoryview], nbytes: int, *, on_step: Step) -> None:
        path = self._path(name)
        content = _counted(buffers, nbytes)
        on_step("created")
        try:
            with translated(self._place):
                if nbytes <= _PART:
                    self._create(path, b"".join(content))
                else:
                    self._upload(path, content, nbytes)
        except (AlreadyExistsError, FileExistsError) as error:
            raise StoreUnavailable(f"{name} is in {self._place} already; a name is written once") from error
        except FileNotFoundError as error:
            raise StoreUnavailable(
                f"{self._place} has lost the upload of {name}; put it again", stored=False
            ) from error
        on_step("written")
        on_step("synced")  # what the server acknowledges is durable

    def renew(self, name: str, nbytes: int) -> None:
        """Object storage drops nothing by itself."""

    def open(self, name: str, nbytes: int, *, once: bool = False) -> StoredFile | None:
        path, token = self._path(name), secrets.token_hex(8)
        lease = Lease(lambda: self.leases.hold(name, token), lambda: self.leases.release(name, token))
        if not lease.hold():
            return None
        try:
            return ObjectFile(partial(self._fetch, path), self._ends(path, nbytes), lease, once=once)
        except FileNotFoundError:
            lease.release()
            return None
        except BaseException:
            with suppress(StoreError):
                lease.release()
            raise

    def beginning(self, name: str, nbytes: int, count: int) -> bytes | None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            return bytes(self.fetch_range(path, 0, min(count, nbytes))) if nbytes else b""
        return None

    def holds(self, name: str, nbytes: int) -> bool:
        path = self._path(name)
        with suppress(FileNotFoundError), translated(self._place):
            return bool(obstore.head(self._store, path)["size"] == nbytes)
        return False

    def hold_each(self, names: Sequence[tuple[str, int]]) -> list[bool]:
        """With several requests at once."""
        return list(self._pool.map(lambda name: self.holds(*name), names))

    def keep_until(self, name: str, nbytes: int, expires_at: float | None) -> None:
        """Object storage drops nothing by itself."""

    def remove(self, name: str, nbytes: int) -> bool:  # noqa: ARG002
        path = self._path(name)
        if not self.leases.take(name):
            return False
        with suppress(FileNotFoundError), translated(self._place):
            obstore.delete(self._store, path)
        return True

    def set_aside(self, name: str, nbytes: int) -> None:
        """The bytes stay where they are: to move an object is to copy it."""

    def is_read(self, name: str) -> bool:
        return self.leases.has_readers(name)

    def walk(self) -> Iterator[tuple[str, float]]:
        with suppress(FileNotFoundError):
            now = self._now()
            for path, changed in self._objects():
                if _is_blob(path):
                    yield path.removesuffix(_SUFFIX), (now - changed).total_seconds()

    def problems(self) -> list[str]:
        namespace = self._namespace()
        strange = [path for path, _ in self._objects() if not _is_blob(path) and path != _MARKER]
        with translated(self._place):
            folders = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return [
            *self.health().faults,
            *(f"{path} in {self._place}/{namespace} is not a blob" for path in strange),
            *(
                f"{self._place}/{folder} is of another index: of an earlier one that was lost, whose backup would find "
                "its blobs there, or of another shelf, which should have a prefix of its own"
                for folder in folders
                if folder.strip("/") != namespace
            ),
        ]

    def health(self) -> Health:
        path = f"{self._namespace()}/{_MARKER}"
        try:
            with translated(self._place):
                obstore.head(self._store, path)
        except FileNotFoundError:
            return Health(faults=(f"{self._place}/{path} is gone: the bucket was emptied, or replaced by another",))
        return Health()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Objects

    def _create(self, path: str, content: bytes) -> None:
        """In one request, on the condition that there is no such object."""
        try:
            obstore.put(self._store, path, content, mode="create")
        except AlreadyExistsError:
            # obstore repeats a request whose answer was lost, and then finds its own object.
            if memoryview(obstore.get(self._store, path).bytes()) != memoryview(content):
                raise

    def _upload(self, path: str, content: Iterable[memoryview], nbytes: int) -> None:
        """In parts, several at once. A failed upload is aborted; that of a dead writer stays until the bucket's rule
        for incomplete uploads removes it: obstore cannot list them."""
        with suppress(FileNotFoundError):
            obstore.head(self._store, path)
            raise FileExistsError(path)
        part = max(_PART, math.ceil(nbytes / _PARTS))
        obstore.put(self._store, path, content, use_multipart=True, chunk_size=part, max_concurrency=_UPLOADS)

    def _ends(self, path: str, nbytes: int) -> Ends:
        """Raises `FileNotFoundError`."""
        tail = self._fetch(path, nbytes - TAIL, nbytes) if nbytes > HEAD + TAIL else None
        try:
            with translated(self._place):
                options: GetOptions = {} if tail is None else {"range": (0, HEAD)}
                answer = obstore.get(self._store, path, options=options)
                size, head = answer.meta["size"], memoryview(answer.bytes())
        except EmptyObject:
            size, head = 0, memoryview(b"")
        if tail is None or size != nbytes:  # of another size: the reader will say so
            return Ends(size, head, memoryview(b""))
        return Ends(size, head, tail.result())

    def _fetch(self, path: str, start: int, stop: int) -> Future[memoryview]:
        return self._pool.submit(self.fetch_range, path, start, stop)

    def fetch_range(self, path: str, start: int, stop: int) -> memoryview:
        """Raises `FileNotFoundError`."""
        try:
            with translated(self._place):
                data = memoryview(obstore.get_range(self._store, path, start=start, end=stop))
        except EmptyObject:
            data = memoryview(b"")
        if len(data) != stop - start:
            raise BlobError("its object has become shorter", reason="truncated")
        return data

    def _objects(self) -> Iterator[tuple[str, datetime]]:
        """The objects of this shelf: their paths behind the namespace, and the times of their last change."""
        folder = f"{self._namespace()}/"
        with translated(self._place):
            for chunk in obstore.list(self._store, folder):
                for meta in chunk:
                    yield meta["path"].removeprefix(folder), meta["last_modified"]

    def _now(self) -> datetime:
        """The time by the clock that dates the objects: the server's, when it wrote the marker anew."""
        path = f"{self._namespace()}/{_MARKER}"
        with translated(self._place):
            obstore.head(self._store, path)  # else: an emptied bucket stays without one, see `health`
            obstore.put(self._store, path, _MARKED)
            return obstore.head(self._store, path)["last_modified"]

    def _path(self, name: str) -> str:
        """Names come from the index; even a tampered index cannot lead out of the prefix."""
        if not is_name(name):
            raise StoreUnavailable(f"{name!r:.80} is not the name of bytes in a store; its index was tampered with")
        return f"{self._namespace()}/{name}{_SUFFIX}"

    def _namespace(self) -> str:
        """The folder of this index's blobs, once its marker was found there, or made for an empty index."""
        if self._checked is None or self._checked[0] != self._index.incarnation:
            usage = self._index.usage(None)  # a Redis that was out of reach tells its incarnation with the first answer
            incarnation = self._index.incarnation
            namespace = blake3(f"objects:{incarnation}".encode(), key=self._index.key).hexdigest()[:16]
            count = usage.caches or len(self._index.jobs.open_items("source", 1))  # a source outlives its cache
            self._require_marker(f"{namespace}/{_MARKER}", count)
            self._checked = (incarnation, namespace)
        return self._checked[1]

    def _require_marker(self, path: str, caches: int) -> None:
        try:
            with translated(self._place):
                obstore.get(self._store, path)
                return
        except FileNotFoundError:
            pass
        if caches:
            raise StoreUnavailable(
                f"the index has {caches} caches, but their blobs are not in {self._place}: it has no object {path}. "
                "Name the bucket and the prefix with which this shelf was made, or restore them"
            )
        with suppress(AlreadyExistsError), translated(self._place):
            obstore.put(self._store, path, _MARKED, mode="create")


def connect(place: ObjectPlace) -> ObjectStore:
    """Nothing is sent yet. Credentials, and the endpoint without one in the URL, are read from the environment."""
    timeout = timedelta(seconds=place.timeout_s)
    options = {"endpoint": place.endpoint, "region": place.region}
    config: Any = {name: value for name, value in options.items() if value is not None}  # of S3, by `address.parse`
    try:
        store: ObjectStore = from_url(
            str(place),
            config=config,
            client_options={"allow_http": True, "timeout": timeout, "connect_timeout": timedelta(seconds=5)},
            retry_config={"max_retries": _RETRIES, "retry_timeout": timeout},
        )
    except (BaseError, ValueError) as error:
        raise InvalidRequest(f"cannot use {place}: {str(error).splitlines()[0]:.200}", param="store") from error
    return store


def _counted(buffers: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
    """The buffers; raises `ValueError` at their end unless they have so many bytes."""
    count = 0
    for buffer in buffers:
        count += buffer.nbytes
        yield memoryview(buffer).cast("B")
    if count != nbytes:
        raise ValueError(f"{count} bytes were given to write, {nbytes} were announced")


def _is_blob(path: str) -> bool:
    return path.endswith(_SUFFIX) and is_name(path.removesuffix(_SUFFIX))
