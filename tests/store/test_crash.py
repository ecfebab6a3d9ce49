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
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import CacheExpired, CacheNotFound, StoreUnavailable
from kvshelf.store.disk import DiskStore
from tests.amounts import few
from tests.store.caches import family, make_cache, require_equal
from tests.store.places import Clock, Place, cut, remove_late_arrivals

STEPS = ("created", "written", "synced", "verified", "published", "replaced")


class Log:
    """A file of the writing child: one short line per event, appended whole or not at all by the kernel."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"")

    def say(self, event: str) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{event}\n".encode())

    def await_first(self) -> None:
        """Until something was said."""
        deadline = time.monotonic() + 60
        while not self._path.stat().st_size:
            assert time.monotonic() < deadline, "the child has not begun"
            time.sleep(0.001)

    def lines(self) -> list[list[str]]:
        """All that was said; the child must be dead."""
        return [line.split() for line in self._path.read_text().splitlines()]


class LateClock(Clock):
    """The wall clock, set ahead as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def __call__(self) -> float:
        return time.time() + self.time


def require_sound(
    place: Place,
    caches: dict[str, CompressedCache],
    stored: set[str],
    gone: set[str],
    *,
    kept: int | None = 0,
) -> set[str]:
    """0 torn, 0 lost: what is listed can be read, what was acknowledged is listed. Returns the ids on the shelf.

    kept: how many blobs are there as bases alone; None: any number.
    """
    clock = LateClock()
    place.let_leases_run_out(clock)
    with place.open(now=clock) as store:
        visible = {manifest.id for manifest in store.list(limit=1000).data}
        for cache_id in visible:
            require_equal(caches[cache_id], store.get(cache_id))
        assert stored <= visible
        assert not gone & visible
        store.sweep()
        assert store.check() == []
        if place.kind == "objects":
            remove_late_arrivals(store)
        needed = {name for entry in store.index.stored() for name, _ in entry.needed()}
        assert place.names() == needed
        assert kept is None or len(needed) == len(visible) + kept
    return visible


def kill_at(step: str) -> Callable[[str], None]:
    def on_step(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step


@pytest.mark.parametrize(("step", "before"), few(9, product(STEPS, ["nothing", "expired", "corrupt"])))
def test_killed_at_a_named_point(place: Place, step: str, before: str) -> None:
    other, cache = make_cache(1), make_cache(2)
    with place.open() as store:
        kept = store.put(other)
        cache_id = store.cache_id(cache.identity)
        if before == "expired":
            store.put(cache, ttl_s=0.001)
            time.sleep(0.002)
        elif before == "corrupt":
            place.change(store.put(cache), cut)

    def child() -> None:
        with place.open(on_step=kill_at(step)) as store:
            store.put(cache)

    assert place.start(child).wait() == -signal.SIGKILL
    published = STEPS.index(step) >= STEPS.index("published")
    with place.open() as store:
        if before == "expired" and not published:
            with pytest.raises(CacheExpired):
                store.get(cache_id)
        elif before == "nothing" and not published:
            with pytest.raises(CacheNotFound):
                store.get(cache_id)
        if before == "corrupt" and not published:
            store.delete(cache_id)
    caches = {kept.id: other, cache_id: cache}
    assert require_sound(place, caches, {kept.id}, set()) == ({kept.id, cache_id} if published else {kept.id})
    with place.open() as store:
        store.put(cache)
        require_equal(cache, store.get(cache_id))


@pytest.mark.slow
def test_killed_at_random_moments(place: Place, tmp_path: Path, soak: bool) -> None:
    """The child puts, replaces and deletes caches as fast as it can; each run goes on with the shelf the last one left.

    A kill between two calls would prove little, so the others are counted: calls take nearly all of the child's time,
    and fewer than half of the kills inside a call has a chance below 1e-4.
    """
    rng = random.Random(20261120)
    rounds = 200 if soak else 20
    made = [make_cache(seed, num_tokens=512, lengths=((256, 200), (31, 512)), dims=(64, 64)) for seed in range(12)]
    with place.open() as store:
        caches = {store.cache_id(cache.identity): cache for cache in made}
    stored: set[str] = set()
    gone: set[str] = set()
    inside = 0
    for _ in range(rounds):
        log, order = Log(tmp_path / "log"), rng.choices(list(caches), k=1000)

        def child(log: Log = log, order: list[str] = order) -> None:
            with place.open() as store:
                for cache_id in order:
                    log.say(f"begin {cache_id}")
                    try:
                        store.delete(cache_id)
                        log.say(f"deleted {cache_id}")
                    except CacheNotFound:
                        store.put(caches[cache_id])
                        log.say(f"put {cache_id}")

        writer = place.start(child)
        log.await_first()
        time.sleep(rng.uniform(0, 0.25))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        lines = log.lines()
        for event, cache_id in lines:
            stored.discard(cache_id)  # while a call is under way, both outcomes are right
            gone.discard(cache_id)
            if event != "begin":
                (stored if event == "put" else gone).add(cache_id)
        inside += lines[-1][0] == "begin"
        visible = require_sound(place, caches, stored, gone)
        stored, gone = visible, set(caches) - visible
    print(f"{rounds} kills on {place.kind}, {inside} of them inside a call: 0 torn, 0 lost")
    assert inside > rounds / 2


# Caches that extend others


@pytest.mark.parametrize("step", few(3, STEPS))
def test_killed_while_a_child_is_put(place: Place, step: str) -> None:
    """The parent has expired in the meantime, so its blob is kept if its child is there, and gone if it is not."""
    root, child = family(2)
    with place.open() as store:
        root_id, child_id = store.put(root).id, store.cache_id(child.identity)

    def work() -> None:
        with place.open(on_step=kill_at(step)) as store:
            store.put(child, parent_id=root_id)

    assert place.start(work).wait() == -signal.SIGKILL
    published = STEPS.index(step) >= STEPS.index("published")
    caches = {root_id: root, child_id: child}
    assert require_sound(place, caches, {root_id}, set()) == ({root_id, child_id} if published else {root_id})
    with place.open() as store:
        store.update(root_id, ttl_s=0.01)
        time.sleep(0.02)
        store.sweep()
    assert require_sound(place, caches, set(), {root_id}, kept=int(published)) == ({child_id} if published else set())


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STEPS[:4], "swapped"])
def test_killed_while_a_chain_is_compacted(place: Place, step: str) -> None:
    """The blob of the last but one is there as a base alone, and goes with the compaction."""
    caches = family(9, entries=16)
    ids: list[str] = []
    with place.open() as store:
        for cache in caches:
            ids.append(store.put(cache, parent_id=ids[-1] if ids else None).id)
        store.update(ids[7], ttl_s=0.01)
        time.sleep(0.02)
        store.sweep()
    stored = dict(zip(ids, caches, strict=True))
    left = set(ids) - {ids[7]}

    def work() -> None:
        with place.open(on_step=kill_at(step)) as store:
            store.compact()

    assert place.start(work).wait() == -signal.SIGKILL
    compacted = step == "swapped"
    assert require_sound(place, stored, left, {ids[7]}, kept=int(not compacted)) == left
    with place.open() as store:
        assert store.compact() == int(not compacted)
    assert require_sound(place, stored, left, {ids[7]}) == left


@pytest.mark.parametrize("deleted", [1, 2])
def test_killed_in_the_middle_of_a_cascade(place: Place, deleted: int) -> None:
    caches = family(3)
    with place.open() as store:
        ids: list[str] = []
        for cache in caches:
            ids.append(store.put(cache, parent_id=ids[-1] if ids else None).id)

    def work() -> None:
        with place.open() as store:
            bury, left = store.index.bury, iter(range(deleted))

            def die(*args: Any) -> bool:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return bury(*args)

            store.index.bury = die  # type: ignore[method-assign]
            store.delete(ids[0], cascade=True)

    assert place.start(work).wait() == -signal.SIGKILL
    left = set(ids[: 3 - deleted])
    assert require_sound(place, dict(zip(ids, caches, strict=True)), left, set(ids) - left) == left
    with place.open() as store:
        store.delete(ids[0], cascade=True)
        assert place.names() == set()


@pytest.mark.slow
def test_killed_at_random_moments_while_caches_grow(place: Place, tmp_path: Path, soak: bool) -> None:
    """As `test_killed_at_random_moments`; the child extends caches, compacts chains, and deletes families."""
    rng = random.Random(20261126)
    rounds = 200 if soak else 6
    made = {seed: family(10, seed) for seed in range(3)}
    with place.open() as store:
        caches = {store.cache_id(cache.identity): cache for line in made.values() for cache in line}
        lines = [[store.cache_id(cache.identity) for cache in line] for line in made.values()]
    stored: set[str] = set()
    gone: set[str] = set()
    inside = 0
    for _ in range(rounds):
        log, order = Log(tmp_path / "log"), [(rng.randrange(len(lines)), rng.random()) for _ in range(1000)]

        def child(log: Log = log, order: list[tuple[int, float]] = order) -> None:
            with place.open() as store:
                for number, chance in order:
                    line = lines[number]
                    if chance < 0.1:
                        log.say("begin compact")
                        store.compact()
                        log.say("compacted all")
                    elif chance < 0.25:
                        first = line[int(chance * 1000) % len(line)]
                        log.say(f"begin {' '.join(line[line.index(first) :])}")
                        with suppress(CacheNotFound):
                            store.delete(first, cascade=True)
                        log.say(f"deleted {' '.join(line[line.index(first) :])}")
                    else:
                        there = {manifest.id for manifest in store.list(limit=1000).data}
                        depth = next((n for n, cache_id in enumerate(line) if cache_id not in there), None)
                        if depth is not None:
                            log.say(f"begin {line[depth]}")
                            parent_id = line[depth - 1] if depth else None
                            store.put(caches[line[depth]], parent_id=parent_id)
                            log.say(f"put {line[depth]}")

        writer = place.start(child)
        log.await_first()
        time.sleep(rng.uniform(0, 0.5))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        lines_said = log.lines()
        for event, *ids in lines_said:
            stored -= set(ids)  # while a call is under way, both outcomes are right
            gone -= set(ids)
            if event in ("put", "deleted"):
                (stored if event == "put" else gone).update(ids)
        inside += lines_said[-1][0] == "begin"
        visible = require_sound(place, caches, stored, gone, kept=None)  # of a chain that is compacted in part
        stored, gone = visible, set(caches) - visible
    print(f"{rounds} kills on {place.kind}, {inside} of them inside a call: 0 torn, 0 lost, 0 orphans")
    assert inside > rounds / 2


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["nothing", "a sweep", "another writer"])
def test_a_writer_that_was_stopped_past_its_lease_cannot_publish(place: Place, meanwhile: str) -> None:
    """SIGSTOP when all is written and verified; SIGCONT when the lease has run out."""
    cache = make_cache()
    lease_s = 2.0

    def stop(name: str) -> None:
        if name == "verified":
            os.kill(os.getpid(), signal.SIGSTOP)

    def child() -> None:
        with place.open(write_lease_s=lease_s, on_step=stop) as store:
            try:
                store.put(cache, name="the stopped one")
            except StoreUnavailable as error:
                os._exit(42 if "put it again" in error.message else 43)

    writer = place.start(child)
    writer.wait_until_stopped()
    time.sleep(lease_s + 0.2)
    with place.open(write_lease_s=lease_s) as store:
        if meanwhile == "a sweep":
            assert store.sweep().orphans == 1
        elif meanwhile == "another writer":
            store.put(cache, name="another")
        os.kill(writer.pid, signal.SIGCONT)
        assert writer.wait() == 42
        assert [manifest.name for manifest in store.list().data] == (
            ["another"] if meanwhile == "another writer" else []
        )
        store.sweep()
        assert len(place.names()) == len(store.list().data)
        assert store.check() == []
        require_equal(cache, store.get(store.put(cache).id))


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
        with store.index.database.read() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2, "a commit waits for the disk"
            assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert events == ["created", "written", "fsync kvb", "fsync blobs", "synced", "verified", "published", "replaced"]
