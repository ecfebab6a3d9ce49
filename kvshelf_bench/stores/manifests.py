"""The time to open, list and maintain a shelf with very many caches."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from kvshelf.api import Timings
from kvshelf.artifact.identity import digest
from kvshelf.kernels.rates import cost
from kvshelf.store.base import Store
from kvshelf.store.blobs import Blobs, new_name
from kvshelf.store.index import Index, Quota, Writing
from kvshelf.store.manifest import Manifest, describe
from kvshelf.store.url import open_store
from kvshelf_bench.measure import Spread, status_bytes
from kvshelf_bench.stores.homes import Home
from kvshelf_bench.stores.store import random_cache

OF_DOCUMENT: Final = 10
"""Caches of one document."""

_TENANT: Final = "default"
_LAYERS: Final = 32
_TEAMS: Final = 1000  # values of the label that is asked for


@dataclass(frozen=True)
class Manifests:
    """A shelf of `count` caches. manifest_bytes: the JSON of one. publish_s: seconds for each, begun and published
    through the index, with a blob of a few bytes. calls_s: seconds by the clock of each call, in a process that has
    opened the shelf for it. process_bytes: the most by which that process has grown.
    """

    home: str
    count: int
    manifest_bytes: int
    publish_s: float
    calls_s: dict[str, Spread]
    process_bytes: int


def manifests(home: Home, count: int, rounds: int, progress: Callable[[], None] = lambda: None) -> Manifests:
    """Publish `count` caches, calling `progress` for each, then measure in a fresh process."""
    index, blobs = home.open()
    with closing(index), closing(blobs):
        template, started = _template(index.key), time.perf_counter()
        for number in range(count):
            _publish(index, blobs, _numbered(template, number))
            progress()
        publish_s = (time.perf_counter() - started) / count
    middle = _numbered(template, count // 2)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        calls_s, grown = alone.submit(_ask, home.url, middle, rounds).result()
    return Manifests(home.name, count, len(template.model_dump_json()), publish_s, calls_s, grown)


def _template(key: bytes) -> Manifest:
    """A manifest of a model of 32 layers."""
    cache = random_cache(0.0, _LAYERS)
    return describe(
        cache,
        cache.pack(),
        tenant=_TENANT,
        timings=Timings(prefill_s=1.0, compress_s=0.1, store_s=0.1),
        id=cache.identity.cache_id(key=key, tenant=_TENANT, codec="none", format_major=1),
        document_id=cache.identity.document_id(key=key, tenant=_TENANT),
        created_at=time.time(),
    )


def _numbered(template: Manifest, number: int) -> Manifest:
    changes = {
        "id": "kvs_" + digest("bench.cache", str(number)),
        "document_id": "doc_" + digest("bench.document", str(number // OF_DOCUMENT)),
        "labels": {"team": f"team-{number % _TEAMS}", "stage": "production"},
    }
    return template.model_copy(update=changes)


def _publish(index: Index, blobs: Blobs, manifest: Manifest) -> None:
    content = memoryview(manifest.id.encode())  # not a blob, as nothing reads it here
    writing = Writing(new_name(manifest.id), manifest.id, manifest.tenant, len(content))
    index.begin(writing, Quota())
    blobs.write(writing.name, [content], len(content), on_step=lambda _: None)
    index.publish(writing, manifest, over=None, cost_s=1.0, now=manifest.created_at)


def _ask(url: str, middle: Manifest, rounds: int) -> tuple[dict[str, Spread], int]:
    """Seconds of each call, and the bytes by which this process grew. Runs in a process of its own."""
    open_store(url).close()  # imports happen here
    before = status_bytes("VmHWM")
    calls_s = {"open, first stat": Spread.of([_opened_s(url, middle.id) for _ in range(rounds)])}
    with open_store(url) as store:
        for name, call in _calls(store, middle).items():
            call()  # the first call does not count
            calls_s[name] = Spread.of([cost(call).wall_s for _ in range(rounds)])
    return calls_s, status_bytes("VmHWM") - before


def _opened_s(url: str, cache_id: str) -> float:
    started = time.perf_counter()
    with open_store(url) as store:
        store.stat(cache_id)
        return time.perf_counter() - started


def _calls(store: Store, middle: Manifest) -> dict[str, Callable[[], object]]:
    return {
        "list, first page": store.list,
        "list, page in the middle": lambda: store.list(after=middle.id),
        "list, page of 1,000": lambda: store.list(limit=1000),
        "list by label": lambda: store.list(labels={"team": middle.labels["team"]}),
        "list by document": lambda: store.list(document_id=middle.document_id),
        "usage": store.usage,
        "sweep": store.sweep,
        "check": store.check,
    }
