"""kill -9 of a process that writes: every cache is there whole or not at all, and none that was acknowledged is lost.

This shows what survives the death of a process. What survives a power cut rests on the order of writes and fsyncs,
which `test_a_cache_is_durable_before_it_is_visible` pins down.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshelf.errors import CacheExpired, CacheNotFound
from kvshelf.store.artifact import CompressedCache
from kvshelf.store.disk import DiskStore
from kvshelf.store.blobs import WRITE_LEASE_S
from tests.store.caches import make_cache, require_equal
from tests.store.processes import start_child

STEPS = ("created", "written", "synced", "verified", "published", "replaced")


class Log:
    """A pipe from the writing child: one short line per event, written whole or not at all by the kernel."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def say(self, event: str) -> None:
        os.write(self._write, f"{event}\n".encode())

    def lines(self) -> list[list[str]]:
        """All that was said; the child must be dead."""
        os.close(self._write)
        with os.fdopen(self._read) as file:
            return [line.split() for line in file.read().splitlines()]


def require_sound(home: Path, caches: dict[str, CompressedCache], stored: set[str], gone: set[str]) -> set[str]:
    """0 torn, 0 lost: what is listed can be read, what was acknowledged is listed. Returns the ids on the shelf."""
    with DiskStore.open(home, now=lambda: time.time() + WRITE_LEASE_S + 1) as store:
        visible = {manifest.id for manifest in store.list(limit=1000).data}
        for cache_id in visible:
            require_equal(caches[cache_id], store.get(cache_id))
        assert stored <= visible
        assert not gone & visible
        store.sweep()
        assert store.check() == []
        assert len(list((home / "blobs").iterdir())) == len(visible)
    return visible


def kill_at(step: str) -> Callable[[str], None]:
    def on_step(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step


@pytest.mark.parametrize("before", ["nothing", "expired", "corrupt"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_named_point(home: Path, step: str, before: str) -> None:
    other, cache = make_cache(1), make_cache(2)
    with DiskStore.open(home) as store:
        kept = store.put(other)
        cache_id = store.cache_id(cache.identity)
        if before == "expired":
            store.put(cache, ttl_s=0.001)
            time.sleep(0.002)
        elif before == "corrupt":
            store.put(cache)
            os.truncate(next((home / "blobs").glob(f"{cache_id.removeprefix('kvs_')}*")), 100)

    def child() -> None:
        with DiskStore.open(home, on_step=kill_at(step)) as store:
            store.put(cache)

    assert start_child(child).wait() == -signal.SIGKILL
    published = STEPS.index(step) >= STEPS.index("published")
    with DiskStore.open(home) as store:
        if before == "expired" and not published:
            with pytest.raises(CacheExpired):
                store.get(cache_id)
        elif before == "nothing" and not published:
            with pytest.raises(CacheNotFound):
                store.get(cache_id)
        if before == "corrupt" and not published:
            store.delete(cache_id)
    caches = {kept.id: other, cache_id: cache}
    assert require_sound(home, caches, {kept.id}, set()) == ({kept.id, cache_id} if published else {kept.id})
    with DiskStore.open(home) as store:
        store.put(cache)
        require_equal(cache, store.get(cache_id))


def test_killed_at_random_moments(home: Path, soak: bool) -> None:
    """The child puts, replaces and deletes caches as fast as it can; each run goes on with the shelf the last one left.

    A kill between two calls would prove little, so the others are counted: calls take nearly all of the child's time,
    and fewer than half of the kills inside a call has a chance below 1e-4.
    """
    rng = random.Random(20261120)
    rounds = 200 if soak else 20
    made = [make_cache(seed, num_tokens=512, lengths=((256, 200), (31, 512)), dims=(64, 64)) for seed in range(12)]
    with DiskStore.open(home) as store:
        caches = {store.cache_id(cache.identity): cache for cache in made}
    stored: set[str] = set()
    gone: set[str] = set()
    inside = 0
    for _ in range(rounds):
        log, order = Log(), rng.choices(list(caches), k=1000)

        def child(log: Log = log, order: list[str] = order) -> None:
            with DiskStore.open(home) as store:
                for cache_id in order:
                    log.say(f"begin {cache_id}")
                    try:
                        store.delete(cache_id)
                        log.say(f"deleted {cache_id}")
                    except CacheNotFound:
                        store.put(caches[cache_id])
                        log.say(f"put {cache_id}")

        writer = start_child(child)
        time.sleep(rng.uniform(0.01, 0.25))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        lines = log.lines()
        for event, cache_id in lines:
            stored.discard(cache_id)  # while a call is under way, both outcomes are right
            gone.discard(cache_id)
            if event != "begin":
                (stored if event == "put" else gone).add(cache_id)
        inside += bool(lines) and lines[-1][0] == "begin"
        visible = require_sound(home, caches, stored, gone)
        stored, gone = visible, set(caches) - visible
    print(f"{rounds} kills, {inside} of them inside a call: 0 torn, 0 lost")
    assert inside > rounds / 2


def test_a_cache_is_durable_before_it_is_visible(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, then folder, then index: the order that a power cut needs."""
    events: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        events.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}')).rpartition('.')[2]}")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    with DiskStore.open(home, on_step=events.append) as store:
        store.put(make_cache())
        with store._index._database.read() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2, "a commit waits for the disk"
            assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert events == ["created", "written", "fsync kvb", "fsync blobs", "synced", "verified", "published", "replaced"]
