"""What every ledger promises, in every home."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.errors import RequestNotFound, StateConflict
from kvshelf.store.disk import DiskStore
from kvshelf.store.disk.database import FILE_NAME
from kvshelf.store.index import Index
from kvshelf.store.jobs.ledger import Ledger, RequestError
from tests.store.indexes import Home, disk_home, empty_redis_home
from tests.store.places import Clock
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
def ledger(home: Home) -> Iterator[Ledger]:
    index = home.open()
    yield index.ledger
    index.close()


def test_a_request_runs_and_ends(ledger: Ledger, home: Home, lease_s: float) -> None:
    before = home.now()
    record = ledger.open_request("req_1", tenant="me", body=b"document")
    assert (record.state, record.attempts) == ("queued", 0)
    assert before - CLOCKS_S <= record.created_at <= home.now() + CLOCKS_S
    assert record.updated_at == record.created_at
    assert ledger.body("req_1") == b"document"
    assert ledger.start_attempt("req_1", worker="w1", lease_s=lease_s) == 1
    running = ledger.get_request("req_1", tenant="me")
    assert (running.state, running.worker) == ("running", "w1")
    assert before - CLOCKS_S <= running.updated_at <= home.now() + CLOCKS_S
    assert running.lease_until == pytest.approx(running.updated_at + lease_s, abs=1e-6)
    home.wait(1)
    ledger.finish("req_1", 1, cache_ids=["kvs_a", "kvs_b"])
    done = ledger.get_request("req_1", tenant="me")
    assert (done.state, done.cache_ids, done.worker, done.lease_until) == ("done", ("kvs_a", "kvs_b"), None, None)
    assert done.updated_at >= running.updated_at + home.tick_s
    with pytest.raises(StateConflict, match="its body was dropped"):
        ledger.body("req_1")


def test_opening_twice_changes_nothing(ledger: Ledger, home: Home, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"first")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    before = ledger.get_request("req_1", tenant="me")
    home.wait(1)
    assert ledger.open_request("req_1", tenant="me", body=b"second") == before
    assert ledger.body("req_1") == b"first"
    ledger.finish("req_1", 1, cache_ids=["kvs_a"])
    assert ledger.open_request("req_1", tenant="me", body=b"third").cache_ids == ("kvs_a",)


def test_a_finished_request_is_done_again_only_when_asked(ledger: Ledger, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    ledger.finish("req_1", 1, cache_ids=["kvs_a"])
    again = ledger.open_request("req_1", tenant="me", body=b"y", again=True)
    assert (again.state, again.cache_ids, ledger.body("req_1")) == ("queued", (), b"y")
    assert (again.attempts, again.attempts_before) == (1, 1)


def test_attempts_are_counted_before_the_work(ledger: Ledger, home: Home, lease_s: float) -> None:
    """Three workers die in a row: nobody reports it, and yet the third attempt is known as the third."""
    ledger.open_request("req_1", tenant="me", body=b"poison")
    for attempt in (1, 2, 3):
        assert ledger.start_attempt("req_1", worker=f"w{attempt}", lease_s=lease_s) == attempt
        assert ledger.get_request("req_1", tenant="me").attempts == attempt
        home.wait(5)


def test_a_live_lease_keeps_others_out(ledger: Ledger, home: Home, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    home.wait(3)
    ledger.renew("req_1", 1, lease_s=600)
    home.wait(3)
    with pytest.raises(StateConflict, match=r"worked on by 'w1' for another 5\d\d\.\d s"):
        ledger.start_attempt("req_1", worker="w2", lease_s=lease_s)
    assert ledger.get_request("req_1", tenant="me").attempts == 1
    ledger.renew("req_1", 1, lease_s=lease_s)
    home.wait(5)
    assert ledger.start_attempt("req_1", worker="w2", lease_s=lease_s) == 2


def test_a_stale_holder_can_do_nothing(ledger: Ledger, home: Home, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)  # the same name: the number fences, not the name
    for act in (
        lambda: ledger.finish("req_1", 1, cache_ids=["kvs_old"]),
        lambda: ledger.fail("req_1", 1, code="internal", message="late", final=True),
        lambda: ledger.renew("req_1", 1, lease_s=99),
    ):
        with pytest.raises(StateConflict, match="attempt 1 no longer holds request 'req_1'"):
            act()
    ledger.finish("req_1", 2, cache_ids=["kvs_new"])
    assert ledger.get_request("req_1", tenant="me").cache_ids == ("kvs_new",)
    with pytest.raises(StateConflict):
        ledger.finish("req_1", 2, cache_ids=["kvs_twice"])
    with pytest.raises(StateConflict, match="has ended"):
        ledger.start_attempt("req_1", worker="w3", lease_s=lease_s)


def test_a_failure_is_repeated_or_final(ledger: Ledger, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    ledger.fail("req_1", 1, code="worker_crashed", message="it died", final=False)
    queued = ledger.get_request("req_1", tenant="me")
    assert (queued.state, queued.attempts) == ("queued", 1)
    assert queued.error == RequestError(code="worker_crashed", message="it died")
    assert ledger.body("req_1") == b"x"
    ledger.start_attempt("req_1", worker="w2", lease_s=lease_s)
    facts = {"tried": [{"bytes": 5, "quality": None, "agreement": 0.25, "word": "ü"}]}
    ledger.fail("req_1", 2, code="quality_below_floor", message="too bad", param="levels", details=facts, final=True)
    failed = ledger.get_request("req_1", tenant="me")
    assert failed.state == "failed"
    assert failed.error == RequestError(code="quality_below_floor", message="too bad", param="levels", details=facts)
    with pytest.raises(StateConflict, match="dropped"):
        ledger.body("req_1")


def test_a_failure_that_nobody_is_to_blame_for_is_not_counted(ledger: Ledger, home: Home, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    for attempt, counted, tries in ((2, False, 1), (3, True, 2), (4, False, 2)):
        assert ledger.start_attempt("req_1", worker="w1", lease_s=lease_s) == attempt
        ledger.fail("req_1", attempt, code="storage_full", message="full", final=False, counted=counted)
        record = ledger.get_request("req_1", tenant="me")
        assert (record.state, record.attempts, record.tries) == ("queued", attempt, tries)


def test_a_failed_request_that_is_sent_again_starts_anew(ledger: Ledger, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    ledger.fail("req_1", 1, code="internal", message="oops", details={"of": "the first"}, final=True)
    again = ledger.open_request("req_1", tenant="me", body=b"x")
    assert (again.state, again.tries, again.error) == ("queued", 0, None)
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    ledger.fail("req_1", 2, code="internal", message="oops again", final=True)
    told = ledger.get_request("req_1", tenant="me").error
    assert told == RequestError(code="internal", message="oops again")  # nothing of the first


def test_a_disk_home_of_before_there_were_details_is_used_as_it_is(tmp_path: Path) -> None:
    disk_home(tmp_path).open().close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("ALTER TABLE requests DROP COLUMN error_details")
        connection.execute(
            "INSERT INTO requests (id, tenant, state, attempts, error_code, error_message, created_at, updated_at) "
            "VALUES ('req_old', 'me', 'failed', 1, 'internal', 'oops', 5, 6)"
        )
        connection.commit()
    for _ in range(2):
        index = disk_home(tmp_path).open()
        assert index.ledger.get_request("req_old", tenant="me").error == RequestError(code="internal", message="oops")
        index.close()


def test_a_fence_holds_across_a_new_start(ledger: Ledger, home: Home, lease_s: float) -> None:
    """A worker that hung through the first life of a request must not end its second: numbers never repeat."""
    ledger.open_request("req_1", tenant="me", body=b"x")
    hung = ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    home.wait(5)
    ledger.fail(
        "req_1",
        ledger.start_attempt("req_1", worker="w2", lease_s=lease_s),
        code="internal",
        message="oops",
        final=True,
    )
    ledger.open_request("req_1", tenant="me", body=b"x")
    current = ledger.start_attempt("req_1", worker="w2", lease_s=lease_s)
    with pytest.raises(StateConflict):
        ledger.finish("req_1", hung, cache_ids=["kvs_old"])
    ledger.finish("req_1", current, cache_ids=["kvs_new"])


def test_tenants_do_not_see_each_others_requests(ledger: Ledger) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    messages = set()
    for request_id, tenant in (("req_1", "you"), ("req_2", "me")):
        with pytest.raises(RequestNotFound) as refusal:
            ledger.get_request(request_id, tenant=tenant)
        messages.add(refusal.value.message.replace(request_id, "<id>"))
    assert len(messages) == 1
    with pytest.raises(StateConflict):
        ledger.open_request("req_1", tenant="you", body=b"x")
    for act in (
        lambda: ledger.body("req_2"),
        lambda: ledger.start_attempt("req_2", worker="w", lease_s=1),
        lambda: ledger.finish("req_2", 1, cache_ids=[]),
    ):
        with pytest.raises(RequestNotFound):
            act()


def test_unfinished_requests_survive_a_restart(home: Home, lease_s: float) -> None:
    index = home.open()
    for number in (3, 1, 2):
        index.ledger.open_request(f"req_{number}", tenant="me", body=b"%d" % number)
        home.wait(0.1)
    index.ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    index.ledger.start_attempt("req_2", worker="w1", lease_s=lease_s)
    index.ledger.finish("req_2", 1, cache_ids=[])
    index.close()
    again = home.open()
    assert [(r.id, r.state) for r in again.ledger.unfinished()] == [("req_3", "queued"), ("req_1", "running")]
    assert again.ledger.body("req_3") == b"3"
    again.close()


def test_old_requests_are_forgotten_and_live_ones_never(ledger: Ledger, home: Home, lease_s: float) -> None:
    for number in (1, 2, 3, 4):
        ledger.open_request(f"req_{number}", tenant="me", body=b"x")
        ledger.start_attempt(f"req_{number}", worker="w1", lease_s=lease_s)
    ledger.finish("req_1", 1, cache_ids=[])
    ledger.fail("req_2", 1, code="internal", message="oops", final=True)
    ledger.fail("req_3", 1, code="internal", message="oops", final=False)
    home.wait(1)
    before = home.now()
    ledger.finish("req_4", 1, cache_ids=[])
    assert ledger.forget(before) == 2
    with pytest.raises(RequestNotFound):
        ledger.get_request("req_1", tenant="me")
    assert ledger.get_request("req_4", tenant="me").state == "done"
    assert [record.id for record in ledger.unfinished()] == ["req_3"]
    assert ledger.forget(home.now() + 1e6) == 1
    assert ledger.forget(home.now() + 1e6) == 0


def test_a_request_that_is_sent_again_is_not_forgotten(ledger: Ledger, home: Home, lease_s: float) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=lease_s)
    ledger.fail("req_1", 1, code="internal", message="oops", final=True)
    ledger.open_request("req_1", tenant="me", body=b"y")
    assert ledger.forget(home.now() + 1e6) == 0
    assert [record.id for record in ledger.unfinished()] == ["req_1"]


def test_texts_and_bodies_of_any_kind_come_back(ledger: Ledger, lease_s: float) -> None:
    body = bytes(range(256)) * 5000
    request_id, tenant = 'req_" {x}:\n漢', "me and\nyou ü"
    ledger.open_request(request_id, tenant=tenant, body=body)
    assert ledger.body(request_id) == body
    ledger.start_attempt(request_id, worker="w 漢", lease_s=lease_s)
    ledger.fail(request_id, 1, code="internal", message="zwölf\n ]]} 漢", param="", final=False)
    record = ledger.get_request(request_id, tenant=tenant)
    assert record.error == RequestError(code="internal", message="zwölf\n ]]} 漢", param="")
    (found,) = ledger.unfinished()
    assert found == record
    ledger.start_attempt(request_id, worker="w", lease_s=lease_s)
    ledger.finish(request_id, 2, cache_ids=[])
    done = ledger.get_request(request_id, tenant=tenant)
    assert (done.cache_ids, done.error) == ((), None)
    ledger.open_request("empty", tenant="me", body=b"")
    assert ledger.body("empty") == b""


def test_many_unfinished_requests_come_oldest_first(ledger: Ledger) -> None:
    for number in range(1100):
        ledger.open_request(f"req_{number:04}", tenant="me", body=b"x")
    assert [record.id for record in ledger.unfinished()] == [f"req_{number:04}" for number in range(1100)]


def test_two_workers_do_not_take_one_attempt(home: Home) -> None:
    index = home.open()
    for number in range(30):
        index.ledger.open_request(f"req_{number}", tenant="me", body=b"x")

    def start(index: Index, number: int) -> bool:
        try:
            return index.ledger.start_attempt(f"req_{number}", worker="w", lease_s=60) == 1
        except StateConflict:
            return False

    assert race(home, 30, start) == [1] * 30
    index.close()


def test_a_sweep_forgets_requests_after_a_month(tmp_path: Path, clock: Clock) -> None:
    with DiskStore.open(tmp_path / "home", now=clock) as store:
        store.ledger.open_request("req_1", tenant="me", body=b"x")
        store.ledger.start_attempt("req_1", worker="w1", lease_s=10)
        store.ledger.finish("req_1", 1, cache_ids=[])
        clock.time += 29 * 86400
        assert store.sweep().requests == 0
        clock.time += 2 * 86400
        assert store.sweep().requests == 1
