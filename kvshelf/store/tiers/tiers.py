"""Tiers in front of the home that has all caches. A failing tier is logged and otherwise ignored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar, cast

from kvshelf.errors import KvshelfError
from kvshelf.store.manifest import Manifest
from kvshelf.store.tiers.tier import Tier
from kvshelf.store.types import Scrubbed, Source

ResultT = TypeVar("ResultT")

log = logging.getLogger("kvshelf.store")

_COMPLAINT_S: Final = 60.0
"""Least time between two log lines about one tier."""

_FAILING_S: Final = 150.0
"""How long `failing` reports a failure: two default sweep intervals and a margin, so a sweep has retried the tier."""


class Tiers:
    """The tiers of a `TieredStore`, fastest first. Any number of threads may use them at once."""

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

    def each(self, act: Callable[[Tier], ResultT], tiers: Iterable[Tier] | None = None) -> list[tuple[Tier, ResultT]]:
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
        self.each(lambda tier: tier.keep_source(manifest, source))

    def confirm(self, manifest: Manifest) -> None:
        self.each(lambda tier: tier.confirm(manifest))

    def drop(self, cache_id: str, tenant: str) -> list[str]:
        """Remove all copies; returns the names of the tiers that had one, the one nearest to the home first."""
        dropped = self.each(lambda tier: tier.drop(cache_id, tenant), reversed(self.all))
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
