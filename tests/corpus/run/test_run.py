"""Whole runs on real Ray: every row ends, whichever processes die meanwhile."""

from __future__ import annotations

import datetime
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import ray

from kvshelf.corpus.run.caller import RowCaller
from kvshelf.corpus.run.pipeline import Order, Report
from kvshelf.corpus.run.progress import RunOptions, RunState, Summary, WorkHours
from kvshelf.corpus.run.run import IN_FLIGHT_PER_REPLICA, give_order
from kvshelf.errors import StorageFull
from kvshelf.workers.cluster.remote import RemoteEngine
from tests.amounts import amount
from tests.corpus.conftest import RunCluster
from tests.corpus.hostile import HANGS, KILLS, KINDS, SLOW, SLOW_S, SWELLS, Remembered, corpus, document, shards
from tests.corpus.runs import (
    begun,
    digests,
    ended,
    options,
    processes,
    require_order,
    until,
    until_at_rest,
    until_waiting,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(amount(900, 7200))]


@pytest.fixture(scope="module")
def count(soak: bool) -> int:
    return 2000 if soak else 60


@pytest.fixture(scope="module")
def undisturbed(run_cluster: RunCluster, count: int) -> tuple[RunOptions, list[Any], Summary, Remembered]:
    """A run of good rows, with a few that are none."""
    lines: list[Any] = corpus(count)
    lines[7:7] = [b"", b"no json", {"custom_id": "odd", "document": "x", "policy": "none-such"}]
    lines.append(document(3))
    lines.insert(40, {"custom_id": "vast", "token_ids": [7] * 400_000})  # its shard is larger than Ray's tasks like
    how = options()
    return how, lines, *whole(run_cluster, lines, how, size=40)


def test_an_ended_run_leaves_no_process_of_its_own(undisturbed: Any) -> None:
    del undisturbed
    until(lambda: not processes("ray::Control"))


def test_every_row_has_an_end(undisturbed: Any, count: int, run_cluster: RunCluster) -> None:
    _, lines, summary, journal = undisturbed
    assert summary.state is RunState.COMPLETED
    assert (summary.total, summary.done, summary.failed) == (len(lines), count + 1, 4)
    assert summary.reused == 1  # the document that comes twice
    assert len(journal.results) == len(lines)
    assert journal.appended == len(lines)
    assert all(result.attempts == 1 for result in journal.results.values() if result.cache_id)
    results = journal.by_id()
    assert results["odd"].error is not None
    assert results["odd"].error.code == "invalid_request"
    assert results["vast"].error is not None
    assert results["vast"].error.code == "document_too_long"
    assert sum(worker.done for worker in summary.workers.values()) == count
    assert summary.fraction == 1.0
    assert summary.tokens_per_s > 0
    assert len(digests(run_cluster, list(journal.results.values()))) == count
    require_order(run_cluster)


def test_a_finished_batch_is_done_again_without_a_prefill(
    undisturbed: Any, run_cluster: RunCluster, soak: bool
) -> None:
    how, lines, first, before = undisturbed
    started = time.monotonic()
    summary, journal = whole(run_cluster, lines, how, size=40)
    seconds = time.monotonic() - started
    assert (summary.state, summary.done, summary.reused) == (RunState.COMPLETED, first.done, first.done)
    assert (summary.gpu_hours, summary.tokens_per_s, dict(summary.workers)) == (0.0, 0.0, {})
    assert {key: result.cache_id for key, result in journal.results.items()} == {
        key: result.cache_id for key, result in before.results.items()
    }
    if soak:
        assert seconds < 60


@pytest.mark.faults
def test_documents_that_do_harm_are_error_rows_and_the_others_are_done(run_cluster: RunCluster, soak: bool) -> None:
    kinds = [KILLS, HANGS, SWELLS] * (4 if soak else 1)
    lines: list[Any] = corpus(40)
    for number, kind in enumerate(kinds):
        lines.insert(number * 7, document(1000 + number, kind=kind))
    summary, journal = whole(run_cluster, lines, options(document_deadline_s=8, max_attempts=3))
    results = journal.by_id()
    failed = {name: result.error.code for name, result in results.items() if result.error is not None}
    assert (summary.state, summary.done, summary.failed) == (RunState.COMPLETED, 40, len(kinds)), failed
    for number, kind in enumerate(kinds):
        result = results[f"d{1000 + number}"]
        assert result.error is not None
        assert result.error.code == KINDS[kind]
        assert result.attempts == 3
    require_order(run_cluster)


def taken(run_cluster: RunCluster, journal: Remembered) -> dict[str, tuple[str, ...]]:
    """The digests of a run's caches, which are deleted: what is left on the shelf costs the next run no time."""
    contents = digests(run_cluster, list(journal.results.values()))
    with run_cluster.store.open() as shelf:
        for cache_id in contents:
            shelf.delete(cache_id, tenant="me")
    return contents


@pytest.fixture(scope="module")
def calm(run_cluster: RunCluster, soak: bool) -> tuple[list[Any], dict[str, tuple[str, ...]]]:
    """Documents, some slow so that there is time to kill something, and the digests of an undisturbed run."""
    wanted, first = 400 if soak else 40, 10_000
    lines = [document(first + number, tokens=(200, 400)) for number in range(wanted)]
    for number in range(0, wanted, 10):
        lines[number] = document(first + number, kind=SLOW)
    _, journal = whole(run_cluster, lines, options())
    return lines, taken(run_cluster, journal)


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["ServedReplica", "ray::Callers", "ray::Control"])
def test_a_process_that_dies_changes_nothing_of_the_end(run_cluster: RunCluster, calm: Any, victim: str) -> None:
    """The caches have the ids and segments of an undisturbed run."""
    lines, expected = calm
    journal = Remembered()
    run = begun(run_cluster, lines, journal, options())
    until(lambda: run.progress().done >= 5)
    (pid, *_) = processes(victim)
    os.kill(pid, signal.SIGKILL)
    if victim == "ServedReplica":  # the only one
        until_waiting(run, "no worker of")
    summary = ended(run)
    assert (summary.state, summary.done, summary.failed) == (RunState.COMPLETED, len(lines), 0)
    assert len(journal.results) == len(expected) == len(lines)
    assert taken(run_cluster, journal) == expected
    require_order(run_cluster)


class Controls:
    """Stands for `Control` where that has a bug, or is dead."""

    def give(self, order: Order) -> Report:
        raise LookupError(f"a bug with {order}")


@pytest.mark.usefixtures("run_cluster")
def test_a_bug_of_the_control_ends_a_run_and_its_death_does_not() -> None:
    """A control that died is started again by Ray; a bug would hold the run for ever."""
    control = ray.remote(num_cpus=0)(Controls).remote()
    ray.get(control.__ray_ready__.remote())  # an order to one that still starts is late, and repeated
    with pytest.raises(LookupError, match="a bug with go"):
        give_order(control, Order.GO)
    ray.kill(control)  # which a call may still come before

    def told_of_nothing() -> bool:
        try:
            return give_order(control, Order.GO) == Report()
        except LookupError:
            return False

    until(told_of_nothing)


@pytest.mark.faults
def test_a_run_that_is_cancelled_ends_at_once_and_goes_on_later(run_cluster: RunCluster) -> None:
    how = options()
    lines = [document(number, kind=SLOW) for number in range(2000, 2010)]  # told in order: the first may end last
    journal = Remembered()
    hopeful = {
        name: RemoteEngine(engine.model, engine.app, engine.handle, target_replicas=3)
        for name, engine in run_cluster.engines.items()
    }
    run = begun(replace(run_cluster, engines=hopeful), lines, journal, how)
    with run_cluster.store.open() as shelf:  # at work as if the replicas that were asked for all ran
        until(lambda: len(shelf.requests.unfinished()) > IN_FLIGHT_PER_REPLICA)
    until(lambda: run.progress().done >= 1)
    began_at = time.monotonic()
    run.cancel("enough")
    summary = ended(run)
    assert time.monotonic() - began_at < 30
    assert (summary.state, summary.reason) == (RunState.CANCELLED, "enough")
    assert 0 < summary.done == len(journal.results) < len(lines)
    require_order(run_cluster)
    rest = ended(begun(run_cluster, lines, journal, how))
    assert (rest.state, rest.done, rest.reused) == (RunState.COMPLETED, len(lines), summary.done)
    assert len(journal.results) == len(lines)


def test_a_run_outside_its_window_waits_and_says_so(run_cluster: RunCluster) -> None:
    now = datetime.datetime.now()
    later = WorkHours((now + datetime.timedelta(hours=2)).time(), (now + datetime.timedelta(hours=3)).time())
    journal = Remembered()
    run = begun(run_cluster, corpus(30), journal, options(window=later))
    until_waiting(run, str(later))
    time.sleep(3)
    assert run.progress().done == 0
    run.cancel()
    assert ended(run).state is RunState.CANCELLED


def test_a_window_that_closes_holds_the_run_and_one_that_opens_lets_it_go_on(
    run_cluster: RunCluster, soak: bool
) -> None:
    """The window closes for some seconds while rows are at work."""
    if not soak:
        pytest.skip("it takes a minute of wall clock; a journal without room holds rows in the same way, tested below")
    closes = datetime.datetime.now() + datetime.timedelta(seconds=25)
    opens = closes + datetime.timedelta(seconds=5 * SLOW_S)
    window = WorkHours(begin=opens.time(), end=closes.time())
    lines = [document(number, kind=SLOW) for number in range(2300, 2310)]
    journal = Remembered()
    run = begun(run_cluster, lines, journal, options(in_flight=1, window=window))
    until_waiting(run, str(window))
    assert datetime.datetime.now() >= closes
    summary = ended(run)
    assert (summary.state, summary.done) == (RunState.COMPLETED, len(lines))
    assert summary.times["waiting"] < opens.timestamp() <= summary.times["running"]
    with run_cluster.store.open() as shelf:
        made = [shelf.stat(result.cache_id or "", tenant="me").created_at for result in journal.results.values()]
    last = closes.timestamp() + 3 * SLOW_S  # for the row that was at work
    assert min(made) < last, "rows were at work before"
    assert [at for at in made if last < at < opens.timestamp() + SLOW_S] == [], "none was begun meanwhile"


@pytest.mark.faults
def test_a_journal_that_has_no_room_holds_the_run_up_and_loses_nothing(run_cluster: RunCluster) -> None:
    """No row begins while results cannot be recorded; rows at work are finished, and the run continues with room."""
    journal = Remembered()
    lines = [document(number, kind=SLOW) for number in range(2100, 2106)]
    run = begun(run_cluster, lines, journal, options(tenant="held", in_flight=1))
    until(lambda: run.progress().done >= 1)
    journal.refuse = StorageFull("no room for results")
    until_waiting(run, "no room for results")
    with run_cluster.store.open() as shelf:
        until_at_rest(shelf, "held")
        count = shelf.usage(tenant="held").caches
        time.sleep(5)
        assert shelf.usage(tenant="held").caches == count < len(lines)
    assert run.progress().state is RunState.WAITING
    journal.refuse = None
    summary = ended(run)
    assert (summary.state, summary.done, len(journal.results)) == (RunState.COMPLETED, 6, 6)
    assert {"running", "waiting", "completed"} <= summary.times.keys()


def test_a_run_stops_when_its_gpu_hours_are_used_up(run_cluster: RunCluster) -> None:
    lines = [document(number, kind=SLOW) for number in range(2200, 2210)]
    summary, journal = whole(run_cluster, lines, options(in_flight=1, max_gpu_hours=4 / 3600))
    assert summary.state is RunState.CANCELLED
    assert "GPU hours are used up" in summary.reason
    assert 0 < len(journal.results) < len(lines)
    assert summary.gpu_hours * 3600 >= 4


def test_a_batch_without_a_success_has_failed(run_cluster: RunCluster) -> None:
    summary, journal = whole(run_cluster, [b"no json", b""], options())
    assert (summary.state, summary.failed, len(journal.results)) == (RunState.FAILED, 2, 2)
    assert "none of the 2 rows" in summary.reason


def test_long_documents_come_first() -> None:
    from kvshelf.corpus.input.reading import ordered

    rows = [row for shard in shards(corpus(100, tokens=(1, 5000))) for row in shard.read()]
    in_order = list(ordered(iter(rows)))
    lengths = [row.length for row in in_order]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(row.line for row in in_order) == list(range(1, 101))


def test_a_row_that_waits_holds_back_no_other_one(run_cluster: RunCluster) -> None:
    """Another worker has the first row. The progress counts all that are on the shelf meanwhile."""
    lines = [document(5000, tokens=(200, 201)), *(document(5001 + number) for number in range(12))]
    how, journal = options(), Remembered()
    (first, *_) = shards(lines)[0].read()
    with run_cluster.store.open() as shelf:
        caller = RowCaller(run_cluster.engines, shelf, how, 0.0, 1)
        assert first.spec is not None
        request_id = caller.job(first, first.spec).id
        shelf.requests.open(request_id, tenant="me", body=b"")
        attempt = shelf.requests.start(request_id, worker="another", lease_s=600)
        run = begun(run_cluster, lines, journal, how)
        until(lambda: run.progress().done >= len(lines) - 1)
        assert run.wait(0) is None
        assert len(journal.results) == len(lines) - 1
        shelf.requests.fail(request_id, attempt, code="no_worker", message="let go", final=False, counted=False)
    assert (ended(run).state, run.progress().done) == (RunState.COMPLETED, len(lines))


@pytest.mark.faults
def test_a_run_under_fire_ends_as_an_undisturbed_one(run_cluster: RunCluster, soak: bool) -> None:
    """2,000 documents, one in a hundred of them hostile, and every 20 seconds a random process dies."""
    if not soak:
        pytest.skip("it takes an hour; the kills one by one are tested above")
    chance = random.Random(1)
    lines = corpus(2000, tokens=(200, 6000))
    for number in range(0, 2000, 100):
        lines[number] = document(number, kind=chance.choice((KILLS, HANGS, SWELLS)))
    journal = Remembered()
    run = begun(run_cluster, lines, journal, options(document_deadline_s=60))
    kills = 0
    while (summary := run.wait(20)) is None:
        victims = [pid for title in ("ServedReplica", "ray::Callers", "ray::Control") for pid in processes(title)]
        if victims:
            os.kill(chance.choice(victims), signal.SIGKILL)
            kills += 1
    assert kills > 10
    assert (summary.state, summary.done, summary.failed) == (RunState.COMPLETED, 1980, 20)
    assert len(journal.results) == 2000
    with run_cluster.store.open() as shelf:
        shelf.sweep(now=time.time() + 3600)
        assert list(shelf.check()) == []
    disturbed = taken(run_cluster, journal)
    good = [line for number, line in enumerate(lines) if number % 100]
    _, undisturbed = whole(run_cluster, good, options())
    assert taken(run_cluster, undisturbed) == disturbed
    require_order(run_cluster)
