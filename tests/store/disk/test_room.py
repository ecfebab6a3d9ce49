"""A home says that it is full before it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvshelf.store.blobs import Health
from kvshelf.store.disk import DiskStore, folder
from kvshelf.store.redis.link import ServerFacts


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore.open(tmp_path / "home") as store:
        assert store.health() == Health()
        free = os.statvfs(tmp_path)
        monkeypatch.setattr(folder, "LEAST_BYTES", free.f_bavail * free.f_frsize * 2)
        (said,) = store.health().full
        assert said.startswith(f"the disk of {tmp_path / 'home'} is full: ")
        monkeypatch.setattr(folder, "LEAST_BYTES", 0)
        monkeypatch.setattr(folder, "LEAST_FILES", 2 * free.f_favail + 1)
        (said,) = store.health().full
        assert "more files" in said


@pytest.mark.parametrize(("used", "full"), [(979, False), (991, True)])
def test_a_redis_whose_memory_is_used_up_is_named(used: int, full: bool) -> None:
    facts = ServerFacts("shelf:6379", "noeviction", 1000, True, used)
    assert bool(facts.full) is full
    assert not ServerFacts("shelf:6379", "noeviction", 0, True, used).full
