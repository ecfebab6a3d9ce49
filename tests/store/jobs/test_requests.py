"""What every home promises of requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.errors import InternalError, QuotaExceeded, RequestNotFound, StateConflict
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import KEEP_ENDED_S, Index, Quota
from kvshelf.store.jobs.requests import RequestError, RequestTable
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from tests.store.caches import make_cache
from tests.store.indexes import Home, disk_home, empty_redis_home
from tests.store.places import Clock, Place
from tests.store.test_index import race


@pytest.fixture(params=["disk", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "disk":
        return disk_home(tmp_path / "home")
    return empty_redis_home(request.getfixturevalue("shared_valkey"))


CLOCKS_S = 0.01
"""By which the clocks of a server and of this process may differ: they are rounded in different ways."""


@pytest.fixture
def lease_s(home: Home) -> float:
    return 4 * home.tick_s


@pytest.fixture
def store(home: Home) -> Iterator[Shelf]:
    with home.shelf() as store:
        yield store
        assert store.check() == []


@pytest.fixture
def requests(store: Shelf) -> RequestTable:
    return store.requests


def test_a_request_runs_and_ends(requests: RequestTable, home: Home, lease_s: float) -> None:
    before = home.now()
    record = requests.open("req_1", tenant="me", body=b"document")
    assert (record.state, record.attempts) == ("queued", 0)
    assert before - CLOCKS_S <= record.created_at <= home.now() + CLOCKS_S
    assert record.updated_at == record.created_at
    assert requests.body("req_1") == b"document"
    assert requests.start("req_1", worker="w1", lease_s=lease_s) == 1
    running = requests.get("req_1", tenant="me")
    assert (running.state, running.worker) == ("running", "w1")
    assert before - CLOCKS_S <= running.updated_at <= home.now() + CLOCKS_S
    assert running.lease_until == pytest.approx(running.updated_at + lease_s, abs=1e-6)
    home.wait(1)
    requests.finish("req_1", 1, cache_ids=["kvs_a", "kvs_b"])
    done = requests.get("req_1", tenant="me")
    assert (done.state, done.cache_ids, done.worker, done.lease_until) == ("done", ("kvs_a", "kvs_b"), None, None)
    assert done.updated_at >= running.updated_at + home.tick_s
    with pytest.raises(StateConflict, match="its body was dropped"):
        requests.body("req_1")


def test_opening_twice_changes_nothing(requests: RequestTable, home: Home, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"first")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    before = requests.get("req_1", tenant="me")
    home.wait(1)
    assert requests.open("req_1", tenant="me", body=b"second") == before
    assert requests.body("req_1") == b"first"
    requests.finish("req_1", 1, cache_ids=["kvs_a"])
    assert requests.open("req_1", tenant="me", body=b"third").cache_ids == ("kvs_a",)


def test_a_finished_request_is_done_again_only_when_asked(requests: RequestTable, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    requests.finish("req_1", 1, cache_ids=["kvs_a"])
    again = requests.open("req_1", tenant="me", body=b"y", again=True)
    assert (again.state, again.cache_ids, requests.body("req_1")) == ("queued", (), b"y")
    assert (again.attempts, again.attempts_before) == (1, 1)


def test_attempts_are_counted_before_the_work(requests: RequestTable, home: Home, lease_s: float) -> None:
    """Three workers die in a row: nobody reports it, and yet the third attempt is known as the third."""
    requests.open("req_1", tenant="me", body=b"poison")
    for attempt in (1, 2, 3):
        assert requests.start("req_1", worker=f"w{attempt}", lease_s=lease_s) == attempt
        assert requests.get("req_1", tenant="me").attempts == attempt
        home.wait(5)


def test_a_live_lease_keeps_others_out(requests: RequestTable, home: Home, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    home.wait(3)
    requests.renew("req_1", 1, lease_s=600)
    home.wait(3)
    with pytest.raises(StateConflict, match="held by worker 'w1'"):
        requests.start("req_1", worker="w2", lease_s=lease_s)
    running = requests.get("req_1", tenant="me")
    assert running.attempts == 1
    assert running.lease_until == pytest.approx(running.updated_at + 600)
    requests.renew("req_1", 1, lease_s=lease_s)
    home.wait(5)
    assert requests.start("req_1", worker="w2", lease_s=lease_s) == 2


def test_a_stale_holder_can_do_nothing(requests: RequestTable, home: Home, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    requests.start("req_1", worker="w1", lease_s=lease_s)  # the same name: the number fences, not the name
    for act in (
        lambda: requests.finish("req_1", 1, cache_ids=["kvs_old"]),
        lambda: requests.fail("req_1", 1, code="internal", message="late", final=True),
        lambda: requests.renew("req_1", 1, lease_s=99),
    ):
        with pytest.raises(StateConflict, match="term 1 of 'req_1' is over"):
            act()
    requests.finish("req_1", 2, cache_ids=["kvs_new"])
    assert requests.get("req_1", tenant="me").cache_ids == ("kvs_new",)
    with pytest.raises(StateConflict):
        requests.finish("req_1", 2, cache_ids=["kvs_twice"])
    with pytest.raises(StateConflict, match="has ended"):
        requests.start("req_1", worker="w3", lease_s=lease_s)


def test_a_failure_is_repeated_or_final(requests: RequestTable, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    requests.fail("req_1", 1, code="worker_crashed", message="it died", final=False)
    queued = requests.get("req_1", tenant="me")
    assert (queued.state, queued.attempts) == ("queued", 1)
    assert queued.error == RequestError(code="worker_crashed", message="it died")
    assert requests.body("req_1") == b"x"
    requests.start("req_1", worker="w2", lease_s=lease_s)
    facts = {"tried": [{"bytes": 5, "quality": None, "agreement": 0.25, "word": "ü"}]}
    requests.fail("req_1", 2, code="quality_below_floor", message="too bad", param="levels", details=facts, final=True)
    failed = requests.get("req_1", tenant="me")
    assert failed.state == "failed"
    assert failed.error == RequestError(code="quality_below_floor", message="too bad", param="levels", details=facts)
    with pytest.raises(StateConflict, match="dropped"):
        requests.body("req_1")


def test_a_failure_that_nobody_is_to_blame_for_is_not_counted(
    requests: RequestTable, home: Home, lease_s: float
) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    for attempt, counted, tries in ((2, False, 1), (3, True, 2), (4, False, 2)):
        assert requests.start("req_1", worker="w1", lease_s=lease_s) == attempt
        requests.fail("req_1", attempt, code="storage_full", message="full", final=False, counted=counted)
        record = requests.get("req_1", tenant="me")
        assert (record.state, record.attempts, record.tries) == ("queued", attempt, tries)


def test_a_failed_request_that_is_sent_again_starts_anew(requests: RequestTable, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    requests.fail("req_1", 1, code="internal", message="oops", details={"of": "the first"}, final=True)
    again = requests.open("req_1", tenant="me", body=b"x")
    assert (again.state, again.tries, again.error) == ("queued", 0, None)
    requests.start("req_1", worker="w1", lease_s=lease_s)
    requests.fail("req_1", 2, code="internal", message="oops again", final=True)
    error = requests.get("req_1", tenant="me").error
    assert error == RequestError(code="internal", message="oops again")  # nothing of the first


def test_a_fence_holds_across_a_new_start(requests: RequestTable, home: Home, lease_s: float) -> None:
    """A worker that hung through the first life of a request must not end its second: numbers never repeat."""
    requests.open("req_1", tenant="me", body=b"x")
    hung = requests.start("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    requests.fail(
        "req_1",
        requests.start("req_1", worker="w2", lease_s=lease_s),
        code="internal",
        message="oops",
        final=True,
    )
    requests.open("req_1", tenant="me", body=b"x")
    current = requests.start("req_1", worker="w2", lease_s=lease_s)
    with pytest.raises(StateConflict):
        requests.finish("req_1", hung, cache_ids=["kvs_old"])
    requests.finish("req_1", current, cache_ids=["kvs_new"])


def test_tenants_do_not_see_each_others_requests(requests: RequestTable) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    messages = set()
    for request_id, tenant in (("req_1", "you"), ("req_2", "me")):
        with pytest.raises(RequestNotFound) as refusal:
            requests.get(request_id, tenant=tenant)
        messages.add(refusal.value.message.replace(request_id, "<id>"))
    assert len(messages) == 1
    with pytest.raises(StateConflict):
        requests.open("req_1", tenant="you", body=b"x")
    for act in (
        lambda: requests.body("req_2"),
        lambda: requests.start("req_2", worker="w", lease_s=1),
        lambda: requests.finish("req_2", 1, cache_ids=[]),
    ):
        with pytest.raises(RequestNotFound):
            act()


def test_unfinished_requests_survive_a_restart(home: Home, lease_s: float) -> None:
    with home.shelf() as store:
        for number in (3, 1, 2):
            store.requests.open(f"req_{number}", tenant="me", body=b"%d" % number)
        store.requests.start("req_1", worker="w1", lease_s=lease_s)
        store.requests.start("req_2", worker="w1", lease_s=lease_s)
        store.requests.finish("req_2", 1, cache_ids=[])
    with home.shelf() as again:
        assert [(r.id, r.state) for r in again.requests.unfinished()] == [("req_3", "queued"), ("req_1", "running")]
        assert again.requests.body("req_3") == b"3"


def test_old_requests_are_forgotten_and_live_ones_never(requests: RequestTable, home: Home, lease_s: float) -> None:
    for number in (1, 2, 3, 4):
        requests.open(f"req_{number}", tenant="me", body=b"x")
        requests.start(f"req_{number}", worker="w1", lease_s=lease_s)
    requests.finish("req_1", 1, cache_ids=[])
    requests.fail("req_2", 1, code="internal", message="oops", final=True)
    requests.fail("req_3", 1, code="internal", message="oops", final=False)
    home.wait(1)
    before = home.now()
    home.wait(1)
    requests.finish("req_4", 1, cache_ids=[])
    assert requests.table.forget("request", before + KEEP_ENDED_S) == 2
    with pytest.raises(RequestNotFound):
        requests.get("req_1", tenant="me")
    assert requests.get("req_4", tenant="me").state == "done"
    assert [record.id for record in requests.unfinished()] == ["req_3"]
    assert requests.table.forget("request", home.now() + KEEP_ENDED_S + 1e6) == 1
    assert requests.table.forget("request", home.now() + KEEP_ENDED_S + 1e6) == 0


def test_a_request_that_is_sent_again_is_not_forgotten(requests: RequestTable, home: Home, lease_s: float) -> None:
    requests.open("req_1", tenant="me", body=b"x")
    requests.start("req_1", worker="w1", lease_s=lease_s)
    requests.fail("req_1", 1, code="internal", message="oops", final=True)
    requests.open("req_1", tenant="me", body=b"y")
    assert requests.table.forget("request", home.now() + KEEP_ENDED_S + 1e6) == 0
    assert [record.id for record in requests.unfinished()] == ["req_1"]


def test_texts_and_bodies_of_any_kind_come_back(requests: RequestTable, lease_s: float) -> None:
    body = bytes(range(256)) * 5000
    request_id, tenant = 'req_" {x}:\n漢', "me and\nyou ü"
    requests.open(request_id, tenant=tenant, body=body)
    assert requests.body(request_id) == body
    requests.start(request_id, worker="w 漢", lease_s=lease_s)
    requests.fail(request_id, 1, code="internal", message="zwölf\n ]]} 漢", param="", final=False)
    record = requests.get(request_id, tenant=tenant)
    assert record.error == RequestError(code="internal", message="zwölf\n ]]} 漢", param="")
    (unfinished,) = requests.unfinished()
    assert unfinished == record
    requests.start(request_id, worker="w", lease_s=lease_s)
    requests.finish(request_id, 2, cache_ids=[])
    done = requests.get(request_id, tenant=tenant)
    assert (done.cache_ids, done.error) == ((), None)
    requests.open("empty", tenant="me", body=b"")
    assert requests.body("empty") == b""


def test_many_unfinished_requests_come_oldest_first(requests: RequestTable) -> None:
    for number in range(510):
        requests.open(f"req_{number:04}", tenant="me", body=b"")
    assert [record.id for record in requests.unfinished()] == [f"req_{number:04}" for number in range(510)]


def test_two_workers_do_not_take_one_attempt(home: Home, requests: RequestTable) -> None:
    for number in range(30):
        requests.open(f"req_{number}", tenant="me", body=b"")

    def start(index: Index, number: int) -> bool:
        try:
            return Shelf(index, home.blobs()).requests.start(f"req_{number}", worker="w", lease_s=60) == 1
        except StateConflict:
            return False

    assert race(home, 30, start) == [1] * 30


def test_of_two_who_open_a_request_one_leaves_its_body(home: Home, store: Shelf) -> None:
    """And of two who open a failed one again."""
    for number in range(10):
        store.requests.open(f"req_{number}", tenant="me", body=b"")
        attempt = store.requests.start(f"req_{number}", worker="w", lease_s=60)
        store.requests.fail(f"req_{number}", attempt, code="internal", message="oops", final=number % 2 == 0)

    def open_both(index: Index, number: int) -> bool:
        requests = Shelf(index, home.blobs(), now=home.now).requests
        opened = [
            requests.open(f"{name}_{number}", tenant="me", body=secrets.token_bytes(99)) for name in ("req", "new")
        ]
        assert {record.state for record in opened} == {"queued"}
        return True

    assert race(home, 10, open_both) == [2] * 10
    for number in range(10):
        assert len(store.requests.body(f"new_{number}")) == 99
        assert len(store.requests.body(f"req_{number}")) == (99 if number % 2 == 0 else 0)
    assert len(store.index.abandoned()) == 0, "the slower one removed its bytes"


def test_a_sweep_forgets_requests_after_a_month(tmp_path: Path, clock: Clock) -> None:
    with DiskStore.open(tmp_path / "home", now=clock) as store:
        store.requests.open("req_1", tenant="me", body=b"x")
        store.requests.start("req_1", worker="w1", lease_s=10)
        store.requests.finish("req_1", 1, cache_ids=[])
        clock.time += 29 * 86400
        assert store.sweep().requests == 0
        clock.time += 2 * 86400
        assert store.sweep().requests == 1


# Bodies


@pytest.mark.parametrize("sealed", [True, False])
def test_the_body_of_a_sealed_home_is_nowhere_in_plain_text(place: Place, *, sealed: bool) -> None:
    """Everything that the home holds is searched for it, in each state of a request. In a plain one it is found."""
    secret = b"The treasure is buried under the third oak."
    rules = Rules(keyring=Keyring([secrets.token_bytes(32)]) if sealed else None)

    def is_readable() -> bool:
        return any(secret in data for data in place.contents())

    with place.open(rules=rules) as store:
        for request_id in ("req_done", "req_failed"):
            store.requests.open(request_id, tenant="me", body=b'{"document": "' + secret * 99 + b'"}')
            assert is_readable() == (not sealed), "queued"
    with place.open(rules=rules) as store:
        assert is_readable() == (not sealed), "after a restart"
        attempts = [
            store.requests.start(request_id, worker="w", lease_s=60) for request_id in ("req_done", "req_failed")
        ]
        assert secret in store.requests.body("req_done")
        assert is_readable() == (not sealed), "running"
        store.requests.finish("req_done", attempts[0], cache_ids=())
        store.requests.fail("req_failed", attempts[1], code="internal", message="oops", final=True)
        assert place.names() == set()
        assert store.check() == []
        assert not (sealed and is_readable()), "done and failed"


def test_a_request_is_not_visible_before_its_body_is_durable(place: Place, clock: Clock) -> None:
    """The process dies between the bytes and the record: a sweep removes the bytes."""

    class Died(BaseException):
        pass

    def die(step: str) -> None:
        with place.open(now=clock) as other:
            assert other.requests.unfinished() == []
        if step == "verified":
            raise Died

    writer = place.open(now=clock, on_step=die)
    writer.requests.bodies.writer.discard = lambda _: None  # type: ignore[method-assign]  # dead processes undo nothing
    with pytest.raises(Died):
        writer.requests.open("req_1", tenant="me", body=b"lost")
    place.let_leases_run_out(clock)
    with place.open(now=clock) as store:
        assert store.sweep().orphans == 1
        assert place.names() == set()
        assert store.requests.unfinished() == []
        assert store.check() == []
    writer.close()


def test_a_body_whose_request_ended_is_swept(place: Place, clock: Clock) -> None:
    """The worker dies between the end of the request and the removal of its body."""
    with place.open(now=clock) as store:
        store.requests.open("req_1", tenant="me", body=b"x" * 1000)
        attempt = store.requests.start("req_1", worker="w", lease_s=60)
        store.requests.bodies.remove = lambda *_: None  # type: ignore[method-assign]
        store.requests.finish("req_1", attempt, cache_ids=[])
    with place.open(now=clock) as store:
        assert len(place.names()) == 1
        assert store.sweep().orphans == 1
        assert place.names() == set()


def test_a_waiting_body_counts_for_the_quota_of_its_tenant(place: Place) -> None:
    """96 MiB of them once waited for a tenant with a quota of 60 MB."""
    with place.open(rules=Rules(quota=Quota(max_bytes=3000))) as store:
        for number in range(3):
            store.requests.open(f"req_{number}", tenant="me", body=b"x" * 1000)
        with pytest.raises(QuotaExceeded, match="3000 of 3000"):
            store.requests.open("req_3", tenant="me", body=b"x")
        with pytest.raises(QuotaExceeded, match="3000 of 3000"):
            store.put(make_cache(), tenant="me")
        store.requests.open("req_4", tenant="other", body=b"x" * 1000)
        attempt = store.requests.start("req_0", worker="w", lease_s=60)
        store.requests.finish("req_0", attempt, cache_ids=[])
        store.requests.open("req_3", tenant="me", body=b"x" * 1000)
        assert len(place.names()) == 4
        assert store.check() == []


def test_a_body_that_is_lost_is_a_named_error(place: Place) -> None:
    with place.open() as store:
        record = store.requests.open("req_1", tenant="me", body=b"x" * 1000)
        assert record.body is not None
        store.blobs.remove(record.body.name, record.body.stored_bytes)
        with pytest.raises(InternalError, match="lost or damaged"):
            store.requests.body("req_1")
