"""What every index promises, in every home."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvshelf.errors import QuotaExceeded, StorageFull, StoreUnavailable
from kvshelf.store import eviction
from kvshelf.store.index import Entry, Filters, Index, Quota
from kvshelf.store.manifest import StoredUsage
from tests.store.index_walk import Walk
from tests.store.indexes import (
    NOW,
    Home,
    cache_id,
    disk_home,
    empty_redis_home,
    entry_of,
    manifest,
    of_no_cache,
    put,
    writing,
)
from tests.store.processes import start_child


@pytest.fixture(params=["disk", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "disk":
        return disk_home(tmp_path / "home")
    return empty_redis_home(request.getfixturevalue("shared_valkey"))


LEASE = 10
"""Ticks of a lease that a test lets run out: what is done before that has two seconds, on a server."""


@pytest.fixture
def index(home: Home) -> Iterator[Index]:
    """Found sound when the test ends."""
    index = home.open()
    yield index
    assert index.problems() == []
    index.close()


def listed(index: Index, query: Filters | None = None, now: float = NOW, before: int | None = None) -> list[str]:
    return [entry.id for entry in index.listing(query or Filters("me"), now, before, 1000)]


def numbers(index: Index, **filters: object) -> list[int]:
    """The caches of "me" that a listing with these filters shows."""
    return [int(id[4:], 16) for id in listed(index, Filters("me", **filters))]  # type: ignore[arg-type]


def abandoned_names(index: Index) -> set[str]:
    return {writing.name for writing in index.abandoned()}


# Publishing


def test_a_cache_is_visible_once_it_is_published(index: Index) -> None:
    write, made = writing(nbytes=1024), manifest(expires_at=NOW + 60.5, pinned=True)
    index.begin(write, Quota())
    assert index.find(made.id, "me") is None
    assert index.usage("me") == StoredUsage(caches=0, bytes=0)
    assert index.publish(write, made, over=None, cost_s=0.1, now=NOW) == (True, None)
    entry = entry_of(index)
    assert entry == Entry(
        seq=entry.seq,
        id=made.id,
        tenant="me",
        state="ready",
        version=0,
        name=write.name,
        nbytes=1024,
        expires_at=NOW + 60.5,
        last_used_at=None,
        uses=0,
        cost_s=0.1,
        priority=eviction.priority(0.0, 1, 0.1, 1024),
        pinned=True,
        ended_at=None,
        problem=None,
        text=made.model_dump_json(),
    )
    assert entry.manifest() == made
    assert index.usage("me") == index.usage(None) == StoredUsage(caches=1, bytes=1024)
    assert listed(index) == [made.id]
    assert index.abandoned() == []


def test_a_cache_is_its_tenants_alone(index: Index) -> None:
    entry = put(index, 1, tenant="me")
    assert index.find(entry.id, "you") is None
    assert listed(index, Filters("you")) == []
    assert index.usage("you") == StoredUsage(caches=0, bytes=0)
    index.touch(entry.id, "you", NOW)
    assert entry_of(index).uses == 0


@pytest.mark.parametrize("tenant", ["a b", "{x}:1", "me\n1 2", "漢", "-", "a" * 512])
def test_a_tenant_has_any_name(index: Index, tenant: str) -> None:
    entry = put(index, 1, tenant=tenant, nbytes=7, expires_at=NOW + 100)
    lost = writing(2, 8, tenant)
    index.begin(lost, Quota())
    assert (entry.tenant, index.usage(tenant)) == (tenant, StoredUsage(caches=1, bytes=7))
    assert index.usage(None) == StoredUsage(caches=1, bytes=7)
    assert index.bury(entry, "deleted", NOW)
    assert index.usage(tenant) == StoredUsage(caches=0, bytes=0)
    assert [(w.tenant, w.nbytes) for w in index.abandoned()] == [(tenant, 7)]


def test_the_first_of_two_writers_wins(index: Index) -> None:
    first = put(index)
    late = writing()
    index.begin(late, Quota())
    assert index.publish(late, manifest(name="late"), over=None, cost_s=1, now=NOW) == (False, first)
    assert entry_of(index) == first
    assert index.knows(late.name)
    index.abandon(late.name)
    assert not index.knows(late.name)


def test_a_cache_whose_blob_was_replaced_since_does_not_give_way(index: Index) -> None:
    seen = put(index)
    repair, second = writing(), writing()
    index.begin(repair, Quota())
    index.begin(second, Quota())
    assert index.swap(seen, manifest(), repair)
    changed = entry_of(index)
    assert index.publish(second, manifest(), over=seen, cost_s=1, now=NOW) == (False, changed)
    assert entry_of(index) == changed
    assert index.publish(second, changed.manifest(), over=changed, cost_s=1, now=NOW) == (True, changed)


def test_bytes_are_replaced_and_all_else_stays(index: Index) -> None:
    first = put(index, nbytes=1010, labels={"a": "1"}, expires_at=NOW + 50, pinned=True)
    put(index, 2)
    index.touch(first.id, "me", NOW)
    first = entry_of(index)
    write = writing(nbytes=1020)
    index.begin(write, Quota())
    assert index.swap(first, first.manifest(), write)
    entry = entry_of(index)
    assert entry == replace(first, name=write.name, nbytes=1020, version=first.version + 1, text=entry.text)
    assert entry.manifest() == first.manifest()
    assert numbers(index, labels={"a": "1"}) == [1]
    assert index.usage("me") == StoredUsage(caches=2, bytes=2020)
    assert abandoned_names(index) == {first.name}
    late = writing()
    index.begin(late, Quota())
    assert not index.swap(first, first.manifest(), late), "it has changed since"
    assert entry_of(index) == entry


def test_a_corrupt_cache_is_ready_again_with_other_bytes(index: Index) -> None:
    made = manifest(labels={"a": "1"})
    first = put(index, nbytes=1000, labels={"a": "1"})
    assert index.mark_corrupt(first, "broken")
    corrupt = entry_of(index)
    write = writing(nbytes=900)
    index.begin(write, Quota())
    assert index.swap(corrupt, made, write)
    entry = entry_of(index)
    assert (entry.state, entry.problem, entry.name) == ("ready", None, write.name)
    assert numbers(index, labels={"a": "1"}) == [1]
    assert index.usage("me") == StoredUsage(caches=1, bytes=900)
    assert abandoned_names(index) == {first.name}
    assert index.problems() == []


@pytest.mark.parametrize("state", ["deleted", "evicted", "expired"])
def test_what_has_ended_is_not_replaced(index: Index, state: Literal["deleted", "evicted", "expired"]) -> None:
    entry = put(index, expires_at=NOW + 1)
    write = writing()
    index.begin(write, Quota())
    assert index.bury(entry, state, NOW + 2)
    assert not index.swap(entry, entry.manifest(), write)
    assert entry_of(index).state == state
    assert index.usage("me") == StoredUsage(caches=0, bytes=0)


def test_a_cache_that_the_writer_knows_to_be_broken_gives_way(index: Index) -> None:
    first = put(index, nbytes=1010, labels={"a": "1"}, expires_at=NOW + 50)
    index.touch(first.id, "me", NOW)
    first = entry_of(index)
    second = writing(nbytes=300)
    index.begin(second, Quota())
    assert index.publish(second, manifest(), over=first, cost_s=1, now=NOW) == (True, first)
    entry = entry_of(index)
    assert (entry.name, entry.expires_at, entry.uses) == (second.name, None, 0)
    assert entry.seq > first.seq
    assert index.usage("me") == StoredUsage(caches=1, bytes=300)
    assert numbers(index, labels={"a": "1"}) == []
    assert index.expired(NOW + 1000, 10) == []
    assert abandoned_names(index) == {first.name}
    assert first.name is not None
    index.abandon(first.name)
    assert not index.knows(first.name)


def test_what_is_not_live_gives_way(index: Index) -> None:
    expired = put(index, 1, expires_at=NOW + 10)
    write = writing(1)
    index.begin(write, Quota())
    assert index.publish(write, manifest(1), over=None, cost_s=1, now=NOW + 10) == (True, expired)

    assert index.mark_corrupt(put(index, 2), "a bit was flipped")
    corrupt = entry_of(index, 2)
    write = writing(2)
    index.begin(write, Quota())
    assert index.publish(write, manifest(2), over=None, cost_s=1, now=NOW) == (True, corrupt)

    assert index.bury(put(index, 3), "deleted", NOW)
    write = writing(3)
    index.begin(write, Quota())
    assert index.publish(write, manifest(3), over=None, cost_s=1, now=NOW) == (True, None)
    assert entry_of(index, 3).live(NOW)
    assert index.usage("me") == StoredUsage(caches=3, bytes=3000)
    assert index.forget(NOW + 1) == 0


# Leases


def test_a_writer_that_was_silent_can_do_nothing(home: Home) -> None:
    index, patient = home.open(LEASE), home.open()
    late, alive, repair = writing(1), writing(2), writing(3)
    entry = put(index, 3)
    for write in (late, alive, repair):
        index.begin(write, Quota())
    patient.renew(alive.name)
    home.wait(LEASE + 1)
    for act in (
        lambda: index.renew(late.name),
        lambda: index.publish(late, manifest(1), over=None, cost_s=1, now=NOW),
        lambda: index.swap(entry, manifest(3), repair),
    ):
        with pytest.raises(StoreUnavailable, match="longer to write than a writer may be silent"):
            act()
    assert index.find(late.cache_id, "me") is None
    assert entry_of(index, 3) == entry
    assert index.publish(alive, manifest(2), over=None, cost_s=1, now=NOW) == (True, None)
    assert sorted(index.abandoned(), key=lambda w: w.cache_id) == [late, repair]
    assert index.problems() == []
    index.close()
    patient.close()


def test_what_is_abandoned_is_known_until_it_is_removed(home: Home) -> None:
    index = home.open(LEASE)
    write = writing(1, 1000)
    index.begin(write, Quota())
    assert index.abandoned() == []
    home.wait(LEASE + 1)
    assert index.abandoned() == index.abandoned() == [write]
    assert index.knows(write.name)
    index.abandon(write.name)
    index.abandon(write.name)
    assert index.abandoned() == []
    assert not index.knows(write.name)
    with pytest.raises(StoreUnavailable):
        index.renew(write.name)
    assert index.problems() == []
    index.close()


# Quotas


def test_a_tenant_keeps_as_many_caches_as_it_may(index: Index) -> None:
    quota = Quota(max_caches=2)
    put(index, 1)
    index.begin(writing(2), quota)
    with pytest.raises(QuotaExceeded, match="2 caches are on the shelf"):
        index.begin(writing(3), quota)
    index.begin(writing(3, tenant="you"), quota)
    index.begin(writing(2), quota)  # only one of the two will stay
    index.begin(writing(1), Quota(max_caches=3))  # as above; what is there will give way
    index.begin(of_no_cache(), quota)


def test_bytes_of_an_item_are_no_cache(index: Index) -> None:
    put(index, 1)
    index.begin(of_no_cache(), Quota())
    index.begin(writing(2), Quota(max_caches=2))
    with pytest.raises(QuotaExceeded, match="2 caches are on the shelf"):
        index.begin(writing(3), Quota(max_caches=2))


def test_a_tenant_keeps_as_many_bytes_as_it_may(index: Index, home: Home) -> None:
    quota = Quota(max_bytes=1000)
    entry = put(index, 1, nbytes=400)
    hurried = home.open(LEASE)
    hurried.begin(writing(2, 500), quota)
    hurried.begin(writing(1, 500), quota)  # what is there will give way
    with pytest.raises(QuotaExceeded):
        hurried.begin(of_no_cache(1, 101), quota)  # they replace nothing
    hurried.begin(writing(4, 1001, tenant="you"), Quota())
    home.wait(LEASE + 1)
    assert len(hurried.abandoned()) == 3, "these hold nothing any more"
    hurried.close()
    index.begin(writing(3, 600), quota)
    with pytest.raises(QuotaExceeded, match="1000 of 1000 bytes are taken and 1 more are needed"):
        index.begin(writing(4, 1), quota)
    assert index.bury(entry, "deleted", NOW)
    index.begin(writing(4, 400), quota)


def test_all_tenants_share_the_budget(index: Index) -> None:
    quota = Quota(budget_bytes=1000)
    put(index, 1, nbytes=400, tenant="you")
    reserved = writing(2, 500)
    index.begin(reserved, quota)
    refused = writing(3, 101)
    with pytest.raises(StorageFull, match="101 bytes do not fit") as full:
        index.begin(refused, quota)
    assert full.value.details == {"fits": True}
    with pytest.raises(StorageFull, match="1001 bytes do not fit") as never:
        index.begin(writing(5, 1001), quota)
    assert never.value.details == {"fits": False}
    assert not index.knows(refused.name)
    index.begin(writing(3, 100), quota)
    index.abandon(reserved.name)
    index.begin(writing(4, 500), quota)
    index.begin(writing(1, 400, tenant="you"), quota)


# Listings


def test_listings_show_live_caches_newest_first(index: Index) -> None:
    for number in (5, 1, 4, 2, 3):
        put(index, number, expires_at=NOW + 10 if number == 4 else None)
    put(index, 6, tenant="you")
    assert numbers(index) == [3, 2, 4, 1, 5]
    assert listed(index, now=NOW + 10) == [cache_id(n) for n in (3, 2, 1, 5)]
    assert index.bury(entry_of(index, 2), "deleted", NOW)
    assert index.mark_corrupt(entry_of(index, 1), "broken")
    assert numbers(index) == [3, 4, 5]
    page = index.listing(Filters("me"), NOW, None, 2)
    assert [entry.id for entry in page] == [cache_id(3), cache_id(4)]
    assert listed(index, before=page[-1].seq) == [cache_id(5)]
    assert listed(index, before=entry_of(index, 5).seq) == []
    assert index.listing(Filters("me"), NOW, None, 1)[0] == entry_of(index, 3)


def test_filters_are_joined_by_and(index: Index) -> None:
    put(index, 1, document_id="doc_a", model="m1", policy="p1", labels={"k": "v", "other": "x"})
    put(index, 2, document_id="doc_a", model="m2", policy="p1", labels={"k": "v"})
    put(index, 3, document_id="doc_b", model="m1", policy="p2", labels={"k": "w"})
    put(index, 4, document_id="doc_a", model="m1", policy="p1", labels={"k": "v"}, tenant="you")
    assert numbers(index, document_id="doc_a") == [2, 1]
    assert numbers(index, model="m1") == [3, 1]
    assert numbers(index, policy="p1") == [2, 1]
    assert numbers(index, labels={"k": "v"}) == [2, 1]
    assert numbers(index, labels={"k": "v", "other": "x"}) == [1]
    assert numbers(index, model="m1", policy="p1", document_id="doc_a", labels={"k": "v"}) == [1]
    assert numbers(index, model="m1", labels={"k": "v", "other": "y"}) == []
    assert numbers(index, document_id="doc_c") == []


def test_a_cache_is_found_by_its_name_and_by_the_beginning_of_its_id(index: Index) -> None:
    near = [0xABCD << 144, 0xABCD << 144 | 1, 0xABCE << 144, 0xABC << 144]
    for number in near:
        put(index, number, name=f"of {number % 2}", model=f"m{number % 2}")
    put(index, 7, name="of 1", tenant="you")
    assert numbers(index, id_prefix="kvs_abcd") == [near[1], near[0]]
    assert numbers(index, id_prefix=cache_id(near[1])[:-1]) == [near[1], near[0]]
    assert numbers(index, id_prefix=cache_id(near[1])) == [near[1]]
    assert numbers(index, id_prefix="kvs_abcd", model="m1") == numbers(index, name="of 1") == [near[1]]
    assert (
        numbers(index, id_prefix="kvs_abcf") == numbers(index, id_prefix="kvs_0000") == numbers(index, name="of") == []
    )
    entry = entry_of(index, near[1])
    assert index.swap(entry, manifest(near[1], name="of 0"))
    assert numbers(index, name="of 1") == []
    assert numbers(index, name="of 0") == near[::-1]


def test_labels_are_told_apart_whatever_is_in_them(index: Index) -> None:
    labels = [{"a": "b:c"}, {"a:b": "c"}, {"a": "b"}, {"a": "b "}, {"a,b": "c"}, {"{a}": "*"}, {"k": ""}, {"漢": "\n"}]
    for number, label in enumerate(labels):
        put(index, number, labels=label)
    for number, label in enumerate(labels):
        assert numbers(index, labels=label) == [number]


def test_a_long_listing_comes_whole(index: Index) -> None:
    for number in range(460):
        put(index, number, model=f"m{number % 2}", labels={"third": str(number % 3)})
    assert numbers(index) == list(range(459, -1, -1))
    wanted = [n for n in range(459, -1, -1) if n % 2 == 0 and n % 3 == 1]
    assert numbers(index, model="m0", labels={"third": "1"}) == wanted
    page = index.listing(Filters("me", model="m0", labels={"third": "1"}), NOW, None, 50)
    assert [entry.id for entry in page] == [cache_id(number) for number in wanted[:50]]
    assert [entry.id for entry in index.stored()] == [cache_id(number) for number in range(460)]


# Changing


def test_a_manifest_is_rewritten(index: Index) -> None:
    entry = put(index, labels={"a": "1", "b": "2"}, expires_at=NOW + 10)
    made = manifest(labels={"b": "3"}, pinned=True, name="renamed")
    assert index.swap(entry, made)
    again = entry_of(index)
    assert again == replace(entry, version=1, expires_at=None, pinned=True, text=made.model_dump_json())
    assert numbers(index, labels={"b": "3"}) == [1]
    assert numbers(index, labels={"a": "1"}) == numbers(index, labels={"b": "2"}) == []
    assert (index.expired(NOW + 100, 10), index.victims(10)) == ([], [])
    assert not index.swap(entry, manifest(name="an older reader's"))
    assert entry_of(index) == again
    assert index.swap(again, manifest(expires_at=NOW + 20))
    assert [e.id for e in index.expired(NOW + 20, 10)] == [e.id for e in index.victims(10)] == [entry.id]
    assert index.usage("me") == StoredUsage(caches=1, bytes=1000)


def test_only_what_is_ready_is_rewritten(index: Index) -> None:
    corrupt, ended, replaced = (put(index, number) for number in (1, 2, 3))
    assert index.mark_corrupt(corrupt, "broken")
    assert index.bury(ended, "deleted", NOW)
    put(index, 3, over=replaced)
    for number, entry in ((1, corrupt), (2, ended), (3, replaced)):
        before = entry_of(index, number)
        assert not index.swap(entry, manifest(number, name="new"))
        assert entry_of(index, number) == before


def test_changes_since_a_place_are_told_in_their_order(index: Index) -> None:
    put(index, 1)
    nothing, place = index.changes("me", None, 10)
    assert nothing == []
    assert index.changes("me", place, 10) == ([], place)
    for number in (2, 3, 4):
        put(index, number)
    put(index, 5, tenant="you")
    index.touch(cache_id(2), "me", NOW)  # a use is none
    relabelled = entry_of(index, 1)
    assert index.swap(relabelled, relabelled.manifest().model_copy(update={"labels": {"a": "b"}}))
    assert index.bury(entry_of(index, 3), "deleted", NOW)
    assert index.mark_corrupt(entry_of(index, 4), "torn")
    changed, after = index.changes("me", place, 10)
    assert [(int(entry.id[4:], 16), entry.state) for entry in changed] == [
        (2, "ready"), (1, "ready"), (3, "deleted"), (4, "corrupt")
    ]  # fmt: skip
    assert changed[1].manifest().labels == {"a": "b"}
    first, between = index.changes("me", place, 1)
    rest, end = index.changes("me", between, 10)
    assert ([*first, *rest], end) == (changed, after)
    put(index, 3)
    assert [entry.state for entry in index.changes("me", after, 10)[0]] == ["ready"]


def test_uses_are_counted_and_lift_the_priority(index: Index) -> None:
    entry = put(index, nbytes=3_000_000, cost_s=0.7)
    assert entry.priority == eviction.priority(0.0, 1, 0.7, 3_000_000)
    index.touch(entry.id, "me", NOW + 1)
    index.touch(entry.id, "me", NOW + 2.25)
    after = entry_of(index)
    assert (after.uses, after.last_used_at) == (2, NOW + 2.25)
    assert after.priority == eviction.priority(0.0, 3, 0.7, 3_000_000)
    assert after.version == 0, "a use is no change of the manifest"
    assert (after.manifest().uses, after.manifest().last_used_at) == (2, NOW + 2.25)
    index.touch(cache_id(9), "me", NOW)
    assert index.find(cache_id(9), "me") is None
    assert index.bury(after, "deleted", NOW)
    index.touch(entry.id, "me", NOW + 3)
    assert entry_of(index).last_used_at != NOW + 3
    assert index.victims(10) == []


def test_a_corrupt_cache_keeps_its_bytes_and_counts_no_more(index: Index) -> None:
    entry = put(index, expires_at=NOW + 10)
    assert index.mark_corrupt(entry, "a bit was flipped")
    after = entry_of(index)
    assert (after.state, after.problem, after.name) == ("corrupt", "a bit was flipped", entry.name)
    assert not index.mark_corrupt(entry, "again")
    assert entry_of(index) == after
    assert index.usage("me") == index.usage(None) == StoredUsage(caches=0, bytes=0)
    assert (listed(index), index.victims(10)) == ([], [])
    assert [e.id for e in index.stored()] == [e.id for e in index.expired(NOW + 10, 10)] == [entry.id]
    assert entry.name is not None
    assert index.knows(entry.name)
    assert not index.swap(after, manifest())
    second = put(index, expires_at=NOW + 10)
    assert not index.mark_corrupt(entry, "of the blob before"), "another blob has taken its place"
    assert entry_of(index) == second


def test_a_tombstone_holds_nothing_of_the_cache(index: Index) -> None:
    entry = put(index, labels={"a": "1"}, name="secret", expires_at=NOW + 100)
    assert index.bury(entry, "deleted", NOW + 3)
    tomb = entry_of(index)
    assert (tomb.state, tomb.ended_at, tomb.seq, tomb.tenant) == ("deleted", NOW + 3, entry.seq, "me")
    assert (tomb.name, tomb.nbytes, tomb.text, tomb.problem, tomb.names()) == (None, 0, None, None, [])
    assert index.usage(None) == StoredUsage(caches=0, bytes=0)
    assert (listed(index), numbers(index, labels={"a": "1"}), index.victims(10)) == ([], [], [])
    assert (index.expired(NOW + 1000, 10), list(index.stored())) == ([], [])
    assert abandoned_names(index) == {entry.name}


def test_what_may_become_a_tombstone(index: Index) -> None:
    entry = put(index, 1, expires_at=NOW + 10)
    assert not index.bury(entry, "expired", NOW + 9.9)
    assert index.bury(entry, "expired", NOW + 10)
    assert not index.bury(entry, "expired", NOW + 10)
    assert not index.bury(entry, "evicted", NOW + 10)
    assert entry_of(index).state == "expired"
    assert index.bury(entry, "deleted", NOW + 11), "deleted is laid over all others"
    assert not index.bury(entry, "deleted", NOW + 12)
    assert (entry_of(index).state, entry_of(index).ended_at) == ("deleted", NOW + 11)

    again = put(index, 1)
    assert not index.bury(entry, "deleted", NOW), "it was put again since"
    assert entry_of(index) == again
    assert not index.bury(again, "expired", NOW + 1e9), "it never expires"
    assert not index.bury(put(index, 2, pinned=True), "evicted", NOW)
    assert index.bury(again, "evicted", NOW)
    assert index.bury(again, "deleted", NOW)

    corrupt = put(index, 3, expires_at=NOW + 10)
    assert index.mark_corrupt(corrupt, "broken")
    assert not index.bury(corrupt, "evicted", NOW)
    assert index.bury(corrupt, "expired", NOW + 10)


def test_what_has_expired_is_found(index: Index) -> None:
    for number, seconds in ((1, 30.0), (2, 10.0), (3, None), (4, 20.0)):
        put(index, number, expires_at=None if seconds is None else NOW + seconds)
    assert {e.id for e in index.expired(NOW + 20, 10)} == {cache_id(2), cache_id(4)}
    assert len(index.expired(NOW + 20, 1)) == 1
    assert {e.state for e in index.expired(NOW + 20, 10)} == {"ready"}


def test_the_cache_whose_loss_costs_least_goes_first(index: Index) -> None:
    put(index, 1, cost_s=1.0)
    put(index, 2, cost_s=5.0)
    put(index, 3, cost_s=0.1, pinned=True)
    put(index, 4, cost_s=0.5)
    put(index, 5, cost_s=0.1, tenant="you")
    assert [e.id for e in index.victims(10)] == [cache_id(n) for n in (5, 4, 1, 2)]
    assert index.victims(1) == [entry_of(index, 5, "you")]
    for _ in range(9):
        index.touch(cache_id(5), "you", NOW)
    index.touch(cache_id(4), "me", NOW)
    assert [e.priority for e in index.victims(10)] == [1000.0, 1000.0, 1000.0, 5000.0]


def test_the_clock_of_eviction_is_the_priority_of_the_last_one_evicted(index: Index, home: Home) -> None:
    old, costly = put(index, 1, cost_s=1.5), put(index, 2, cost_s=4.0)
    assert index.bury(put(index, 3, cost_s=9.0), "deleted", NOW), "which is no eviction"
    assert index.bury(old, "evicted", NOW)
    assert put(index, 4, cost_s=0.1).priority == eviction.priority(old.priority, 1, 0.1, 1000)
    assert index.bury(costly, "evicted", NOW)
    assert index.bury(entry_of(index, 4), "evicted", NOW)
    again = home.open()
    assert put(again, 5, cost_s=0.1).priority == eviction.priority(costly.priority, 1, 0.1, 1000), "it never goes back"
    again.close()


def test_tombstones_are_forgotten_by_age(index: Index) -> None:
    for number, state in ((1, "deleted"), (2, "evicted"), (3, "expired"), (4, "deleted")):
        assert index.bury(put(index, number, expires_at=NOW + 1), state, NOW + 10 * number)  # type: ignore[arg-type]
    put(index, 5)
    assert index.forget(NOW + 40) == 3
    assert [number for number in range(1, 6) if index.find(cache_id(number), "me") is not None] == [4, 5]
    assert index.forget(NOW + 1e6) == 1
    assert index.find(cache_id(5), "me") is not None


def test_a_home_outlives_its_connections(index: Index, home: Home) -> None:
    entry = put(index)
    again = home.open()
    assert again.key == index.key
    assert len(again.key) == 32
    assert entry_of(again) == entry
    again.close()


# Together


def race(home: Home, rounds: int, act: Callable[[Index, int], bool]) -> list[int]:
    """Two processes do the same at the same time, round after round; how many succeeded in each round."""
    barrier = multiprocessing.get_context("fork").Barrier(2)
    successes = multiprocessing.get_context("fork").Array("i", rounds)

    def work() -> None:
        index = home.open()
        for number in range(rounds):
            barrier.wait(60)
            if act(index, number):
                with successes.get_lock():
                    successes[number] += 1

    children = [start_child(work), start_child(work)]
    assert [child.wait() for child in children] == [0, 0]
    return list(successes)


@pytest.mark.usefixtures("index")
def test_two_processes_do_not_share_one_quota(home: Home) -> None:
    def begin(index: Index, number: int) -> bool:
        # Each round has a cache of each process's own, and room for one.
        try:
            index.begin(writing(random.getrandbits(100), 10, tenant=f"t{number}"), Quota(max_bytes=15))
        except QuotaExceeded:
            return False
        return True

    assert race(home, 50, begin) == [1] * 50


def test_two_processes_do_not_publish_one_cache(index: Index, home: Home) -> None:
    def publish(index: Index, number: int) -> bool:
        write = writing(number)
        index.begin(write, Quota())
        published, other = index.publish(write, manifest(number), over=None, cost_s=1, now=NOW)
        assert published or (other is not None and other.name != write.name)
        return published

    assert race(home, 50, publish) == [1] * 50
    assert index.usage("me") == StoredUsage(caches=50, bytes=50_000)


def test_two_processes_do_not_bury_one_cache(index: Index, home: Home) -> None:
    for number in range(50):
        put(index, number)
    assert race(home, 50, lambda index, number: index.bury(entry_of(index, number), "deleted", NOW)) == [1] * 50
    assert index.usage("me") == StoredUsage(caches=0, bytes=0)


# In any order


def test_nothing_drifts_in_any_order_of_operations(index: Index, soak: bool) -> None:
    for seed in range(20 if soak else 3):
        walk = Walk(index, random.Random(seed))
        for step in range(2000 if soak else 400):
            walk.step()
            if soak and step % 20 == 0:
                walk.check()
        walk.check()
        walk.end()
