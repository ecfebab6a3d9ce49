"""A tier: a place for copies of caches, in front of the home that has all caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvshelf.store.manifest import Manifest
from kvshelf.store.types import BlobFile, Scrubbed, Source

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache


class Tier(Protocol):
    """Copies that may be dropped at any time; used by `TieredStore` alone. Several threads may use it at once.

    A copy has the home's manifest and is verified whenever it is read. A damaged copy, or one of another blob than the
    manifest names, is dropped. Methods raise `StoreError` and `OSError` when the tier does not work.
    """

    name: str
    """The name of this tier in a receipt: "ram" or "disk"."""

    def noted(self) -> str:
        """The home's `incarnation` at the last comparison of all copies with it; empty if there was none."""

    def note(self, incarnation: str) -> None:
        """Record that all copies have been compared with this incarnation of the home."""

    def keep(self, manifest: Manifest, cache: CompressedCache) -> None:
        """Keep a copy, dropping others to make room. Does nothing if the copy is here already, is larger than the whole
        budget, or belongs to another manifest."""

    def keep_source(self, manifest: Manifest, source: Source) -> None:
        """Keep the source with a copy, and no longer than it. Does nothing if there is no copy."""

    def confirm(self, manifest: Manifest) -> None:
        """Update a copy, if there is one, to the home's manifest."""

    def find(self, cache_id: str, tenant: str, *, recent: bool) -> Manifest | None:
        """The manifest of a copy that has not expired, for use while the home cannot answer.

        recent: only if the home confirmed the copy recently, so that a deletion would be known.
        """

    def open_cache(self, manifest: Manifest) -> ArrivingCache | None:
        """The copy of the manifest's blob, as `Store.open_cache`. None if there is no good copy."""

    def open_parts(self, manifest: Manifest) -> PartialCache | None:
        """As `open_cache`, for `Store.open_parts`."""

    def open_blob(self, manifest: Manifest) -> BlobFile | None:
        """As `open_cache`, for `Store.open_blob`."""

    def source(self, manifest: Manifest) -> Source | None:
        """The source of the manifest's document, verified."""

    def touch(self, cache_id: str, tenant: str) -> None:
        """Record a use of the cache, so that its copy stays longer."""

    def drop(self, cache_id: str, tenant: str) -> bool:
        """Remove a copy; False if there was none."""

    def manifests(self) -> Iterator[Manifest]:
        """The manifests of all copies that have not expired."""

    def sweep(self, now: float | None) -> None:
        """As `Store.sweep`."""

    def problems(self) -> list[str]:
        """As `Store.check`."""

    def scrub(self) -> Iterator[Scrubbed]:
        """As `Store.scrub`."""

    def close(self) -> None:
        """Release files and memory."""
