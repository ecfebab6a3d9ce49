"""A cache that is coded smaller under its id: whole or as before at every moment, for every reader and place."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import CertifiedBy, Quality, Timings, Tried
from kvshelf.api.caches import Recoded
from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import CacheNotFound, QuotaExceeded, StateConflict, StorageFull
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf.store.disk.overlay import Overlay
from kvshelf.store.index import Quota
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.ladder.table import LEASE_S, ColdCache
from kvshelf.store.manifest import BY_GUARD, Judgement
from kvshelf.store.rules import Rules
from kvshelf.store.sealing import is_sealed
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from tests.amounts import few
from tests.store.caches import family, make_cache, require_equal
from tests.store.places import Clock, Place
from tests.store.test_crash import STEPS, LateClock, Log, kill_at

LADDER = Ladder.parse("none:1d,int8:7d,int2")
DAY = 86400.0
CERTIFIED = CertifiedBy(name="law", alpha=0.1, digest="0" * 64)
MEASURED = Quality(agreement=0.9, low=0.8, high=0.95, worst=None, cues=90, kl=0.1, probe_s=0.0, version=1)
TRIED = (Tried(policy="full", compression_ratio=0.0, codec="none", bytes=17),)


def large(seed: int = 1) -> CompressedCache:
    """Of which int8 is smaller: more than its residual."""
    return make_cache(seed, num_tokens=256, lengths=((256, 256), (256, 200)), dims=(64, 64))


TINY = make_cache(1).identity.model.fingerprint()


def cold(store: Store, ladder: Ladder = LADDER, model: str = TINY) -> list[ColdCache]:
    return [cache for cache in store.ladder.cold(ladder, model) if cache is not None]


def coded(store: Store, seen: ColdCache, codec: str | None = None, quality: Quality | None = None) -> bool:
    """What a replica does, by codecs that need no model."""
    cache = store.get(seen.manifest.id, tenant=seen.manifest.tenant).encoded(codec or seen.codecs[0])
    return store.ladder.replace(seen, cache.pack(), quality)


def test_the_id_stays_and_the_blob_is_that_of_a_creation_under_the_codec(store: DiskStore, clock: Clock) -> None:
    cache = large()
    before = store.put(cache, name="report", labels={"team": "law"}, source="the text")
    direct = store.put(cache, codec="int8", tenant="other")
    clock.time += DAY + 1
    (seen,) = cold(store)
    assert seen.codecs == ("int8",), "a cache that was made under int8 waits for its own rung"
    assert coded(store, seen, quality=MEASURED)
    after = store.stat(before.id)
    assert (after.codec, after.recoded, after.quality) == ("int8", Recoded(codec="none", at=clock.time), MEASURED)
    assert (after.blob_digest, after.bytes_stored) == (direct.blob_digest, direct.bytes_stored)
    assert after.revision != before.revision
    kept = {"id", "name", "labels", "source", "document_id", "created_at", "expires_at", "tenant", "timings"}
    assert after.model_dump(include=kept) == before.model_dump(include=kept)
    require_equal(cache.encoded("int8"), store.get(before.id))
    with store.open_blob(before.id) as blob:
        assert (blob.digest, len(blob.file.read())) == (after.blob_digest, after.bytes_stored)
    assert store.source(before.id) == "the text"
    assert cold(store) == [], "it is on its rung"
    clock.time += 7 * DAY
    assert {seen.manifest.tenant: seen.codecs for seen in cold(store)} == {"default": ("int2",), "other": ("int2",)}


def test_a_download_is_stored_elsewhere_as_what_it_is(store: DiskStore, clock: Clock) -> None:
    manifest = store.put(large())
    clock.time += DAY + 1
    assert coded(store, cold(store)[0])
    with store.open_blob(manifest.id) as blob:
        cache = CompressedCache.from_bytes(blob.file.read())
    again = store.put(cache, codec=cache.codec)
    assert (again.codec, again.recoded) == ("int8", None)
    assert again.id == store.cache_id(cache.identity, codec="int8") != manifest.id


def test_a_use_keeps_a_cache_on_its_rung(store: DiskStore, clock: Clock) -> None:
    manifest = store.put(large())
    clock.time += DAY / 2
    store.touch(manifest.id)
    clock.time += DAY
    assert cold(store) == []
    clock.time += 1
    assert [seen.manifest.id for seen in cold(store)] == [manifest.id]


def test_what_is_left_alone(store: DiskStore, clock: Clock) -> None:
    store.put(large(1), pinned=True)
    store.put(large(2), guaranteed_until=clock.time + 99 * DAY)
    store.put(large(3), codec="int4")
    store.put(large(4), ttl_s=DAY)
    store.put(large(7), judged=Judgement(certificate=CERTIFIED))
    root, child = family(2)
    store.put(child, parent_id=store.put(root).id)
    imported = replace(large(8), identity=replace(large(8).identity, parent="0" * 64))
    store.put(imported)  # what it extends is not here
    store.put(large(9), judged=Judgement(quality=MEASURED.model_copy(update={"reason": f"{BY_GUARD}: 3 of 4"})))
    store.put(large(10), judged=Judgement(quality=MEASURED, tried=TRIED))  # it has no floor
    taken = store.put(large(5), judged=Judgement(quality=MEASURED, tried=TRIED, min_quality=0.5))
    manifest = store.put(large(6))
    clock.time += 30 * DAY
    assert [seen.manifest.id for seen in cold(store)] == [taken.id, manifest.id]
    assert cold(store, model="another") == []


@pytest.mark.parametrize("meanwhile", ["asked", "renamed", "deleted", "extended", "put again"])
def test_a_cache_that_changed_since_it_was_seen_stays_as_it_is(store: DiskStore, clock: Clock, meanwhile: str) -> None:
    root, child = family(2)
    manifest = store.put(root)
    clock.time += DAY + 1
    (seen,) = cold(store)
    packed = root.encoded("int8").pack()
    if meanwhile == "asked":
        store.touch(manifest.id)
    elif meanwhile == "renamed":
        store.update(manifest.id, name="another")
    elif meanwhile == "extended":
        store.put(child, parent_id=manifest.id)
    else:
        store.delete(manifest.id)
        if meanwhile == "put again":
            store.put(root)
    assert not store.ladder.replace(seen, packed, None)
    if meanwhile == "deleted":
        with pytest.raises(CacheNotFound):
            store.get(manifest.id)
    else:
        require_equal(root, store.get(manifest.id))
        assert store.stat(manifest.id).recoded is None


def test_a_creation_makes_it_again_as_it_was(store: DiskStore, clock: Clock) -> None:
    cache = large()
    manifest = store.put(cache, name="report", pinned=False)
    clock.time += DAY + 1
    assert coded(store, cold(store)[0])
    again = store.put(cache, name="other", judged=Judgement(quality=MEASURED), timings=Timings(prefill_s=9.0))
    assert (again.id, again.name, again.codec, again.recoded) == (manifest.id, "report", "none", None)
    assert (again.blob_digest, again.quality) == (manifest.blob_digest, MEASURED)
    require_equal(cache, store.get(manifest.id))
    assert cold(store) == [], "who made it again has used it"
    clock.time += DAY + 1
    assert len(cold(store)) == 1


@pytest.mark.parametrize("meanwhile", ["deleted", "renamed once", "renamed", "made again"])
def test_a_creation_while_others_change_the_cache(home: Path, clock: Clock, meanwhile: str) -> None:
    changes = list[str]()

    def change(step: str) -> None:
        if step != "verified" or not armed or (changes and meanwhile != "renamed"):
            return
        changes.append(step)
        if meanwhile == "deleted":
            store.delete(manifest.id)
        elif meanwhile == "made again":
            store.put(large())
        else:
            store.update(manifest.id, name=f"name {len(changes)}")

    armed = False
    with DiskStore.open(home, now=clock, on_step=change) as store:
        manifest = store.put(large())
        clock.time += DAY + 1
        assert coded(store, cold(store)[0])
        armed = True
        if meanwhile == "renamed":
            with pytest.raises(StateConflict, match="was changed 10 times while it was made again"):
                store.put(large())
        else:
            assert store.put(large()).recoded is None
            require_equal(large(), store.get(manifest.id))
        assert store.stat(manifest.id).name == {"renamed once": "name 1", "renamed": "name 10"}.get(meanwhile, "")
        assert store.check() == []


def test_a_promised_cache_is_made_again_where_the_promises_have_room(home: Path, clock: Clock) -> None:
    size = len(large().to_bytes())
    with DiskStore.open(home, now=clock, rules=Rules(quota=Quota(tenant_promised_bytes=size))) as store:
        manifest = store.put(large())
        clock.time += DAY + 1
        assert coded(store, cold(store)[0])
        store.update(manifest.id, pinned=True)
        small = store.put(make_cache(2), pinned=True)
        with pytest.raises(QuotaExceeded):
            store.put(large())
        store.update(small.id, pinned=False)
        assert store.put(large()).recoded is None
        assert store.usage(tenant="default").caches == 2


def test_a_cache_that_is_smaller_on_the_shelf_below_is_made_on_this_one(home: Path, tmp_path: Path) -> None:
    clock = LateClock()
    with DiskStore.open(home, now=clock) as below:
        manifest = below.put(large())
        clock.time += DAY + 1
        assert coded(below, cold(below)[0])
    with Overlay.open_over(tmp_path / "own", home, rules=Rules()) as store:
        assert store.stat(manifest.id).codec == "int8"
        again = store.put(large())
        assert (again.id, again.codec, again.recoded) == (manifest.id, "none", None)
        require_equal(large(), store.get(manifest.id))


def test_what_extends_a_cache_that_is_made_again_stays(store: DiskStore, clock: Clock) -> None:
    root, child = family(2, entries=256)
    manifest = store.put(root)
    clock.time += DAY + 1
    assert coded(store, cold(store)[0])
    extending = store.put(child, parent_id=manifest.id)
    assert store.put(root).codec == "none"
    require_equal(root, store.get(manifest.id))
    require_equal(child, store.get(extending.id))
    store.delete(manifest.id, cascade=True)
    assert store.usage(tenant="default").bytes == 0


def test_a_reader_finishes_with_the_former_blob(store: DiskStore, clock: Clock) -> None:
    cache = large()
    manifest = store.put(cache)
    with store.open_cache(manifest.id) as arriving, store.open_blob(manifest.id) as blob:
        clock.time += DAY + 1
        assert coded(store, cold(store)[0])
        arriving.read(together=True)
        require_equal(cache, arriving.cache())
        require_equal(cache, CompressedCache.from_bytes(blob.file.read()))
    require_equal(cache.encoded("int8"), store.get(manifest.id))


def test_readers_see_one_blob_or_the_other(home: Path) -> None:
    """While caches go down and are made again, each read is of the blob that its digest names."""
    caches = {text: large().encoded(text) for text in ("none", "int8")}
    ended = threading.Event()
    wrong: list[str] = []
    clock = LateClock()
    with DiskStore.open(home, now=clock) as store:
        manifest = store.put(large())

        def read() -> None:
            while not ended.is_set():
                cache = store.get(manifest.id)
                if cache.pack().root != caches[cache.codec].pack().root:
                    wrong.append(cache.codec)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(15):
            clock.time += DAY + 1
            assert coded(store, cold(store)[0], "int8")
            store.put(large())
        ended.set()
        for thread in threads:
            thread.join()
        store.sweep()
        assert store.check() == []
    assert wrong == []


def test_it_needs_no_room_of_its_tenant_and_evicts_nobody(home: Path, clock: Clock) -> None:
    size = len(large().to_bytes())
    rules = Rules(quota=Quota(max_caches=1, max_bytes=size))
    with DiskStore.open(home, now=clock, rules=rules) as store:
        store.put(large())
        clock.time += DAY + 1
        assert coded(store, cold(store)[0])
        assert store.usage(tenant="default").bytes < size / 2
    budget = Rules(quota=Quota(budget_bytes=size))
    with DiskStore.open(home / "budget", now=clock, rules=budget) as store:
        others = [store.put(make_cache(2)), store.put(make_cache(3))]
        clock.time += DAY + 1
        with pytest.raises(StorageFull):  # a larger blob in place of a small one
            store.ladder.replace(cold(store)[0], large(2).pack(), None)
        assert [store.stat(other.id).recoded for other in others] == [None, None]


def test_sealed_caches_stay_sealed_and_tenants_apart(home: Path, clock: Clock) -> None:
    rules = Rules(keyring=Keyring([bytes(range(32))]))
    with DiskStore.open(home, now=clock, rules=rules) as store:
        ids = {tenant: store.put(large(), tenant=tenant).id for tenant in ("law", "logs")}
        clock.time += DAY + 1
        for seen in cold(store):
            if seen.manifest.tenant == "law":
                assert coded(store, seen)
        assert {tenant: store.stat(id_, tenant=tenant).codec for tenant, id_ in ids.items()} == {
            "law": "int8",
            "logs": "none",
        }
        require_equal(large().encoded("int8"), store.get(ids["law"], tenant="law"))
        with pytest.raises(CacheNotFound):
            store.get(ids["law"], tenant="logs")
        assert all(is_sealed(path.read_bytes()) for path in (home / "blobs").iterdir())
        assert store.check() == []


def test_copies_in_tiers_give_way(home: Path, tmp_path: Path, clock: Clock) -> None:
    shelf = DiskStore.open(home, now=clock)
    tiers = [RamTier(1 << 30, now=clock), DiskTier.open(tmp_path / "tier", 1 << 30, key=shelf.key, now=clock)]
    with TieredStore(shelf, tiers) as store:
        manifest = store.put(large())
        clock.time += DAY + 1
        assert coded(store, cold(store)[0])
        for place in ("home", "ram"):  # the first read drops the former copies, and makes new ones
            with store.open_cache(manifest.id) as arriving:
                assert (arriving.place == "ram") == (place == "ram")
                arriving.read(together=True)
                require_equal(large().encoded("int8"), arriving.cache())
        for tier in tiers:
            copy = tier.find(manifest.id, "default", recent=True)
            assert copy is not None
            assert copy.blob_digest == store.stat(manifest.id).blob_digest
        assert list(store.check()) == []


def test_one_replica_of_a_model_has_the_ladder(home: Path, clock: Clock) -> None:
    with DiskStore.open(home, now=clock) as store, DiskStore.open(home, now=clock) as other:
        term = store.ladder.take("tiny")
        assert term is not None
        assert other.ladder.take("tiny") is None
        assert other.ladder.take("another model") is not None
        clock.time += LEASE_S - 1
        store.ladder.renew("tiny", term)
        clock.time += LEASE_S - 1
        assert other.ladder.take("tiny") is None
        store.ladder.release("tiny", term)
        assert other.ladder.take("tiny") is not None
        assert store.check() == []


# kill -9


def coded_by(place: Place, clock: Callable[[], float], **options: Any) -> None:
    with place.open(now=clock, **options) as store:
        assert coded(store, cold(store)[0])


def require_either(place: Place, cache: CompressedCache, cache_id: str, clock: LateClock) -> str:
    """The codec of the cache, which is whole, with nothing beside it."""
    place.let_leases_run_out(clock)
    with place.open(now=clock) as store:
        manifest = store.stat(cache_id)
        require_equal(cache.encoded(manifest.codec), store.get(cache_id))
        assert (manifest.codec == "none") == (manifest.recoded is None)
        store.sweep()
        assert store.check() == []
        if place.kind == "disk":
            assert place.names() == {name for entry in store.index.stored() for name, _ in entry.needed()}
    return manifest.codec


@pytest.mark.parametrize("step", few(3, [*STEPS[:4], "swapped"]))
def test_killed_at_a_named_point(place: Place, step: str) -> None:
    cache, clock = large(), LateClock()
    with place.open() as store:
        cache_id = store.put(cache).id
    clock.time += DAY + 1

    def child() -> None:
        coded_by(place, clock, on_step=kill_at(step))

    assert place.start(child).wait() == -signal.SIGKILL
    assert require_either(place, cache, cache_id, clock) == ("int8" if step == "swapped" else "none")
    if step != "swapped":
        coded_by(place, clock)
        assert require_either(place, cache, cache_id, clock) == "int8"


def test_killed_at_random_moments(place: Place, tmp_path: Path, soak: bool) -> None:
    """The child codes a cache smaller and makes it again, as fast as it can, a moment later each time."""
    cache, clock, codecs, soon = large(), LateClock(), list[str](), Ladder.parse("none:1s,int8")
    with place.open() as store:
        cache_id = store.put(cache).id
    clock.time += DAY + 1
    for number in range(100 if soak else 4):
        log = Log(tmp_path / "log")

        def child(log: Log = log) -> None:
            with place.open(now=clock) as store:
                log.say("begin")
                while True:
                    clock.time += 2
                    for seen in cold(store, soon):
                        coded(store, seen)
                    store.put(cache)

        writer = place.start(child)
        log.await_first()
        time.sleep(0.01 + 0.013 * (number % 8))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        clock.time += DAY  # later than it was for the child
        codecs.append(require_either(place, cache, cache_id, clock))
    print(f"{len(codecs)} kills on {place.kind}: {codecs.count('int8')} left it smaller, 0 torn, 0 lost")


def test_other_homes_are_one_shelf(place: Place) -> None:
    """The manifest of a recoded cache is read by every kind of index."""
    clock = LateClock()
    store: Shelf
    with place.open() as store:
        manifest = store.put(large(), labels={"team": "law"})
    clock.time += DAY + 1
    coded_by(place, clock)
    with place.open(now=clock) as store:
        (listed,) = store.list(labels={"team": "law"}).data
        assert (listed.id, listed.codec, listed.made_codec) == (manifest.id, "int8", "none")
        assert store.usage(tenant="default").bytes == listed.bytes_stored
