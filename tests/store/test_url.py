"""One URL names a home and the tiers before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import CacheExpired, InvalidRequest, StorageFull, StoreUnavailable
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota
from kvshelf.store.redis import RedisStore
from kvshelf.store.rules import Rules
from kvshelf.store.tiers.tiered import TieredStore
from kvshelf.store.url import open_store
from tests.store.caches import make_cache, require_equal
from tests.store.redis.servers import PATIENT, ValkeyServer

SIZE = len(make_cache().to_bytes())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server


def test_a_url_opens_the_folder_it_names(tmp_path: Path) -> None:
    with open_store(f"disk://{tmp_path}/a%20b/shelf") as store:
        manifest = store.put(make_cache())
    assert (tmp_path / "a b" / "shelf" / "shelf.sqlite3").is_file()
    with open_store(f"disk://{tmp_path}/a%20b/shelf") as store:
        require_equal(make_cache(), store.get(manifest.id))
        assert isinstance(store, DiskStore)


@pytest.mark.parametrize("wrong", [None, b"disk:///tmp/shelf", Path("/tmp/shelf")])
def test_what_is_no_text_names_no_store(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="named by a URL"):
        open_store(wrong)


def test_a_url_opens_the_server_it_names(server: ValkeyServer) -> None:
    url = f"{server.url}/3{PATIENT}&prefix=mine"
    with open_store(url) as store:
        assert isinstance(store, RedisStore)
        manifest = store.put(make_cache())
    assert server.client(db=3).exists("{mine}:home")
    with open_store(url) as store:
        require_equal(make_cache(), store.get(manifest.id))


@pytest.mark.parametrize(
    ("tiers", "homes"),
    [
        ("ram:1GiB", ("redis", "ram")),
        ("disk://{}/scratch?max=1GiB", ("redis", "disk")),
        ("ram:1GiB+disk://{}/scratch?max=1GiB", ("redis", "disk", "ram")),
    ],
)
def test_tiers_stand_before_the_home(server: ValkeyServer, tmp_path: Path, tiers: str, homes: tuple[str, ...]) -> None:
    with open_store(f"{tiers.format(tmp_path)}+{server.url}{PATIENT}") as store:
        assert isinstance(store, TieredStore)
        assert store.delete(store.put(make_cache()).id).homes == homes


def test_tiers_stand_before_a_folder(tmp_path: Path) -> None:
    with open_store(f"ram:1GiB+disk://{tmp_path}/scratch?max=1GiB+disk://{tmp_path}/home?max=1TB") as store:
        assert store.delete(store.put(make_cache()).id).homes == ("disk", "disk", "ram")


def test_the_budget_of_a_home_evicts_and_that_of_a_tier_does_not_show(tmp_path: Path) -> None:
    with open_store(f"ram:{SIZE}B+disk://{tmp_path}/home?max={2 * SIZE}") as store:
        first, *others = (store.put(make_cache(seed)) for seed in range(3))
        with pytest.raises(CacheExpired, match="evicted"):
            store.get(first.id)
        for seed, manifest in enumerate(others, 1):
            require_equal(make_cache(seed), store.get(manifest.id))
    with open_store(f"disk://{tmp_path}/small?max=10") as store, pytest.raises(StorageFull):
        store.put(make_cache())


def test_rules_hold_for_the_home_and_not_for_copies(tmp_path: Path) -> None:
    rules = Rules(default_ttl_s=60, quota=Quota(max_caches=1))
    with open_store(f"disk://{tmp_path}/scratch?max=1GiB+disk://{tmp_path}/home", rules=rules) as store:
        manifest = store.put(make_cache())
        assert manifest.expires_at is not None
        assert abs(manifest.expires_at - time.time() - 60) < 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("10B", 10), ("2K", 2000), ("2Ki", 2048), ("1.5MB", 1_500_000), ("2GiB", 2 << 30), ("1T", 10**12)],
)
def test_sizes(tmp_path: Path, text: str, size: int) -> None:
    with open_store(f"ram:{text}+disk://{tmp_path}/home") as store:
        assert isinstance(store, TieredStore)
        assert store.tiers.all[0].max_bytes == size  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "unknown scheme ''"),
        ("/var/lib/kvshelf", "it is a path; did you mean disk:///var/lib/kvshelf"),
        ("//me:secret@host", "cannot open the store '//***@host': unknown scheme ''"),
        ("file:///x", "unknown scheme 'file'"),
        ("disk://relative/path", "must be absolute"),
        ("disk:relative", "must be absolute"),
        ("disk://", "must be absolute"),
        ("disk:///", "must be absolute"),
        ("disk:///a/../b", "without '..'"),
        ("disk:///a?colour=red", "no parameter 'colour'"),
        ("disk:///a?max=1&colour=red", "no parameter 'colour'"),
        ("disk:///a?max=1&max=2", "max is given twice"),
        ("disk:///a?max=", "'' is no size"),
        ("disk:///a?max=0", "'0' is no size"),
        ("disk:///a?max=-1GiB", "'-1GiB' is no size"),
        ("disk:///a?max=lots", "'lots' is no size"),
        ("disk:///a#b", "no parameter 'b'"),
        ("ram:2GiB", "memory cannot be one"),
        ("ram:2GiB+ram:2GiB", "memory cannot be one"),
        ("ram:2GiB+ram:1GiB+disk:///a", "before the home there may be"),
        ("disk:///b?max=1GiB+ram:2GiB+disk:///a", "before the home there may be"),
        ("redis://host+disk:///a", "before the home there may be"),
        ("ram:+disk:///a", "'' is no size"),
        ("ram:much+disk:///a", "'much' is no size"),
        ("disk:///b+disk:///a", "how much it may take"),
        ("disk://b?max=1GiB+disk:///a", "must be absolute"),
        ("ram:2GiB+file:///a", "unknown scheme 'file'"),
    ],
)
def test_other_urls_are_refused_with_what_is_supported(url: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match="A store is disk:///absolute/path or redis://host:6379/0") as refusal:
        open_store(url)
    assert why in refusal.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@host/0/1",
        "ram:2GiB+redis://user:s3cret@host?max=much",
        "redis://user:s3cret@host+disk:///a",
        "redis://user:s3cret/with@slashes@host?max=much",
        "redis://user:plus+x:s3cret@host?max=much",
        "http://user:s3cret@host",
        "ram:1+http://user:s3\ncret@host",
        "redis://user:s3cret@host:99999",
        "disk:///scratch?max=1GiB+rediss://:s3cret@host?max=0",
    ],
)
def test_a_refusal_shows_no_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        open_store(url)
    assert "cret" not in refusal.value.message
    assert "cret" not in refusal.value.message


def test_a_refused_tier_leaves_the_home_closed_and_the_folder_alone(tmp_path: Path) -> None:
    with open_store(f"disk://{tmp_path}/a") as store:
        manifest = store.put(make_cache())
    with pytest.raises(StoreUnavailable, match="is a home for caches"):
        open_store(f"disk://{tmp_path}/a?max=1GiB+disk://{tmp_path}/b")
    with pytest.raises(StoreUnavailable, match="is a home for caches"):
        open_store(f"disk://{tmp_path}/a?max=1GiB+disk://{tmp_path}/a")
    assert not (tmp_path / "b").exists()
    with open_store(f"disk://{tmp_path}/scratch?max=1GiB+disk://{tmp_path}/a") as store:
        store.get(manifest.id)
    open_store(f"disk://{tmp_path}/c").close()
    with pytest.raises(StoreUnavailable, match="copies for another home"):
        open_store(f"disk://{tmp_path}/scratch?max=1GiB+disk://{tmp_path}/c")


def test_a_service_can_start_while_its_home_is_away(server: ValkeyServer, tmp_path: Path) -> None:
    url = f"ram:1GiB+disk://{tmp_path}/scratch?max=1GiB+{server.url}{PATIENT}"
    server.kill()
    with pytest.raises(StoreUnavailable):
        open_store(url)
    server.start()
    with open_store(url) as store:
        manifest = store.put(make_cache())
    server.kill()
    with open_store(url) as store:
        require_equal(make_cache(), store.get(manifest.id))
        with pytest.raises(StoreUnavailable):
            store.put(make_cache(1))
        server.start()  # empty
        time.sleep(1.2)  # until it is tried again
        assert store.sweep().expired == 0
        require_equal(make_cache(), store.get(manifest.id))
        store.put(make_cache(1))
    with open_store(server.url + PATIENT) as home:
        assert {one.id for one in home.list().data} == {manifest.id, home.cache_id(make_cache(1).identity)}


def test_an_emptied_home_gets_its_key_back(server: ValkeyServer, tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/scratch?max=1GiB+{server.url}{PATIENT}"
    with open_store(url) as store:
        manifest = store.put(make_cache())
    server.kill()
    server.start()
    with open_store(url) as store:
        assert store.put(make_cache(1)).id != manifest.id
        require_equal(make_cache(), store.get(manifest.id))
    server.client().flushall()
    with open_store(server.url + PATIENT):
        pass  # somebody without the folder makes the home anew, under another key
    with pytest.raises(StoreUnavailable, match="copies for another home"):
        open_store(url)
