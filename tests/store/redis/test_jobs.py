"""What only the job table of a Redis home has: expiry by the server, a server that is full, foreign values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis

from kvshelf.errors import KvshelfError, RequestNotFound, StorageFull, StoreUnavailable
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.requests import RequestTable
from kvshelf.store.redis import RedisStore
from kvshelf.store.redis.jobs import RedisJobs
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.table import Item
from tests.store.indexes import fill
from tests.store.redis.servers import LyingServer, ValkeyServer

BASE = "{kvshelf}:"


@pytest.fixture
def requests(valkey: ValkeyServer) -> Iterator[RequestTable]:
    with RedisStore.open(valkey.url) as store:
        yield store.requests


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with valkey.client(decode_responses=True) as client:
        yield client


def run(requests: RequestTable, request_id: str, *, final: bool | None = None, body: bytes = b"") -> None:
    """Open a request, and end it if `final` says how."""
    requests.open(request_id, tenant="me", body=body)
    attempt = requests.start(request_id, worker="w", lease_s=60)
    if final is not None:
        requests.fail(request_id, attempt, code="internal", message="oops", final=final)


def test_nothing_is_left_of_what_was_forgotten(requests: RequestTable, client: redis.Redis) -> None:
    before = set(client.keys())
    for request_id, final in (("failed", True), ("done", None)):
        run(requests, request_id, final=final, body=b"x" * 1000)
    requests.finish("done", 1, cache_ids=["kvs_1"])
    left = set(client.keys()) - before
    assert left == {BASE + key for key in ("jobs", "j:failed", "j:done", "jt:request:me", "due:request")}
    assert requests.table.forget("request", client.time()[0] + KEEP_ENDED_S + 60) == 2
    assert set(client.keys()) - before == {BASE + "jobs"}


def test_the_server_drops_what_has_ended(
    requests: RequestTable, client: redis.Redis, connect: Callable[[str], RedisLink], valkey: ValkeyServer
) -> None:
    """A day after a sweep would have done so; and never what waits or holds bytes."""
    for request_id, final in (("queued", False), ("failed", True), ("running", None), ("done", None)):
        run(requests, request_id, final=final, body=b"x" * 1000)
    requests.finish("done", 1, cache_ids=["kvs_1"])
    ends = {key.removeprefix(BASE): client.pttl(key) / 1000 for key in client.scan_iter(BASE + "j:*")}
    assert ends["j:queued"] == ends["j:running"] == -1e-3
    assert ends["j:done"] == pytest.approx(KEEP_ENDED_S + 86400, abs=60)
    assert ends["j:failed"] == pytest.approx(KEEP_ENDED_S + 86400, abs=60)
    run(requests, "failed")
    assert client.pttl(BASE + "j:failed") == -1, "it is queued again"

    jobs = RedisJobs(connect(valkey.url), "kvshelf")
    item = Item("batch", "batch_1", "me", "{}", open=True)
    jobs.add(item)
    assert jobs.take("batch_1", lease_s=60) == 1
    jobs.append("batch_1", 1, [b"a line"])
    jobs.change(replace(item, open=False, due=time.time() + 100))
    assert client.pttl(BASE + "jl:batch_1") == pytest.approx((86400 + 100) * 1000, abs=60_000)


def test_what_the_server_has_lost_is_unknown_and_makes_no_trouble(requests: RequestTable, client: redis.Redis) -> None:
    run(requests, "done")
    requests.finish("done", 1, cache_ids=[])
    run(requests, "lost")
    client.delete(BASE + "j:done", BASE + "j:lost")
    for request_id in ("done", "lost"):
        with pytest.raises(RequestNotFound):
            requests.get(request_id, tenant="me")
        with pytest.raises(RequestNotFound):
            requests.start(request_id, worker="w", lease_s=60)
    assert requests.unfinished() == []
    assert requests.table.forget("request", client.time()[0] + KEEP_ENDED_S + 60) == 0
    assert client.zcard(BASE + "due:request") == 0
    record = requests.open("done", tenant="me", body=b"x")
    assert (record.state, record.attempts) == ("queued", 0)


def test_requests_of_other_prefixes_are_others(requests: RequestTable, valkey: ValkeyServer) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    with RedisStore.open(f"{valkey.url}?prefix=other") as other:
        assert other.requests.unfinished() == []
        with pytest.raises(RequestNotFound):
            other.requests.body("req_1")


def test_a_full_server_takes_no_new_request_and_ends_the_old(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey(maxmemory="8mb")
    with RedisStore.open(server.url) as store, server.client(decode_responses=True) as client:
        requests = store.requests
        for request_id in ("req_1", "req_2", "req_3"):
            run(requests, request_id, body=b"x" * 1000)
        fill(client)
        for body in (b"", b"x"):
            with pytest.raises(StorageFull):
                requests.open("req_4", tenant="me", body=body)
        with pytest.raises(RequestNotFound):
            requests.get("req_4", tenant="me")
        requests.renew("req_1", 1, lease_s=60)
        requests.finish("req_1", 1, cache_ids=["kvs_1"])
        requests.fail("req_2", 1, code="storage_full", message="full", final=True)
        requests.fail("req_3", 1, code="storage_full", message="full", final=False)
        assert [requests.get(f"req_{n}", tenant="me").state for n in (1, 2, 3)] == ["done", "failed", "queued"]
        assert [record.id for record in requests.unfinished()] == ["req_3"]
        assert requests.body("req_3") == b"x" * 1000


@pytest.mark.parametrize("key", ["j:req_1", "open:request", "due:request", "jt:request:me", "jobs"])
def test_values_of_the_wrong_type_are_a_named_error(requests: RequestTable, client: redis.Redis, key: str) -> None:
    run(requests, "req_1")
    client.delete(BASE + key)
    client.set(BASE + key, "somebody else's")
    acts: list[Callable[[], object]] = [
        lambda: requests.open("req_1", tenant="me", body=b"x"),
        lambda: requests.open("req_2", tenant="me", body=b"x"),
        lambda: requests.start("req_1", worker="w", lease_s=1),
        lambda: requests.renew("req_1", 1, lease_s=1),
        lambda: requests.get("req_1", tenant="me"),
        lambda: requests.body("req_1"),
        lambda: requests.finish("req_1", 1, cache_ids=[]),
        requests.unfinished,
        lambda: requests.table.forget("request", 0),
    ]
    errors = []
    for act in acts:
        try:
            act()
        except KvshelfError as error:
            errors.append(error)
    refused = "ERR value is not an integer" if key == "jobs" else "WRONGTYPE"
    assert any(isinstance(error, StoreUnavailable) and refused in str(error) for error in errors)
    assert {type(error).__name__ for error in errors} <= {"StoreUnavailable", "StateConflict"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("term", "x"),
        ("text", "["),
        ("text", "[]"),
        ("text", '{"state": "lost"}'),
        ("created_at", None),
        ("kind", None),
        ("holder", "\udcff"),
    ],
)
def test_fields_that_are_no_request_are_a_named_error(
    requests: RequestTable, client: redis.Redis, field: str, value: str | None
) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    if value is None:
        client.hdel(BASE + "j:req_1", field)
    else:
        client.hset(BASE + "j:req_1", field, value.encode(errors="surrogateescape"))
    with pytest.raises(StoreUnavailable, match="not what kvshelf wrote there"):
        requests.get("req_1", tenant="me")


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*2\r\n$4\r\nbody\r\n:5\r\n"])
def test_a_server_that_answers_something_else_is_a_named_error(
    connect: Callable[[str], RedisLink], answer: bytes
) -> None:
    with LyingServer(answer) as server:
        jobs = RedisJobs(connect(server.url), "kvshelf")
        acts: list[Callable[[], object]] = [
            lambda: jobs.find("req_1", "me"),
            lambda: jobs.open_items("request"),
            lambda: jobs.forget("request", 0),
        ]
        for act in acts:
            with pytest.raises(StoreUnavailable):
                act()
