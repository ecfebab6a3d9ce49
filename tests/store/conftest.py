from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.store.disk import DiskStore


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path, clock: Clock) -> Iterator[DiskStore]:
    """A shelf in a folder of its own, found sound when the test ends."""
    with DiskStore.open(home, now=clock) as store:
        yield store
        assert store.check() == []
