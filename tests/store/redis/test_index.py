"""What only the index of a Redis home has: keys that a server may drop, lose, or have for somebody else."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from kvshelf.errors import StorageFull, StoreUnavailable
from kvshelf.store.index import KEEP_ENDED_S, Filters, Quota
from kvshelf.store.manifest import StoredUsage
from kvshelf.store.redis import address
from kvshelf.store.redis.index import HOME_FORMAT, RedisIndex
from kvshelf.store.redis.link import RedisLink
from tests.store.index_walk import Walk
from tests.store.indexes import NOW, cache_id, entry_of, fill, manifest, put, redis_home, writing
from tests.store.processes import start_child
from tests.store.redis.servers import Cluster, LyingServer, ValkeyServer, wait_until

KEPT = 9.1e15
BASE = "{kvshelf}:"
HOME = BASE + "home"
DAY_S = 86400.0


def open_index(server: ValkeyServer, key: bytes | None = None, write_lease_s: float = 60.0) -> RedisIndex:
    link = RedisLink(address.parse(f"{server.url}?timeout_s=10"))
    return RedisIndex.open(link, "kvshelf", key, write_lease_s=write_lease_s)


@pytest.fixture
def index(valkey: ValkeyServer) -> Iterator[RedisIndex]:
    index = open_index(valkey)
    yield index
    index.close()


@pytest.fixture
def client(valkey: ValkeyServer) -> redis.Redis:
    return redis.Redis(port=valkey.port, decode_responses=True)


def require_no_rest(client: redis.Redis) -> None:
    """Every key of the home is as it must be for the entries and writes there are: nothing is missing, nothing left."""
    keys = {key.removeprefix(BASE) for key in client.scan_iter(BASE + "*", count=1000)}
    entries = {key[2:]: client.hgetall(BASE + key) for key in keys if key.startswith("c:")}
    stored = {id: e for id, e in entries.items() if e["state"] in ("ready", "corrupt")}
    ready = {id: e for id, e in stored.items() if e["state"] == "ready"}

    def members(key: str) -> dict[str, float]:
        return dict(client.zrange(BASE + key, 0, -1, withscores=True))

    assert members("stored") == {id: float(e["seq"]) for id, e in stored.items()}
    assert members("expiry") == {id: float(e["expires_at"]) for id, e in stored.items() if "expires_at" in e}
    refs = {(base.split(":")[0], id) for id, e in stored.items() for base in e.get("bases", "").split(",") if base}
    assert {(key[2:], id) for key in keys if key.startswith("r:") for id in client.smembers(BASE + key)} == refs
    bases = {name for name, _ in refs}
    assert bases - {e["name"] for e in stored.values()} == {n for n, end in members("writes").items() if end == KEPT}
    unpinned = {id: float(e["priority"]) for id, e in ready.items() if e["pinned"] == "0" and e["name"] not in bases}
    assert members("eviction") == unpinned
    ends = {id: float(e.get("pinned_until", "inf")) for id, e in ready.items() if e["pinned"] == "1"}
    assert members("pins") == ends
    numbers = Counter(id for _, id in refs if id in ready)
    assert members("spliced") == {id: float(number) for id, number in numbers.items()}
    children = {(e["parent_id"], id) for id, e in entries.items() if "parent_id" in e}
    family = {(key[2:], id) for key in keys if key.startswith("k:") for id in client.smembers(BASE + key)}
    assert family == children
    assert members("ended") == {id: float(e["ended_at"]) for id, e in entries.items() if id not in stored}
    assert {key[2:] for key in keys if key.startswith("m:")} == set(stored)
    listings = Counter(id for key in keys if key.startswith("l:") for id in members(key))
    places = client.hgetall(BASE + "places")
    assert set(places) == set(stored)
    assert listings == Counter({id: places[id].split(" ")[1].count(",") + 1 for id in ready})

    due: Counter[str] = Counter()
    for entry in ready.values():
        for key in ("u", "u:" + entry["tenant"]):
            due.update({f"{key} caches": 1, f"{key} bytes": int(entry["nbytes"])})
            if entry["pinned"] == "1":
                due.update({f"{key} pinned_caches": 1, f"{key} pinned_bytes": int(entry["nbytes"])})
    writes = members("writes")
    records = {
        name: record for key in keys if key.startswith("w:") for name, record in client.hgetall(BASE + key).items()
    }
    assert set(writes) == set(records)
    for name, record in records.items():
        nbytes, of_cache, tenant = record.split(" ", 2)
        for key in ("u", "u:" + tenant):
            if writes[name]:
                due.update({f"{key} held_caches": int(of_cache), f"{key} held_bytes": int(nbytes)})
    counted = {
        f"{key} {field}": int(number)
        for key in keys
        if re.match("u(:|$)", key)
        for field, number in client.hgetall(BASE + key).items()
    }
    assert {k: n for k, n in counted.items() if n} == {k: n for k, n in due.items() if n}
    rest = {
        key
        for key in keys
        if not re.match(
            "(c|m|l|w|u|r|k|changes):|(u|stored|expiry|eviction|pins|spliced|ended|places|writes|home)$", key
        )
    }
    assert rest == set()


# Nothing is left over, everything ends


def lasting(client: Any) -> list[Any]:
    """The keys but those of what changed, which the server ends within a day."""
    changes = client.keys(BASE + "changes:*")
    assert all(0 < client.ttl(key) <= 86_400 for key in changes)
    return sorted({*client.scan_iter()} - {*changes})


def test_no_key_holds_more_or_less_than_the_entries(valkey: ValkeyServer, client: redis.Redis, soak: bool) -> None:
    index = redis_home(valkey.url).open()
    for seed in range(10 if soak else 2):
        walk = Walk(index, random.Random(100 + seed))
        for step in range(300):
            walk.step()
            if step % 50 == 0:
                require_no_rest(client)
        walk.check()
        require_no_rest(client)
        walk.end()
        assert lasting(client) == [HOME]
    index.close()


def test_when_all_is_gone_only_the_home_is_left(index: RedisIndex, client: redis.Redis) -> None:
    entry = put(index, 1, labels={"a": "b"}, expires_at=NOW + 100)
    assert index.bury(entry, "deleted", NOW)
    for write in index.abandoned():
        index.abandon(write.name)
    assert index.forget(NOW + 1) == 1
    assert lasting(client) == [HOME]


def test_the_server_ends_a_cache_and_its_references(index: RedisIndex, client: redis.Redis) -> None:
    """No sweep came for a month. An entry stays as long as others have its blob as a base, or it as their parent."""
    root = put(index, 1, expires_at=NOW + 100)
    assert root.name is not None
    write = replace(writing(2), bases=((root.name, root.nbytes),), parent_id=root.id)
    index.begin(write, Quota())
    index.publish(write, manifest(2, expires_at=NOW + 200), over=None, cost_s=1, now=NOW)
    assert client.ttl(f"{BASE}c:{root.id}") == -1
    assert index.bury(root, "expired", NOW + 150)
    assert (index.is_base(root.name), index.knows(root.name), index.abandoned()) == (True, True, [])
    assert client.ttl(f"{BASE}c:{root.id}") == -1
    client.delete(f"{BASE}c:{entry_of(index, 2).id}", f"{BASE}m:{entry_of(index, 2).id}")
    assert index.expired(NOW + 300, 10) == []
    assert not index.is_base(root.name)
    assert [writing.name for writing in index.abandoned()] == [root.name]
    index.abandon(root.name)
    assert index.children(root.id, "me") == []
    assert index.forget(NOW + 151) == 1
    assert lasting(client) == [HOME]


def test_the_server_ends_what_has_an_end(index: RedisIndex, client: redis.Redis) -> None:
    """The manifest first, so that nothing is readable whose bytes are gone; the rest when nobody asks any more."""
    entry = put(index, 1, expires_at=NOW + 100)
    forever = put(index, 2)
    assert index.bury(put(index, 3), "deleted", NOW)
    assert index.mark_corrupt(put(index, 4, expires_at=NOW + 100), "broken")

    def ends(key: str) -> float:
        """Seconds after NOW; -1: never."""
        left_ms = client.pttl(BASE + key)
        return left_ms if left_ms < 0 else time.time() + left_ms / 1000 - NOW

    for number in (1, 4):
        assert ends(f"m:{cache_id(number)}") == pytest.approx(100 + DAY_S, abs=0.3)
        assert ends(f"c:{cache_id(number)}") == pytest.approx(100 + KEEP_ENDED_S, abs=0.3)
    assert ends(f"c:{cache_id(3)}") == pytest.approx(KEEP_ENDED_S, abs=0.3)
    assert ends(f"m:{forever.id}") == ends(f"c:{forever.id}") == -1

    assert index.swap(entry, manifest(1, expires_at=NOW + 500))
    assert index.swap(forever, manifest(2, expires_at=NOW + 500))
    for number in (1, 2):
        assert ends(f"m:{cache_id(number)}") == pytest.approx(500 + DAY_S, abs=0.3)
        assert ends(f"c:{cache_id(number)}") == pytest.approx(500 + KEEP_ENDED_S, abs=0.3)
    assert index.swap(entry_of(index, 1), manifest(1))
    assert ends(f"m:{entry.id}") == ends(f"c:{entry.id}") == -1
    put(index, 3)
    assert ends(f"c:{cache_id(3)}") == -1, "what is put again does not end as the tombstone would have"

    without_end = {key.removeprefix(BASE) for key in client.scan_iter() if client.pttl(key) == -1}
    kinds = {re.sub(":.*", ":", key) for key in without_end}
    shared = {"home", "stored", "places", "expiry", "eviction", "writes", "u", "u:", "l:", "w:"}
    assert kinds <= shared | {"c:", "m:"}
    assert {key for key in without_end if key[:2] in ("c:", "m:")} == {
        f"{k}:{cache_id(n)}" for k in "cm" for n in (1, 3)
    }


def test_a_cache_that_the_server_ended_is_expired(index: RedisIndex, client: redis.Redis) -> None:
    now = time.time() - DAY_S
    entry = put(index, 1, now=now, expires_at=now + 0.2)
    wait_until(lambda: not client.exists(f"{BASE}m:{entry.id}"), "the server drops the manifest")
    behind = now  # the clock of a caller that lags
    after = entry_of(index)
    assert (after.state, after.problem, after.live(behind)) == ("expired", None, False)
    assert index.listing(Filters("me"), behind, None, 10) == []
    assert list(index.stored()) == []
    (due,) = index.expired(now + 1, 10)
    assert due == replace(entry, text=None)
    assert index.problems() == []
    assert index.bury(due, "expired", time.time())
    require_no_rest(client)
    assert index.usage(None) == StoredUsage(caches=0, bytes=0)


def test_a_cache_that_no_sweep_saw_for_a_month_leaves_nothing(index: RedisIndex, client: redis.Redis) -> None:
    entry = put(index, 1, expires_at=NOW + 10, labels={"a": "b"})
    client.delete(f"{BASE}m:{entry.id}", f"{BASE}c:{entry.id}")  # as the server does
    assert index.find(entry.id, "me") is None
    assert index.listing(Filters("me", labels={"a": "b"}), NOW, None, 10) == []
    assert index.victims(10) == []
    assert index.problems() == []
    assert index.expired(NOW + 10, 10) == []
    assert index.usage("me") == StoredUsage(caches=0, bytes=0)
    assert lasting(client) == [HOME]


def test_a_manifest_that_the_server_lost_is_a_corrupt_cache(index: RedisIndex, client: redis.Redis) -> None:
    """Dropped by a server that evicts, or by hand."""
    entry = put(index, 1, expires_at=NOW + 1000)
    client.delete(f"{BASE}m:{entry.id}")
    lost = entry_of(index)
    assert (lost.state, lost.problem, lost.name) == ("corrupt", "its manifest is gone from the server", entry.name)
    assert index.listing(Filters("me"), NOW, None, 10) == []
    assert not index.swap(entry, manifest())
    assert index.problems() == [f"index: {entry.id} has lost its manifest"]
    assert [e.state for e in index.stored()] == ["corrupt"]
    again = writing()
    index.begin(again, Quota())
    assert index.publish(again, manifest(), over=None, cost_s=1, now=NOW) == (True, lost)
    client.delete(f"{BASE}m:{entry.id}")
    assert index.mark_corrupt(entry_of(index), "it is gone")
    assert index.usage(None) == StoredUsage(caches=0, bytes=0)
    assert entry_of(index).problem == "it is gone"


# The home


def test_processes_that_start_at_once_agree_on_the_key(
    valkey: ValkeyServer, client: redis.Redis, tmp_path: Path, soak: bool
) -> None:
    def work(number: int) -> Callable[[], None]:
        def open_and_tell() -> None:
            index = open_index(valkey)
            (tmp_path / str(number)).write_bytes(index.key + index.incarnation.encode())

        return open_and_tell

    for _ in range(5 if soak else 2):
        client.flushall()
        children = [start_child(work(number)) for number in range(4)]
        assert [child.wait() for child in children] == [0] * 4
        assert len({(tmp_path / str(number)).read_bytes() for number in range(4)}) == 1


def test_a_remembered_key_is_for_an_empty_home_only(valkey: ValkeyServer) -> None:
    mine = b"\xff" * 32
    assert open_index(valkey, mine).key == mine
    assert open_index(valkey, b"\x00" * 32).key == mine
    assert redis.Redis(port=valkey.port).hget(HOME, "key") == mine


def test_shelves_with_other_prefixes_are_other_shelves(valkey: ValkeyServer) -> None:
    link = RedisLink(address.parse(valkey.url))
    one, other = (RedisIndex.open(link, prefix) for prefix in ("one", "other"))
    put(one)
    assert other.find(cache_id(1), "me") is None
    assert one.key != other.key
    assert other.usage(None) == StoredUsage(caches=0, bytes=0)
    link.close()


@pytest.mark.parametrize("found_format", ["1", "9", ""])
def test_a_home_of_another_format_is_refused(valkey: ValkeyServer, client: redis.Redis, found_format: str) -> None:
    open_index(valkey)
    client.hset(HOME, "format", found_format)
    with pytest.raises(StoreUnavailable, match=f"works with {HOME_FORMAT}"):
        open_index(valkey)


@pytest.mark.parametrize("field", ["key", "incarnation", "blobs"])
def test_a_home_that_is_not_ours_is_refused(valkey: ValkeyServer, client: redis.Redis, field: str) -> None:
    open_index(valkey)
    client.hdel(HOME, field)
    with pytest.raises(StoreUnavailable, match="not what kvshelf wrote there"):
        open_index(valkey)
    client.delete(HOME)
    client.set(HOME, "somebody else's")
    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        open_index(valkey)


def test_a_server_that_restarts_empty_is_used_on_with_the_same_key(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey()
    index = open_index(server)
    first = put(index, 1)
    writing_then = writing(2)
    index.begin(writing_then, Quota())
    key, incarnation = index.key, index.incarnation
    server.kill()
    server.start()
    wait_until(lambda: answers(lambda: index.find(first.id, "me") is None), "it is found to be empty")
    assert (index.key, open_index(server).key) == (key, key)
    assert index.incarnation != incarnation
    with pytest.raises(StoreUnavailable, match="put it again"):
        index.publish(writing_then, manifest(2), over=None, cost_s=1, now=NOW)
    assert put(index, 1).seq > first.seq, "numbers never repeat, also after a loss"
    assert not index.bury(first, "deleted", NOW)
    assert index.problems() == []
    index.close()


def test_a_home_that_is_out_of_reach_is_entered_later_with_a_known_key(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    server = start_valkey()
    server.kill()
    with pytest.raises(StoreUnavailable):
        open_index(server)
    mine, others = open_index(server, b"k" * 32), open_index(server, b"o" * 32)
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        mine.usage(None)
    server.start()
    wait_until(lambda: answers(lambda: mine.usage(None).caches == 0), "it is reached")
    assert open_index(server).key == b"k" * 32
    wait_until(lambda: "replaced" in error_of(lambda: others.usage(None)), "the other key is refused")


def answers(act: Callable[[], bool]) -> bool:
    with suppress(StoreUnavailable):
        return act()
    return False


def test_two_processes_find_the_same_new_home(valkey: ValkeyServer, client: redis.Redis) -> None:
    one, other = open_index(valkey), open_index(valkey)
    client.flushall()
    put(one)
    assert entry_of(other).name == entry_of(one).name
    assert one.incarnation == other.incarnation
    one.close()
    other.close()


def test_a_home_that_was_replaced_is_not_written_to(valkey: ValkeyServer, client: redis.Redis) -> None:
    index = open_index(valkey)
    client.flushall()
    open_index(valkey)
    for act in (lambda: index.begin(writing(), Quota()), lambda: index.find(cache_id(1), "me"), index.problems):
        with pytest.raises(StoreUnavailable, match="replaced by another one; open it again"):
            act()
    assert lasting(client) == [HOME]
    index.close()


# Somebody else's hands


@pytest.mark.parametrize("key", ["stored", "expiry", "eviction", "ended", "places", "writes", "u", "c", "m", "w"])
def test_values_of_the_wrong_type_are_a_named_error(index: RedisIndex, client: redis.Redis, key: str) -> None:
    entry = put(index, 1, expires_at=NOW + 10)
    full_key = f"{BASE}{key}:{entry.id}" if key in "cmw" else BASE + key
    client.delete(full_key)
    client.rpush(full_key, "somebody else's")
    write = writing(1)
    acts: list[Callable[[], object]] = [
        lambda: index.begin(write, Quota()),
        lambda: index.publish(write, manifest(), over=entry, cost_s=1, now=NOW),
        lambda: index.find(entry.id, "me"),
        lambda: index.listing(Filters("me"), NOW, None, 10),
        lambda: list(index.stored()),
        lambda: index.touch(entry.id, "me", NOW),
        lambda: index.swap(entry, manifest()),
        lambda: index.mark_corrupt(entry, "broken"),
        lambda: index.bury(entry, "deleted", NOW),
        lambda: index.expired(NOW + 100, 10),
        lambda: index.victims(10),
        lambda: index.abandoned(),
        lambda: index.forget(NOW),
        lambda: index.usage(None),
        lambda: index.knows(write.name),
        lambda: index.problems(),
    ]
    errors = [error_of(act) for act in acts]
    assert any("WRONGTYPE" in error for error in errors)


def error_of(act: Callable[[], object]) -> str:
    """The message of the one error that is allowed, or nothing."""
    try:
        act()
    except StoreUnavailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value"), [("seq", "x"), ("nbytes", ""), ("expires_at", "soon"), ("version", None), ("tenant", None)]
)
def test_fields_that_are_no_entry_are_a_named_error(
    index: RedisIndex, client: redis.Redis, field: str, value: str | None
) -> None:
    entry = put(index)
    if value is None:
        client.hdel(f"{BASE}c:{entry.id}", field)
    else:
        client.hset(f"{BASE}c:{entry.id}", field, value)
    if field == "tenant":
        assert index.find(entry.id, "me") is None
    else:
        with pytest.raises(StoreUnavailable, match=r"not what kvshelf wrote there"):
            index.find(entry.id, "me")
    with pytest.raises(StoreUnavailable):
        list(index.stored())


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*1\r\n$5\r\nfound\r\n"])
def test_a_server_that_answers_something_else_is_a_named_error(
    connect: Callable[[str], RedisLink], answer: bytes
) -> None:
    with LyingServer(answer) as server, pytest.raises(StoreUnavailable):
        RedisIndex.open(connect(server.url), "kvshelf")


def test_a_write_that_was_revoked_cannot_begin_again(valkey: ValkeyServer) -> None:
    hurried, write = open_index(valkey, write_lease_s=0.01), writing()
    hurried.begin(write, Quota())
    time.sleep(0.05)
    assert hurried.abandoned() == [write]
    with pytest.raises(StoreUnavailable, match="put it again"):
        hurried.begin(write, Quota())
    assert hurried.problems() == []
    hurried.close()


def test_a_write_that_the_server_lost_is_forgotten(index: RedisIndex, client: redis.Redis) -> None:
    write = writing()
    index.begin(write, Quota())
    client.delete(f"{BASE}w:{write.cache_id}")
    client.zadd(BASE + "writes", {write.name: 1})
    assert index.abandoned() == []
    assert client.zcard(BASE + "writes") == 0


def test_every_inconsistency_is_found(valkey: ValkeyServer, index: RedisIndex, client: redis.Redis) -> None:
    entry = put(index, 1, expires_at=NOW + 1000, labels={"a": "b"})
    put(index, 2, pinned=True)
    assert index.mark_corrupt(put(index, 3, expires_at=NOW + 1000), "broken")
    index.begin(writing(4, 100, 7), Quota())
    assert index.problems() == []
    (listing, *_) = client.keys(BASE + "l:*")
    raw = redis.Redis(port=valkey.port)
    spoilers: dict[str, Callable[[redis.client.Pipeline], object]] = {
        "expires at another time": lambda p: p.zadd(BASE + "expiry", {entry.id: 5}),
        "eviction is off by 1": lambda p: p.zadd(BASE + "eviction", {"kvs_dangling": 5}),
        "wrong rank for eviction": lambda p: p.zrem(BASE + "eviction", entry.id),
        "expiry is off by 1": lambda p: p.zadd(BASE + "expiry", {"kvs_dangling": 5}),
        "is off by -1": lambda p: p.zrem(BASE + "expiry", cache_id(99)) and p.hincrby(BASE + "u", "caches", -1),
        "bytes@u:me is off by 3": lambda p: p.hincrby(BASE + "u:me", "bytes", 3),
        "held_bytes@u is off by 9": lambda p: p.hincrby(BASE + "u", "held_bytes", 9),
        f"{listing.removeprefix(BASE)} is off by 1": lambda p: p.zadd(listing, {"kvs_dangling": 1}),
        "is missing in a listing": lambda p: [p.zrem(key, entry.id) for key in client.keys(BASE + "l:*")],
        "places is off by 1": lambda p: p.hset(BASE + "places", "kvs_dangling", "0  me"),
        "has no place": lambda p: p.hdel(BASE + "places", entry.id),
        "kept under another seq": lambda p: p.zadd(BASE + "stored", {entry.id: 7}),
        "counted with other bytes": lambda p: p.hset(f"{BASE}c:{entry.id}", "nbytes", "5"),
        "has ended and is kept": lambda p: p.hset(f"{BASE}c:{entry.id}", "state", "deleted"),
        "is corrupt and listed": lambda p: p.hset(f"{BASE}c:{entry.id}", "state", "corrupt"),
        "has lost its manifest": lambda p: p.delete(f"{BASE}m:{entry.id}"),
    }
    dumps = {key: raw.dump(key) for key in raw.scan_iter()}
    for problem, spoil in spoilers.items():
        pipeline = client.pipeline()
        spoil(pipeline)
        pipeline.execute()
        assert [p for p in index.problems() if problem in p], problem
        client.flushall()
        for key, dump in dumps.items():
            client.restore(key, 0, dump)
        assert index.problems() == []


# A server that is full


def test_a_full_server_refuses_new_caches_and_gives_room_back(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey(maxmemory="8mb")
    client = redis.Redis(port=server.port, decode_responses=True)
    index = open_index(server)
    entry, other = put(index, 1, expires_at=NOW + 100, labels={"a": "b"}), put(index, 2)
    begun, given_up = writing(3), writing(4)
    index.begin(begun, Quota())
    index.begin(given_up, Quota())
    hurried, lapsed = open_index(server, write_lease_s=0.01), writing(6)
    hurried.begin(lapsed, Quota())
    fill(client)
    before = set(client.keys(BASE + "*")), client.hgetall(BASE + "u")
    for act in (
        lambda: index.begin(writing(5), Quota()),
        lambda: index.publish(begun, manifest(3), over=None, cost_s=1, now=NOW),
        lambda: index.swap(entry, manifest(1)),
    ):
        with pytest.raises(StorageFull):
            act()
    assert (set(client.keys(BASE + "*")), client.hgetall(BASE + "u")) == before
    require_no_rest(client)

    index.touch(entry.id, "me", NOW)
    assert entry_of(index).uses == 1
    assert index.mark_corrupt(other, "broken")
    assert index.bury(entry_of(index, 1), "evicted", NOW)
    assert index.bury(entry_of(index, 2), "deleted", NOW)
    index.abandon(given_up.name)
    assert {write.name for write in index.abandoned()} == {entry.name, other.name, lapsed.name}
    for write in index.abandoned():
        index.abandon(write.name)
    assert index.forget(NOW + 1) == 2
    require_no_rest(client)
    client.delete("filler")
    assert index.publish(begun, manifest(3), over=None, cost_s=1, now=NOW) == (True, None)
    index.close()


# An answer that never came


class Cutter:
    """Stands between an index and its server. While `armed`, what is asked gets there, and the answer does not."""

    def __init__(self, server: ValkeyServer) -> None:
        self.armed = False
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError), peer, socket.create_connection(("127.0.0.1", self._server.port)) as behind:
            while request := peer.recv(1 << 16):
                behind.sendall(request)
                answer = behind.recv(1 << 16)
                if self.armed:
                    return
                peer.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def test_what_was_done_without_an_answer_is_done_once(
    valkey: ValkeyServer, index: RedisIndex, client: redis.Redis
) -> None:
    """The link does not send a script twice, and a caller that tries again does no harm."""
    cutter = Cutter(valkey)
    link = RedisLink(address.parse(cutter.url))
    shaky = RedisIndex.open(link, "kvshelf")

    def cut_off(act: Callable[[], object]) -> None:
        cutter.armed = True
        before = calls()
        with pytest.raises(StoreUnavailable):
            act()
        assert calls() == before + 1
        cutter.armed = False
        wait_until(lambda: answers(lambda: shaky.find(cache_id(9), "me") is None), "the link is used again")

    def calls() -> int:
        return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

    write, made = writing(), manifest()
    cut_off(lambda: shaky.begin(write, Quota()))
    shaky.begin(write, Quota())
    assert client.hgetall(BASE + "u:me") == {"held_caches": "1", "held_bytes": "1000"}
    cut_off(lambda: shaky.publish(write, made, over=None, cost_s=1, now=NOW))
    entry = entry_of(index)
    assert entry.name == write.name
    assert shaky.publish(write, made, over=None, cost_s=1, now=NOW) == (True, None), "it was us"
    assert entry_of(index) == entry

    other = writing(1, 9)
    shaky.begin(other, Quota())
    cut_off(lambda: shaky.swap(entry, made, other))
    assert shaky.swap(entry, made, other)
    assert entry_of(index).version == 1
    entry = entry_of(index)
    cut_off(lambda: shaky.bury(entry, "deleted", NOW))
    assert entry_of(index).state == "deleted"
    assert not shaky.bury(entry, "deleted", NOW)
    require_no_rest(client)
    cutter.close()
    link.close()


# A cluster, and many


def test_an_index_lies_on_one_node_of_a_cluster(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        index = redis_home(f"{cluster.url}?timeout_s=10").open()
        walk = Walk(index, random.Random(7))
        for _ in range(150):
            walk.step()
        walk.check()
        with_keys = [node for node in cluster.nodes if node.client().dbsize()]
        assert len(with_keys) == 1
        require_no_rest(with_keys[0].client(decode_responses=True))
        index.close()


def test_no_script_does_much_at_once(index: RedisIndex, client: redis.Redis, soak: bool) -> None:
    """The server does nothing else while a script runs. Commands are counted, for time says more of the neighbours."""
    total = 20_000 if soak else 1100
    for number in range(total):
        made = manifest(number, model=f"m{number % 2}", labels={"half": str(number % 2)}, expires_at=NOW + 1000)
        write = writing(number)
        index.begin(write, Quota())
        assert index.publish(write, made, over=None, cost_s=1, now=NOW)[0]
    with client.monitor() as monitor:
        assert index.listing(Filters("me", model="m0", labels={"half": "1"}), NOW, None, 20) == []
        assert len(index.listing(Filters("me"), NOW, None, 1000)) == 1000
        assert sum(1 for _ in index.stored()) == total
        assert index.problems() == []
        assert len(index.expired(NOW + 1000, 200)) == len(index.victims(200)) == 200
        client.echo("the end")
        scripts = [0]
        while (seen := monitor.next_command())["command"] != "ECHO the end":
            if seen["client_type"] == "lua":
                scripts[-1] += 1
            elif seen["command"].startswith("EVALSHA"):
                scripts.append(0)
    assert total / 100 < len(scripts)
    assert max(scripts) < 2500
