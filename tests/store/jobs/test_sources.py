"""Sources: kept beside a cache, with a place and a time of their own. The same on every home."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheHasChildren,
    CacheNotFound,
    EtagMismatch,
    InvalidRequest,
    QuotaExceeded,
    SourceNotKept,
    StorageFull,
)
from kvshelf.store import housekeeping
from kvshelf.store.index import KEEP_ENDED_S, Quota
from kvshelf.store.jobs import sources
from kvshelf.store.manifest import Manifest, SourceRecord, StoredUsage
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from kvshelf.store.types import TokenIds
from tests.amounts import in_turn
from tests.store.caches import family, make_cache, require_equal
from tests.store.places import Clock, Place, flip, gone

SIZE = len(make_cache().to_bytes())
TOKENS = make_cache().num_tokens
TEXT = "the text of the contract"
BIG = make_cache(7, lengths=((30, 30), (30, 30)))
"""Larger than another cache, and smaller than two."""

IDS = TokenIds(tuple(range(7, 7 + TOKENS)), 3)


@pytest.fixture
def shelf(place: Place, clock: Clock) -> Iterator[Shelf]:
    with place.open(now=clock) as shelf:
        yield shelf
        assert shelf.check() == []


def sealed(*keys: int) -> Rules:
    return Rules(keyring=Keyring([bytes([key]) * 32 for key in keys]))


def kept_of(shelf: Shelf, manifest: Manifest) -> SourceRecord:
    kept = shelf.sources.find(manifest.id, manifest.tenant)
    assert kept is not None
    return kept


def evict(shelf: Shelf, manifest: Manifest) -> None:
    entry = shelf.index.find(manifest.id, manifest.tenant)
    assert entry is not None
    assert shelf.index.bury(entry, "evicted", shelf.clock())


# Kept, in either form


@pytest.mark.slow
def test_a_source_is_kept_beside_its_cache(shelf: Shelf, place: Place) -> None:
    text = "Zwölf Boxkämpfer \0 jagen\r\n" * 1000
    manifest = shelf.put(make_cache(), source=text)
    assert (manifest.has_source, shelf.stat(manifest.id)) == (True, manifest)
    assert manifest.source is not None
    assert (manifest.source.form, manifest.source.nbytes) == ("text", len(text.encode()))
    assert shelf.source(manifest.id) == text
    assert len(place.names()) == 2
    for ask in (shelf.source, shelf.original):
        with pytest.raises(CacheNotFound):
            ask(manifest.id, tenant="you")
    assert shelf.delete(manifest.id).bytes_freed == SIZE + len(text.encode())
    assert place.names() == set()


@pytest.mark.parametrize("largest", [1000, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**32 - 1])
@pytest.mark.parametrize("rules", [Rules(), sealed(1)], ids=["plain", "sealed"])
def test_token_ids_take_two_to_four_bytes_each(place: Place, largest: int, rules: Rules) -> None:
    spread = TokenIds(tuple(largest - 7919 * i % (largest + 1) for i in range(TOKENS)), 3)
    width = 2 if largest < 2**16 else 3 if largest < 2**24 else 4
    with place.open(rules=rules) as shelf:
        manifest = shelf.put(make_cache(), source=spread)
        assert shelf.source(manifest.id) == spread
        assert manifest.source is not None
        assert (manifest.source.form, kept_of(shelf, manifest).width) == ("tokens", width)
        assert manifest.source.nbytes <= width * TOKENS
        repeated = shelf.put(make_cache(1), source=TokenIds((largest,) * TOKENS))
        assert repeated.source is not None
        assert repeated.source.nbytes < width * TOKENS, "compressed, as that is smaller"
        assert shelf.source(repeated.id) == TokenIds((largest,) * TOKENS)


def test_a_source_is_added_to_a_cache_that_is_there(shelf: Shelf, place: Place) -> None:
    first = shelf.put(make_cache(), labels={"a": "b"})
    with pytest.raises(SourceNotKept, match="is not kept"):
        shelf.source(first.id)
    for _ in range(2):
        again = shelf.put(make_cache(), source=TEXT)
        assert again.model_copy(update={"source": None}) == first
    assert shelf.keep_source(first.id, "another text") == again, "a source that is kept stays"
    assert shelf.keep_source(first.id, IDS) == again
    assert shelf.source(first.id) == TEXT
    assert len(place.names()) == 2


def test_a_text_takes_the_place_of_token_ids(shelf: Shelf, place: Place) -> None:
    manifest = shelf.put(make_cache(), source=IDS)
    now = shelf.keep_source(manifest.id, TEXT)
    assert now.source is not None
    assert (now.source.form, shelf.source(manifest.id), shelf.stat(manifest.id)) == ("text", TEXT, now)
    evict(shelf, manifest)
    assert shelf.original(manifest.id) == (now, TEXT)
    shelf.sweep()
    assert place.names() == {kept_of(shelf, manifest).body.name}


@pytest.mark.parametrize(
    "source",
    [
        *("", "half \ud800", 5),
        *(TokenIds(()), TokenIds((1,) * (TOKENS - 1)), TokenIds((1,) * TOKENS, TOKENS + 1)),
        *(TokenIds((-1,) * TOKENS), TokenIds((2**32,) * TOKENS)),
    ],
    ids=str,
)
def test_what_is_no_source_is_refused(shelf: Shelf, place: Place, source: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        shelf.put(make_cache(), source=source)
    assert refusal.value.param == "source"
    assert place.names() == set()


# It outlives its cache


@pytest.mark.parametrize("source", [TEXT, IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("end", ["evicted", "expired", "flipped", "gone"])
def test_a_lost_cache_has_its_source(place: Place, clock: Clock, end: str, source: Any) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(make_cache(), source=source, ttl_s=100, labels={"a": "b"}, name="contract")
        manifest = shelf.update(manifest.id, labels={"a": "c"})
        if end == "evicted":
            evict(shelf, manifest)
        elif end == "expired":
            clock.time += 101
        else:
            place.change(manifest, flip if end == "flipped" else gone)
        for _ in range(2):  # as whoever comes first, and after a sweep
            with pytest.raises(CacheCorrupt if end in ("flipped", "gone") else CacheExpired):
                shelf.get(manifest.id)
            assert shelf.original(manifest.id) == (manifest, source)
            with pytest.raises(CacheNotFound):
                shelf.original(manifest.id, tenant="you")
            shelf.sweep()
        again = shelf.put(make_cache(), source=source, ttl_s=100, labels={"a": "c"})
        assert again.source == manifest.source, "it stayed, and nothing was written for it"
        require_equal(make_cache(), shelf.get(manifest.id))
        assert shelf.original(again.id) == (again, source)
        shelf.delete(manifest.id)
        shelf.sweep()
        assert place.names() == set()


def test_a_cache_that_is_put_again_without_a_source_has_the_old_one(shelf: Shelf) -> None:
    manifest = shelf.put(make_cache(), source=IDS)
    evict(shelf, manifest)
    again = shelf.put(make_cache())
    assert (again.source, shelf.source(again.id)) == (manifest.source, IDS)


def test_what_is_left_is_listed(shelf: Shelf, clock: Clock) -> None:
    """Without a time of its own a source stays for 30 days, and the list says so."""
    made = [shelf.put(make_cache(seed), ttl_s=100, source=TEXT, name=f"number {seed}") for seed in range(3)]
    shelf.put(make_cache(3), source=TEXT, tenant="you")
    assert shelf.list(ended=True).data == ()
    clock.time += 101
    shelf.sweep()
    evicted = shelf.put(make_cache(4), source=TEXT, source_ttl_s=50)
    evict(shelf, evicted)
    assert [manifest.id for manifest in shelf.list(ended=True, limit=2).data] == [evicted.id, made[2].id]
    page = shelf.list(ended=True, limit=2, after=made[2].id)
    assert ([manifest.id for manifest in page.data], page.has_more) == ([made[1].id, made[0].id], False)
    assert page.data[0].source is not None
    assert page.data[0].source.expires_at == clock.time + sources.LEFT_S
    assert [manifest.id for manifest in shelf.list(ended=True, name="number 1").data] == [made[1].id]
    assert shelf.list(ended=True, tenant="you").data == ()
    with pytest.raises(InvalidRequest, match="after"):
        shelf.list(ended=True, after=f"kvs_{'0' * 40}")
    shelf.delete(made[0].id)
    clock.time += sources.LEFT_S
    shelf.sweep()
    assert shelf.list(ended=True).data == ()


def test_a_cache_without_a_source_leaves_none(shelf: Shelf) -> None:
    bare = shelf.put(make_cache())
    evict(shelf, bare)
    with pytest.raises(SourceNotKept):
        shelf.original(bare.id)
    with pytest.raises(CacheNotFound):
        shelf.original(f"kvs_{'0' * 40}")


def test_a_source_has_a_time_of_its_own(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        long = shelf.put(make_cache(0), ttl_s=10, source=TEXT, source_ttl_s=100)
        short = shelf.put(make_cache(1), source=TEXT, source_ttl_s=50)
        assert short.source is not None
        assert short.source.expires_at == clock.time + 50
        clock.time += 60
        assert shelf.original(long.id) == (long, TEXT)
        for ask in (shelf.source, shelf.original):
            with pytest.raises(SourceNotKept):
                ask(short.id)
        assert not shelf.stat(short.id).has_source, "it says so once it was asked"
        assert shelf.sweep().sources == 1
        clock.time += 60
        assert shelf.sweep().sources == 1
        with pytest.raises(SourceNotKept):
            shelf.original(long.id)
        require_equal(make_cache(1), shelf.get(short.id))
        assert len(place.names()) == 1


def test_a_later_end_counts_and_an_earlier_one_does_not(shelf: Shelf, clock: Clock) -> None:
    manifest = shelf.put(make_cache(), source=TEXT, source_ttl_s=50)
    for ttl_s, end in ((20, 50), (80, 80), (None, None), (90, None)):
        now = shelf.keep_source(manifest.id, TEXT, ttl_s=ttl_s)
        assert now.source is not None
        assert now.source.expires_at == (None if end is None else clock.time + end)
        assert shelf.original(manifest.id) == (shelf.stat(manifest.id), TEXT) == (now, TEXT)


def test_a_text_that_takes_the_place_of_token_ids_ends_no_sooner(shelf: Shelf, clock: Clock) -> None:
    manifest = shelf.put(make_cache(), source=IDS, source_ttl_s=50)
    now = shelf.keep_source(manifest.id, TEXT, ttl_s=20)
    assert now.source is not None
    assert (now.source.form, now.source.expires_at) == ("text", clock.time + 50)


def test_the_rules_of_a_shelf_hold_for_sources(place: Place, clock: Clock) -> None:
    with place.open(now=clock, rules=Rules(default_ttl_s=60, max_ttl_s=100)) as shelf:
        manifest = shelf.put(make_cache(), ttl_s=10, source=TEXT)
        assert manifest.source is not None
        assert manifest.source.expires_at == clock.time + 60
        with pytest.raises(InvalidRequest, match="100 s at most"):
            shelf.put(make_cache(1), source=TEXT, source_ttl_s=101)


def test_a_source_outlives_the_tombstone_of_its_cache(shelf: Shelf, place: Place, clock: Clock) -> None:
    manifest = shelf.put(make_cache(), ttl_s=10, source=TEXT, source_ttl_s=2 * KEEP_ENDED_S)
    clock.time += 20
    shelf.sweep()
    clock.time += KEEP_ENDED_S + 1
    shelf.sweep()
    assert shelf.index.find(manifest.id, "default") is None
    with pytest.raises(CacheExpired):
        shelf.stat(manifest.id)
    with pytest.raises(CacheNotFound):
        shelf.stat(manifest.id, tenant="you")
    assert shelf.original(manifest.id) == (manifest, TEXT)
    with pytest.raises(CacheNotFound):
        shelf.delete(manifest.id, tenant="you")
    assert shelf.delete(manifest.id).bytes_freed == len(TEXT)
    with pytest.raises(CacheNotFound):
        shelf.delete(manifest.id)
    assert place.names() == set()


# Deletion


@pytest.mark.parametrize("end", ["live", "evicted", "expired", "corrupt"])
@pytest.mark.parametrize("source", [TEXT, IDS], ids=["text", "tokens"])
def test_a_deletion_leaves_no_word(place: Place, clock: Clock, end: str, source: Any) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(make_cache(), source=source, ttl_s=100, name="the heliotrope contract")
        packed = source.encode() if isinstance(source, str) else sources.packed_source(source, TOKENS)[0]
        words = [packed, b"heliotrope"]
        assert all(any(word in data for data in place.contents()) for word in words)
        if end == "evicted":
            evict(shelf, manifest)
        elif end == "expired":
            clock.time += 101
            shelf.sweep()
        elif end == "corrupt":
            place.change(manifest, flip)
            with pytest.raises(CacheCorrupt):
                shelf.get(manifest.id)
        with pytest.raises(CacheNotFound):
            shelf.delete(manifest.id, tenant="you")
        shelf.delete(manifest.id)
        with pytest.raises(CacheNotFound):
            shelf.original(manifest.id)
        shelf.sweep()
        assert place.names() == set()
    for word in words:
        assert not any(word in data for data in place.contents())


def test_a_cascade_takes_the_sources_along(shelf: Shelf, place: Place) -> None:
    caches = family(3)
    made: list[Manifest] = []
    for cache in caches:
        parent_id = made[-1].id if made else None
        made.append(shelf.put(cache, source=TEXT, parent_id=parent_id))
    with pytest.raises(CacheHasChildren):
        shelf.delete(made[0].id)
    assert shelf.source(made[0].id) == TEXT, "a deletion that is refused takes nothing"
    freed = shelf.usage().bytes + 3 * len(TEXT)
    assert shelf.delete(made[0].id, cascade=True).bytes_freed == freed
    assert place.names() == set()


def test_a_deletion_that_is_refused_leaves_the_source(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = shelf.put(make_cache(), source=TEXT)
    bury = shelf.index.bury

    def late(*args: Any) -> bool:
        monkeypatch.setattr(shelf.index, "bury", bury)
        shelf.update(seen.id, name="changed meanwhile")
        return bury(*args)

    monkeypatch.setattr(shelf.index, "bury", late)
    with pytest.raises(EtagMismatch):
        shelf.delete(seen.id, if_revision=[seen.revision])
    assert shelf.source(seen.id) == TEXT
    evict(shelf, seen)
    assert shelf.original(seen.id)[0].name == "changed meanwhile"


# Space


def test_sources_count_for_a_tenant_as_files_do(place: Place, clock: Clock) -> None:
    rules = Rules(quota=Quota(max_bytes=SIZE + len(TEXT), max_caches=1))
    with place.open(now=clock, rules=rules) as shelf:
        first = shelf.put(make_cache(0), ttl_s=10, source=TEXT)
        shelf.put(make_cache(1), tenant="you", source=TEXT)
        clock.time += 20
        with pytest.raises(QuotaExceeded, match="bytes are taken"):
            shelf.put(BIG)
        second = shelf.put(make_cache(2))
        with pytest.raises(QuotaExceeded):
            shelf.keep_source(second.id, TEXT)
        assert not shelf.stat(second.id).has_source
        shelf.delete(first.id)
        assert shelf.keep_source(second.id, TEXT).has_source
        assert shelf.usage(tenant="default") == StoredUsage(caches=1, bytes=SIZE)


def test_caches_are_evicted_before_sources(place: Place, clock: Clock) -> None:
    rules = Rules(quota=Quota(budget_bytes=len(BIG.to_bytes()) + len(TEXT)))
    with place.open(now=clock, rules=rules) as shelf:
        made = [shelf.put(make_cache(seed), source=TEXT) for seed in range(2)]
        with pytest.raises(CacheExpired) as refusal:
            shelf.stat(made[0].id)
        assert refusal.value.details["reason"] == "evicted"
        assert [shelf.original(manifest.id)[1] for manifest in made] == [TEXT] * 2
        shelf.put(BIG)
        with pytest.raises(CacheExpired):
            shelf.stat(made[1].id)
        with pytest.raises(SourceNotKept):
            shelf.original(made[0].id)
        assert shelf.original(made[1].id)[1] == TEXT, "the oldest goes first, and no more than must"


def test_a_cache_whose_source_was_taken_is_told(place: Place, clock: Clock) -> None:
    rules = Rules(quota=Quota(budget_bytes=2 * SIZE))
    with place.open(now=clock, rules=rules) as shelf:
        pinned = shelf.put(make_cache(0), source=TEXT, pinned=True)
        shelf.put(make_cache(1), pinned=True)
        assert not shelf.stat(pinned.id).has_source
        with pytest.raises(SourceNotKept):
            shelf.source(pinned.id)
        with pytest.raises(StorageFull):
            shelf.put(make_cache(2))
        require_equal(make_cache(0), shelf.get(pinned.id))


# Damage, keys


@pytest.mark.parametrize("source", [TEXT, IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("damage", ["gone", "other", "short"])
def test_a_damaged_source_is_dropped_and_its_cache_stays(shelf: Shelf, place: Place, source: Any, damage: str) -> None:
    manifest = shelf.put(make_cache(), source=source)
    body = kept_of(shelf, manifest).body
    data = {"gone": None, "other": b"x" * body.stored_bytes, "short": b"x"}[damage]
    shelf.blobs.remove(body.name, body.stored_bytes)
    if data is not None:
        shelf.blobs.write(body.name, [memoryview(data)], len(data), on_step=lambda _: None)
    assert [scrubbed.problem is None for scrubbed in shelf.scrub()] == [True, False]
    for ask in (shelf.source, shelf.original):
        with pytest.raises(SourceNotKept):
            ask(manifest.id)
    assert not shelf.stat(manifest.id).has_source
    require_equal(make_cache(), shelf.get(manifest.id))
    assert shelf.keep_source(manifest.id, source).has_source
    assert shelf.source(manifest.id) == source
    shelf.sweep()
    assert len(place.names()) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"width": 4}, {"width": 5}, {"compressed": True, "width": 2}, {"compressed": False}],
    ids=str,
)
def test_token_ids_that_are_not_what_was_written_are_refused(shelf: Shelf, wrong: dict[str, Any]) -> None:
    spread = TokenIds(tuple(7919 * i % 60_000 for i in range(TOKENS)))
    ids = TokenIds((5,) * TOKENS) if wrong == {"compressed": False} else spread
    manifest = shelf.put(make_cache(), source=ids)
    item = shelf.index.jobs.find(sources.source_id(manifest.id), "default")
    assert item is not None
    text = kept_of(shelf, manifest).model_copy(update=wrong).model_dump_json()
    assert shelf.index.jobs.change(replace(item, text=text)) is not None
    with pytest.raises(SourceNotKept) as refusal:
        shelf.original(manifest.id)
    assert refusal.value.details["reason"] == "source_malformed"


def test_sources_of_lost_caches_are_sealed_anew(place: Place) -> None:
    with place.open(rules=sealed(1)) as shelf:
        manifest = shelf.put(make_cache(), source=TEXT)
        assert not any(TEXT.encode() in data for data in place.contents())
        evict(shelf, manifest)
    with place.open(rules=sealed(2, 1)) as shelf:
        assert [(scrubbed.id, scrubbed.problem) for scrubbed in shelf.reseal()] == [(manifest.id, None)]
        assert list(shelf.reseal()) == []
        shelf.sweep()
        assert len(place.names()) == 1
    with place.open(rules=sealed(2)) as shelf:
        assert shelf.original(manifest.id) == (manifest, TEXT)


# kill -9

STEPS = ("created", "written", "synced", "verified")


@in_turn({"step": [*STEPS, "published", "replaced"], "nth": [1, 2]})
def test_killed_while_a_cache_is_put_with_its_source(place: Place, clock: Clock, step: str, nth: int) -> None:
    left = nth if step in STEPS else 1

    def kill(name: str) -> None:
        nonlocal left
        left -= name == step
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        with place.open(now=clock, on_step=kill) as store:
            store.put(make_cache(), source=TEXT)

    assert place.start(child).wait() == -signal.SIGKILL
    place.let_leases_run_out(clock)
    with place.open(now=clock) as shelf:
        cache_id = shelf.cache_id(make_cache().identity)
        shelf.sweep()
        if step in STEPS:
            for ask in (shelf.stat, shelf.original):
                with pytest.raises(CacheNotFound):
                    ask(cache_id)
        else:
            require_equal(make_cache(), shelf.get(cache_id))
        made = shelf.put(make_cache(), source=TEXT)
        assert shelf.original(cache_id) == (made, TEXT)
        clock.time += sources.UNCLAIMED_S + 1
        shelf.sweep()
        assert shelf.original(cache_id) == (made, TEXT), "it was claimed"
        assert len(place.names()) == 2
        assert shelf.check() == []


def test_a_source_whose_writer_died_before_it_claimed_it_is_its_cache_s(place: Place, clock: Clock) -> None:
    def child() -> None:
        with place.open(now=clock) as store:
            store.sources.claim = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
            store.put(make_cache(), source=TEXT)

    assert place.start(child).wait() == -signal.SIGKILL
    with place.open(now=clock) as shelf:
        cache_id = shelf.cache_id(make_cache().identity)
        require_equal(make_cache(), shelf.get(cache_id))
        for _ in range(3):
            clock.time += sources.UNCLAIMED_S + 1
            assert shelf.sweep().sources == 0
            assert shelf.stat(cache_id).has_source
            assert shelf.source(cache_id) == TEXT


@pytest.mark.parametrize("at", ["bury", "end_owned", "remove"])
def test_killed_while_a_cache_and_its_source_are_deleted(place: Place, clock: Clock, at: str) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(make_cache(), source=TEXT)

    def child() -> None:
        with place.open(now=clock) as store:
            target = {"bury": store.index, "end_owned": store.bodies, "remove": store.bodies}[at]
            act = getattr(target, at)

            def then_die(*args: Any, **kwargs: Any) -> None:
                act(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(target, at, then_die)
            store.delete(manifest.id)

    assert place.start(child).wait() == -signal.SIGKILL
    with place.open(now=clock) as shelf:
        with pytest.raises((SourceNotKept, CacheNotFound)):
            shelf.original(manifest.id)
        with pytest.raises(CacheNotFound):
            shelf.get(manifest.id)
        shelf.sweep()
        assert place.names() == set()
        assert shelf.check() == []
    assert not any(TEXT.encode() in data for data in place.contents())


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_cache_says_that_the_time_of_its_source_is_over(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(make_cache(1), source=TEXT, source_ttl_s=60)
        clock.time += 61
        assert shelf.sweep().sources == 1
        assert not shelf.stat(manifest.id).has_source


@pytest.mark.parametrize("damaged", [False, True])
def test_a_process_that_dies_while_it_removes_a_source_leaves_no_cache_that_names_it(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(make_cache(1), source=TEXT)
        monkeypatch.setattr(shelf.index.jobs, "remove", killed)
        kept = shelf.sources.find(manifest.id, "default")
        assert kept is not None
        remove = partial(housekeeping.drop_sources, shelf.index, shelf.blobs, 10)
        if damaged:
            shelf.blobs.remove(kept.body.name, kept.body.stored_bytes)
            remove = partial(shelf.source, manifest.id)
        with pytest.raises(KeyboardInterrupt):
            remove()
        assert not shelf.stat(manifest.id).has_source
