"""The rules by which a batch rests, is told of, and ends."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api.batches import BatchError, RequestCounts
from kvshelf.corpus.run.progress import Progress, RunState
from kvshelf.errors import StateConflict
from kvshelf.service.jobs.batch_files import outcome
from kvshelf.service.jobs.batch_work import outranked, rest_reason, stuck, waiting, with_progress
from kvshelf.service.routes.batches import _require_results
from kvshelf.store.disk import DiskStore
from kvshelf.store.jobs.batches import BatchRecord

NOON = datetime.datetime(2030, 5, 5, 12, 0).timestamp()
PROBLEM = BatchError(code="empty_file", message="no line")


def batch(state: Any = "in_progress", window: str | None = None, **fields: Any) -> BatchRecord:
    values: dict[str, Any] = {"id": "batch_1", "tenant": "me", "created_at": 0.0, "expires_at": NOON + 60}
    return BatchRecord(**values | {"body": {"window": window}, "state": state, "times": {state: 0.0}} | fields)


@pytest.mark.parametrize(
    ("record", "rests"),
    [
        (batch(), False),
        (batch("paused"), True),
        (batch("validating"), False),
        (batch("finalizing"), False),
        (batch("cancelling"), False),
        (batch("paused", expires_at=NOON), False),
        (batch(window="11:00-13:00"), False),
        (batch(window="13:00-11:00"), True),
        (batch(window="13:00-14:00"), True),
        (batch("cancelling", window="13:00-14:00"), False),
        (batch("finalizing", window="13:00-14:00"), False),
        (batch("validating", window="13:00-14:00"), False),
        (batch(window="13:00-14:00", expires_at=NOON), False),
    ],
)
def test_when_a_batch_rests(record: BatchRecord, *, rests: bool) -> None:
    assert bool(rest_reason(record, NOON)) == rests


def ranked(priority: int, state: Any = "in_progress", **fields: Any) -> BatchRecord:
    return batch(state, body={"window": fields.pop("window", None), "priority": priority}, **fields)


@pytest.mark.parametrize(
    ("record", "other", "waits"),
    [
        (ranked(0), ranked(1), True),
        (ranked(0), ranked(1, "validating"), True),
        (ranked(-10, "validating"), batch(), True),
        (ranked(1), ranked(1), False),
        (ranked(1), ranked(0), False),
        (ranked(0), ranked(1, tenant="other"), False),
        (ranked(0), ranked(1, "paused"), False),
        (ranked(0), ranked(1, window="13:00-14:00"), False),
        (ranked(0), ranked(1, progress={"waits_for": "the shelf is full"}), False),
        (ranked(0, "cancelling"), ranked(1), False),
        (ranked(0, "finalizing"), ranked(1), False),
        (ranked(0, expires_at=NOON), ranked(1), False),
    ],
)
def test_who_leaves_the_place_to_a_batch_of_higher_priority(
    record: BatchRecord, other: BatchRecord, *, waits: bool
) -> None:
    assert bool(outranked(record, [record, other], NOON)) == waits


def test_what_waited_for_a_higher_batch_goes_before_a_lower_one_at_once() -> None:
    low, middle, high = (ranked(priority) for priority in range(3))
    middle = waiting(middle, outranked(middle, [low, middle, high], NOON), NOON)
    assert not rest_reason(middle, NOON), "it has no pause: the higher one may end at any moment"
    assert outranked(low, [low, middle], NOON)


@pytest.mark.parametrize(
    ("state", "counts", "problems", "ends", "code"),
    [
        ("finalizing", (3, 3, 0), (), "completed", None),
        ("finalizing", (3, 1, 2), (), "completed", None),
        ("finalizing", (3, 0, 3), (), "failed", "no_success"),
        ("finalizing", (3, 1, 0), (), "expired", None),
        ("finalizing", (3, 0, 0), (), "expired", None),
        ("finalizing", (0, 0, 0), (), "expired", None),
        ("cancelling", (3, 1, 0), (), "cancelled", None),
        ("cancelling", (3, 0, 0), (), "cancelled", None),
        ("finalizing", (0, 0, 0), (PROBLEM,), "failed", "empty_file"),
        ("finalizing", (3, 1, 0), (PROBLEM,), "failed", "empty_file"),
    ],
)
def test_how_a_batch_ends(state: Any, counts: tuple[int, int, int], problems: Any, ends: str, code: str | None) -> None:
    total, completed, failed = counts
    found = outcome(batch(state, problems=problems), RequestCounts(total=total, completed=completed, failed=failed))
    assert found[0] == ends
    assert [problem.code for problem in found[1]] == ([] if code is None else [code])


def progress(done: int, reused: int, failed: int = 0, **fields: Any) -> Progress:
    return Progress(RunState.RUNNING, done=done, reused=reused, failed=failed, **fields)


def test_callers_are_told_of_no_step_back_when_a_run_begins_again() -> None:
    """Of 10 rows 5 were made and 1 was reused; the next run comes by these six first, all of them reused."""
    before = batch(counts=RequestCounts(total=10, completed=6, reused=1), progress={"tokens": 600, "gpu_hours": 2.0})
    told = [with_progress(before, progress(n, n, tokens=100 * n, gpu_hours=0.5), before) for n in (1, 6)]
    assert [record.counts for record in told] == [before.counts] * 2
    assert [record.progress["tokens"] for record in told] == [600] * 2
    on = with_progress(before, progress(8, 7, failed=1, tokens=800, bytes_full_16bit=9, gpu_hours=1.0), before)
    assert on.counts == RequestCounts(total=10, completed=8, failed=1, reused=2)
    assert (on.progress["tokens"], on.progress["bytes_full_16bit"], on.progress["gpu_hours"]) == (800, 9, 3.0)


def test_nothing_is_told_for_the_passing_of_time() -> None:
    before = batch(counts=RequestCounts(total=10))
    once = with_progress(before, progress(1, 0, elapsed_s=1.0), before)
    assert with_progress(once, progress(1, 0, elapsed_s=9.0), before) is once
    waiting = Progress(RunState.WAITING, "the store is full", done=1)
    assert with_progress(once, waiting, before).progress["waits_for"] == "the store is full"


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_batch_that_waits_rests_for_a_pause_that_grows_until_it_gets_on(state: Any) -> None:
    record, pauses = batch(state, expires_at=NOON + 3600), []
    for _ in range(9):
        record = waiting(record, "no room", NOON)
        pauses.append(record.progress["pause_s"])
        assert rest_reason(record, NOON + pauses[-1] - 1) == "no room"
        assert rest_reason(record, NOON + pauses[-1]) == ""
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    started = with_progress(record, progress(0, 0), record)
    assert (rest_reason(started, NOON), waiting(started, "no room", NOON).progress["pause_s"]) == ("", 300)
    got_on = with_progress(started, progress(1, 0), started)
    assert waiting(got_on, "no room", NOON).progress["pause_s"] == 5


def test_a_pause_ends_with_the_state_and_with_the_time_of_the_batch() -> None:
    record = waiting(batch(expires_at=NOON + 2), "no room", NOON)
    assert rest_reason(record, NOON + 1) == "no room"
    assert rest_reason(record, NOON + 2) == ""
    assert rest_reason(record.entered("cancelling", NOON + 1), NOON + 1) == ""
    assert rest_reason(record.entered("paused", NOON + 0.5).entered("in_progress", NOON + 1), NOON + 1) == ""
    late = waiting(batch("finalizing", expires_at=NOON - 1), "no room", NOON)
    assert rest_reason(late, NOON + 1) == "no room", "its results must be written all the same"


def test_a_run_is_stuck_when_it_has_waited_for_a_while() -> None:
    waits = Progress(RunState.WAITING, "the quota is used up", times={"running": NOON - 60, "waiting": NOON})
    assert (stuck(waits, NOON + 1), stuck(waits, NOON + 10)) == ("", "the quota is used up")
    assert stuck(Progress(RunState.RUNNING, times=waits.times), NOON + 60) == ""


def test_a_batch_whose_results_are_gone_is_not_tried_again(tmp_path: Path) -> None:
    """Its journal goes with them, so that nobody knows which rows are done."""
    with DiskStore.open(tmp_path / "home") as store:
        body = {"endpoint": "/v1/caches", "input_file_id": "file_0", "options": {}}
        batch = store.batches.create("default", body, now=0.0, expires_at=9.0)
        term = store.batches.table.take(batch.id, lease_s=60)
        assert term is not None
        store.batches.table.append(batch.id, term, [b"a row"])
        with (tmp_path / "out").open("w+b") as file:
            about = {"filename": "out", "purpose": "batch_output", "batch_id": batch.id}
            kept = store.files.create(file, tenant="default", **about)  # type: ignore[arg-type]
        named = {"output_file_id": kept.id}
        record = store.batches.update(batch.id, lambda now: now.entered("completed", 1.0, **named), tenant="default")
        _require_results(store, record)
        assert list(store.batches.journal(batch.id)) == [b"a row"]
        store.files.delete(kept.id, tenant="default")
        assert list(store.batches.journal(batch.id)) == []
        with pytest.raises(StateConflict, match="were deleted or have expired; create a new batch"):
            _require_results(store, record)
