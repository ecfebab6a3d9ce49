"""Any order of calls, beside a model of what the shelf must say: a dictionary and a clock."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, KvshelfError
from kvshelf.store.disk import DiskStore
from tests.store.caches import make_cache, require_equal
from tests.store.conftest import Clock

CACHES = [make_cache(seed, num_tokens=9, lengths=((4, seed),), dims=(2, 3)) for seed in range(4)]
which = st.integers(0, len(CACHES) - 1)
tenants = st.sampled_from(["me", "you"])


@dataclass
class Expected:
    """What the model knows of one cache: `order` is its place in listings."""

    order: int
    state: str = "ready"  # ready | corrupt | deleted
    expires_at: float | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Shelf(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.home = Path(self.folder.name) / "home"
        self.clock = Clock()
        self.store = DiskStore.open(self.home, now=self.clock)
        self.model: dict[tuple[int, str], Expected] = {}
        self.puts = 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def id_of(self, seed: int, tenant: str) -> str:
        return self.store.cache_id(CACHES[seed].identity, tenant=tenant)

    def fate(self, seed: int, tenant: str) -> type[KvshelfError] | None:
        """The error that reading this cache must raise, None when it must succeed."""
        expected = self.model.get((seed, tenant))
        if expected is None or expected.state == "deleted":
            return CacheNotFound
        if expected.expires_at is not None and expected.expires_at <= self.clock.time:
            return CacheExpired
        return CacheCorrupt if expected.state == "corrupt" else None

    @rule(seed=which, tenant=tenants, ttl_s=st.none() | st.integers(1, 20), label=st.sampled_from("ab"))
    def put(self, seed: int, tenant: str, ttl_s: int | None, label: str) -> None:
        manifest = self.store.put(CACHES[seed], tenant=tenant, ttl_s=ttl_s, labels={"l": label})
        if self.fate(seed, tenant) is not None:
            self.puts += 1
            expires_at = None if ttl_s is None else self.clock.time + ttl_s
            self.model[seed, tenant] = Expected(self.puts, "ready", expires_at, {"l": label})
        assert (manifest.expires_at, manifest.labels) == (
            self.model[seed, tenant].expires_at,
            self.model[seed, tenant].labels,
        )

    @rule(seed=which, tenant=tenants)
    def get(self, seed: int, tenant: str) -> None:
        fate = self.fate(seed, tenant)
        if fate is None:
            require_equal(CACHES[seed], self.store.get(self.id_of(seed, tenant), tenant=tenant))
        else:
            with pytest.raises(fate):
                self.store.get(self.id_of(seed, tenant), tenant=tenant)

    @rule(seed=which, tenant=tenants, label=st.sampled_from("ab"), ttl_s=st.none() | st.integers(1, 20))
    def update(self, seed: int, tenant: str, label: str, ttl_s: int | None) -> None:
        fate = self.fate(seed, tenant)
        if fate is not None:
            with pytest.raises(fate):
                self.store.update(self.id_of(seed, tenant), tenant=tenant, labels={"l": label})
            return
        self.store.update(self.id_of(seed, tenant), tenant=tenant, labels={"l": label}, ttl_s=ttl_s)
        expected = self.model[seed, tenant]
        expected.labels = {"l": label}
        expected.expires_at = None if ttl_s is None else self.clock.time + ttl_s

    @rule(seed=which, tenant=tenants)
    def delete(self, seed: int, tenant: str) -> None:
        if self.fate(seed, tenant) is CacheNotFound:
            with pytest.raises(CacheNotFound):
                self.store.delete(self.id_of(seed, tenant), tenant=tenant)
            return
        self.store.delete(self.id_of(seed, tenant), tenant=tenant)
        self.model[seed, tenant].state = "deleted"

    @rule(seed=which, tenant=tenants, how=st.sampled_from(["flip", "cut", "remove"]))
    def damage(self, seed: int, tenant: str, how: str) -> None:
        """A file is damaged and found out by the next reader."""
        if self.fate(seed, tenant) is not None:
            return
        cache_id = self.id_of(seed, tenant)
        (path,) = (self.home / "blobs").glob(f"{cache_id.removeprefix('kvs_')}-*")
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        else:
            data[len(data) // 2] ^= 1
            path.write_bytes(data if how == "flip" else data[:-1])
        with pytest.raises(CacheCorrupt):
            self.store.get(cache_id, tenant=tenant)
        self.model[seed, tenant].state = "corrupt"

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.time += seconds

    @rule()
    def sweep(self) -> None:
        self.store.sweep()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = DiskStore.open(self.home, now=self.clock)

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
    def the_shelf_is_sound(self) -> None:
        corrupt = [key for key, expected in self.model.items() if expected.state == "corrupt"]
        assert len(self.store.check()) <= len(corrupt), "only what was damaged on purpose is out of order"
        files = len(list((self.home / "blobs").iterdir()))
        assert files <= sum(expected.state == "ready" for expected in self.model.values())


TestShelf = Shelf.TestCase
TestShelf.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
