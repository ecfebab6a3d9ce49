"""Pauses between tries."""

from __future__ import annotations

import pytest

from kvshelf.backoff import backoff_s


def test_pauses_double_up_to_their_limit_however_many_there_are() -> None:
    assert [backoff_s(repeat, 0.5, 3.0) for repeat in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff_s(100_000, 0.5, 3.0) == 3.0
    assert backoff_s(100_000, 0.0, 3.0) == 0.0


def test_a_part_of_a_pause_is_left_to_chance() -> None:
    pauses = [backoff_s(1, 1.0, 9.0, spread=0.25) for _ in range(300)]
    assert min(pauses) == pytest.approx(1.5, abs=0.05)
    assert max(pauses) == pytest.approx(2.0, abs=0.05)
