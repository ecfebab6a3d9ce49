"""A place for copies of caches, before the home that has them all."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from kvshelf.store.artifact.arriving import ArrivingCache
from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import BlobFile, Scrubbed


class Tier(abc.ABC):
    """Copies that may give way at any time; used by `TieredStore` alone. Serves several threads at once.

    A copy lies under the home's manifest and is verified whenever it is read. One that turns out bad, or that is of
    another blob than the manifest says, is no copy: it is dropped. Methods raise `StoreError` and `OSError` when the
    tier does not work.
    """

    name: str
    """What a receipt calls this place: "ram" or "disk"."""

    @abc.abstractmethod
    def noted(self) -> str:
        """The home's `incarnation` when all copies were last compared with it; empty if they never were."""

    @abc.abstractmethod
    def note(self, incarnation: str) -> None:
        """All copies have been compared with the home."""

    @abc.abstractmethod
    def keep(self, manifest: Manifest, cache: CompressedCache) -> None:
        """Take a copy; others give way to it. Nothing happens if it is here, if it is larger than the whole budget, or
        if the manifest is not this cache's."""

    @abc.abstractmethod
    def keep_source(self, manifest: Manifest, text: str) -> None:
        """Keep the source beside a copy; nothing happens where there is none."""

    @abc.abstractmethod
    def confirm(self, manifest: Manifest) -> None:
        """What the home says of a cache now: the copy gets it, if there is one."""

    @abc.abstractmethod
    def find(self, cache_id: str, tenant: str, *, recent: bool) -> Manifest | None:
        """The manifest of a copy that has not expired, to be used when the home cannot say what has become of it.

        recent: only if the copy would have heard of a deletion before long.
        """

    @abc.abstractmethod
    def open_cache(self, manifest: Manifest) -> ArrivingCache | None:
        """The copy of the manifest's blob, as `Store.open_cache`. None: there is none, or no good one."""

    @abc.abstractmethod
    def open_blob(self, manifest: Manifest) -> BlobFile | None:
        """As `open_cache`, for `Store.open_blob`."""

    @abc.abstractmethod
    def source(self, manifest: Manifest) -> str | None:
        """The source that the manifest speaks of, verified."""

    @abc.abstractmethod
    def touch(self, cache_id: str, tenant: str) -> None:
        """The cache was used: its copy stays longer."""

    @abc.abstractmethod
    def drop(self, cache_id: str, tenant: str) -> bool:
        """Remove a copy; False if there was none."""

    @abc.abstractmethod
    def manifests(self) -> Iterator[Manifest]:
        """Those of all copies that have not expired."""

    @abc.abstractmethod
    def sweep(self, now: float | None) -> None:
        """As `Store.sweep`."""

    @abc.abstractmethod
    def problems(self) -> list[str]:
        """As `Store.check`."""

    @abc.abstractmethod
    def scrub(self) -> Iterator[Scrubbed]:
        """As `Store.scrub`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and memory."""
