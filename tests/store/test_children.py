"""Caches that extend others: what a home keeps of them, what readers get, and what is left when one of them ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import Timings
from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheHasChildren,
    CacheNotFound,
    InvalidRequest,
    QuotaExceeded,
)
from kvshelf.store.base import Store
from kvshelf.store.index import Quota
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from tests.amounts import amount
from tests.store.caches import extended, make_cache, require_equal
from tests.store.family_walk import FamilyWalk
from tests.store.places import Clock, DiskPlace, Place, RedisPlace, flip
from tests.store.redis.servers import ValkeyServer

PLAIN, SEALED = Rules(), Rules(keyring=Keyring([b"k" * 32]))


def big(seed: int = 0, **fields: Any) -> CompressedCache:
    """Two layers of two heads, 128 KiB of keys and values."""
    return make_cache(seed, num_tokens=160, lengths=((64, 64), (100, 28)), dims=(64, 64), **fields)


def family(generations: int, **fields: Any) -> list[CompressedCache]:
    """A cache, the cache that extends it, the cache that extends that one, and so on."""
    caches = [big(**fields)]
    while len(caches) < generations:
        caches.append(extended(caches[-1], len(caches)))
    return caches


def put_all(store: Store, caches: list[CompressedCache], **fields: Any) -> list[Manifest]:
    """Each as the child of the one before."""
    manifests: list[Manifest] = []
    for cache in caches:
        manifests.append(store.put(cache, parent_id=manifests[-1].id if manifests else None, **fields))
    return manifests


def bytes_of(store: Shelf, cache_id: str) -> int:
    """Those of a cache's own file."""
    entry = store.index.find(cache_id, "default")
    assert entry is not None
    return entry.nbytes


def bases_of(store: Shelf, cache_id: str) -> int:
    entry = store.index.find(cache_id, "default")
    assert entry is not None
    return len(entry.bases)


@pytest.fixture(params=[PLAIN, SEALED], ids=["plain", "sealed"])
def rules(request: pytest.FixtureRequest) -> Rules:
    param: Rules = request.param
    return param


@pytest.fixture
def store(place: Place, clock: Clock, rules: Rules) -> Iterator[Shelf]:
    with place.open(now=clock, rules=rules) as store:
        yield store
        assert store.check() == []


# Bytes


@pytest.mark.parametrize("codec", ["none", "int4:group=32,residual=8"])
def test_a_child_is_stored_as_what_its_parent_lacks(store: Shelf, codec: str, place: Place) -> None:
    caches = family(3) if codec == "none" else [cache.encoded(codec) for cache in family(1)]
    while len(caches) < 3:
        caches.append(extended(caches[-1], len(caches)))
    made = put_all(store, caches)
    for parent, child, cache in zip(made, made[1:], caches[1:], strict=False):
        new = child.bytes_stored - parent.bytes_stored
        assert new / 2 < bytes_of(store, child.id) < new + 8192
        assert (child.parent_id, store.stat(child.id).parent_id) == (parent.id, parent.id)
        assert cache.pack().nbytes == child.bytes_stored
    assert [bases_of(store, manifest.id) for manifest in made] == [0, 1, 2]
    assert len(place.names()) == 3


def test_a_child_is_read_as_if_it_were_whole(store: Shelf) -> None:
    caches = family(3)
    for manifest, cache in zip(put_all(store, caches), caches, strict=True):
        require_equal(cache, store.get(manifest.id))
        with store.open_cache(manifest.id) as arriving:
            arriving.read()
            require_equal(cache, arriving.cache())
        with store.open_blob(manifest.id) as blob:
            assert (blob.file.read(), blob.digest) == (cache.to_bytes(), manifest.blob_digest)
        with store.open_parts(manifest.id) as parts:
            for index in range(parts.num_layers):
                layer = parts.layer(index)
                layer.fetch(range(layer.num_runs))
            assert parts.whole
    assert {scrubbed.problem for scrubbed in store.scrub()} == {None}


def test_runs_of_a_child_are_read_alone(place: Place, clock: Clock) -> None:
    """Rows enough for several runs: the digest of each is in the child's own file, the rows in its parent's."""
    parent = make_cache(num_tokens=3000, lengths=((2500, 2500),), dims=(16, 16))
    child = extended(parent, entries=1500, tokens=2000)
    with place.open(now=clock) as store:
        made = put_all(store, [parent, child])
        assert bases_of(store, made[1].id) == 1
        with store.open_parts(made[1].id) as parts:
            layer = parts.layer(0)
            assert layer.num_runs == 5
            layer.fetch([1, 4])
            rows = layer.record.parts[0].keys[1024:2048]
            assert (rows == child.layers[0].parts[0].keys[1024:2048]).all()
            assert parts.read_bytes < parts.nbytes / 2


def test_what_shares_little_is_stored_whole(store: Shelf) -> None:
    parent, other = big(0), big(1)
    made = put_all(store, [parent, other])
    assert bases_of(store, made[1].id) == 0
    assert made[1].parent_id == made[0].id
    require_equal(other, store.get(made[1].id))


def test_usage_and_receipts_count_own_bytes(store: Shelf) -> None:
    made = put_all(store, family(3))
    own = [bytes_of(store, manifest.id) for manifest in made]
    assert (store.usage().caches, store.usage().bytes) == (3, sum(own))
    assert store.delete(made[2].id).bytes_freed == own[2]
    receipt = store.delete(made[0].id, cascade=True)
    assert (receipt.bytes_freed, receipt.descendants) == (own[0] + own[1], (made[1].id,))
    assert store.usage().bytes == 0


def test_children_are_listed(store: Shelf) -> None:
    root = store.put(big())
    made = [store.put(extended(big(), seed), parent_id=root.id) for seed in (1, 2)]
    store.put(extended(extended(big(), 1), 3), parent_id=made[0].id)
    assert {manifest.id for manifest in store.list(parent_id=root.id).data} == {manifest.id for manifest in made}
    assert store.list(parent_id=made[1].id).data == ()


# What ends


def test_a_parent_that_expired_leaves_its_children_what_they_need(store: Shelf, clock: Clock, place: Place) -> None:
    caches = family(3)
    root = store.put(caches[0], ttl_s=10, source="the text")
    child = store.put(caches[1], parent_id=root.id, ttl_s=100)
    grandchild = store.put(caches[2], parent_id=child.id)
    own = [bytes_of(store, manifest.id) for manifest in (root, child, grandchild)]
    clock.time += 20
    store.sweep()
    with pytest.raises(CacheExpired):
        store.get(root.id)
    require_equal(caches[2], store.get(grandchild.id))
    assert len(place.names()) == 4, "its blob is kept for them, and its source for itself"
    assert store.check() == []
    assert store.usage().bytes == own[1] + own[2]
    clock.time += 100
    store.sweep()
    require_equal(caches[2], store.get(grandchild.id))
    assert store.delete(grandchild.id).bytes_freed == own[2]
    assert store.delete(root.id).bytes_freed >= len("the text")
    assert place.names() == set()


def test_kept_bytes_count_for_the_quota(place: Place, clock: Clock) -> None:
    caches = family(2)
    limit = caches[1].pack().nbytes + 8192
    rules = Rules(quota=Quota(max_bytes=limit))
    with place.open(now=clock, rules=rules) as store:
        root = store.put(caches[0], ttl_s=10)
        child = store.put(caches[1], parent_id=root.id)
        clock.time += 20
        store.sweep()
        with pytest.raises(QuotaExceeded):
            store.put(big(6))
        store.delete(child.id)
        store.put(big(6))


def test_only_caches_that_are_no_base_are_evicted(place: Place, clock: Clock) -> None:
    """The root costs nothing to make again, and is the last of the three to go."""
    caches = family(3)
    with place.open(now=clock) as store:
        made = put_all(store, caches)
        rules = Rules(quota=Quota(budget_bytes=store.usage().bytes + 1000))
    with place.open(now=clock, rules=rules) as store:
        assert [entry.id for entry in store.index.victims(9)] == [made[2].id]
        for seed in range(7, 12):
            kept = {store.put(big(seed), timings=Timings(prefill_s=100.0)).id}
            gone = [manifest for manifest in made if manifest.id not in {manifest.id for manifest in store.list().data}]
            assert gone == made[len(made) - len(gone) :]
            assert kept <= {manifest.id for manifest in store.list().data}
            assert store.check() == []
            for manifest in store.list().data:
                store.get(manifest.id)
        assert gone == made


def test_a_cache_with_children_is_deleted_only_with_them(store: Shelf, place: Place, rules: Rules) -> None:
    caches = family(3)
    secret = caches[0].layers[0].keys.numpy().tobytes()[:4096]
    made = put_all(store, caches, source="the text")
    if rules is PLAIN:
        assert any(secret in data for data in place.contents())
    with pytest.raises(CacheHasChildren, match=r"2 caches extend .*cascade=true"):
        store.delete(made[0].id)
    with pytest.raises(CacheHasChildren, match="1 cache extends"):
        store.delete(made[1].id)
    assert len(store.list().data) == 3
    receipt = store.delete(made[0].id, cascade=True)
    assert receipt.descendants == (made[2].id, made[1].id)
    for manifest in made:
        with pytest.raises(CacheNotFound):
            store.get(manifest.id)
    assert place.names() == set()
    assert not any(secret in data for data in place.contents())
    with pytest.raises(CacheNotFound):
        store.delete(made[0].id, cascade=True)


@pytest.mark.parametrize("shares", [True, False])
def test_a_descendant_behind_an_expired_cache_is_one_still(
    store: Shelf, clock: Clock, place: Place, shares: bool
) -> None:
    caches = family(3) if shares else [big(0), big(1), big(2)]
    root = store.put(caches[0])
    child = store.put(caches[1], parent_id=root.id, ttl_s=10)
    grandchild = store.put(caches[2], parent_id=child.id)
    clock.time += 40 * 86400
    store.sweep()
    clock.time += 40 * 86400
    store.sweep()
    with pytest.raises(CacheHasChildren):
        store.delete(root.id)
    assert store.delete(root.id, cascade=True).descendants == (grandchild.id,)
    assert place.names() == set()
    clock.time += 80 * 86400
    assert sum(store.sweep().tombstones for _ in range(3)) == 3


def test_expired_children_do_not_hinder_a_deletion(store: Shelf, clock: Clock, place: Place) -> None:
    made = put_all(store, family(1))
    store.put(family(2)[1], parent_id=made[0].id, ttl_s=10)
    clock.time += 20
    store.delete(made[0].id)
    assert place.names() == set()


def test_a_cache_whose_parent_was_deleted_is_refused(store: Shelf, place: Place) -> None:
    caches = family(2)
    root = store.put(caches[0])
    store.delete(root.id)
    with pytest.raises(CacheNotFound):
        store.put(caches[1], parent_id=root.id)
    with pytest.raises(CacheNotFound):
        store.put(caches[1], parent_id="kvs_" + "0" * 40)
    child = store.put(caches[1])
    with pytest.raises(InvalidRequest, match="parent_id"):
        store.put(caches[1], parent_id=child.id)
    assert len(place.names()) == 1


@pytest.mark.parametrize("step", ["created", "written", "verified"])
@pytest.mark.parametrize("how", ["delete", "expire", "replace"])
def test_a_parent_ends_while_its_child_is_written(place: Place, clock: Clock, step: str, how: str) -> None:
    caches = family(3)
    with place.open(now=clock) as other:
        made = put_all(other, caches[:2], ttl_s=1000)

        def on_step(name: str) -> None:
            nonlocal step
            if name != step:
                return
            step = ""
            if how == "delete":
                other.delete(made[0].id, cascade=True)
            elif how == "expire":
                clock.time += 2000
                other.sweep()
            else:
                place.change(made[1], flip)
                with suppress(CacheCorrupt):
                    other.get(made[1].id)
                other.put(caches[1])

        with place.open(now=clock, on_step=on_step, write_lease_s=9999) as store:
            if how == "delete":
                with pytest.raises(CacheNotFound):
                    store.put(caches[2], parent_id=made[1].id)
                assert store.list().data == ()
            else:
                again = store.put(caches[2], parent_id=made[1].id)
                require_equal(caches[2], store.get(again.id))
            store.sweep()
            assert store.check() == []
            assert len(place.names()) == {"delete": 0, "expire": 1}.get(how, len(place.names()))


def test_an_expired_parent_is_no_error(store: Shelf, clock: Clock) -> None:
    caches = family(2)
    root = store.put(caches[0], ttl_s=10)
    clock.time += 20
    child = store.put(caches[1], parent_id=root.id)
    assert bases_of(store, child.id) == 0
    require_equal(caches[1], store.get(child.id))


# What is replaced


@pytest.mark.slow
def test_long_chains_are_compacted(store: Shelf, place: Place) -> None:
    caches = family(11)
    made = put_all(store, caches)
    before = [store.stat(manifest.id) for manifest in made]
    assert store.compact() == 3
    assert store.compact() == 0
    assert [bases_of(store, manifest.id) for manifest in made] == [*range(8), 0, 0, 0]
    assert [store.stat(manifest.id) for manifest in made] == before
    for manifest, cache in zip(made, caches, strict=True):
        require_equal(cache, store.get(manifest.id))
    assert len(place.names()) == 11
    child = store.put(extended(caches[-1], 11), parent_id=made[-1].id)
    assert bases_of(store, child.id) == 1


@pytest.mark.slow
def test_a_base_that_was_compacted_is_kept(place: Place, clock: Clock) -> None:
    caches = family(10)
    with place.open(now=clock) as store:
        made = put_all(store, caches)
        assert store.compact() == 2
        assert len(place.names()) == 10, "nobody has the bytes of the eighth as a base any more"
        other = store.put(extended(caches[8], 50), parent_id=made[8].id)
        assert bases_of(store, other.id) == 1
        store.delete(made[0].id, cascade=True)
        assert place.names() == set()


@pytest.mark.slow
def test_a_chain_for_which_there_is_no_room_stays(place: Place, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is evicted for it."""
    with place.open(now=clock) as store:
        made = put_all(store, family(10))
        taken = store.usage().bytes
    for quota in (Quota(budget_bytes=taken + 1000), Quota(max_bytes=taken + 1000)):
        with place.open(now=clock, rules=Rules(quota=quota)) as store:
            assert store.compact() == 0
            assert len(store.list().data) == 10
            assert [bases_of(store, manifest.id) for manifest in made] == [*range(10)]
    assert len(caplog.records) == 2
    with place.open(now=clock) as store:
        assert store.compact() == 2


def test_resealing_ends_with_all_bytes_under_the_new_key(place: Place, clock: Clock) -> None:
    caches = family(3)
    old, new = b"o" * 32, b"n" * 32
    with place.open(now=clock, rules=Rules(keyring=Keyring([old]))) as store:
        made = put_all(store, caches)
    with place.open(now=clock, rules=Rules(keyring=Keyring([new, old]))) as store:
        made.append(store.put(extended(caches[2], 9), parent_id=made[2].id))
        caches.append(extended(caches[2], 9))
        assert [scrubbed.problem for scrubbed in store.reseal()] == [None] * 4
        assert store.check() == []
        assert len(place.names()) == 4
        assert [bases_of(store, manifest.id) for manifest in made] == [0, 1, 2, 3]
    with place.open(now=clock, rules=Rules(keyring=Keyring([new]))) as store:
        for manifest, cache in zip(made, caches, strict=True):
            require_equal(cache, store.get(manifest.id))


def test_a_damaged_base_is_found_by_every_reader(place: Place, clock: Clock) -> None:
    caches = family(3)
    with place.open(now=clock) as store:
        made = put_all(store, caches, source="the text")
        place.change(made[0], flip)
        for manifest in reversed(made):
            with pytest.raises(CacheCorrupt):
                store.get(manifest.id)
        assert len(store.check()) == 3
        for manifest, cache in zip(made, caches, strict=True):
            store.mend(cache, manifest.id, tenant="default")
            require_equal(cache, store.get(manifest.id))
        assert store.check() == []
        assert len(place.names()) == 6, "three blobs and three sources"


def test_a_corrupt_parent_is_put_again(place: Place, clock: Clock) -> None:
    caches = family(3)
    with place.open(now=clock) as store:
        made = put_all(store, caches)
        place.change(made[0], flip)
        for manifest in made[:2]:
            with pytest.raises(CacheCorrupt):
                store.get(manifest.id)
        again = put_all(store, caches[:2])
        require_equal(caches[1], store.get(again[1].id))
        with pytest.raises(CacheCorrupt):
            store.get(made[2].id)
        store.put(caches[2], parent_id=again[1].id)
        assert store.check() == []
        assert len(place.names()) == 3


def test_a_longer_life_is_that_of_the_bases_too(place: Place, clock: Clock) -> None:
    caches = family(2)
    with place.open() as store:
        root = store.put(caches[0], ttl_s=100)
        child = store.put(caches[1], parent_id=root.id, ttl_s=1000)
        if isinstance(place, RedisPlace):
            client = place.server.client()
            keys = client.keys(f"{{{place.prefix}/*}}:0")
            assert all(client.ttl(key) > 1500 for key in keys)
            store.update(child.id, ttl_s=None)
            assert all(client.ttl(key) == -1 for key in keys)
            ids = (f"{{{place.prefix}}}:c:{manifest.id}" for manifest in (root, child))
            assert [client.ttl(key) for key in ids] == [-1, -1]
    with place.open(now=lambda: clock.time + 1e9) as store:
        store.sweep()
        if isinstance(place, RedisPlace):
            require_equal(caches[1], store.get(child.id))
        else:
            assert store.list().data == ()


# Tiers


@pytest.fixture
def tiered(place: Place, clock: Clock, tmp_path: Path) -> Iterator[TieredStore]:
    """Memory and a folder before a home."""
    home = place.open(now=clock)
    disk = DiskTier.open(tmp_path / "scratch", 1 << 30, key=home.key, now=clock)
    with TieredStore(home, [RamTier(1 << 30, now=clock), disk]) as store:
        yield store
        assert store.check() == []


def test_tiers_hold_whole_caches(tiered: TieredStore, place: Place, tmp_path: Path) -> None:
    caches = family(3)
    made = put_all(tiered, caches)
    scratch = DiskPlace(tmp_path / "scratch")
    assert sorted(path.stat().st_size for path in (scratch.folder / "blobs").iterdir()) == [
        manifest.bytes_stored for manifest in made
    ]
    for manifest, cache in zip(made, caches, strict=True):
        require_equal(cache, tiered.get(manifest.id))
    with pytest.raises(CacheHasChildren):
        tiered.delete(made[0].id)
    receipt = tiered.delete(made[0].id, cascade=True)
    assert (receipt.homes, receipt.descendants) == ((place.kind, "disk", "ram"), (made[2].id, made[1].id))
    assert place.names() == scratch.names() == set()
    secret = caches[0].layers[0].keys.numpy().tobytes()[:4096]
    assert not any(secret in data for data in (*place.contents(), *scratch.contents()))
    for manifest in made:
        with pytest.raises(CacheNotFound):
            tiered.open_blob(manifest.id)


def test_a_tier_drops_a_parent_alone(tiered: TieredStore) -> None:
    caches = family(2)
    made = put_all(tiered, caches)
    for tier in tiered.tiers.all:
        assert tier.drop(made[0].id, "default")
        assert tier.open_blob(made[1]) is not None
    require_equal(caches[0], tiered.get(made[0].id))
    assert all(tier.open_blob(made[0]) is not None for tier in tiered.tiers.all)


def test_damage_at_home_is_mended_from_a_tier(tiered: TieredStore, place: Place) -> None:
    """That of a base is damage to all caches that use it."""
    caches = family(3)
    made = put_all(tiered, caches)
    place.change(made[0], flip)
    assert sum(scrubbed.problem is not None for scrubbed in tiered.scrub()) == 3
    home = tiered.home
    for manifest, cache in zip(made, caches, strict=True):
        require_equal(cache, home.get(manifest.id))
    assert [bases_of(home, manifest.id) for manifest in made] == [0, 0, 0]


def test_a_home_that_lost_everything_learns_of_parents_again(
    shared_valkey: ValkeyServer, clock: Clock, tmp_path: Path
) -> None:
    place = RedisPlace(shared_valkey)
    caches = family(3)
    key = b"k" * 32
    for again in (False, True):
        disk = DiskTier.open(tmp_path / "scratch", 1 << 30, key=key, now=clock)
        with TieredStore(place.open(now=clock, key=key), [disk]) as store:
            if not again:
                made = put_all(store, caches)
                client = shared_valkey.client()
                client.delete(*client.keys(f"{{{place.prefix}[/}}]*"))
                continue
            store.sweep()
            for manifest, cache in zip(made, caches, strict=True):
                require_equal(cache, store.home.get(manifest.id))
            assert {manifest.id for manifest in store.list(parent_id=made[0].id).data} == {made[1].id}
            with pytest.raises(CacheHasChildren, match="2 caches"):
                store.delete(made[0].id)
            assert len(store.delete(made[0].id, cascade=True).descendants) == 2
            assert store.check() == []


# In any order


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_reference_is_counted_in_any_order_of_calls(place: Place, clock: Clock) -> None:
    with place.open(now=clock, write_lease_s=1e6) as store:
        walk = FamilyWalk(place, store, clock, random.Random(20261126))
        slow = place.kind == "objects"
        for step in range(amount(25 if slow else 150, 2000)):
            walk.step()
            if step % (5 if slow else 1) == 0:
                walk.check()
        walk.check()
    print(f"{sum(walk.done.values())} steps on {place.kind}: {dict(walk.done)}")
