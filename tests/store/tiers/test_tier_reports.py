"""What a store with tiers tells about itself: where a cache was read, and which tier does not work."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvshelf.store.blobs import Health
from kvshelf.store.url import open_store
from tests.store.caches import make_cache


def test_a_cache_says_where_it_is_read(tmp_path: Path) -> None:
    url = f"ram:8MiB+disk://{tmp_path}/near?max=1GiB+disk://{tmp_path}/home"
    with open_store(f"disk://{tmp_path}/home") as home:
        cache_id = home.put(make_cache()).id
        with home.open_cache(cache_id) as arriving:
            assert arriving.place == "home"

    def read() -> str:
        with store.open_cache(cache_id) as arriving:
            arriving.read()
            return arriving.place

    with open_store(url) as store:
        assert [read(), read()] == ["home", "ram"]
    with open_store(url) as store:
        assert [read(), read()] == ["disk", "ram"]


def test_a_tier_that_fails_is_a_warning_and_no_fault(tmp_path: Path) -> None:
    near = tmp_path / "near"
    with open_store(f"disk://{near}?max=1GiB+disk://{tmp_path}/home") as store:
        cache_id = store.put(make_cache()).id
        store.get(cache_id)
        assert store.health() == Health()
        shutil.rmtree(near)
        near.write_text("in the way")
        store.get(cache_id)
        health = store.health()
        assert health.faults == ()
        assert health.warnings == ("the disk tier does not work; caches come from the home",)
