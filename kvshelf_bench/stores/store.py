"""The cost of putting a cache on a shelf and getting it back, compared with the same bytes without kvshelf."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept
from kvshelf.errors import CacheNotFound
from kvshelf.kernels.rates import Cost, cost
from kvshelf.store.base import Store
from kvshelf.store.shelf import Shelf
from kvshelf_bench.measure import Spread, interleaved, ratios
from kvshelf_bench.stores.homes import Bare, Home

PUT, GET = "put", "get"
FIRST_LAYER, OPEN_BLOB = "first layer", "open_blob"
OURS: Final = (PUT, GET, FIRST_LAYER, OPEN_BLOB)
"""The ways through kvshelf."""

KV_HEADS: Final = 8
HEAD_DIM: Final = 128
"""Of a layer of Llama-3.1-8B."""

_REMOVED: Final = 0.875
_ENTRY_BYTES: Final = 2 * HEAD_DIM * 2  # key and value in bfloat16

STEPS: Final[Mapping[str, str]] = {
    "created": "begin",
    "written": "write",
    "synced": "sync",
    "verified": "read back",
    "published": "publish",
}
"""The steps that a home reports during a write, and the work between the previous step and this one. "begin" lays out
and digests the blob, and registers the write."""


@dataclass(frozen=True)
class WayTime:
    """One way to write or read the bytes. wall_s, cpu_s: seconds of a call, the latter of this process alone.

    ours, ours_cpu: how many times as fast `put` or `get` is within a round, by either clock; 1 for `put` and `get`.
    """

    wall_s: Spread
    cpu_s: Spread
    ours: Spread
    ours_cpu: Spread


@dataclass(frozen=True)
class Throughput:
    """One size on one home. steps_s: seconds by the clock of each step of `put`. limit, peer: names among `ways`."""

    home: str
    nbytes: int
    layers: int
    ways: dict[str, WayTime]
    steps_s: dict[str, Spread]
    limit: str
    peer: str | None


def throughput(home: Home, megabytes: float, layers: int, rounds: int) -> Throughput:
    """Put and get a cache of a size (millions of bytes) `rounds` times, interleaved with the ways without kvshelf."""
    cache = random_cache(megabytes, layers)
    packed = cache.pack()
    steps = PutSteps()
    index, blobs = home.open()
    with Shelf(index, blobs, on_step=steps) as store:
        cache_id = store.put(cache).id
        bare = home.bare(packed)
        ways: dict[str, Callable[[], Cost]] = {
            PUT: partial(timed_put, store, cache, steps),
            **{name: partial(_write, bare, run) for name, run in bare.writes.items()},
            GET: partial(cost, lambda: store.get(cache_id)),
            FIRST_LAYER: partial(_first_layer, store, cache_id),
            OPEN_BLOB: partial(cost, lambda: store.open_blob(cache_id).close()),
            **{name: partial(cost, run) for name, run in bare.reads.items()},
        }
        costs = interleaved(ways, rounds)
        store.delete(cache_id)
    ours = {name: PUT if name in (PUT, *bare.writes) else GET for name in costs}
    times = {name: _way(costs[name], costs[ours[name]]) for name in costs}
    return Throughput(home.name, packed.nbytes, layers, times, steps.spreads(rounds), bare.limit, bare.peer)


def random_cache(megabytes: float, layers: int, *, seed: int = 0) -> CompressedCache:
    """A cache of about `megabytes` million bytes: bfloat16, in each head an eighth of the document's entries."""
    kept = max(1, round(megabytes * 1e6 / (layers * KV_HEADS * _ENTRY_BYTES)))
    tokens = round(kept / (1 - _REMOVED))
    generator = torch.Generator().manual_seed(seed)
    model = ModelIdentity("random", f"{seed:040x}", "bfloat16", "{}", "{}", "", "")
    identity = Identity(
        model=model,
        document=f"{seed:040x}",
        num_tokens=tokens,
        layout="plain",
        boundary="text",
        prefill="whole",
        policy="random",
        policy_version=1,
        policy_params={"seed": seed},
        budget_tokens=kept,
        compression_ratio=_REMOVED,
    )
    return CompressedCache(tuple(_layer(kept, tokens, generator) for _ in range(layers)), tokens, tokens, identity)


def _layer(kept: int, tokens: int, generator: torch.Generator) -> Kept:
    def numbers() -> torch.Tensor:  # random bits: a normal distribution takes several times as long to draw
        bits = torch.randint(-(1 << 15), 1 << 15, (KV_HEADS * kept, HEAD_DIM), dtype=torch.int16, generator=generator)
        return bits.view(torch.bfloat16)

    positions = [torch.randperm(tokens, generator=generator)[:kept].sort().values for _ in range(KV_HEADS)]
    return Kept(
        keys=numbers(),
        values=numbers(),
        entries_at=torch.cat(positions).to(torch.int32),
        offsets=offsets_of([kept] * KV_HEADS),
    )


class PutSteps:
    def __init__(self) -> None:
        self._last = 0.0
        self.seconds: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, step: str) -> None:
        if step in STEPS:
            now = time.perf_counter()
            self.seconds.setdefault(STEPS[step], []).append(now - self._last)
            self._last = now

    def spreads(self, rounds: int) -> dict[str, Spread]:
        """Of the last `rounds` puts."""
        return {name: Spread.of(seconds[-rounds:]) for name, seconds in self.seconds.items()}


def timed_put(store: Store, cache: CompressedCache, steps: PutSteps) -> Cost:
    with suppress(CacheNotFound):
        store.delete(store.cache_id(cache.identity))
    steps.begin()
    return cost(lambda: store.put(cache))


def _write(bare: Bare, run: Callable[[], object]) -> Cost:
    bare.remove()
    return cost(run)


def _first_layer(store: Store, cache_id: str) -> Cost:
    """As for a question: one thread reads, another waits for the first layer. The other layers are read untimed."""
    with ThreadPoolExecutor(1) as reader:

        def wait() -> None:
            arriving = store.open_cache(cache_id)
            reader.submit(arriving.read)
            arriving.layers[0].result()

        return cost(wait)


def _way(costs: Sequence[Cost], ours: Sequence[Cost]) -> WayTime:
    wall, cpu = [spent.wall_s for spent in costs], [spent.seconds for spent in costs]
    our_wall, our_cpu = [spent.wall_s for spent in ours], [spent.seconds for spent in ours]
    return WayTime(Spread.of(wall), Spread.of(cpu), ratios(wall, our_wall), ratios(cpu, our_cpu))
