"""Changes under the condition that a cache is as its caller has seen it. They hold across processes and front ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Barrier
from typing import Any

import pytest

from kvshelf.errors import CacheCorrupt, CacheExpired, CacheNotFound, EtagMismatch
from kvshelf.store.shelf import Shelf
from tests.store.caches import make_cache
from tests.store.places import Clock, Place, RedisPlace, flip
from tests.store.redis.servers import ValkeyServer

CHANGES: list[dict[str, Any]] = [{"name": "b"}, {"labels": {"a": "b"}}, {"pinned": True}, {"ttl_s": 60.0}]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_what_has_changed_since_is_left_as_it_is(place: Place, change: dict[str, Any]) -> None:
    with place.open() as ours, place.open() as theirs:
        seen = ours.put(make_cache())
        ours.touch(seen.id)
        assert ours.stat(seen.id).revision == seen.revision, "a use is no change"
        now = theirs.update(seen.id, **change)
        assert now.revision != seen.revision
        for stale in ([seen.revision], ["other", seen.revision], []):
            with pytest.raises(EtagMismatch, match=now.revision) as refusal:
                ours.update(seen.id, name="late", if_revision=stale)
            assert refusal.value.param == "if-match"
            with pytest.raises(EtagMismatch):
                ours.delete(seen.id, if_revision=stale)
        assert ours.stat(seen.id) == theirs.stat(seen.id)
        again = ours.update(seen.id, name="in time", if_revision=["other", now.revision])
        assert theirs.delete(seen.id, if_revision=[again.revision]).id == seen.id


def test_a_source_that_was_added_is_a_change(place: Place) -> None:
    with place.open() as shelf:
        seen = shelf.put(make_cache())
        shelf.keep_source(seen.id, "its text")
        with pytest.raises(EtagMismatch):
            shelf.delete(seen.id, if_revision=[seen.revision])


def test_a_cache_that_ended_is_not_changed_and_says_how_it_ended(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        expired = shelf.put(make_cache(0), ttl_s=5)
        damaged = shelf.put(make_cache(1))
        clock.time += 6
        place.change(damaged, flip)
        with pytest.raises(CacheCorrupt):
            shelf.get(damaged.id)
        for manifest, error in ((expired, CacheExpired), (damaged, CacheCorrupt)):
            with pytest.raises(error):
                shelf.delete(manifest.id, if_revision=[manifest.revision])
            shelf.delete(manifest.id)
            with pytest.raises(CacheNotFound):
                shelf.delete(manifest.id, if_revision=[manifest.revision])


def test_of_many_who_saw_the_same_one_succeeds(place: Place, soak: bool) -> None:
    """Each has a connection of its own, as front ends have. Half of them delete."""
    rounds, callers = 300 if soak else 12, 6
    with ExitStack() as stack:
        shelves = [stack.enter_context(place.open()) for _ in range(callers)]
        threads = stack.enter_context(ThreadPoolExecutor(callers))
        won: Counter[str] = Counter()
        for number in range(rounds):
            seen = shelves[0].put(make_cache(number % 3), name=str(number))
            barrier = Barrier(callers)
            calls = [
                partial(shelf.delete, seen.id, if_revision=[seen.revision])
                if n % 2
                else partial(shelf.update, seen.id, name=f"by {n}", if_revision=[seen.revision])
                for n, shelf in enumerate(shelves)
            ]
            outcomes = Counter(threads.map(partial(_outcome, barrier), calls))
            assert outcomes["deleted"] + outcomes["changed"] == 1, outcomes
            won += outcomes
            if outcomes["changed"]:
                shelves[0].delete(seen.id)
        assert shelves[0].check() == []
    print(dict(won))


def _outcome(barrier: Barrier, call: Callable[[], Any]) -> str:
    barrier.wait()
    try:
        return "changed" if hasattr(call(), "revision") else "deleted"
    except (EtagMismatch, CacheNotFound) as error:
        return error.code


def test_a_change_between_looking_and_deleting_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment that a race rarely meets: what was seen is compared, then it changes, then it is to be deleted."""
    with place.open() as ours, place.open() as theirs:
        seen = ours.put(make_cache())
        _before_burying(ours, lambda: theirs.update(seen.id, name="changed meanwhile"), monkeypatch)
        with pytest.raises(EtagMismatch):
            ours.delete(seen.id, if_revision=[seen.revision])
        assert theirs.stat(seen.id).name == "changed meanwhile"
        assert ours.delete(seen.id).id == seen.id, "without a condition it is deleted as it is"


def test_bytes_outlive_the_manifest_of_whoever_extends_it_while_another_shortens_it(
    shared_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one goes on when the cache is to be kept for long again."""
    place = RedisPlace(shared_valkey)
    with place.open() as ours, place.open() as theirs:
        seen = ours.put(make_cache(), ttl_s=100, source="its text")
        rewrite = theirs.index.swap

        def overtaken(*args: Any, **more: Any) -> bool:
            changed = rewrite(*args, **more)
            ours.update(seen.id, ttl_s=5000)
            return changed

        monkeypatch.setattr(theirs.index, "swap", overtaken)
        theirs.update(seen.id, ttl_s=30)
        assert ours.stat(seen.id).expires_at == pytest.approx(time.time() + 5000, abs=60)
        client = shared_valkey.client()
        chunks = client.keys(f"{{{place.prefix}/*}}:0")
        assert len(chunks) == 2, "the blob and the source"
        lives = sorted(client.ttl(key) for key in chunks)
        assert lives[0] == -1, "a source ends with a sweep"
        assert lives[1] > 4000


def _before_burying(shelf: Shelf, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bury = shelf.index.bury

    def late(*args: Any) -> bool:
        monkeypatch.setattr(shelf.index, "bury", bury)
        call()
        return bury(*args)

    monkeypatch.setattr(shelf.index, "bury", late)
