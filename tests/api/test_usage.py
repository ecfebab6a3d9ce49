"""The query of GET /v1/usage."""

from __future__ import annotations

import datetime

import pytest

from kvshelf.api.usage import UsageQuery


@pytest.mark.parametrize(
    ("to", "first"),
    [
        ("2026-01-31", "2026-01-02"),
        ("0001-01-31", "0001-01-02"),
        ("0001-01-02", "0001-01-01"),
        ("9999-12-31", "9999-12-02"),
    ],
)
def test_the_first_day_is_29_before_the_last_or_the_first_that_there_is(to: str, first: str) -> None:
    assert UsageQuery.model_validate({"to": to}).first_day == datetime.date.fromisoformat(first)
