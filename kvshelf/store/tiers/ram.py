"""Copies of caches in the memory of one process; the least recently used are dropped first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Final

from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.blob.frame import BlobSummary
from kvshelf.artifact.memory import fresh_memory
from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store import checks
from kvshelf.store.manifest import Manifest
from kvshelf.store.tiers.tiers import Tier
from kvshelf.store.types import BlobFile, Scrubbed, Source

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache

RECENT_S: Final = 60.0
"""How long a copy may be used without the home after the home has confirmed it.

A deletion by another process drops no copy here before the next sweep, and some processes never sweep. Equal to the
default interval of sweeps, so that a deleted cache is not served for longer than from a disk tier.
"""


PER_COPY: Final = 16 << 10
"""Bytes of the objects that describe a copy, besides its blob, so that many small caches count in full. With many
layers these objects take about ten times as much, but then the blob is far larger."""

_LEAST_MAPPED: Final = 2 << 20  # bytes; smaller copies share pages: a process may have only some 65,000 maps


@dataclass(frozen=True)
class _Copy:
    """body: all segments, in memory that is never written again; readers have views of it."""

    manifest: Manifest
    summary: BlobSummary
    body: memoryview
    confirmed_at: float  # of time.monotonic

    @property
    def nbytes(self) -> int:
        return self.summary.nbytes + PER_COPY


_Key = tuple[str, str]  # tenant, id


class RamTier(Tier):
    """See `Tier`. Readers get views of a copy's memory, verified at each read; nothing is copied."""

    name = "ram"

    def __init__(self, max_bytes: int, *, now: Callable[[], float] = time.time, recent_s: float = RECENT_S) -> None:
        """max_bytes: of all copies, with `PER_COPY`. now: the wall clock, Unix seconds. recent_s: see `RECENT_S`."""
        self._noted = ""
        self.max_bytes = max_bytes
        self._now = now
        self._recent_s = recent_s
        self._lock = threading.Lock()
        self.copies: OrderedDict[_Key, _Copy] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that all copies take, `PER_COPY` included."""
        return self._nbytes

    def noted(self) -> str:
        return self._noted

    def note(self, incarnation: str) -> None:
        self._noted = incarnation

    def keep(self, manifest: Manifest, cache: CompressedCache) -> None:
        if manifest.bytes_stored + PER_COPY > self.max_bytes or self._copy_of(manifest) is not None:
            return
        packed = cache.pack()
        if packed.root.hex() == manifest.blob_digest:
            summary = BlobSummary(packed.header, packed.root, packed.nbytes)
            self._put(_Copy(manifest, summary, _body(packed), time.monotonic()))

    def keep_source(self, manifest: Manifest, source: Source) -> None:
        """Sources are asked for too rarely to take memory."""

    def confirm(self, manifest: Manifest) -> None:
        key = _key(manifest)
        with self._lock:
            copy = self.copies.get(key)
            if copy is None:
                return
            if copy.manifest.blob_digest == manifest.blob_digest:
                self.copies[key] = _Copy(manifest, copy.summary, copy.body, time.monotonic())
            else:
                self._remove(key)

    def find(self, cache_id: str, tenant: str, *, recent: bool) -> Manifest | None:
        with self._lock:
            copy = self.copies.get((tenant, cache_id))
        if copy is None or self._expired(copy.manifest):
            return None
        if recent and time.monotonic() - copy.confirmed_at > self._recent_s:
            return None
        return copy.manifest

    def open_cache(self, manifest: Manifest) -> ArrivingCache | None:
        copy = self._copy_of(manifest)
        if copy is None:
            return None
        from kvshelf.artifact.opened.arriving import ArrivingCache  # here, because it imports torch

        return ArrivingCache(copy.summary, copy.body, partial(self._dropping, copy))

    def open_parts(self, manifest: Manifest) -> PartialCache | None:
        copy = self._copy_of(manifest)
        if copy is None:
            return None
        from kvshelf.artifact.opened.partial import PartialCache  # as above

        return PartialCache(copy.summary, copy.body, partial(self._dropping, copy))

    def open_blob(self, manifest: Manifest) -> BlobFile | None:
        arriving = self.open_cache(manifest)
        if arriving is None:
            return None
        with arriving:
            arriving.read()
            try:
                data = arriving.cache().to_bytes()
            except CacheCorrupt:  # the copy is damaged, and `_dropping` has removed it: the home is read
                return None
        return BlobFile(BytesIO(data), len(data), manifest.blob_digest)

    def source(self, manifest: Manifest) -> Source | None:  # noqa: ARG002
        return None

    def touch(self, cache_id: str, tenant: str) -> None:
        with self._lock:
            if (tenant, cache_id) in self.copies:
                self.copies.move_to_end((tenant, cache_id))

    def drop(self, cache_id: str, tenant: str) -> bool:
        with self._lock:
            return self._remove((tenant, cache_id))

    def manifests(self) -> Iterator[Manifest]:
        with self._lock:
            manifests = [copy.manifest for copy in self.copies.values()]
        return (manifest for manifest in manifests if not self._expired(manifest))

    def sweep(self, now: float | None) -> None:  # noqa: ARG002 - what the home has expired is dropped with the rest
        with self._lock:
            for key in [key for key, copy in self.copies.items() if self._expired(copy.manifest)]:
                self._remove(key)

    def problems(self) -> list[str]:
        return []

    def scrub(self) -> Iterator[Scrubbed]:
        for manifest in self.manifests():
            arriving = self.open_cache(manifest)
            if arriving is not None:
                with arriving:
                    arriving.read()
                    error = next((error for layer in arriving.layers if (error := layer.exception())), None)
                problem = None if error is None else str(error)
                yield Scrubbed(id=manifest.id, tenant=manifest.tenant, bytes=manifest.bytes_stored, problem=problem)

    def close(self) -> None:
        with self._lock:
            self.copies.clear()
            self._nbytes = 0

    def _copy_of(self, manifest: Manifest) -> _Copy | None:
        """The copy of the manifest's blob, which counts as used now."""
        key = _key(manifest)
        with self._lock:
            copy = self.copies.get(key)
            if copy is None or copy.manifest.blob_digest != manifest.blob_digest:
                return None
            self.copies.move_to_end(key)
            return copy

    def _put(self, copy: _Copy) -> None:
        key = _key(copy.manifest)
        with self._lock:
            self._remove(key)
            while self._nbytes + copy.nbytes > self.max_bytes:
                self._remove(next(iter(self.copies)))
            self.copies[key] = copy
            self._nbytes += copy.nbytes

    def _remove(self, key: _Key) -> bool:
        copy = self.copies.pop(key, None)
        if copy is not None:
            self._nbytes -= copy.nbytes
        return copy is not None

    def _expired(self, manifest: Manifest) -> bool:
        return manifest.expires_at is not None and manifest.expires_at <= self._now()

    @contextmanager
    def _dropping(self, copy: _Copy) -> Iterator[None]:
        """Inside the block, a `BlobError` drops the copy."""
        try:
            yield
        except BlobError as error:
            manifest = copy.manifest
            with self._lock:
                stored = self.copies.get(_key(manifest))
                if stored is not None and stored.body is copy.body:
                    self._remove(_key(manifest))
            raise checks.corrupt(manifest.id, f"its copy in memory: {error.message}", error.reason) from error


def _key(manifest: Manifest) -> _Key:
    return manifest.tenant, manifest.id


def _body(packed: PackedBlob) -> memoryview:
    """The segments of a blob, one after the other in memory of their own. The buffers of `packed` may be small parts of
    large tensors, which they would keep in memory."""
    size = packed.header.body_bytes
    memory = fresh_memory(size) if size >= _LEAST_MAPPED else memoryview(bytearray(size))
    end = 0
    for segment in packed.parts[1:-1]:
        for buffer in segment:
            memory[end : end + buffer.nbytes] = buffer.cast("B")
            end += buffer.nbytes
    return memory
