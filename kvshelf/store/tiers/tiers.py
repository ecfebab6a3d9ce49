"""Tiers: places for copies of caches, in front of the home that has all caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from kvshelf.errors import KvshelfError
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import BlobFile, Scrubbed, Source

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.opened.arriving import ArrivingCache
    from kvshelf.artifact.opened.partial import PartialCache

ResultT = TypeVar("ResultT")

log = logging.getLogger("kvshelf.store")

_COMPLAINT_S: Final = 60.0
"""Least time between two log lines about one tier."""

_FAILING_S: Final = 150.0
"""How long `failing` reports a failure: two default sweep intervals and a margin, so a sweep has retried the tier."""


class Tier(Protocol):
    """Copies that may be dropped at any time; used by `TieredStore` alone. Several threads may use it at once. A copy
    has the home's manifest and is verified whenever it is read. A damaged copy, or one of another blob than the
    manifest names, is dropped. Methods raise `StoreError` and `OSError` when the tier does not work."""

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
        """The manifest of a copy that has not expired, for use while the home cannot answer. recent: only if the home
        confirmed the copy recently, so that a deletion would be known."""

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


class Tiers:
    """The tiers of a `TieredStore`, fastest first. Any number of threads may use them at once. A failing tier is logged
    and otherwise ignored."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.all = tuple(tiers)
        self._complained_at: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}

    @contextmanager
    def tolerant(self, tier: Tier) -> Iterator[None]:
        """Logs an error of a tier in the block and ends the block: copies are optional."""
        try:
            yield
        except (KvshelfError, OSError, MemoryError) as error:
            now = self._failed_at[tier.name] = time.monotonic()
            if now - self._complained_at.get(tier.name, -_COMPLAINT_S) >= _COMPLAINT_S:
                self._complained_at[tier.name] = now
                log.warning("the %s tier does not work; caches come from the home: %s", tier.name, error)

    def failing(self) -> list[str]:
        """The names of the tiers that failed recently."""
        now = time.monotonic()
        return [name for name, at in self._failed_at.items() if now - at < _FAILING_S]

    def call_all(
        self, act: Callable[[Tier], ResultT], tiers: Iterable[Tier] | None = None
    ) -> list[tuple[Tier, ResultT]]:
        """Call `act` on each of `tiers` (None: on all); returns each tier that works, with the result."""
        results: list[tuple[Tier, ResultT]] = []
        for tier in self.all if tiers is None else tiers:
            with self.tolerant(tier):
                results.append((tier, act(tier)))
        return results

    def first(self, act: Callable[[Tier], ResultT | None], tiers: Iterable[Tier] | None = None) -> ResultT | None:
        """The first result of `act` that is not None, over the tiers that work."""
        for tier in self.all if tiers is None else tiers:
            with self.tolerant(tier):
                if (result := act(tier)) is not None:
                    return result
        return None

    def source(self, manifest: Manifest) -> Source | None:
        source = self.first(lambda tier: tier.source(manifest)) if manifest.has_source else None
        return cast("Source | None", source)  # mypy takes a union in the place of a type variable for an object

    def keep_source(self, manifest: Manifest, source: Source) -> None:
        self.confirm(manifest)
        self.call_all(lambda tier: tier.keep_source(manifest, source))

    def confirm(self, manifest: Manifest) -> None:
        self.call_all(lambda tier: tier.confirm(manifest))

    def drop(self, cache_id: str, tenant: str) -> list[str]:
        """Remove all copies; returns the names of the tiers that had one, the one nearest to the home first."""
        dropped = self.call_all(lambda tier: tier.drop(cache_id, tenant), reversed(self.all))
        return [tier.name for tier, had in dropped if had]

    def problems(self) -> list[str]:
        """As `Store.check`; a tier that does not work is a problem, too."""
        problems: list[str] = []
        for tier in self.all:
            try:
                problems += [f"{tier.name} tier: {problem}" for problem in tier.problems()]
            except (KvshelfError, OSError) as error:
                problems.append(f"{tier.name} tier: {error}")
        return problems

    def scrub(self) -> Iterator[Scrubbed]:
        """Read every copy to its end, drop the damaged copies, and report only those."""
        for tier in self.all:
            with self.tolerant(tier):
                for scrubbed in tier.scrub():
                    if scrubbed.problem is not None:
                        tier.drop(scrubbed.id, scrubbed.tenant)
                        yield scrubbed.model_copy(update={"problem": f"{tier.name} tier: {scrubbed.problem}"})
