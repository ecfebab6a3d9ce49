"""Times of day: whether it is one of them, how long until the next, and what is none."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.service.loops import Hours
from kvshelf.service.settings import load_settings


def at(hour: int, minute: int = 0, second: int = 0) -> float:
    return datetime(2026, 11, 29, hour, minute, second, tzinfo=UTC).timestamp()


def test_hours_begin_at_their_minute_and_end_at_theirs() -> None:
    office = Hours.parse(["07:30-18:00"])
    assert office.begin_in_s(at(7, 29, 30)) == pytest.approx(30)
    assert office.begin_in_s(at(7, 30)) == office.begin_in_s(at(17, 59, 59)) == 0
    assert office.begin_in_s(at(18)) == pytest.approx(13.5 * 3600)


def test_the_nearest_of_several_counts_and_one_may_go_over_midnight() -> None:
    shifts = Hours.parse(["22:00-02:00", "07:30-18:00"])
    assert [shifts.begin_in_s(at(hour)) for hour in (23, 0, 1, 12)] == [0.0] * 4
    assert shifts.begin_in_s(at(2)) == pytest.approx(5.5 * 3600)
    assert shifts.begin_in_s(at(19)) == pytest.approx(3 * 3600)
    assert Hours.parse([]).begin_in_s(at(3)) == 0, "all day"


def test_the_next_look_is_when_the_next_hours_begin_or_at_the_interval() -> None:
    office = Hours.parse(["07:30-18:00"])
    assert office.next_look_s(at(7, 29, 30), 300.0) == pytest.approx(30)
    assert office.next_look_s(at(7, 20), 300.0) == office.next_look_s(at(9), 300.0) == 300.0
    assert Hours().next_look_s(at(3), 300.0) == 300.0


@pytest.mark.parametrize(
    "text", ["7:30-18:00", "07:30", "24:00-01:00", "07:60-08:00", "07:30-18:00 CET", "07:30 - 18:00"]
)
def test_what_is_no_span_of_a_day_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no span of a day"):
        Hours.parse([text])
    with pytest.raises(ValueError, match="begins when it ends"):
        Hours.parse(["08:00-08:00"])


def test_the_setting_has_several_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_WARM_HOURS", "07:30-18:00, 22:00-02:00")
    with pytest.raises(InvalidRequest, match="the hours of KVSHELF_WARM"):
        load_settings()
    monkeypatch.setenv("KVSHELF_WARM", "team=law")
    assert load_settings().warm_hours == ("07:30-18:00", "22:00-02:00")
    monkeypatch.setenv("KVSHELF_WARM_HOURS", "morning")
    with pytest.raises(InvalidRequest, match="warm_hours"):
        load_settings()
