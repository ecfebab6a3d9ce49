"""Copies before a home: faster where they are good, and never a different answer."""

from __future__ import annotations

import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept
from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, KvshelfError, SourceNotKept, StoreUnavailable
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota
from kvshelf.store.manifest import Manifest
from kvshelf.store.redis import RedisStore
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import PER_COPY, RECENT_S, RamTier
from kvshelf.store.tiers.tiered import TieredStore
from kvshelf.store.tiers.tiers import Tier
from kvshelf.store.types import TokenIds
from tests.amounts import few
from tests.store.caches import golden_caches, make_cache, require_equal
from tests.store.places import Clock, DiskPlace, Place, flip, gone
from tests.store.redis.servers import PATIENT, ValkeyServer, wait_until

SIZE = len(make_cache().to_bytes())
IN_RAM = SIZE + PER_COPY
KINDS = ["ram", "disk"]


@dataclass
class Node:
    """A store with tiers before a home, and its parts to look into."""

    store: TieredStore
    home: Shelf
    ram: RamTier
    disk: DiskTier
    folder: DiskPlace

    def tier(self, kind: str) -> Tier:
        return self.ram if kind == "ram" else self.disk

    def drop_from_all_but(self, kind: str, manifest: Manifest) -> None:
        for tier in (self.ram, self.disk):
            if tier.name != kind:
                assert tier.drop(manifest.id, manifest.tenant)


def put_tiers(
    home: Shelf,
    near: Path,
    clock: Clock,
    *,
    machine: str = "a",
    ram: int = 1 << 20,
    disk: int = 1 << 20,
    **options: Any,
) -> Node:
    """Put tiers before a home; one machine by its name has one folder."""
    folder = near / f"scratch-{machine}"
    memory = RamTier(ram, now=clock)
    tier = DiskTier.open(folder, disk, key=home.key, now=clock, **options)
    return Node(TieredStore(home, [memory, tier]), home, memory, tier, DiskPlace(folder))


@pytest.fixture
def build(clock: Clock, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """`put_tiers`, closed when the test ends."""
    with ExitStack() as stack:

        def build(home: Shelf, **options: Any) -> Node:
            node = put_tiers(home, tmp_path, clock, **options)
            stack.callback(node.store.close)
            return node

        yield build


@pytest.fixture
def node(place: Place, clock: Clock, build: Callable[..., Node]) -> Node:
    return build(open_home(place, clock))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that a test may stop."""
    with ValkeyServer(tmp_path) as server:
        yield server


@pytest.fixture
def far(server: ValkeyServer, clock: Clock, build: Callable[..., Node]) -> Node:
    """Before a Redis home that may go away."""
    return build(RedisStore.open(server.url + PATIENT, now=clock))


@pytest.fixture
def hasty(server: ValkeyServer, clock: Clock, build: Callable[..., Node]) -> Node:
    """Before a Redis home that may hang, and is given up as soon as users are promised."""
    return build(RedisStore.open(server.url, now=clock))


def open_home(place: Place, clock: Clock, **options: Any) -> Shelf:
    """Its writers' leases do not run out on a busy machine."""
    return place.open(now=clock, **options)


def flip_in_ram(node: Node, manifest: Manifest) -> None:
    """One bit of the copy's last layer."""
    with node.store.open_cache(manifest.id) as arriving:
        arriving.read()
        record = arriving.cache().layers[-1]
    assert isinstance(record, Kept)
    record.values[-1, -1] = -record.values[-1, -1]


def fates(store: Store, ids: list[str]) -> list[str]:
    return [fate(lambda one=one: store.get(one)) for one in ids]


def fate(call: Callable[[], Any]) -> str:
    try:
        call()
    except KvshelfError as error:
        return error.code
    return "ok"


# Reading


def test_every_call_says_what_it_does() -> None:
    calls = [name for name, call in vars(Store).items() if inspect.isfunction(call) and call.__doc__]
    assert len(calls) > 20
    assert [name for name in calls if not inspect.getdoc(getattr(TieredStore, name))] == []


def test_what_is_put_is_in_every_tier(node: Node) -> None:
    cache = make_cache()
    manifest = node.store.put(cache, labels={"a": "b"})
    assert node.home.stat(manifest.id) == manifest
    for tier in (node.ram, node.disk):
        assert tier.find(manifest.id, "default", recent=True) == manifest
        arriving = tier.open_cache(manifest)
        assert arriving is not None
        with arriving:
            arriving.read()
            require_equal(cache, arriving.cache())


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_come_from_the_first_tier_that_has_them(node: Node, place: Place, kind: str) -> None:
    """The home's are gone, and it does not notice."""
    manifest = node.store.put(make_cache())
    node.drop_from_all_but(kind, manifest)
    place.change(manifest, gone)
    require_equal(make_cache(), node.store.get(manifest.id))
    with node.store.open_blob(manifest.id) as blob_file:
        assert blob_file.file.read() == make_cache().to_bytes()
        assert (blob_file.nbytes, blob_file.digest) == (manifest.bytes_stored, manifest.blob_digest)
    with pytest.raises(CacheCorrupt):
        node.home.get(manifest.id)


def test_a_read_is_shared_with_the_tiers_after_its_last_layer(node: Node) -> None:
    manifest = node.home.put(make_cache())
    with node.store.open_cache(manifest.id) as arriving:
        kept: list[bool] = []
        arriving.layers[-1].add_done_callback(lambda _: kept.append(bool(list(node.ram.manifests()))))
        arriving.read()
    assert kept == [False], "nobody waits for the copies"
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [manifest]


def test_a_copy_moves_up_to_the_faster_tiers(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.ram.drop(manifest.id, "default")
    node.store.get(manifest.id)
    assert list(node.ram.manifests()) == [manifest]


def test_a_read_that_was_given_up_leaves_no_copy(node: Node) -> None:
    manifest = node.home.put(make_cache())
    with node.store.open_cache(manifest.id):
        pass
    arriving = node.store.open_cache(manifest.id)
    arriving.close()
    arriving.read()
    assert list(node.ram.manifests()) == list(node.disk.manifests()) == []


@pytest.mark.parametrize("name", few(9, sorted(golden_caches())))
def test_every_kind_of_cache_comes_back_from_every_tier(node: Node, name: str) -> None:
    cache = golden_caches()[name]
    manifest = node.store.put(cache)
    for _ in KINDS:
        require_equal(cache, node.store.get(manifest.id))
        with node.store.open_blob(manifest.id) as file:
            assert file.file.read() == cache.to_bytes()
        node.ram.drop(manifest.id, "default")


def test_a_put_encodes_once_and_keeps_the_codec(node: Node) -> None:
    manifest = node.store.put(make_cache(), codec="int4:group=8,residual=2")
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [manifest]
    assert node.store.get(manifest.id).codec == "int4:group=8,residual=2"
    assert node.store.put(make_cache(), codec="int4:group=8,residual=2") == manifest


def test_memory_is_read_without_a_copy(node: Node) -> None:
    manifest = node.store.put(make_cache())
    first, second = (node.store.get(manifest.id).layers[0] for _ in range(2))
    assert isinstance(first, Kept)
    assert isinstance(second, Kept)
    assert first.keys.data_ptr() == second.keys.data_ptr()


def test_a_copy_in_memory_keeps_nothing_else_alive(node: Node) -> None:
    """Its bytes are its own: the tensors that were put may be small parts of large ones."""
    cache = make_cache()
    manifest = node.store.put(cache)
    got = node.store.get(manifest.id).layers[0]
    assert isinstance(got, Kept)
    assert isinstance(cache.layers[0], Kept)
    assert got.keys.data_ptr() != cache.layers[0].keys.data_ptr()


# Copies that are bad


def damage(node: Node, kind: str, manifest: Manifest) -> None:
    if kind == "ram":
        flip_in_ram(node, manifest)
    else:
        node.folder.change(manifest, flip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_copy_is_dropped_and_the_home_is_asked(node: Node, kind: str) -> None:
    manifest = node.store.put(make_cache())
    node.drop_from_all_but(kind, manifest)
    damage(node, kind, manifest)
    require_equal(make_cache(), node.store.get(manifest.id))
    copy = node.tier(kind).open_cache(manifest)
    assert copy is not None, "a good one took its place"
    with copy:
        copy.read()
        require_equal(make_cache(), copy.cache())


@pytest.mark.parametrize("kind", KINDS)
def test_a_download_of_a_bad_copy_comes_from_the_home(node: Node, kind: str) -> None:
    manifest = node.store.put(make_cache())
    node.drop_from_all_but(kind, manifest)
    damage(node, kind, manifest)
    with node.store.open_blob(manifest.id) as file:
        assert file.file.read() == make_cache().to_bytes()
    assert node.tier(kind).find(manifest.id, "default", recent=False) is None
    assert list((node.folder.folder / "quarantine").iterdir()) == [], "a copy is not worth an inspection"


def test_layers_before_the_damage_are_used_and_those_after_it_come_from_elsewhere(node: Node) -> None:
    manifest = node.store.put(make_cache())
    flip_in_ram(node, manifest)
    node.folder.change(manifest, flip)
    with node.store.open_cache(manifest.id) as arriving:
        arriving.read()
        require_equal(make_cache(), arriving.cache())


def test_without_a_good_copy_anywhere_it_is_corrupt(node: Node, place: Place) -> None:
    manifest = node.store.put(make_cache())
    node.drop_from_all_but("ram", manifest)
    flip_in_ram(node, manifest)
    place.change(manifest, flip)
    with pytest.raises(CacheCorrupt):
        node.store.get(manifest.id)
    with pytest.raises(CacheCorrupt):
        node.store.get(manifest.id)
    node.store.delete(manifest.id)
    with pytest.raises(CacheNotFound):
        node.store.get(manifest.id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_mends_a_corrupt_home(node: Node, place: Place, kind: str) -> None:
    manifest = node.store.put(make_cache(), labels={"a": "b"})
    node.drop_from_all_but(kind, manifest)
    place.change(manifest, flip)
    with pytest.raises(CacheCorrupt):
        node.home.get(manifest.id)
    require_equal(make_cache(), node.store.get(manifest.id))
    require_equal(make_cache(), node.home.get(manifest.id))
    assert node.home.stat(manifest.id) == manifest


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_changed_elsewhere_stays_when_a_copy_mends_the_home(
    node: Node, place: Place, clock: Clock, kind: str
) -> None:
    """The copy has the manifest of before: what the home says counts, also of the text beside the cache."""
    manifest = node.store.put(make_cache(), labels={"a": "old"}, ttl_s=9000, source="text")
    node.drop_from_all_but(kind, manifest)
    with open_home(place, clock) as other:
        other.update(manifest.id, labels={"a": "new"}, ttl_s=60, pinned=True, name="new")
        other.touch(manifest.id)
        changed = other.stat(manifest.id)
        place.change(manifest, flip)
        with pytest.raises(CacheCorrupt):
            other.get(manifest.id)
        require_equal(make_cache(), node.store.get(manifest.id))
        assert other.stat(manifest.id) == changed
        require_equal(make_cache(), other.get(manifest.id))
        assert other.source(manifest.id) == "text"
        assert [scrubbed.problem for scrubbed in other.scrub()] == [None]
        assert other.check() == []
    clock.time += 60
    assert fate(lambda: node.store.get(manifest.id)) == "cache_expired"


def test_a_cache_that_is_deleted_while_a_copy_mends_it_stays_deleted(place: Place, clock: Clock) -> None:
    manifest: Manifest

    def meanwhile(step: str) -> None:
        if step == "verified" and meant:
            with open_home(place, clock) as other:
                other.delete(manifest.id)

    meant: list[str] = []
    home = open_home(place, clock, on_step=meanwhile)
    with TieredStore(home, [RamTier(1 << 20, now=clock)]) as store:
        manifest = store.put(make_cache())
        place.change(manifest, flip)
        with pytest.raises(CacheCorrupt):
            home.get(manifest.id)
        meant.append("now")
        store.get(manifest.id)
        assert fate(lambda: home.stat(manifest.id)) == "cache_not_found"
        assert place.names() == set()


def test_any_copy_in_memory_mends_a_home_that_can_be_asked(place: Place, clock: Clock) -> None:
    """However long ago the home confirmed it: that it is corrupt there says that nobody has deleted it."""
    with TieredStore(open_home(place, clock), [RamTier(1 << 20, now=clock, recent_s=0)]) as store:
        manifest = store.put(make_cache())
        place.change(manifest, flip)
        with open_home(place, clock) as home, pytest.raises(CacheCorrupt):
            home.get(manifest.id)
        require_equal(make_cache(), store.get(manifest.id))


def test_a_corrupt_home_is_mended_before_a_change(node: Node, place: Place) -> None:
    manifest = node.store.put(make_cache())
    place.change(manifest, flip)
    with pytest.raises(CacheCorrupt):
        node.home.get(manifest.id)
    assert node.store.update(manifest.id, name="mended").name == "mended"
    require_equal(make_cache(), node.home.get(manifest.id))


def test_a_scrub_mends_the_home_and_throws_bad_copies_away(node: Node, place: Place) -> None:
    good, at_home, in_ram, on_disk = (node.store.put(make_cache(seed)) for seed in range(4))
    place.change(at_home, flip)
    flip_in_ram(node, in_ram)
    node.folder.change(on_disk, flip)
    problems = [(scrubbed.id, scrubbed.problem) for scrubbed in node.store.scrub() if scrubbed.problem]
    assert [one for one, _ in problems] == [at_home.id, in_ram.id, on_disk.id]
    assert [why.split(":")[0] for _, why in problems[1:]] == ["ram tier", "disk tier"]
    assert {scrubbed.id for scrubbed in node.store.scrub()} == {m.id for m in (good, at_home, in_ram, on_disk)}
    assert [scrubbed.problem for scrubbed in node.store.scrub()] == [None] * 4
    assert node.store.check() == []


def test_a_check_names_the_tier(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.folder.change(manifest, gone)
    (problem,) = node.store.check()
    assert problem.startswith("disk tier: ")
    assert manifest.id in problem


# The home decides


def test_a_deletion_names_every_place_and_leaves_nothing(node: Node, place: Place) -> None:
    manifest = node.store.put(make_cache())
    receipt = node.store.delete(manifest.id)
    assert receipt.homes == (place.kind, "disk", "ram")
    assert (receipt.bytes_freed, node.ram.nbytes, node.folder.names()) == (SIZE, 0, set())
    with pytest.raises(CacheNotFound):
        node.store.get(manifest.id)


def test_a_deletion_elsewhere_is_seen_by_the_next_read(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.home.delete(manifest.id)
    with pytest.raises(CacheNotFound):
        node.store.get(manifest.id)
    assert (node.ram.nbytes, node.folder.names()) == (0, set())


def test_a_deletion_elsewhere_reaches_the_tiers_with_the_next_sweep(node: Node, clock: Clock) -> None:
    deleted, expired, stays = (node.store.put(make_cache(seed), ttl_s=[None, 5, None][seed]) for seed in range(3))
    node.home.delete(deleted.id)
    clock.time += 5
    node.store.sweep()
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [stays]
    assert node.ram.nbytes == IN_RAM
    assert len(node.folder.names()) == 1
    assert fates(node.store, [deleted.id, expired.id, stays.id]) == ["cache_not_found", "cache_expired", "ok"]


def test_a_deletion_while_it_is_read_leaves_no_copy(node: Node) -> None:
    manifest = node.home.put(make_cache())
    with node.store.open_cache(manifest.id) as arriving:
        node.store.delete(manifest.id)
        arriving.read()
        require_equal(make_cache(), arriving.cache())
    assert (node.ram.nbytes, node.folder.names()) == (0, set())


def test_an_update_reaches_the_copies(node: Node, clock: Clock) -> None:
    manifest = node.store.put(make_cache())
    changed = node.store.update(manifest.id, ttl_s=5, labels={"a": "b"}, name="n", pinned=True)
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [changed]
    clock.time += 5
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == []
    with pytest.raises(CacheExpired):
        node.store.stat(manifest.id)


def test_a_use_prolongs_the_copies_as_it_does_the_cache(node: Node, clock: Clock) -> None:
    made = node.store.put(make_cache(), ttl_s=100, ttl_renew_s=100)
    tiers = (node.ram, node.disk)
    for _ in range(3):
        clock.time += 90
        node.store.touch(made.id)
        node.store.sweep()
        assert [copy.expires_at for tier in tiers for copy in tier.manifests()] == [clock.time + 100] * 2
    node.store.update(made.id, expires_at=clock.time + 5, ttl_renew_s=None)
    node.store.touch(made.id)
    assert [copy.expires_at for tier in tiers for copy in tier.manifests()] == [clock.time + 5] * 2


def test_an_update_elsewhere_reaches_a_copy_when_it_is_read_and_all_with_a_sweep(node: Node) -> None:
    manifest = node.store.put(make_cache())
    changed = node.home.update(manifest.id, labels={"a": "b"})
    node.store.get(manifest.id)
    assert list(node.ram.manifests()) == [changed]
    node.store.sweep()
    assert list(node.disk.manifests()) == [changed]


def test_what_the_home_evicted_is_evicted(place: Place, clock: Clock, build: Callable[..., Node]) -> None:
    node = build(open_home(place, clock, rules=Rules(quota=Quota(budget_bytes=2 * SIZE + 1))))
    first, second, third = (node.store.put(make_cache(seed)) for seed in range(3))
    gone_ids = [m.id for m in (first, second, third) if fate(lambda m=m: node.home.stat(m.id)) == "cache_expired"]
    assert len(gone_ids) == 1
    with pytest.raises(CacheExpired, match="evicted"):
        node.store.get(gone_ids[0])
    assert {m.id for m in node.disk.manifests()} == {first.id, second.id, third.id} - set(gone_ids)


def made_anew() -> CompressedCache:
    """Another compression of the document of `make_cache()`: the same id, other bytes."""
    return replace(make_cache(), layers=make_cache(1).layers)


def test_a_cache_that_was_made_anew_elsewhere_takes_the_place_of_its_copies(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.home.delete(manifest.id)
    anew = node.home.put(made_anew())
    assert (anew.id, anew.blob_digest == manifest.blob_digest) == (manifest.id, False)
    require_equal(made_anew(), node.store.get(manifest.id))
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [anew]
    assert (node.ram.nbytes, len(node.folder.names())) == (IN_RAM, 1)


def test_a_cache_that_is_put_anew_takes_the_place_of_its_copies(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.home.delete(manifest.id)
    anew = node.store.put(made_anew())
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [anew]


def test_a_sweep_drops_copies_of_what_was_made_anew(node: Node) -> None:
    manifest = node.store.put(make_cache())
    node.home.delete(manifest.id)
    node.home.put(made_anew())
    node.store.sweep()
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == []


def test_a_put_of_other_bytes_than_the_home_has_leaves_no_copy_of_them(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = node.home.put(make_cache())
    assert node.store.put(made_anew()) == manifest
    assert list(node.ram.manifests()) == list(node.disk.manifests()) == []
    require_equal(make_cache(), node.store.get(manifest.id))
    assert caplog.records == [], "it is no failure"


def test_layers_of_two_caches_are_never_mixed(node: Node) -> None:
    """The copy turns out bad while it is read, and by then the home has the cache made anew."""
    manifest = node.store.put(make_cache())
    flip_in_ram(node, manifest)
    node.disk.drop(manifest.id, "default")
    with node.store.open_cache(manifest.id) as arriving:
        node.home.delete(manifest.id)
        node.home.put(made_anew())
        arriving.read()
        with pytest.raises(CacheCorrupt):
            arriving.cache()
    require_equal(made_anew(), node.store.get(manifest.id))


@pytest.mark.parametrize("hostile", ["", "kvs_", "../../etc/passwd", "kvs_" + "g" * 40, "kvs_" + "0" * 40])
def test_ids_that_are_none_are_not_found(node: Node, hostile: str) -> None:
    calls = (node.store.stat, node.store.get, node.store.delete, node.store.open_blob, node.store.source)
    assert {fate(lambda call=call: call(hostile)) for call in calls} == {"cache_not_found"}
    node.store.touch(hostile)


def test_tenants_do_not_see_each_other_s_copies(node: Node) -> None:
    mine = node.store.put(make_cache(), tenant="me")
    for call in (node.store.stat, node.store.get, node.store.delete):
        assert fate(lambda call=call: call(mine.id, tenant="you")) == "cache_not_found"
    require_equal(make_cache(), node.store.get(mine.id, tenant="me"))


# Sources


def test_a_source_lies_beside_the_copy_on_the_disk(node: Node) -> None:
    manifest = node.store.put(make_cache(), source="the text")
    assert node.disk.source(manifest) == "the text"
    assert node.store.source(manifest.id) == node.home.source(manifest.id) == "the text"
    without = node.store.put(make_cache(1))
    with pytest.raises(SourceNotKept):
        node.store.source(without.id)
    kept = node.store.keep_source(without.id, "more text")
    assert (kept.has_source, node.disk.source(kept)) == (True, "more text")
    for tier in (node.ram, node.disk):
        assert kept in list(tier.manifests())
    assert node.store.delete(manifest.id).bytes_freed == SIZE + len("the text")


def test_a_source_that_is_asked_for_is_copied(node: Node) -> None:
    manifest = node.home.put(make_cache(), source="the text")
    node.store.get(manifest.id)
    assert node.disk.source(manifest) is None
    assert node.store.source(manifest.id) == "the text"
    assert node.disk.source(manifest) == "the text"


def test_a_source_that_was_replaced_elsewhere_is_not_answered_from_the_copy(node: Node) -> None:
    manifest = node.store.put(make_cache(), source="the text")
    node.home.delete(manifest.id)
    node.home.put(make_cache(), source="its second edition")
    assert node.store.source(manifest.id) == "its second edition"


@pytest.mark.parametrize("end", ["evicted", "expired", "corrupt"])
def test_a_cache_that_the_home_lost_is_made_again_from_the_source_there(node: Node, clock: Clock, end: str) -> None:
    ids = TokenIds(tuple(range(make_cache().num_tokens)))
    manifest = node.store.put(make_cache(), source=ids, ttl_s=100)
    if end == "expired":
        clock.time += 101
    else:
        entry = node.home.index.find(manifest.id, "default")
        assert entry is not None
        if end == "evicted":
            assert node.home.index.bury(entry, "evicted", clock.time)
        else:
            assert node.home.index.mark_corrupt(entry, "a bit was flipped")
    assert node.store.original(manifest.id) == (manifest, ids)
    if end != "corrupt":  # else the tiers answer
        with pytest.raises(CacheExpired):
            node.store.stat(manifest.id)
        assert node.store.put(make_cache()).source == manifest.source
    require_equal(make_cache(), node.store.get(manifest.id))
    node.store.delete(manifest.id)
    with pytest.raises(CacheNotFound):
        node.store.original(manifest.id)


def test_a_folder_keeps_no_source_without_its_copy(node: Node) -> None:
    """Nothing would tell another machine's folder of its deletion."""
    secret = "the heliotrope contract"
    manifest = node.store.put(make_cache(), source=secret)
    entry = node.disk.store.index.find(manifest.id, "default")
    assert entry is not None
    assert node.disk.store.index.bury(entry, "evicted", node.disk.store.clock())
    assert any(secret.encode() in data for data in node.folder.contents())
    node.store.sweep()
    node.disk.sweep(None)
    assert not any(secret.encode() in data for data in node.folder.contents())
    assert node.store.source(manifest.id) == secret


# Budgets


def size_of(path: Path) -> int:
    """0 of what another thread has removed meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_no_tier_takes_more_than_its_budget(place: Place, clock: Clock, build: Callable[..., Node]) -> None:
    node = build(open_home(place, clock), ram=3 * IN_RAM + 5, disk=5 * SIZE + 5)
    manifests = [node.store.put(make_cache(seed)) for seed in range(12)]
    most = [0, 0]
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            for index in random.Random(seed).choices(range(12), k=25):
                require_equal(make_cache(index), node.store.get(manifests[index].id))
                files = (node.folder.folder / "blobs").glob("*")
                most[0], most[1] = max(most[0], node.ram.nbytes), max(most[1], sum(map(size_of, files)))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert 2 * IN_RAM < most[0] <= 3 * IN_RAM + 5
    assert 4 * SIZE < most[1] <= 5 * SIZE + 5


def test_what_is_larger_than_a_tier_drives_nothing_out(
    place: Place, clock: Clock, build: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    node = build(open_home(place, clock), ram=2 * IN_RAM, disk=2 * SIZE)
    small = node.store.put(make_cache(0))
    large = node.store.put(make_cache(1, num_tokens=400, lengths=((400, 400), (400, 400))))
    assert large.bytes_stored > 2 * IN_RAM
    for tier in (node.ram, node.disk):
        assert list(tier.manifests()) == [small]
    assert node.store.get(large.id).num_tokens == 400
    assert caplog.records == [], "it is no failure"


def test_the_copy_in_memory_that_was_used_last_stays_longest(node: Node) -> None:
    node.ram.max_bytes = 2 * IN_RAM
    first, second = (node.store.put(make_cache(seed)) for seed in range(2))
    node.store.touch(first.id)
    third = node.store.put(make_cache(2))
    assert {m.id for m in node.ram.manifests()} == {first.id, third.id}
    node.store.get(first.id)
    fourth = node.store.put(make_cache(3))
    assert {m.id for m in node.ram.manifests()} == {first.id, fourth.id}
    assert second.id in {m.id for m in node.disk.manifests()}


# The home cannot be reached


def test_what_is_read_only_works_on_without_the_home(far: Node, server: ValkeyServer, clock: Clock) -> None:
    manifest = far.store.put(make_cache(), ttl_s=60, source="the text")
    elsewhere = far.home.put(make_cache(1))
    server.kill()
    require_equal(make_cache(), far.store.get(manifest.id))
    assert far.store.stat(manifest.id) == manifest
    assert far.store.source(manifest.id) == "the text"
    with far.store.open_blob(manifest.id) as file:
        assert file.file.read() == make_cache().to_bytes()
    refused: list[Callable[[], Any]] = [
        lambda: far.store.get(elsewhere.id),
        lambda: far.store.stat("kvs_" + "0" * 40),
        lambda: far.store.put(make_cache(2)),
        lambda: far.store.delete(manifest.id),
        lambda: far.store.update(manifest.id, name="n"),
        lambda: far.store.keep_source(manifest.id, "n"),
        lambda: far.store.list(),
        lambda: far.store.usage(),
        lambda: far.store.touch(manifest.id),
        lambda: far.store.health(),
        lambda: far.store.check(),
        lambda: far.store.sweep(),
        lambda: list(far.store.scrub()),
        lambda: far.store.requests.unfinished(),
    ]
    assert [fate(call) for call in refused] == ["store_unavailable"] * len(refused)
    require_equal(make_cache(), far.store.get(manifest.id))
    clock.time += 60
    assert fate(lambda: far.store.get(manifest.id)) == "store_unavailable", "it has expired, by all that is known"
    assert far.store.cache_id(make_cache().identity) == manifest.id


@pytest.mark.parametrize("kind", KINDS)
def test_either_tier_stands_in_for_a_home_that_hangs(hasty: Node, server: ValkeyServer, kind: str) -> None:
    manifest = hasty.store.put(make_cache())
    hasty.drop_from_all_but(kind, manifest)
    server.pause()
    for _ in range(3):
        require_equal(make_cache(), hasty.store.get(manifest.id))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        hasty.store.stat(manifest.id)
        times.append(time.perf_counter() - started)
    server.resume()
    print(f"\n{kind} tier, home hung: stat in {median(times) * 1e6:.0f} us")
    assert median(times) < 0.05
    time.sleep(1.2)  # until the server is tried again
    assert hasty.store.update(manifest.id, name="healed").name == "healed"


@pytest.mark.slow
def test_memory_does_not_stand_in_for_long(far: Node, server: ValkeyServer, clock: Clock) -> None:
    """Of what it was not told lately it may have missed the deletion."""
    brief = RamTier(1 << 20, now=clock, recent_s=2)
    store = TieredStore(far.home, [brief])
    manifest = store.put(make_cache())
    time.sleep(2.1)
    store.get(manifest.id)
    server.kill()
    require_equal(make_cache(), store.get(manifest.id))
    time.sleep(2.1)
    assert fate(lambda: store.get(manifest.id)) == "store_unavailable"
    assert RECENT_S == 60.0


def test_a_bad_copy_and_no_home_is_no_proof_of_corruption(far: Node, server: ValkeyServer) -> None:
    manifest = far.store.put(make_cache())
    far.ram.drop(manifest.id, "default")
    far.folder.change(manifest, flip)
    server.kill()
    assert fate(lambda: far.store.get(manifest.id)) == "store_unavailable"


def test_a_bad_copy_in_memory_and_no_home_comes_from_the_disk(far: Node, server: ValkeyServer) -> None:
    manifest = far.store.put(make_cache())
    flip_in_ram(far, manifest)
    server.kill()
    require_equal(make_cache(), far.store.get(manifest.id))


def test_an_outage_makes_no_copy_look_recent(far: Node, server: ValkeyServer) -> None:
    manifest = far.store.put(make_cache())
    far.ram.drop(manifest.id, "default")
    server.kill()
    require_equal(make_cache(), far.store.get(manifest.id))
    assert far.ram.find(manifest.id, "default", recent=True) is None


@pytest.mark.slow
def test_reads_go_on_whatever_happens_to_redis(hasty: Node, server: ValkeyServer, soak: bool) -> None:
    """Under load it hangs, dies, comes back empty and is full: what a tier has is answered, in time and right."""
    manifests = [hasty.store.put(make_cache(seed)) for seed in range(6)]
    over = threading.Event()
    problems: list[str] = []
    times: list[float] = []

    def ask(seed: int) -> None:
        dice = random.Random(seed)
        while not over.is_set():
            index = dice.randrange(6)
            started = time.perf_counter()
            try:
                require_equal(make_cache(index), hasty.store.get(manifests[index].id))
            except Exception as error:
                problems.append(repr(error))
            times.append(time.perf_counter() - started)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10 if soak else 1):
        time.sleep(1.5)
        for happens, for_s in (
            (server.pause, 1.5),
            (server.resume, 1.5),
            (server.kill, 1.5),
            (server.start, 0),
        ):
            happens()
            time.sleep(for_s)
        wait_until(lambda: fate(hasty.store.usage) == "ok", "the home is asked again")
        server.client().config_set("maxmemory", 1)
        time.sleep(0.5)
        assert fate(lambda: hasty.store.put(make_cache(7))) == "storage_full"
        server.client().config_set("maxmemory", 0)
    over.set()
    for thread in threads:
        thread.join()
    print(f"\n{len(times)} reads, the slowest in {max(times):.2f} s")
    assert problems == []
    assert max(times) < 1.5, "once the time that a socket may stand still, and what neighbours take"
    hasty.store.sweep()
    assert {manifest.id for manifest in hasty.home.list().data} == {manifest.id for manifest in manifests}
    assert hasty.store.check() == []


# The home has lost everything


def test_an_empty_home_gets_back_what_is_read(far: Node, server: ValkeyServer) -> None:
    manifest = far.store.put(make_cache(), labels={"a": "b"}, pinned=True, source="the text")
    never = far.home.put(make_cache(1))
    server.kill()
    server.start()
    require_equal(make_cache(), far.store.get(manifest.id))
    require_equal(make_cache(), far.home.get(manifest.id))
    assert far.home.stat(manifest.id) == manifest
    assert far.home.source(manifest.id) == "the text"
    assert fate(lambda: far.store.get(never.id)) == "cache_not_found"


def test_a_source_that_nobody_copied_is_lost_and_not_promised(far: Node, server: ValkeyServer) -> None:
    manifest = far.home.put(make_cache(), source="the text")
    far.store.get(manifest.id)
    server.kill()
    server.start()
    far.store.get(manifest.id)
    assert not far.store.stat(manifest.id).has_source
    with pytest.raises(SourceNotKept):
        far.store.source(manifest.id)
    assert far.store.keep_source(manifest.id, "the text").has_source


def test_what_the_home_forgot_in_its_own_time_is_not_lost(far: Node, clock: Clock) -> None:
    """After a month it does not remember deletions, and is no other home."""
    manifest = far.store.put(make_cache())
    far.home.delete(manifest.id)
    far.home.sweep(clock.time + 31 * 86400)
    assert not far.home.remembers(manifest.id)
    assert fates(far.store, [manifest.id]) == ["cache_not_found"]
    assert (far.ram.nbytes, far.folder.names()) == (0, set())


def test_an_empty_home_gets_back_everything_with_a_sweep(far: Node, server: ValkeyServer, clock: Clock) -> None:
    stays, expired = far.store.put(make_cache(0)), far.store.put(make_cache(1), ttl_s=5)
    server.kill()
    server.start()
    clock.time += 5
    far.store.sweep()
    assert [manifest.id for manifest in far.home.list().data] == [stays.id]
    for tier in (far.ram, far.disk):
        assert tier.noted() == far.home.incarnation
    far.home.delete(stays.id)
    assert fates(far.store, [stays.id, expired.id]) == ["cache_not_found", "cache_not_found"]


def test_a_cache_is_given_back_once(far: Node, server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    """Though several threads notice that it is lost while the first of them is at it."""
    manifest = far.store.put(make_cache())
    server.kill()
    server.start()
    opened = [far.store.open_cache(manifest.id) for _ in range(4)]
    threads = [threading.Thread(target=arriving.read) for arriving in opened]
    with caplog.at_level(logging.INFO, logger="kvshelf.store"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.message for record in caplog.records] == [f"gave cache {manifest.id} back to its home"]


@pytest.mark.parametrize("change", ["update", "delete", "keep_source"])
def test_a_change_to_what_the_home_lost_is_a_change(far: Node, server: ValkeyServer, change: str) -> None:
    manifest = far.store.put(make_cache())
    server.kill()
    server.start()
    if change == "update":
        assert far.store.update(manifest.id, name="n").name == far.home.stat(manifest.id).name == "n"
    elif change == "keep_source":
        far.store.keep_source(manifest.id, "text")
        assert far.home.source(manifest.id) == "text"
    else:
        assert far.store.delete(manifest.id).homes == ("redis", "disk", "ram")
        far.store.sweep()
        assert fates(far.store, [manifest.id]) == ["cache_not_found"]
        assert far.home.usage().caches == 0


def test_what_was_deleted_since_the_loss_stays_deleted(
    far: Node, server: ValkeyServer, clock: Clock, build: Callable[..., Node]
) -> None:
    """Also on a machine that has not compared its copies with the home since."""
    manifest = far.store.put(make_cache())
    other = build(RedisStore.open(server.url + PATIENT, now=clock), machine="b")
    other.store.get(manifest.id)
    server.kill()
    server.start()
    far.store.delete(manifest.id)
    assert other.disk.noted() != far.home.incarnation
    other.store.sweep()
    assert fates(other.store, [manifest.id]) == ["cache_not_found"]
    assert list(other.disk.manifests()) == []
    assert far.home.usage().caches == 0


def test_a_folder_remembers_the_home_over_a_restart(server: ValkeyServer, clock: Clock, tmp_path: Path) -> None:
    """Redis is emptied while nobody runs: ids stay what they were, and the caches go back."""
    folder = tmp_path / "scratch"
    first = RedisStore.open(server.url + PATIENT, now=clock)
    with TieredStore(first, [DiskTier.open(folder, 1 << 20, key=first.key, now=clock)]) as store:
        manifest = store.put(make_cache())
    server.kill()
    server.start()
    again = RedisStore.open(server.url + PATIENT, key=DiskTier.known_key(folder), now=clock)
    with TieredStore(again, [DiskTier.open(folder, 1 << 20, key=again.key, now=clock)]) as store:
        assert store.cache_id(make_cache().identity) == manifest.id
        require_equal(make_cache(), store.get(manifest.id))
        require_equal(make_cache(), again.get(manifest.id))


def test_a_full_home_loses_nothing(server: ValkeyServer, clock: Clock, build: Callable[..., Node]) -> None:
    node = build(RedisStore.open(server.url + PATIENT, now=clock, rules=Rules(quota=Quota(max_caches=2))))
    manifests = [node.store.put(make_cache(seed)) for seed in range(2)]
    server.kill()
    server.start()
    others = [node.home.put(make_cache(seed)) for seed in (2, 3)]
    node.store.sweep()
    assert len(list(node.disk.manifests())) == 2
    assert node.disk.noted() != node.home.incarnation
    assert fates(node.store, [m.id for m in manifests]) == ["ok", "ok"]
    for other in others:
        node.store.delete(other.id)
    node.store.sweep()
    assert node.disk.noted() == node.home.incarnation
    assert [fate(lambda m=m: node.home.get(m.id)) for m in manifests] == ["ok", "ok"]


def test_what_does_not_fit_into_the_home_stays_and_is_tried_again(far: Node, server: ValkeyServer) -> None:
    manifest = far.store.put(make_cache())
    server.kill()
    server.start()
    assert far.home.usage().caches == 0
    server.client().config_set("maxmemory", 1)
    far.store.sweep()
    assert far.disk.noted() != far.home.incarnation
    require_equal(make_cache(), far.store.get(manifest.id))
    server.client().config_set("maxmemory", 0)
    far.store.sweep()
    assert far.disk.noted() == far.home.incarnation
    require_equal(make_cache(), far.home.get(manifest.id))


# Folders, processes, failures


def test_a_folder_of_another_home_is_refused(home: Path, tmp_path: Path) -> None:
    with DiskStore.open(home) as first, DiskStore.open(tmp_path / "other") as second:
        DiskTier.open(tmp_path / "scratch", 1000, key=first.key).close()
        with pytest.raises(StoreUnavailable, match="holds copies for another home"):
            DiskTier.open(tmp_path / "scratch", 1000, key=second.key)


def test_a_home_is_no_tier(home: Path, store: DiskStore) -> None:
    """Its caches would be dropped as copies of what their home does not know."""
    manifest = store.put(make_cache())
    for make in (DiskTier.known_key, lambda folder: DiskTier.open(folder, 1000, key=store.key)):
        with pytest.raises(StoreUnavailable, match="is a home for caches"):
            make(home)
    store.get(manifest.id)


def test_processes_share_a_tier_on_the_disk(
    place: Place, clock: Clock, tmp_path: Path, build: Callable[..., Node]
) -> None:
    """What one process put, another reads from its machine's folder; what one deletes is gone for both."""
    node = build(open_home(place, clock))
    manifests = [node.store.put(make_cache(seed)) for seed in range(2)]
    for manifest in manifests:
        node.ram.drop(manifest.id, "default")
        place.change(manifest, gone)

    def work() -> None:
        other = put_tiers(open_home(place, clock), tmp_path, clock)
        require_equal(make_cache(0), other.store.get(manifests[0].id))
        assert other.store.put(make_cache(2)).id
        other.store.delete(manifests[1].id)

    assert place.start(work).wait() == 0
    third = node.store.cache_id(make_cache(2).identity)
    assert {m.id for m in node.disk.manifests()} == {manifests[0].id, third}
    assert fates(node.store, [manifests[0].id, manifests[1].id, third]) == ["ok", "cache_not_found", "ok"]


def test_a_store_closes_its_parts_whatever_one_of_them_says(tmp_path: Path) -> None:
    closed: list[str] = []

    class Part(RamTier):
        def close(self) -> None:
            closed.append(self.name)
            raise OSError("no")

    home = DiskStore.open(tmp_path / "closing")
    store = TieredStore(home, [Part(1), Part(1)])
    with pytest.raises(OSError, match="no"):
        store.close()
    assert closed == ["ram", "ram"]
    with pytest.raises(StoreUnavailable):
        home.put(make_cache())


def test_a_tier_that_fails_fails_nobody(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    manifest = node.store.put(make_cache(), source="the text")
    (node.folder.folder / "shelf.sqlite3").unlink()
    node.ram.drop(manifest.id, "default")
    with caplog.at_level(logging.WARNING, logger="kvshelf.store"):
        for _ in range(3):
            node.ram.drop(manifest.id, "default")
            require_equal(make_cache(), node.store.get(manifest.id))
        assert node.store.source(manifest.id) == "the text"
        second = node.store.put(make_cache(1), source="more")
        node.store.update(second.id, name="n")
        node.store.touch(second.id)
        node.store.open_blob(second.id).close()
        node.store.sweep()
        list(node.store.scrub())
        assert node.store.delete(second.id).homes[1:] == ("ram",)
    assert [record.message.split(";")[0] for record in caplog.records] == ["the disk tier does not work"]
    (problem,) = node.store.check()
    assert problem.startswith("disk tier: ")


def test_copies_are_sealed_as_the_home_is(place: Place, clock: Clock, build: Callable[..., Node]) -> None:
    keyring = Keyring([bytes(range(32))])
    node = build(open_home(place, clock, rules=Rules(keyring=keyring)), keyring=keyring)
    manifest = node.store.put(make_cache(), source="the text")
    sealed = [path.read_bytes() for path in (node.folder.folder / "blobs").iterdir()]
    assert len(sealed) == 2
    assert not any(b"KVSHELF" in data or b"the text" in data for data in sealed)
    node.ram.drop(manifest.id, "default")
    place.change(manifest, gone)
    require_equal(make_cache(), node.store.get(manifest.id))
    assert node.store.source(manifest.id) == "the text"


# Any order of calls


class Twin:
    """The same calls on a store with tiers and on a home alone."""

    def __init__(self, store: TieredStore, alone: Shelf) -> None:
        self.stores: tuple[Store, Store] = (store, alone)

    def call(self, what: Callable[[Store], Any]) -> None:
        tiered, alone = (self._answer(what, store) for store in self.stores)
        assert tiered == alone

    @staticmethod
    def _answer(what: Callable[[Store], Any], store: Store) -> Any:
        try:
            return what(store)
        except KvshelfError as error:
            return error.code, error.message, error.details


def plain(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(exclude={"timings"})


@pytest.mark.parametrize("seed", range(3))
def test_tiers_never_change_an_answer(
    place: Place, clock: Clock, build: Callable[..., Node], tmp_path: Path, soak: bool, seed: int
) -> None:
    home = open_home(place, clock)
    node = build(home, ram=2 * IN_RAM, disk=4 * SIZE)
    alone = DiskStore.open(tmp_path / "alone", key=home.key, now=clock)
    twin = Twin(node.store, alone)
    dice = random.Random(seed)
    ids = [alone.cache_id(make_cache(number).identity) for number in range(8)]
    calls: dict[str, Callable[[int], Callable[[Store], Any]]] = {
        "put": lambda n: lambda s: plain(s.put(make_cache(n), ttl_s=[None, 3, 9][n % 3], labels={"n": str(n)})),
        "put source": lambda n: lambda s: plain(s.put(make_cache(n), source=f"text {n}")),
        "get": lambda n: lambda s: s.get(ids[n]).to_bytes(),
        "get again": lambda n: lambda s: s.get(ids[n]).to_bytes(),
        "open": lambda n: lambda s: read_all(s, ids[n]),
        "stat": lambda n: lambda s: plain(s.stat(ids[n])),
        "source": lambda n: lambda s: s.source(ids[n]),
        "update": lambda n: lambda s: plain(s.update(ids[n], ttl_s=[None, 4][n % 2], name=f"n{clock.time}")),
        "delete": lambda n: lambda s: s.delete(ids[n]).model_dump(exclude={"homes"}),
        "keep source": lambda n: lambda s: plain(s.keep_source(ids[n], f"text {n}")),
        "touch": lambda n: lambda s: s.touch(ids[n]),
        "sweep": lambda _: lambda s: s.sweep().expired,
        "list": lambda n: lambda s: [plain(m) for m in s.list(labels={"n": str(n)} if n % 2 else None).data],
        "usage": lambda _: lambda s: s.usage(),
    }
    for _ in range(1000 if soak else 60):
        clock.time += dice.choice([0, 0, 0, 1])
        name, number = dice.choice(list(calls)), dice.randrange(8)
        if name in ("get", "get again") and dice.random() < 0.2:
            damage_a_copy(node, dice, ids[number])
        twin.call(calls[name](number))
        assert node.ram.nbytes <= 2 * IN_RAM
    assert node.store.check() == alone.check() == []
    alone.close()


def read_all(store: Store, cache_id: str) -> bytes:
    with store.open_cache(cache_id) as arriving:
        arriving.read()
        return arriving.cache().to_bytes()


def damage_a_copy(node: Node, dice: random.Random, cache_id: str) -> None:
    copies = {m.id: m for m in node.ram.manifests()}
    if cache_id in copies:
        flip_in_ram(node, copies[cache_id])
    copies = {m.id: m for m in node.disk.manifests()}
    if cache_id in copies and dice.random() < 0.5:
        node.folder.change(copies[cache_id], dice.choice([flip, gone]))


# Speed


def test_how_fast_a_hit_is(far: Node, tmp_path: Path) -> None:
    """Printed, not held: neighbours disturb it. A hit in memory must be the fastest, though."""
    cache = make_cache(num_tokens=4096, lengths=((4096,) * 4,) * 8, dims=(32, 32))
    store = TieredStore(far.home, [RamTier(1 << 30), DiskTier.open(tmp_path / "s", 1 << 30, key=far.home.key)])
    ram, disk = store.tiers.all
    manifest = store.put(cache)
    reads: dict[str, Callable[[], CompressedCache]] = {
        "ram": lambda: store.get(manifest.id),
        "disk": lambda: _read(disk.open_cache(manifest)),
        "redis": lambda: far.home.get(manifest.id),
    }
    times: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(5):
        for name, read in reads.items():
            started = time.perf_counter()
            read()
            times[name].append(time.perf_counter() - started)
    mb = manifest.bytes_stored / 1e6
    print(f"\n{mb:.0f} MB: " + ", ".join(f"{name} {median(took) * 1e3:.1f} ms" for name, took in times.items()))
    assert median(times["ram"]) < median(times["redis"])
    assert ram.name == "ram"


def _read(arriving: Any) -> CompressedCache:
    with arriving:
        arriving.read()
        return arriving.cache()  # type: ignore[no-any-return]
