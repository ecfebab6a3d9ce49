"""Any order of calls, beside a model of what the shelf must say: a dictionary and a clock. The same on every home."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvshelf.api import Timings
from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, KvshelfError, StorageFull
from kvshelf.store.index import Quota
from kvshelf.store.rules import Rules
from tests.store.caches import make_cache, require_equal
from tests.store.objects.servers import S3Server
from tests.store.places import Clock, DiskPlace, ObjectsPlace, Place, RedisPlace, cut, flip, gone
from tests.store.redis.servers import ValkeyServer
from tests.store.zygote import Zygote

CACHES = [make_cache(seed, num_tokens=9, lengths=((4, 4),), dims=(2, 3)) for seed in range(4)]
COSTS = {"me": (1.0, 1.37, 1.93, 2.71), "you": (1.11, 1.51, 2.17, 3.07)}  # s; no two priorities ever meet
SIZE = len(CACHES[0].to_bytes())
BUDGET = 5 * SIZE
RULES = Rules(quota=Quota(budget_bytes=BUDGET))
STEPS = ("created", "written", "synced", "verified", "published", "replaced")

which = st.integers(0, len(CACHES) - 1)
tenants = st.sampled_from(["me", "you"])
ttls = st.none() | st.integers(1, 20)


@dataclass
class Expected:
    """What the model knows of one cache: `order` is its place in listings."""

    order: int
    state: str = "ready"  # ready | corrupt | deleted | evicted
    expires_at: float | None = None
    labels: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    uses: int = 0
    priority: float = 0.0


class ShelfMachine(RuleBasedStateMachine):
    """`make_place` makes an empty place in a folder."""

    make_place: ClassVar[Callable[[Path], Place]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.place = type(self).make_place(Path(self.folder.name))
        self.clock = Clock()
        self.model: dict[tuple[int, str], Expected] = {}
        self.puts = 0
        self.age = 0.0  # the eviction clock
        self.store = self.open()

    def open(self, **options: object):  # type: ignore[no-untyped-def]
        return self.place.open(now=self.clock, rules=RULES, **options)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    # The model

    def id_of(self, seed: int, tenant: str) -> str:
        return self.store.cache_id(CACHES[seed].identity, tenant=tenant)

    def is_expired(self, expected: Expected) -> bool:
        return expected.expires_at is not None and expected.expires_at <= self.clock.time

    def fate(self, seed: int, tenant: str) -> type[KvshelfError] | None:
        """The error that reading this cache must raise, None when it must succeed."""
        expected = self.model.get((seed, tenant))
        if expected is None or expected.state == "deleted":
            return CacheNotFound
        if expected.state == "evicted" or self.is_expired(expected):
            return CacheExpired
        return CacheCorrupt if expected.state == "corrupt" else None

    def priority(self, seed: int, tenant: str, uses: int) -> float:
        return self.age + uses * COSTS[tenant][seed] / (SIZE / 1e6)

    def make_room(self, seed: int, tenant: str) -> bool:
        """Let the model expire and evict as a put of this cache must; False when there is no room even then."""
        others = {key: entry for key, entry in self.model.items() if key != (seed, tenant) and entry.state == "ready"}
        if len(others) < BUDGET // SIZE:
            return True
        gone = [key for key, entry in others.items() if self.is_expired(entry)]
        for key in gone:
            self.model[key].state = "expired"
        victims = sorted(
            (
                key
                for key, entry in self.model.items()
                if entry.state == "ready" and not self.is_expired(entry) and not entry.pinned
            ),
            key=lambda key: self.model[key].priority,
        )
        if not victims:
            return bool(gone)
        victim = self.model[victims[0]]
        victim.state = "evicted"
        self.age = max(self.age, victim.priority)
        return True

    def stored(self, seed: int, tenant: str, ttl_s: int | None, label: str, pinned: bool) -> None:
        self.puts += 1
        expires_at = None if ttl_s is None else self.clock.time + ttl_s
        priority = self.priority(seed, tenant, 1)
        self.model[seed, tenant] = Expected(self.puts, "ready", expires_at, {"l": label}, pinned, 0, priority)

    # The rules

    @rule(
        seed=which,
        tenant=tenants,
        ttl_s=ttls,
        label=st.sampled_from("ab"),
        pinned=st.sampled_from([False, False, True]),
    )
    def put(self, seed: int, tenant: str, ttl_s: int | None, label: str, pinned: bool) -> None:
        fate = self.fate(seed, tenant)
        room = fate is None or self.make_room(seed, tenant)

        def put() -> None:
            manifest = self.store.put(
                CACHES[seed],
                tenant=tenant,
                ttl_s=ttl_s,
                labels={"l": label},
                pinned=pinned,
                timings=Timings(prefill_s=COSTS[tenant][seed]),
            )
            if fate is not None:
                self.stored(seed, tenant, ttl_s, label, pinned)
            expected = self.model[seed, tenant]
            assert (manifest.expires_at, manifest.labels) == (expected.expires_at, expected.labels)

        if room:
            put()
        else:
            with pytest.raises(StorageFull):
                put()

    @rule(seed=which, tenant=tenants, step=st.sampled_from(STEPS))
    def crash(self, seed: int, tenant: str, step: str) -> None:
        """A writer is killed with kill -9 at a named point: the cache is there whole or not at all."""
        if self.fate(seed, tenant) is None:
            return
        room = self.make_room(seed, tenant)

        def die(name: str) -> None:
            if name == step:
                os.kill(os.getpid(), signal.SIGKILL)

        place, clock, rules = self.place, self.clock, RULES

        def work() -> None:
            with place.open(now=clock, rules=rules, on_step=die) as store:
                store.put(
                    CACHES[seed], tenant=tenant, labels={"l": "a"}, timings=Timings(prefill_s=COSTS[tenant][seed])
                )

        status = self.place.start(work).wait()
        assert (status == -signal.SIGKILL) == room, "without room it ends with StorageFull before the first step"
        if room and STEPS.index(step) >= STEPS.index("published"):
            self.stored(seed, tenant, None, "a", False)
        self.place.let_leases_run_out(self.clock)
        self.store.sweep()
        self.note_swept()

    @rule(seed=which, tenant=tenants)
    def get(self, seed: int, tenant: str) -> None:
        fate = self.fate(seed, tenant)
        if fate is None:
            require_equal(CACHES[seed], self.store.get(self.id_of(seed, tenant), tenant=tenant))
        else:
            with pytest.raises(fate):
                self.store.get(self.id_of(seed, tenant), tenant=tenant)

    @rule(seed=which, tenant=tenants)
    def touch(self, seed: int, tenant: str) -> None:
        self.store.touch(self.id_of(seed, tenant), tenant=tenant)
        expected = self.model.get((seed, tenant))
        if expected is not None and expected.state == "ready":
            expected.uses += 1
            expected.priority = self.priority(seed, tenant, expected.uses + 1)

    @rule(seed=which, tenant=tenants, label=st.sampled_from("ab"), ttl_s=ttls, pinned=st.booleans())
    def update(self, seed: int, tenant: str, label: str, ttl_s: int | None, pinned: bool) -> None:
        fate = self.fate(seed, tenant)
        cache_id = self.id_of(seed, tenant)
        if fate is not None:
            with pytest.raises(fate):
                self.store.update(cache_id, tenant=tenant, labels={"l": label})
            return
        self.store.update(cache_id, tenant=tenant, labels={"l": label}, ttl_s=ttl_s, pinned=pinned)
        expected = self.model[seed, tenant]
        expected.labels, expected.pinned = {"l": label}, pinned
        expected.expires_at = None if ttl_s is None else self.clock.time + ttl_s

    @rule(seed=which, tenant=tenants)
    def delete(self, seed: int, tenant: str) -> None:
        if self.fate(seed, tenant) is CacheNotFound:
            with pytest.raises(CacheNotFound):
                self.store.delete(self.id_of(seed, tenant), tenant=tenant)
            return
        self.store.delete(self.id_of(seed, tenant), tenant=tenant)
        self.model[seed, tenant].state = "deleted"

    @rule(seed=which, tenant=tenants, how=st.sampled_from([flip, cut, gone]))
    def damage(self, seed: int, tenant: str, how: Callable[[bytearray], bytearray | None]) -> None:
        """Bytes are damaged and found out by the next reader."""
        if self.fate(seed, tenant) is not None:
            return
        manifest = self.store.stat(self.id_of(seed, tenant), tenant=tenant)
        self.place.change(manifest, how)
        with pytest.raises(CacheCorrupt):
            self.store.get(manifest.id, tenant=tenant)
        self.model[seed, tenant].state = "corrupt"

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.time += seconds

    @rule()
    def sweep(self) -> None:
        self.store.sweep()
        self.note_swept()

    def note_swept(self) -> None:
        for expected in self.model.values():
            if expected.state in ("ready", "corrupt") and self.is_expired(expected):
                expected.state = "expired"

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()

    @invariant()
    def the_listing_is_right(self) -> None:
        for tenant in ("me", "you"):
            live = sorted(
                (expected.order, self.id_of(seed, owner), expected.labels)
                for (seed, owner), expected in self.model.items()
                if owner == tenant and self.fate(seed, owner) is None
            )
            page = self.store.list(tenant=tenant)
            assert [(m.id, m.labels) for m in page.data] == [(i, labels) for _, i, labels in reversed(live)]
            labelled = self.store.list(tenant=tenant, labels={"l": "a"})
            assert [m.id for m in labelled.data] == [i for _, i, labels in reversed(live) if labels["l"] == "a"]

    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        ready = [expected for expected in self.model.values() if expected.state == "ready"]
        assert self.store.usage().caches == len(ready)
        assert self.store.usage().bytes == len(ready) * SIZE <= BUDGET
        corrupt = [expected for expected in self.model.values() if expected.state == "corrupt"]
        assert len(self.store.check()) <= len(corrupt), "only what was damaged on purpose is out of order"
        # In a bucket the bytes of a corrupt cache stay where they are: to hide them is to copy them.
        in_sight = len(corrupt) if self.place.kind == "objects" else 0
        assert len(ready) <= len(self.place.names()) <= len(ready) + in_sight


class OnDisk(ShelfMachine):
    make_place = staticmethod(lambda folder: DiskPlace(folder / "home"))


def run(machine: type[ShelfMachine], soak: bool) -> None:
    """2,000 steps with the full counts, 200 otherwise, in runs of 40."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=50 if soak else 3, stateful_step_count=40, deadline=None)
    )


def test_any_order_of_calls_on_disk(soak: bool) -> None:
    run(OnDisk, soak)


def test_any_order_of_calls_in_redis(soak: bool, shared_valkey: ValkeyServer) -> None:
    class InRedis(ShelfMachine):
        make_place = staticmethod(lambda _: RedisPlace(shared_valkey))

    run(InRedis, soak)


@pytest.mark.slow
def test_any_order_of_calls_on_objects(soak: bool, shared_s3: S3Server, zygote: Zygote) -> None:
    class OnObjects(ShelfMachine):
        make_place = staticmethod(lambda folder: ObjectsPlace(DiskPlace(folder / "home"), shared_s3, zygote.start))

    run(OnObjects, soak)
