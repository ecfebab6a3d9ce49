"""All tiers before a home together. A failing tier is logged and otherwise ignored."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvshelf.errors import KvshelfError
from kvshelf.store.manifest import Manifest
from kvshelf.store.tiers.tier import Tier
from kvshelf.store.types import BlobFile, Scrubbed

log = logging.getLogger("kvshelf.store")

_COMPLAINT_S: Final = 60.0
"""Least time between two log lines about one tier."""

_FAILING_S: Final = 150.0
"""How long `failing` reports a failure: two default sweep intervals and a margin, so a sweep has retried the tier."""


class Copies:
    """The tiers' copies of a cache, fastest first. Used by `TieredStore` alone; any number of threads at once."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
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

    def open_blob(self, manifest: Manifest) -> BlobFile | None:
        for tier in self._tiers:
            with self.tolerant(tier):
                file = tier.open_blob(manifest)
                if file is not None:
                    return file
        return None

    def source(self, manifest: Manifest) -> str | None:
        if manifest.has_source:
            for tier in self._tiers:
                with self.tolerant(tier):
                    text = tier.source(manifest)
                    if text is not None:
                        return text
        return None

    def keep_source(self, manifest: Manifest, text: str) -> None:
        self.confirm(manifest)
        for tier in self._tiers:
            with self.tolerant(tier):
                tier.keep_source(manifest, text)

    def confirm(self, manifest: Manifest) -> None:
        for tier in self._tiers:
            with self.tolerant(tier):
                tier.confirm(manifest)

    def touch(self, cache_id: str, tenant: str) -> None:
        for tier in self._tiers:
            with self.tolerant(tier):
                tier.touch(cache_id, tenant)

    def drop(self, cache_id: str, tenant: str) -> list[str]:
        """Remove all copies; returns the names of the tiers that had one, the one nearest to the home first."""
        had: list[str] = []
        for tier in reversed(self._tiers):
            with self.tolerant(tier):
                if tier.drop(cache_id, tenant):
                    had.append(tier.name)
        return had

    def problems(self) -> list[str]:
        """As `Store.check`; a tier that does not work is one."""
        found: list[str] = []
        for tier in self._tiers:
            try:
                found += [f"{tier.name} tier: {problem}" for problem in tier.problems()]
            except (KvshelfError, OSError) as error:
                found.append(f"{tier.name} tier: {error}")
        return found

    def scrub(self) -> Iterator[Scrubbed]:
        """Read every copy to its end, drop the damaged ones, and report these only."""
        for tier in self._tiers:
            with self.tolerant(tier):
                for found in tier.scrub():
                    if found.problem is not None:
                        tier.drop(found.id, found.tenant)
                        yield found.model_copy(update={"problem": f"{tier.name} tier: {found.problem}"})
