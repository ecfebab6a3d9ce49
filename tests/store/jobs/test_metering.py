"""What every home keeps of the use of its tenants."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.api.usage import KEEP_DAYS, MOST_PARTS, Metered, today
from kvshelf.store.index import Index
from kvshelf.store.jobs.metering import Meter, Metering, ModelUsed
from kvshelf.store.shelf import Shelf
from tests.store.indexes import Home, disk_home, empty_redis_home
from tests.store.test_index import race

DAY = datetime.date(2026, 3, 1)
LATER = DAY + datetime.timedelta(days=1)


@pytest.fixture(params=["disk", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "disk":
        return disk_home(tmp_path / "home")
    return empty_redis_home(request.getfixturevalue("shared_valkey"))


@pytest.fixture
def shelf(home: Home) -> Iterator[Shelf]:
    with home.shelf() as shelf:
        yield shelf
        assert shelf.check() == []


def used(answers: int = 1, worker_s: float = 0.5) -> dict[str, ModelUsed]:
    return {"tiny": ModelUsed(answers=answers, worker_s=worker_s)}


def test_what_several_writers_add_at_the_same_time_adds_up(shelf: Shelf, home: Home) -> None:
    def add(index: Index, number: int) -> bool:
        Metering(index.jobs, index.key).add("me", DAY, used(), writer=str(os.getpid()), number=number + 1)
        return True

    assert race(home, 20, add) == [2] * 20
    (day,) = shelf.metering.days(DAY, DAY, tenant="me")
    assert day.by_model == used(40, 20.0)
    assert list(day.writers.values()) == [20, 20]


def test_what_is_sent_again_counts_once(shelf: Shelf) -> None:
    for number in (1, 1, 2, 1):
        shelf.metering.add("me", DAY, used(3), writer="a", number=number)
    (day,) = shelf.metering.days(DAY, DAY, tenant="me")
    assert day.by_model["tiny"].answers == 6


def test_tenants_days_and_models_are_kept_apart(shelf: Shelf, home: Home) -> None:
    add = shelf.metering.add
    add("me", DAY, used(1), writer="a", number=1)
    add("me", LATER, used(2), writer="a", number=1)
    add("me", LATER, {"other": Metered(answers=4)}, writer="b", number=1)
    add("you", LATER, used(8), writer="a", number=1)
    with home.shelf() as again:  # as after a restart
        days = again.metering.days
        assert [(day.day, sorted(day.by_model)) for day in days(DAY, LATER, tenant="me")] == [
            (DAY, ["tiny"]),
            (LATER, ["other", "tiny"]),
        ]
        assert [(day.tenant, day.by_model["tiny"].answers) for day in days(LATER, LATER, tenant=None)] == [
            ("me", 2),
            ("you", 8),
        ]
        assert days(DAY, LATER, tenant="nobody") == []


def test_a_day_is_kept_for_its_time_and_then_forgotten(shelf: Shelf) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for age in (0, KEEP_DAYS - 1, KEEP_DAYS + 1):
        shelf.metering.add("me", now.date() - datetime.timedelta(days=age), used(age), writer="a", number=1)
    assert shelf.sweep(now.timestamp()).usage == 1
    kept = shelf.metering.days(datetime.date.min, datetime.date.max, tenant="me")
    assert [day.by_model["tiny"].answers for day in kept] == [KEEP_DAYS - 1, 0]


def test_conversations_are_told_apart_up_to_a_number_and_nothing_is_lost(shelf: Shelf) -> None:
    def of(names: range) -> dict[str, dict[str, ModelUsed]]:
        return {f"conv_{number}": used() for number in names}

    add = shelf.metering.add
    add("me", DAY, used(3), writer="a", number=1, conversations=of(range(2)))
    add("me", DAY, used(9), writer="b", number=1, conversations=of(range(1, MOST_PARTS + 7)))
    (day,) = shelf.metering.days(DAY, DAY, tenant="me")
    assert day.by_model["tiny"].answers == 12
    assert list(day.conversations) == [f"conv_{number}" for number in range(MOST_PARTS)], "the first ones"
    assert [day.conversations[f"conv_{number}"]["tiny"].answers for number in range(3)] == [1, 2, 1]


def test_a_meter_sends_what_each_conversation_used_once(shelf: Shelf) -> None:
    meter = Meter(
        shelf.metering, "tiny", now=lambda: datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC).timestamp()
    )
    for number in range(2 * MOST_PARTS):
        meter.add("me", f"conv_{number}", answers=1, cache_read_tokens=5)
    meter.add("me", "conv_0", saved_s=0.5)
    meter.add("me", answers=1)
    for _ in range(2):
        meter.flush()
    (day,) = shelf.metering.days(DAY, DAY, tenant="me")
    assert day.by_model["tiny"] == ModelUsed(answers=2 * MOST_PARTS + 1, cache_read_tokens=10 * MOST_PARTS, saved_s=0.5)
    assert len(day.conversations) == MOST_PARTS
    assert day.conversations["conv_0"]["tiny"] == Metered(answers=1, cache_read_tokens=5, saved_s=0.5)


def test_groups_of_the_guard_are_told_apart_however_many_conversations_there_are(shelf: Shelf) -> None:
    meter = Meter(shelf.metering, "tiny")
    for number in range(MOST_PARTS):
        meter.add("me", f"conv_{number}", answers=1)
    for differs in (0, 1):
        meter.add("me", guard_group="law", guarded=1, guard_differed=differs)
    meter.add("me", guarded=1)
    meter.flush()
    meter.add("me", guard_group="law", guarded=1)
    meter.flush()
    (day,) = shelf.metering.days(today(), today(), tenant="me")
    groups = {"law": Metered(guarded=3, guard_differed=1)}
    assert day.by_model["tiny"] == ModelUsed(answers=MOST_PARTS, guarded=4, guard_differed=1, guard_groups=groups)
    assert len(day.conversations) == MOST_PARTS
