"""What only the ledger of a Redis home has: expiry by the server, a server that is full, values that are not ours."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from kvshelf.errors import RequestNotFound, StorageFull, StoreUnavailable
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.redis.ledger import RedisLedger
from kvshelf.store.redis.link import RedisLink
from tests.store.indexes import fill
from tests.store.redis.servers import LyingServer, ValkeyServer

BASE = "{kvshelf}:"


@pytest.fixture
def ledger(valkey: ValkeyServer, connect: Callable[[str], RedisLink]) -> RedisLedger:
    return RedisLedger(connect(valkey.url), "kvshelf")


@pytest.fixture
def client(valkey: ValkeyServer) -> Iterator[redis.Redis]:
    with valkey.client(decode_responses=True) as client:
        yield client


def run(ledger: RedisLedger, request_id: str, *, final: bool | None = None) -> None:
    """Open a request, and end it if `final` says how."""
    ledger.open_request(request_id, tenant="me", body=b"x" * 1000)
    attempt = ledger.start_attempt(request_id, worker="w", lease_s=60)
    if final is not None:
        ledger.fail(request_id, attempt, code="internal", message="oops", final=final)


def test_the_server_drops_what_has_ended(ledger: RedisLedger, client: redis.Redis) -> None:
    for request_id, final in (("queued", False), ("failed", True), ("running", None)):
        run(ledger, request_id, final=final)
    run(ledger, "done")
    ledger.finish("done", 1, cache_ids=["kvs_1"])
    ends = {key.removeprefix(BASE): client.pttl(key) / 1000 for key in client.scan_iter(BASE + "r:*")}
    assert ends["r:queued"] == ends["r:running"] == -1e-3
    assert ends["r:done"] == pytest.approx(KEEP_ENDED_S, abs=60)
    assert ends["r:failed"] == pytest.approx(KEEP_ENDED_S, abs=60)
    assert {key.removeprefix(BASE) for key in client.scan_iter(BASE + "b:*")} == {"b:queued", "b:running"}
    assert client.pttl(BASE + "b:queued") == -1
    assert client.keys(BASE + "a:*") == [], "no body is on its way"
    assert set(client.zrange(BASE + "requests", 0, -1)) == {"queued", "running"}
    assert set(client.zrange(BASE + "ended", 0, -1)) == {"done", "failed"}

    run(ledger, "failed")
    assert client.pttl(BASE + "r:failed") == -1, "it is wanted again"
    assert set(client.zrange(BASE + "ended", 0, -1)) == {"done"}


def test_what_the_server_has_dropped_is_unknown_and_makes_no_trouble(ledger: RedisLedger, client: redis.Redis) -> None:
    run(ledger, "done")
    ledger.finish("done", 1, cache_ids=[])
    run(ledger, "lost")
    client.delete(BASE + "r:done", BASE + "r:lost")
    for request_id in ("done", "lost"):
        with pytest.raises(RequestNotFound):
            ledger.get_request(request_id, tenant="me")
        with pytest.raises(RequestNotFound):
            ledger.start_attempt(request_id, worker="w", lease_s=60)
    assert ledger.unfinished() == []
    assert ledger.forget(time.time() + 60) == 1
    record = ledger.open_request("done", tenant="me", body=b"x")
    assert (record.state, record.attempts) == ("queued", 0)


def test_a_body_may_be_larger_than_a_reply(ledger: RedisLedger, soak: bool) -> None:
    for nbytes in (16 << 20, (16 << 20) + 1, (80 if soak else 17) << 20):
        body = random.Random(nbytes).randbytes(1 << 20) * (nbytes >> 20) + b"x" * (nbytes % (1 << 20))
        ledger.open_request(f"req_{nbytes}", tenant="me", body=body)
        assert ledger.body(f"req_{nbytes}") == body


def test_requests_of_other_prefixes_are_others(
    ledger: RedisLedger, valkey: ValkeyServer, connect: Callable[..., RedisLink]
) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    other = RedisLedger(connect(valkey.url), "other")
    assert other.unfinished() == []
    with pytest.raises(RequestNotFound):
        other.body("req_1")


def test_a_full_server_takes_no_new_request_and_ends_the_old(
    start_valkey: Callable[..., ValkeyServer], connect: Callable[..., RedisLink]
) -> None:
    server = start_valkey(maxmemory="8mb")
    ledger, client = RedisLedger(connect(server.url), "kvshelf"), server.client(decode_responses=True)
    for request_id in ("req_1", "req_2", "req_3"):
        run(ledger, request_id)
    fill(client)
    with pytest.raises(StorageFull):
        ledger.open_request("req_4", tenant="me", body=b"x")
    with pytest.raises(RequestNotFound):
        ledger.get_request("req_4", tenant="me")
    ledger.renew("req_1", 1, lease_s=60)
    ledger.finish("req_1", 1, cache_ids=["kvs_1"])
    ledger.fail("req_2", 1, code="storage_full", message="full", final=True)
    ledger.fail("req_3", 1, code="storage_full", message="full", final=False)
    assert [ledger.get_request(f"req_{n}", tenant="me").state for n in (1, 2, 3)] == ["done", "failed", "queued"]
    assert [record.id for record in ledger.unfinished()] == ["req_3"]


@pytest.mark.parametrize("key", ["r:req_1", "requests", "ended"])
def test_values_of_the_wrong_type_are_a_named_error(ledger: RedisLedger, client: redis.Redis, key: str) -> None:
    run(ledger, "req_1")
    client.delete(BASE + key)
    client.set(BASE + key, "somebody else's")
    acts: list[Callable[[], object]] = [
        lambda: ledger.open_request("req_1", tenant="me", body=b"x"),
        lambda: ledger.open_request("req_2", tenant="me", body=b"x"),
        lambda: ledger.start_attempt("req_1", worker="w", lease_s=1),
        lambda: ledger.renew("req_1", 1, lease_s=1),
        lambda: ledger.finish("req_1", 1, cache_ids=[]),
        lambda: ledger.get_request("req_1", tenant="me"),
        lambda: ledger.body("req_1"),
        ledger.unfinished,
        lambda: ledger.forget(0),
    ]
    errors = []
    for act in acts:
        try:
            act()
        except Exception as error:
            errors.append(error)
    assert any(isinstance(error, StoreUnavailable) and "WRONGTYPE" in str(error) for error in errors)
    assert {type(error).__name__ for error in errors} <= {"StoreUnavailable", "StateConflict"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts", "x"), ("cache_ids", "["), ("state", "lost"), ("created_at", None), ("id", "\udcff")],
)
def test_fields_that_are_no_request_are_a_named_error(
    ledger: RedisLedger, client: redis.Redis, field: str, value: str | None
) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    if value is None:
        client.hdel(BASE + "r:req_1", field)
    else:
        client.hset(BASE + "r:req_1", field, value.encode(errors="surrogateescape"))
    with pytest.raises(StoreUnavailable, match="not what kvshelf wrote there"):
        ledger.get_request("req_1", tenant="me")


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*2\r\n$4\r\nbody\r\n:5\r\n"])
def test_a_server_that_answers_something_else_is_a_named_error(
    connect: Callable[[str], RedisLink], answer: bytes
) -> None:
    with LyingServer(answer) as server:
        ledger = RedisLedger(connect(server.url), "kvshelf")
        for act in (lambda: ledger.body("req_1"), ledger.unfinished, lambda: ledger.get_request("req_1", tenant="me")):
            with pytest.raises(StoreUnavailable):
                act()
