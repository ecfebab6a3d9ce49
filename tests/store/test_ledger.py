from __future__ import annotations

from pathlib import Path

import pytest

from kvshelf.errors import RequestNotFound, StateConflict
from kvshelf.store.disk import DiskStore
from kvshelf.store.ledger import Ledger, RequestError
from tests.store.conftest import Clock


@pytest.fixture
def ledger(store: DiskStore) -> Ledger:
    return store.ledger


def test_a_request_runs_and_ends(ledger: Ledger, clock: Clock) -> None:
    record = ledger.open_request("req_1", tenant="me", body=b"document")
    assert (record.state, record.attempts, record.created_at) == ("queued", 0, clock.time)
    assert ledger.body("req_1") == b"document"
    assert ledger.start_attempt("req_1", worker="w1", lease_s=10) == 1
    running = ledger.get_request("req_1", tenant="me")
    assert (running.state, running.worker, running.lease_until) == ("running", "w1", clock.time + 10)
    clock.time += 3
    ledger.finish("req_1", 1, cache_ids=["kvs_a", "kvs_b"])
    done = ledger.get_request("req_1", tenant="me")
    assert (done.state, done.cache_ids, done.worker, done.lease_until) == ("done", ("kvs_a", "kvs_b"), None, None)
    assert done.updated_at == clock.time
    with pytest.raises(StateConflict, match="its body was dropped"):
        ledger.body("req_1")


def test_opening_twice_changes_nothing(ledger: Ledger, clock: Clock) -> None:
    ledger.open_request("req_1", tenant="me", body=b"first")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    before = ledger.get_request("req_1", tenant="me")
    clock.time += 1
    assert ledger.open_request("req_1", tenant="me", body=b"second") == before
    assert ledger.body("req_1") == b"first"
    ledger.finish("req_1", 1, cache_ids=["kvs_a"])
    assert ledger.open_request("req_1", tenant="me", body=b"third").cache_ids == ("kvs_a",)


def test_a_finished_request_is_done_again_only_when_asked(ledger: Ledger) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    ledger.finish("req_1", 1, cache_ids=["kvs_a"])
    again = ledger.open_request("req_1", tenant="me", body=b"y", again=True)
    assert (again.state, again.cache_ids, ledger.body("req_1")) == ("queued", (), b"y")
    assert (again.attempts, again.attempts_before) == (1, 1)


def test_attempts_are_counted_before_the_work(ledger: Ledger, clock: Clock) -> None:
    """Three workers die in a row: nobody reports it, and yet the third attempt is known as the third."""
    ledger.open_request("req_1", tenant="me", body=b"poison")
    for attempt in (1, 2, 3):
        assert ledger.start_attempt("req_1", worker=f"w{attempt}", lease_s=10) == attempt
        assert ledger.get_request("req_1", tenant="me").attempts == attempt
        clock.time += 10


def test_a_live_lease_keeps_others_out(ledger: Ledger, clock: Clock) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    clock.time += 9
    ledger.renew("req_1", 1, lease_s=10)
    clock.time += 9
    with pytest.raises(StateConflict, match=r"worked on by 'w1' for another 1\.0 s"):
        ledger.start_attempt("req_1", worker="w2", lease_s=10)
    assert ledger.get_request("req_1", tenant="me").attempts == 1
    clock.time += 1
    assert ledger.start_attempt("req_1", worker="w2", lease_s=10) == 2


def test_a_stale_holder_can_do_nothing(ledger: Ledger, clock: Clock) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    clock.time += 10
    ledger.start_attempt("req_1", worker="w1", lease_s=10)  # the same name: the number fences, not the name
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
        ledger.start_attempt("req_1", worker="w3", lease_s=10)


def test_a_failure_is_repeated_or_final(ledger: Ledger) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    ledger.fail("req_1", 1, code="worker_crashed", message="it died", final=False)
    queued = ledger.get_request("req_1", tenant="me")
    assert (queued.state, queued.attempts) == ("queued", 1)
    assert queued.error == RequestError(code="worker_crashed", message="it died")
    assert ledger.body("req_1") == b"x"
    ledger.start_attempt("req_1", worker="w2", lease_s=10)
    ledger.fail("req_1", 2, code="document_too_long", message="too long", param="document", final=True)
    failed = ledger.get_request("req_1", tenant="me")
    assert failed.state == "failed"
    assert failed.error == RequestError(code="document_too_long", message="too long", param="document")
    with pytest.raises(StateConflict, match="dropped"):
        ledger.body("req_1")


def test_a_failed_request_that_is_sent_again_starts_anew(ledger: Ledger) -> None:
    ledger.open_request("req_1", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    ledger.fail("req_1", 1, code="internal", message="oops", final=True)
    again = ledger.open_request("req_1", tenant="me", body=b"x")
    assert (again.state, again.tries, again.error) == ("queued", 0, None)


def test_a_fence_holds_across_a_new_start(ledger: Ledger, clock: Clock) -> None:
    """A worker that hung through the first life of a request must not end its second: numbers never repeat."""
    ledger.open_request("req_1", tenant="me", body=b"x")
    hung = ledger.start_attempt("req_1", worker="w1", lease_s=10)
    clock.time += 10
    ledger.fail(
        "req_1", ledger.start_attempt("req_1", worker="w2", lease_s=10), code="internal", message="oops", final=True
    )
    ledger.open_request("req_1", tenant="me", body=b"x")
    current = ledger.start_attempt("req_1", worker="w2", lease_s=10)
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


def test_unfinished_requests_survive_a_restart(home: Path, clock: Clock) -> None:
    with DiskStore.open(home, now=clock) as store:
        for number in (3, 1, 2):
            store.ledger.open_request(f"req_{number}", tenant="me", body=b"%d" % number)
            clock.time += 1
        store.ledger.start_attempt("req_1", worker="w1", lease_s=10)
        store.ledger.start_attempt("req_2", worker="w1", lease_s=10)
        store.ledger.finish("req_2", 1, cache_ids=[])
    with DiskStore.open(home, now=clock) as store:
        assert [(r.id, r.state) for r in store.ledger.unfinished()] == [("req_3", "queued"), ("req_1", "running")]
        assert store.ledger.body("req_3") == b"3"


def test_old_requests_are_forgotten_and_live_ones_never(store: DiskStore, clock: Clock) -> None:
    ledger = store.ledger
    for number in (1, 2):
        ledger.open_request(f"req_{number}", tenant="me", body=b"x")
    ledger.start_attempt("req_1", worker="w1", lease_s=10)
    ledger.finish("req_1", 1, cache_ids=[])
    clock.time += 31 * 86400
    assert store.sweep().requests == 1
    assert [record.id for record in ledger.unfinished()] == ["req_2"]
