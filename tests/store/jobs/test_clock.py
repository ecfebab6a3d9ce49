"""What expires is compared with the home's clock, and a clock that jumps deletes nothing for good."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvshelf.errors import CacheExpired, CacheHasChildren, QuotaExceeded
from kvshelf.store.index import Quota
from kvshelf.store.jobs.clock import Doubt
from kvshelf.store.redis import address
from kvshelf.store.redis.clock import RedisClock
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf
from tests.amounts import few
from tests.store.caches import make_cache, require_equal
from tests.store.places import Clock, Place, RedisPlace
from tests.store.redis.servers import ValkeyServer

HOUR_S = 3600.0
DAY_S = 86400.0


class Machine:
    """A wall clock and the time that goes by, which a test sets."""

    def __init__(self) -> None:
        self.wall, self.uptime = Clock(), Clock()

    def passes(self, seconds: float) -> None:
        self.wall.time += seconds
        self.uptime.time += seconds

    def jumps(self, seconds: float) -> None:
        self.wall.time += seconds

    def open(self, place: Place) -> Shelf:
        return place.open(now=self.wall, elapsed=self.uptime)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def redis_place(shared_valkey: ValkeyServer) -> RedisPlace:
    return RedisPlace(shared_valkey)


def readable(shelf: Shelf, cache_id: str) -> bool:
    try:
        shelf.get(cache_id)
    except CacheExpired:
        return False
    return True


def test_a_jump_hides_what_expired_and_deletes_nothing_until_it_has_passed(place: Place, machine: Machine) -> None:
    cache = make_cache(1)
    with machine.open(place) as shelf:
        kept = shelf.put(cache, ttl_s=DAY_S, source="the text of the document", source_ttl_s=2 * DAY_S)
        shelf.sweep()
        machine.passes(60)
        shelf.sweep()
        machine.jumps(3 * DAY_S)
        for _ in range(3):
            assert shelf.sweep().expired == shelf.sweep().sources == 0
            assert not readable(shelf, kept.id)
            machine.passes(60)
        machine.jumps(-3 * DAY_S)  # somebody set it right
        require_equal(cache, shelf.get(kept.id))
        assert shelf.sweep().expired == 0
        machine.passes(DAY_S)
        assert shelf.sweep().expired == 1, "and nothing is doubted any more"


def test_a_clock_that_stays_is_believed_when_its_jump_has_passed(place: Place, machine: Machine) -> None:
    with machine.open(place) as shelf:
        shelf.put(make_cache(1), ttl_s=DAY_S)
        late = shelf.put(make_cache(2), ttl_s=10 * DAY_S)
        shelf.sweep()
        machine.jumps(2 * DAY_S)
        assert shelf.sweep().expired == 0
        machine.passes(DAY_S - 60)
        assert shelf.sweep().expired == 0
    with machine.open(place) as shelf:  # the doubt outlives the process
        machine.passes(30)
        assert shelf.sweep().expired == 0
        machine.passes(60)
        assert shelf.sweep().expired == 1, "its day is over by any clock"
        machine.passes(DAY_S)
        shelf.sweep()
        assert readable(shelf, late.id)
        machine.passes(7 * DAY_S)
        assert shelf.sweep().expired == 1


def test_time_that_passed_in_sleep_is_no_jump(place: Place, machine: Machine) -> None:
    with machine.open(place) as shelf:
        shelf.put(make_cache(1), ttl_s=HOUR_S)
        shelf.sweep()
        machine.passes(3 * DAY_S)  # the uptime goes on while a machine sleeps
        assert shelf.sweep().expired == 1


def test_a_clock_that_was_set_back_deletes_nothing_when_it_returns(place: Place, machine: Machine) -> None:
    with machine.open(place) as shelf:
        kept = shelf.put(make_cache(1), ttl_s=DAY_S)
        shelf.sweep()
        machine.jumps(-2 * DAY_S)
        assert shelf.sweep().expired == 0
        machine.passes(HOUR_S)
        assert shelf.sweep().expired == 0
        machine.jumps(2 * DAY_S)
        assert shelf.sweep().expired == 0
        assert readable(shelf, kept.id)
        machine.passes(DAY_S - HOUR_S + 1)
        assert shelf.sweep().expired == 1


def test_a_machine_that_was_off_is_doubted_for_as_long(place: Place, machine: Machine) -> None:
    """Nobody knows whether the clock is right after a start: the battery of a hardware clock may have died."""
    with machine.open(place) as shelf:
        kept = shelf.put(make_cache(1), ttl_s=HOUR_S)
        shelf.sweep()
        machine.jumps(DAY_S)
        doubt = Doubt(shelf.index.jobs, machine.wall, machine.uptime, boot="the next start")
        assert doubt.deadline() == machine.wall() - DAY_S
        machine.passes(DAY_S)
        assert doubt.deadline() == machine.wall()
        assert not readable(shelf, kept.id)


def test_quotas_and_deletions_believe_no_jump(place: Place, machine: Machine) -> None:
    rules = Rules(quota=Quota(max_caches=2))
    with place.open(now=machine.wall, elapsed=machine.uptime, rules=rules) as shelf:
        parent = shelf.put(make_cache(1))
        shelf.put(make_cache(2), ttl_s=DAY_S, parent_id=parent.id)
        shelf.sweep()
        machine.jumps(2 * DAY_S)
        with pytest.raises(QuotaExceeded):
            shelf.admit("default")
        with pytest.raises(CacheHasChildren):
            shelf.delete(parent.id)


_PUT = """
import json, sys, time
real, ahead_s = time.time, float(sys.argv[2])
time.time = lambda: real() + ahead_s
from kvshelf import open_store
from tests.store.caches import make_cache
with open_store(sys.argv[1]) as store:
    manifest = store.put(make_cache(int(sys.argv[3])), ttl_s=60, source="a text", source_ttl_s=60)
    store.sweep()
    store.touch(manifest.id)
    store.get(manifest.id)
    print(json.dumps([manifest.id, manifest.expires_at, manifest.created_at]))
"""


@pytest.mark.parametrize("hours", few(1, [-3, 3]))
def test_a_lifetime_in_redis_is_by_the_clock_of_the_server(redis_place: RedisPlace, hours: int) -> None:
    url = f"{redis_place.server.url}?prefix={redis_place.prefix}&timeout_s=10"
    command = [sys.executable, "-c", _PUT, url, str(hours * HOUR_S), "1"]
    cache_id, expires_at, created_at = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    seconds, _ = redis_place.server.client().time()
    assert expires_at == pytest.approx(seconds + 60, abs=30)
    assert created_at == pytest.approx(seconds, abs=30)
    with redis_place.open() as shelf:
        assert shelf.stat(cache_id).expires_at == expires_at
        assert shelf.sweep().expired == 0
        shelf.get(cache_id)
        assert shelf.original(cache_id)[1] == "a text"


def test_the_server_is_asked_once_a_minute(redis_place: RedisPlace) -> None:
    uptime = Clock()
    link = RedisLink(address.parse(redis_place.server.url))
    calls = count_calls(link)
    clock = RedisClock(link, "{x}:home", uptime)
    first = clock()
    uptime.time += 59
    assert clock() == pytest.approx(first + 59)
    assert len(calls) == 1
    uptime.time += 2
    assert clock() == pytest.approx(first, abs=10), "as the server says: no minute has passed for it"
    assert len(calls) == 2
    link.close()


def count_calls(link: object) -> list[object]:
    calls: list[object] = []
    script: Callable[..., object] = link.script  # type: ignore[attr-defined]

    def counted(*args: object) -> object:
        calls.append(args)
        return script(*args)

    link.script = counted  # type: ignore[attr-defined]
    return calls


def test_a_server_whose_clock_jumps_by_hours_keeps_the_bytes(redis_place: RedisPlace) -> None:
    """It ends what no sweep ended, a day later: there is no clock but its own that would tell it more."""
    with redis_place.open() as shelf:
        manifest = shelf.put(make_cache(1), ttl_s=60)
        client = redis_place.server.client()
        ends = [client.pttl(key) for key in client.keys(f"*{manifest.id.removeprefix('kvs_')}*")]
        assert ends
        assert min(ends) > 23 * HOUR_S * 1000
