"""Commands that use a store directly, without a service: check, scrub, reseal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvshelf._extras import needs_extra
from kvshelf.cli.output import common
from kvshelf.errors import CacheCorrupt, InvalidRequest, StoreUnavailable
from kvshelf.terminal import progress_bar

if TYPE_CHECKING:
    from kvshelf.store.base import Store
    from kvshelf.store.types import Scrubbed


@contextmanager
def opened(url: str, key_file: Path | None) -> Iterator[Store]:
    with needs_extra("serve", purpose="a store"):
        from kvshelf.store.url import StoreConfig

    with StoreConfig(url, encryption_key_file=None if key_file is None else str(key_file)).open() as store:
        yield store


def look_over(url: str, key_file: Path | None) -> str:
    """Summarizes the contents of a store without reading blobs. Raises `StoreUnavailable` that lists every problem."""
    with opened(url, key_file) as store:
        from kvshelf.store.private import without_secret

        health, problems, usage = store.health(), store.check(), store.usage()
    shown = without_secret(url)
    amiss = list(dict.fromkeys([*health.faults, *health.full, *problems]))
    if amiss:
        raise StoreUnavailable(f"{shown}: {'; '.join(amiss)}")
    advice = "".join(f". {warning}" for warning in health.warnings)
    return f"{shown}: {usage.caches} caches, {common.megabytes(usage.bytes)}, nothing amiss{advice}"


def scrub(url: str, key_file: Path | None) -> str:
    """Reads every cache of a store. Raises `CacheCorrupt` that lists the damaged ones."""
    with opened(url, key_file) as store:
        return _walked(store, store.scrub(), "reading", "read")


def reseal(url: str, key_file: Path | None) -> str:
    """Rewrites every cache that is not sealed with the first key of the key file. Raises like `scrub`."""
    with opened(url, key_file) as store:
        from kvshelf.store.shelf import Shelf

        if not isinstance(store, Shelf):
            raise InvalidRequest("--reseal rewrites the home store: give its URL without the tiers before it")
        return _walked(store, store.reseal(), "sealing", "sealed anew")


def _walked(store: Store, caches: Iterator[Scrubbed], doing: str, done: str) -> str:
    """Walks all caches with a progress bar. A damaged cache does not stop the walk."""
    count = nbytes = 0
    problems: list[str] = []
    with progress_bar() as progress:
        bar = progress.add_task(doing, total=store.usage().caches)
        for cache in caches:
            progress.advance(bar)
            count, nbytes = count + 1, nbytes + cache.bytes
            if cache.problem is not None:
                problems.append(f"{cache.id}: {cache.problem}")
    if problems:
        raise CacheCorrupt(f"{len(problems)} of {count} caches: {'; '.join(problems)}")
    return f"{count} caches, {common.megabytes(nbytes)}, {done}"
