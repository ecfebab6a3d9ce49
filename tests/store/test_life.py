"""What a shelf does with time and space: rules, quotas, eviction, sources, leases. The same on every home."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import Timings
from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheNotFound,
    InvalidRequest,
    QuotaExceeded,
    StorageFull,
    StoreUnavailable,
)
from kvshelf.store.index import Quota
from kvshelf.store.manifest import StoredUsage
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from tests.store.caches import make_cache, require_equal
from tests.store.places import Clock, DiskPlace, Place, flip, gone

SIZE = len(make_cache().to_bytes())
"""Of every cache of `make_cache` without arguments, whatever its seed."""


def rules(**quota: int) -> Rules:
    return Rules(quota=Quota(**quota))


@pytest.fixture
def shelf(place: Place, clock: Clock) -> Iterator[Shelf]:
    with place.open(now=clock) as shelf:
        yield shelf
        assert shelf.check() == []


# Expiry by rule


def test_a_cache_without_an_expiry_gets_the_default(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=Rules(default_ttl_s=60)) as shelf:
        assert shelf.put(make_cache(0)).expires_at == clock.time + 60
        assert shelf.put(make_cache(1), ttl_s=5).expires_at == clock.time + 5
        first = shelf.put(make_cache(2), ttl_s=500)
        assert shelf.update(first.id, ttl_s=None).expires_at is None


def test_no_cache_is_kept_longer_than_the_maximum(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=Rules(max_ttl_s=60, default_ttl_s=90)) as shelf:
        manifest = shelf.put(make_cache())
        assert manifest.expires_at == clock.time + 60
        too_long: list[dict[str, Any]] = [{"ttl_s": 61}, {"expires_at": clock.time + 61}]
        for fields in too_long:
            with pytest.raises(InvalidRequest, match="kept for 60 s at most") as refusal:
                shelf.put(make_cache(1), **fields)
            assert refusal.value.param in fields
            with pytest.raises(InvalidRequest):
                shelf.expiry(**{"ttl_s": None, "expires_at": None} | fields)
        with pytest.raises(InvalidRequest, match="no expiry"):
            shelf.update(manifest.id, ttl_s=None)
        assert shelf.update(manifest.id, ttl_s=10).expires_at == clock.time + 10
        assert place.names() == {shelf.index.find(manifest.id, "default").name}  # type: ignore[union-attr]


# Renewal by use


def test_each_use_prolongs_a_cache_that_renews(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        made = shelf.put(make_cache(0), ttl_s=100, ttl_renew_s=100, source="its text", source_ttl_s=300)
        fixed = shelf.put(make_cache(1), ttl_s=100)
        for _ in range(3):
            clock.time += 90
            shelf.touch(made.id)
            assert shelf.stat(made.id).expires_at == clock.time + 100
        with pytest.raises(CacheExpired):
            shelf.stat(fixed.id)
        manifest = shelf.stat(made.id)
        assert (manifest.uses, manifest.ttl_renew_s, manifest.revision) == (3, 100, made.revision)
        assert manifest.source == made.source, "a source keeps its own end"
    with place.open(now=clock) as shelf:  # as after a restart
        clock.time += 90
        shelf.touch(made.id)
        require_equal(shelf.get(made.id), make_cache(0))
        clock.time += 99
        assert shelf.sweep().expired == 1, "the fixed one alone"
        assert shelf.stat(made.id).expires_at == clock.time + 1
        clock.time += 1
        shelf.touch(made.id)
        with pytest.raises(CacheExpired):
            shelf.stat(made.id)
        assert shelf.sweep().expired == 1, "a use revives nothing"
        shelf.touch(made.id)
        assert shelf.check() == []


def test_a_use_shortens_no_life_and_uses_close_to_each_other_write_once(shelf: Shelf, clock: Clock) -> None:
    made = shelf.put(make_cache(0), ttl_s=1000, ttl_renew_s=100)
    until = clock.time + 1000
    shelf.touch(made.id)
    assert shelf.stat(made.id).expires_at == until
    shelf.update(made.id, ttl_s=100, ttl_renew_s=100)

    def version() -> int:
        entry = shelf.index.find(made.id, "default")
        assert entry is not None
        return entry.version

    before = version()
    for _ in range(9):
        clock.time += 0.1
        shelf.touch(made.id)
    assert version() == before, "less than a hundredth of its time has passed"
    clock.time += 0.2
    shelf.touch(made.id)
    assert (version(), shelf.stat(made.id).expires_at) == (before + 1, clock.time + 100)
    shelf.update(made.id, expires_at=clock.time + 10, ttl_renew_s=None)
    clock.time += 5
    shelf.touch(made.id)
    assert shelf.stat(made.id).expires_at == clock.time + 5
    shelf.update(made.id, ttl_s=None, ttl_renew_s=100)
    shelf.touch(made.id)
    assert shelf.stat(made.id).expires_at is None


def test_uses_renew_within_the_longest_lifetime(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        made = shelf.put(make_cache(0), ttl_s=100, ttl_renew_s=100)
    with place.open(now=clock, rules=Rules(max_ttl_s=60)) as shelf:
        with pytest.raises(InvalidRequest, match="kept for 60 s at most"):
            shelf.put(make_cache(1), ttl_s=5, ttl_renew_s=100)
        clock.time += 90
        shelf.touch(made.id)
        assert shelf.stat(made.id).expires_at == clock.time + 60


def test_a_renewal_keeps_what_was_changed_at_the_same_time(shelf: Shelf, clock: Clock) -> None:
    made = shelf.put(make_cache(0), ttl_s=100, ttl_renew_s=100)
    ended = threading.Event()

    def use() -> None:
        while not ended.is_set():
            clock.time += 2
            shelf.touch(made.id)

    users = [threading.Thread(target=use) for _ in range(2)]
    for user in users:
        user.start()
    for number in range(20):
        shelf.update(made.id, name=str(number))
        assert shelf.stat(made.id).name == str(number)
    ended.set()
    for user in users:
        user.join()
    manifest = shelf.stat(made.id)
    assert manifest.name == "19"
    assert manifest.expires_at == pytest.approx(clock.time + 100, abs=5)


# Quotas


def test_a_tenant_keeps_as_many_caches_as_it_may(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(max_caches=2)) as shelf:
        first = shelf.put(make_cache(0), tenant="me", ttl_s=10)
        shelf.admit("me")
        shelf.put(make_cache(1), tenant="me")
        for refused in (lambda: shelf.put(make_cache(2), tenant="me"), lambda: shelf.admit("me")):
            with pytest.raises(QuotaExceeded, match="2 caches"):
                refused()
        assert len(place.names()) == 2, "nothing of what was refused stays"
        assert shelf.put(make_cache(0), tenant="me") == first, "what is there already is not refused"
        shelf.put(make_cache(2), tenant="you")
        clock.time += 10
        shelf.admit("me")
        shelf.put(make_cache(2), tenant="me")
        with pytest.raises(CacheExpired):
            shelf.stat(first.id, tenant="me")


def test_a_tenant_keeps_as_many_bytes_as_it_may(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(max_bytes=2 * SIZE + 10)) as shelf:
        shelf.put(make_cache(0), source="ten bytes.")
        kept = shelf.put(make_cache(1))
        for seed, source in ((2, None), (1, "x")):
            with pytest.raises(QuotaExceeded, match=f"{2 * SIZE + 10} of {2 * SIZE + 10} bytes are taken"):
                shelf.put(make_cache(seed), source=source)
        assert len(place.names()) == 3, "nothing of what was refused stays"
        shelf.delete(kept.id)
        assert shelf.usage(tenant="default").bytes == SIZE
        shelf.put(make_cache(2))


def test_a_refusal_says_whether_less_on_the_shelf_would_help(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(max_bytes=SIZE)) as shelf:
        shelf.put(make_cache(0))
        for cache, fits in ((make_cache(1), True), (make_cache(1, num_tokens=512), False)):
            with pytest.raises(QuotaExceeded) as refusal:
                shelf.put(cache)
            assert refusal.value.details["fits"] is fits


def test_a_cache_that_is_replaced_does_not_count_twice(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(max_caches=1, max_bytes=SIZE, budget_bytes=SIZE)) as shelf:
        manifest = shelf.put(make_cache())
        place.change(manifest, gone)
        require_equal(make_cache(), shelf.get(shelf.put(make_cache()).id))


# Eviction


def costly(seconds: float) -> Timings:
    return Timings(prefill_s=seconds)


def test_a_full_home_evicts_what_costs_least_to_make_again(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=3 * SIZE)) as shelf:
        ids = [shelf.put(make_cache(seed), timings=costly(cost)).id for seed, cost in enumerate((3, 1, 2))]
        shelf.put(make_cache(3), timings=costly(5))
        with pytest.raises(CacheExpired, match="was evicted to make room") as gone:
            shelf.get(ids[1])
        assert gone.value.details["reason"] == "evicted"
        shelf.touch(ids[2])
        shelf.touch(ids[2])  # 2 s, asked twice and made once: worth 6 s now
        shelf.put(make_cache(4), timings=costly(5))
        with pytest.raises(CacheExpired):
            shelf.get(ids[0])
        require_equal(make_cache(2), shelf.get(ids[2]))
        assert shelf.usage().bytes == 3 * SIZE
        assert len(place.names()) == 3
        assert shelf.check() == []
        assert shelf.put(make_cache(1)).id == ids[1], "what was evicted can be put again"


def test_what_nobody_asks_grows_old(place: Place, clock: Clock) -> None:
    """A cache that cost much goes in the end, if the others are asked again and again."""
    with place.open(now=clock, rules=rules(budget_bytes=2 * SIZE)) as shelf:
        old = shelf.put(make_cache(0), timings=costly(5)).id
        for seed in range(1, 8):
            shelf.put(make_cache(seed), timings=costly(1))
        with pytest.raises(CacheExpired):
            shelf.stat(old)


def test_a_write_for_which_nothing_goes_is_refused_at_once(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=SIZE)) as shelf:
        shelf.put(make_cache(0), pinned=True)
        begin, begun = shelf.index.begin, []

        def counted(*args: Any) -> None:
            begun.append(args)
            begin(*args)

        monkeypatch.setattr(shelf.index, "begin", counted)
        with pytest.raises(StorageFull, match="budget"):
            shelf.put(make_cache(1))
        assert len(begun) == 1


def test_pinned_caches_and_those_that_are_read_are_not_evicted(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=3 * SIZE)) as shelf:
        pinned = shelf.put(make_cache(0), pinned=True)
        read = shelf.put(make_cache(1), timings=costly(1))
        other = shelf.put(make_cache(2), timings=costly(9))
        with shelf.open_cache(read.id) as arriving:
            last = shelf.put(make_cache(3))
            with pytest.raises(CacheExpired):
                shelf.get(other.id)
            shelf.update(last.id, pinned=True)
            with pytest.raises(StorageFull, match="budget"):
                shelf.put(make_cache(4))
            arriving.read()
            require_equal(make_cache(1), arriving.cache())
        shelf.put(make_cache(4))
        with pytest.raises(CacheExpired):
            shelf.get(read.id)
        for kept in (pinned, last):
            shelf.get(kept.id)


def test_a_promise_is_kept_until_its_time_and_no_longer(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=2 * SIZE)) as shelf:
        until = clock.time + 100
        promised = shelf.put(make_cache(0), guaranteed_until=until, expires_at=until)
        other = shelf.put(make_cache(1), timings=costly(9))
        assert (promised.guaranteed_until, other.guaranteed_until) == (until, None)
        shelf.put(make_cache(2))
        with pytest.raises(CacheExpired):
            shelf.get(other.id)
        shelf.update(shelf.put(make_cache(2)).id, guaranteed_until=until)
        clock.time += 99
        assert shelf.sweep().expired == 0
        with pytest.raises(StorageFull, match="budget"):
            shelf.put(make_cache(3))
        require_equal(make_cache(0), shelf.get(promised.id))
        shelf.update(promised.id, expires_at=None)
        clock.time += 1
        shelf.put(make_cache(3))  # no sweep has come: the first that needs room sees that the time is over
        assert not [cache for cache in shelf.list().data if cache.guaranteed_until]
        assert shelf.check() == []


def test_an_owner_deletes_what_is_promised_and_takes_promises_back(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=2 * SIZE, tenant_promised_bytes=2 * SIZE)) as shelf:
        deleted, freed = (shelf.put(make_cache(seed), guaranteed_until=clock.time + 50).id for seed in range(2))
        with pytest.raises(StorageFull):
            shelf.put(make_cache(2))
        shelf.delete(deleted)
        assert shelf.index.promised("default").bytes == SIZE
        assert shelf.update(freed, guaranteed_until=None).guaranteed_until is None
        assert shelf.index.promised(None).bytes == 0
        for seed in (2, 3):
            shelf.put(make_cache(seed), timings=costly(9))
        with pytest.raises(CacheExpired, match="evicted"):
            shelf.get(freed)


def test_a_promise_beyond_the_budget_is_refused_and_says_what_is_free(place: Place, clock: Clock) -> None:
    """Pins count as promises without an end. What is refused leaves everything as it was."""
    with place.open(now=clock, rules=rules(tenant_promised_bytes=2 * SIZE + 7, promised_bytes=3 * SIZE)) as shelf:
        until = clock.time + 50
        shelf.require_promise(until, None)
        shelf.put(make_cache(0), guaranteed_until=until)
        plain = shelf.put(make_cache(1))
        pinned = shelf.put(make_cache(2), pinned=True)
        message = (
            rf"{2 * SIZE} of {2 * SIZE + 7} bytes .* by this tenant \(tenant_promised_bytes\), 7 are free, .* {SIZE};"
        )
        tries: list[Callable[[], object]] = [
            lambda: shelf.put(make_cache(3), guaranteed_until=until),
            lambda: shelf.put(make_cache(3), pinned=True),
            lambda: shelf.update(plain.id, guaranteed_until=until),
            lambda: shelf.update(plain.id, pinned=True, name="x"),
        ]
        for attempt in tries:
            with pytest.raises(QuotaExceeded, match=message) as refusal:
                attempt()
            assert refusal.value.param == "guaranteed_until"
        assert (len(place.names()), shelf.stat(plain.id)) == (3, plain)
        shelf.update(pinned.id, guaranteed_until=until, name="longer")  # it counts already
        shelf.put(make_cache(0), tenant="you", pinned=True)
        with pytest.raises(
            QuotaExceeded, match=rf"{3 * SIZE} of {3 * SIZE} bytes .* stay \(promised_bytes\), 0 are free"
        ):
            shelf.put(make_cache(1), tenant="you", pinned=True)
        with pytest.raises(QuotaExceeded, match="promised_bytes"):
            shelf.require_promise(until, None, tenant="you")
        clock.time += 50
        shelf.sweep()
        assert shelf.index.promised("default").bytes == SIZE, "of the pin"
        shelf.update(plain.id, pinned=True)
        assert shelf.check() == []


@pytest.mark.parametrize("until", [0, -1, 1e13, float("nan"), True, "soon", "now"])
def test_a_promise_is_a_time_in_the_future_before_the_cache_s_end(place: Place, clock: Clock, until: Any) -> None:
    with place.open(now=clock, rules=Rules(max_ttl_s=100)) as shelf:
        cache = shelf.put(make_cache(0))
        for time in (clock.time if until == "now" else until, clock.time + 101):
            tries: list[Callable[[], object]] = [
                lambda time=time: shelf.put(make_cache(1), guaranteed_until=time),
                lambda time=time: shelf.update(cache.id, guaranteed_until=time),
                lambda time=time: shelf.require_promise(time, cache.expires_at),
            ]
            for attempt in tries:
                with pytest.raises(InvalidRequest) as refusal:
                    attempt()
                assert refusal.value.param == "guaranteed_until"
        shelf.update(cache.id, guaranteed_until=clock.time + 60)
        with pytest.raises(InvalidRequest, match="the cache ends 10 s before"):
            shelf.update(cache.id, ttl_s=50)
        assert shelf.update(cache.id, ttl_s=50, guaranteed_until=None).guaranteed_until is None
        assert len(place.names()) == 1


def test_a_cache_larger_than_the_home_drives_nobody_out(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=rules(budget_bytes=3 * SIZE)) as shelf:
        ids = [shelf.put(make_cache(seed)).id for seed in range(3)]
        with pytest.raises(StorageFull, match="do not fit"):
            shelf.put(make_cache(9, num_tokens=4000, lengths=((2000, 2000),)))
        for cache_id in ids:
            shelf.stat(cache_id)
        assert len(place.names()) == 3


def test_room_that_others_take_is_made_again(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment that a race rarely meets, several times in a row: room was made, and somebody else is faster."""
    budget = rules(budget_bytes=3 * SIZE)
    with place.open(now=clock, rules=budget) as ours, place.open(now=clock, rules=budget) as theirs:
        for seed in range(3):
            ours.put(make_cache(seed))
        begin, faster = ours.index.begin, iter(range(3, 8))

        def late(*args: Any) -> None:
            if (seed := next(faster, None)) is not None:
                theirs.put(make_cache(seed))
            begin(*args)

        monkeypatch.setattr(ours.index, "begin", late)
        mine = ours.put(make_cache(9))
        assert list(faster) == [], "all of them were faster"
        require_equal(make_cache(9), ours.get(mine.id))
        assert ours.usage().bytes == 3 * SIZE
        assert len(place.names()) == 3


def test_what_another_evicted_first_is_room_as_well(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = rules(budget_bytes=SIZE)
    with place.open(now=clock, rules=budget) as ours, place.open(now=clock, rules=budget) as theirs:
        first = ours.put(make_cache(0))
        victims = ours.index.victims

        def listed(limit: int) -> Any:
            entries = victims(limit)
            theirs.delete(first.id)
            monkeypatch.undo()
            return entries

        monkeypatch.setattr(ours.index, "victims", listed)
        second = ours.put(make_cache(1))
        require_equal(make_cache(1), ours.get(second.id))
        with pytest.raises(CacheNotFound):  # evicted, it would raise `CacheExpired`: the other was faster
            ours.stat(first.id)
        assert len(place.names()) == 1


# Registration and leases


def test_a_writer_that_was_silent_for_too_long_cannot_publish(tmp_path: Path) -> None:
    """Its lease has run out; nobody has swept or written the cache meanwhile. On a server, whose clock cannot be set,
    `test_crash.py` stops a real writer."""
    place, clock = DiskPlace(tmp_path / "home"), Clock()

    def late(step: str) -> None:
        clock.time += 61 if step == "verified" else 0

    with place.open(now=clock, on_step=late) as shelf:
        with pytest.raises(StoreUnavailable, match="put it again") as refusal:
            shelf.put(make_cache())
        assert refusal.value.details == {"stored": False}
    with place.open(now=clock) as shelf:
        assert shelf.list().data == ()
        shelf.sweep()
        assert place.names() == set()


@pytest.mark.slow
def test_a_writer_that_works_keeps_its_lease_however_slow_its_medium_is(place: Place) -> None:
    """Each pause is longer than the lease: one where the bytes are made durable, one where they are read back."""

    def slow(step: str) -> None:
        time.sleep(2.2 if step in ("written", "verified") else 0)

    with place.open(write_lease_s=2.0, on_step=slow) as shelf:
        manifest = shelf.put(make_cache())
        require_equal(make_cache(), shelf.get(manifest.id))
        assert shelf.sweep().orphans == 0
    assert "kvshelf-write-lease" not in [thread.name for thread in threading.enumerate()]


def test_a_lease_that_cannot_be_renewed_for_a_while_ends_no_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The index can be used again before the lease has run out; all together takes longer than that."""
    place = DiskPlace(tmp_path / "home")

    def outage(step: str) -> None:
        if step == "synced":
            with closing(sqlite3.connect(place.folder / "shelf.sqlite3")) as other:
                other.execute("BEGIN IMMEDIATE")
                time.sleep(0.9)
            time.sleep(2.5)

    with place.open(write_lease_s=3.0, busy_s=0.05, on_step=outage) as shelf:
        require_equal(make_cache(), shelf.get(shelf.put(make_cache()).id))
    assert "was not renewed" in caplog.text


def test_what_gave_way_is_removed_although_its_remover_died(place: Place) -> None:
    """The index knows the names until the bytes are gone: a server has no folder to look for orphans in."""

    class Died(Exception):
        pass

    def die(step: str) -> None:
        if step == "published":
            raise Died

    with place.open() as shelf:
        manifest = shelf.put(make_cache(), ttl_s=1e-3)
    with place.open(on_step=die) as shelf, pytest.raises(Died):
        shelf.put(make_cache())
    with place.open() as shelf:
        assert len(place.names()) == 2
        assert shelf.sweep().orphans == 1
        assert len(place.names()) == 1
        require_equal(make_cache(), shelf.get(manifest.id))


# Reading through, sealing


def test_a_scrub_reads_everything_and_sets_aside_what_is_corrupt(place: Place) -> None:
    with place.open() as shelf:
        manifests = [shelf.put(make_cache(seed), tenant=f"t{seed % 2}", source="text") for seed in range(4)]
        assert [scrubbed.problem for scrubbed in shelf.scrub()] == [None] * 4
        shelf.blobs.remove(shelf.index.find(manifests[1].id, "t1").name, SIZE)  # type: ignore[union-attr, arg-type]
        problems = {one.id: one.problem for one in shelf.scrub()}
        assert [problems[m.id] is None for m in manifests] == [True, False, True, True]
        with pytest.raises(CacheCorrupt):
            shelf.stat(manifests[1].id, tenant="t1")


def sealed(*keys: int) -> Rules:
    return Rules(keyring=Keyring([bytes([key]) * 32 for key in keys]))


def holds(shelf: Shelf, cache: CompressedCache) -> bool:
    """Whether plain bytes of a cache lie in the home."""
    needle = cache.layers[0].keys.numpy().tobytes()[:64]
    entry = shelf.index.find(shelf.cache_id(cache.identity), "default")
    assert entry is not None
    file = shelf.blobs.open(entry.name or "", entry.nbytes)
    assert file is not None
    with file:
        return needle in (file.read(entry.nbytes) or b"")


def test_a_sealed_shelf_keeps_nothing_in_the_clear(place: Place) -> None:
    cache = make_cache()
    with place.open(rules=sealed(1)) as shelf:
        manifest = shelf.put(cache, source="a secret text")
        require_equal(cache, shelf.get(manifest.id))
        assert shelf.source(manifest.id) == "a secret text"
        with shelf.open_blob(manifest.id) as blob:
            assert blob.file.read() == cache.to_bytes(), "a download is the plain blob"
        assert not holds(shelf, cache)
        assert next(shelf.scrub()).problem is None
        assert shelf.check() == []
    for other in (None, sealed(2)):
        with place.open(rules=other) as shelf, pytest.raises(StoreUnavailable, match="key"):
            shelf.get(manifest.id)
    with place.open(rules=sealed(1)) as shelf:
        require_equal(cache, shelf.get(manifest.id))  # a missing key condemned nothing
        place.change(manifest, flip)
        with pytest.raises(CacheCorrupt):
            shelf.get(manifest.id)


def test_what_is_changed_while_a_cache_is_sealed_anew_stays_changed(place: Place) -> None:
    cache = make_cache()
    changes = iter(
        [
            lambda shelf: shelf.update(manifest.id, name="new", ttl_s=60),
            lambda shelf: shelf.keep_source(manifest.id, "text"),
        ]
    )

    def meanwhile(step: str) -> None:
        if step == "verified" and (change := next(changes, None)) is not None:
            with place.open() as other:
                change(other)

    with place.open() as shelf:
        manifest = shelf.put(cache, labels={"a": "b"})
    with place.open(rules=sealed(1), on_step=meanwhile) as shelf:
        assert [scrubbed.problem for scrubbed in shelf.reseal()] == [None, None], (
            "the cache, and the source that came meanwhile"
        )
        now = shelf.stat(manifest.id)
        assert (now.name, now.labels, now.has_source) == ("new", {"a": "b"}, True)
        assert now.expires_at is not None
        assert shelf.source(manifest.id) == "text"
        require_equal(cache, shelf.get(manifest.id))
        assert list(shelf.reseal()) == []
    with place.open() as shelf, pytest.raises(StoreUnavailable, match="key"):
        shelf.get(manifest.id)


def test_a_cache_that_is_deleted_while_it_is_sealed_anew_stays_deleted(place: Place) -> None:
    def meanwhile(step: str) -> None:
        if step == "verified":
            with place.open() as other, suppress(CacheNotFound):
                other.delete(manifest.id)

    with place.open() as shelf:
        manifest = shelf.put(make_cache(), source="text")
    with place.open(rules=sealed(1), on_step=meanwhile) as shelf:
        assert [scrubbed.problem for scrubbed in shelf.reseal()] == [None]
        with pytest.raises(CacheNotFound):
            shelf.stat(manifest.id)
        assert shelf.usage() == StoredUsage(caches=0, bytes=0)
        assert place.names() == set()


def test_a_cache_that_never_rests_does_not_hold_up_the_others(place: Place) -> None:
    def meanwhile(step: str) -> None:
        if step == "verified":
            with place.open() as other:
                other.update(busy.id, labels={"at": str(time.monotonic())})

    with place.open() as shelf:
        busy, quiet = shelf.put(make_cache(1)), shelf.put(make_cache(2))
        shelf.touch(quiet.id)
        used = shelf.stat(quiet.id)
    with place.open(rules=sealed(1), on_step=meanwhile) as shelf:
        problems = {scrubbed.id: scrubbed.problem for scrubbed in shelf.reseal()}
        assert "changed 10 times" in (problems[busy.id] or "")
        assert problems[quiet.id] is None
        assert shelf.stat(quiet.id) == used, "nothing of it has changed"


def test_keys_are_rotated(place: Place) -> None:
    caches = [make_cache(seed) for seed in range(3)]
    with place.open() as shelf:
        plain = shelf.put(caches[0], source="text", labels={"a": "b"})
        assert holds(shelf, caches[0])
    with place.open(rules=sealed(1)) as shelf:
        old = shelf.put(caches[1])
        assert shelf.get(plain.id) is not None, "what is not sealed yet can be read"
    with place.open(rules=sealed(2, 1)) as shelf:
        new = shelf.put(caches[2])
        assert sorted(scrubbed.id for scrubbed in shelf.reseal()) == sorted([plain.id, plain.id, old.id]), (
            "a source, too"
        )
        assert list(shelf.reseal()) == []
        assert shelf.sweep().orphans == 0
    with place.open(rules=sealed(2)) as shelf:
        for cache, manifest in zip(caches, (plain, old, new), strict=True):
            require_equal(cache, shelf.get(manifest.id))
            assert not holds(shelf, cache)
        assert shelf.stat(plain.id).labels == {"a": "b"}
        assert shelf.source(plain.id) == "text"
        assert len(place.names()) == 4


def test_a_sealed_blob_under_another_id_does_not_open(place: Place) -> None:
    with place.open(rules=sealed(1)) as shelf:
        mine, theirs = shelf.put(make_cache(0)), shelf.put(make_cache(1), tenant="you")
        stolen = bytearray()
        with pytest.MonkeyPatch.context():
            place.change(theirs, lambda data: stolen.extend(data) or data)  # type: ignore[func-returns-value]
        place.change(mine, lambda _: stolen)
        with pytest.raises(CacheCorrupt) as refusal:
            shelf.get(mine.id)
        assert refusal.value.details["reason"] == "sealed_damaged"
