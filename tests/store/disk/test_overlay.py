"""A shelf over another's: look-ups go through to it, and nothing of it ever changes."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheNotFound,
    InvalidRequest,
    KvshelfError,
    QuotaExceeded,
    StateConflict,
    StoreUnavailable,
)
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf.store.disk.overlay import Overlay
from kvshelf.store.index import Quota
from kvshelf.store.rules import Rules
from kvshelf.store.url import open_store
from tests.store.caches import make_cache, require_equal

SIZE = len(make_cache().to_bytes())


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A shelf with five caches of one tenant and one of another, at rest."""
    home = tmp_path / "theirs"
    with DiskStore.open(home) as shelf:
        for seed in range(5):
            shelf.put(make_cache(seed), labels={"seed": str(seed)}, source=f"text {seed}", pinned=seed == 4)
        shelf.put(make_cache(5), tenant="you")
    return home


@pytest.fixture
def url(tmp_path: Path, theirs: Path) -> str:
    return f"disk://{tmp_path}/mine?under=disk://{theirs}"


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a folder: its bytes, its mode and when it and its folder last changed."""
    files: dict[str, Any] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        files[str(path.relative_to(folder))] = (data, status.st_mode, status.st_mtime_ns, status.st_ctime_ns)
    return files


def test_what_is_below_is_read_as_if_it_were_here(url: str, theirs: Path) -> None:
    with open_store(url) as mine, DiskStore.open(theirs) as shelf:
        for seed in range(5):
            cache_id = shelf.cache_id(make_cache(seed).identity)
            assert mine.cache_id(make_cache(seed).identity) == cache_id
            require_equal(make_cache(seed), mine.get(cache_id))
            assert mine.stat(cache_id) == shelf.stat(cache_id)
            assert mine.source(cache_id) == f"text {seed}"
            with mine.open_parts(cache_id) as parts, mine.open_blob(cache_id) as blob:
                assert (parts.num_tokens, blob.nbytes) == (make_cache(seed).num_tokens, SIZE)
        assert mine.usage().caches == 0, "it counts for nobody here"
        assert mine.put(make_cache(0)) == shelf.stat(shelf.cache_id(make_cache(0).identity))
        assert mine.usage().caches == 0


def test_tenants_of_both_shelves_see_their_own_alone(url: str) -> None:
    with open_store(url) as mine:
        yours = mine.cache_id(make_cache(5).identity, tenant="you")
        require_equal(make_cache(5), mine.get(yours, tenant="you"))
        with pytest.raises(CacheNotFound) as refused:
            mine.get(yours)
        with pytest.raises(CacheNotFound) as unknown:
            mine.get("kvs_" + "0" * 40)
        assert refused.value.message.replace(yours, "") == unknown.value.message.replace("kvs_" + "0" * 40, "")
        assert [cache.id for cache in mine.list(tenant="you").data] == [yours]
        assert mine.list(tenant="nobody").data == ()


def test_a_change_copies_a_cache_up_and_a_deletion_is_refused(url: str, theirs: Path) -> None:
    before = contents(theirs)
    with open_store(url) as mine:
        cache_id = mine.cache_id(make_cache(4).identity)
        with pytest.raises(StateConflict, match=r"shelf below, in .*theirs, which is only read"):
            mine.delete(cache_id)
        mine.touch(cache_id)
        assert mine.stat(cache_id).uses == 0
        changed = mine.update(cache_id, name="mine")
        assert (changed.name, changed.pinned, changed.labels) == ("mine", False, {"seed": "4"}), "their pin is theirs"
        assert (mine.source(cache_id), mine.usage().caches) == ("text 4", 1)
        require_equal(make_cache(4), mine.get(cache_id))
        child = mine.put(make_cache(9), parent_id=mine.cache_id(make_cache(1).identity))
        assert (child.parent_id, mine.usage().caches) == (mine.cache_id(make_cache(1).identity), 3)
        mine.delete(cache_id)
        assert mine.stat(cache_id).name == "", "theirs is there again"
        assert mine.check() == []
    assert contents(theirs) == before


def test_the_quota_is_of_what_lies_here(url: str) -> None:
    with open_store(url, rules=Rules(quota=Quota(max_caches=1))) as mine:
        mine.put(make_cache(8))
        mine.get(mine.cache_id(make_cache(1).identity))
        with pytest.raises(QuotaExceeded, match="1 caches"):
            mine.update(mine.cache_id(make_cache(1).identity), name="a copy")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_a_listing_has_each_cache_once(url: str, limit: int) -> None:
    with open_store(url) as mine:
        own = [mine.put(make_cache(seed)).id for seed in (7, 8)]
        copied = mine.update(mine.cache_id(make_cache(2).identity), name="copied").id
        below = [mine.cache_id(make_cache(seed).identity) for seed in (4, 3, 1, 0)]
        ids: list[str] = []
        page = mine.list(limit=limit)
        while True:
            assert len(page.data) <= limit
            ids += [cache.id for cache in page.data]
            if not page.has_more:
                break
            page = mine.list(limit=limit, after=ids[-1])
        assert ids == [copied, *reversed(own), *below]
        assert [cache.id for cache in mine.list(labels={"seed": "3"}).data] == [below[1]]


@pytest.mark.slow
def test_nothing_below_changes_under_a_thousand_mixed_operations(url: str, theirs: Path) -> None:
    """One blob below is damaged, one is missing: that is found and told, and repaired by nobody."""
    names = sorted((theirs / "blobs").iterdir())
    blobs = [name for name in names if name.stat().st_size == SIZE]
    damaged = bytearray(blobs[0].read_bytes())
    damaged[SIZE // 2] ^= 1
    blobs[0].write_bytes(damaged)
    blobs[1].unlink()
    before, chance = contents(theirs), random.Random(53)
    done: set[str] = set()
    with open_store(url, rules=Rules(quota=Quota(budget_bytes=4 * SIZE + 4096))) as mine:
        ids = [mine.cache_id(make_cache(seed).identity) for seed in range(8)]
        operations: dict[str, Callable[[str, int], object]] = {
            "get": lambda cache_id, _: mine.get(cache_id),
            "stat": lambda cache_id, _: mine.stat(cache_id),
            "source": lambda cache_id, _: mine.source(cache_id),
            "original": lambda cache_id, _: mine.original(cache_id),
            "touch": lambda cache_id, _: mine.touch(cache_id),
            "delete": lambda cache_id, _: mine.delete(cache_id, cascade=chance.random() < 0.5),
            "update": lambda cache_id, n: mine.update(cache_id, name=str(n), ttl_s=chance.choice([None, 0.001, 60])),
            "pin": lambda cache_id, _: mine.update(cache_id, pinned=chance.random() < 0.5),
            "put": lambda _, n: mine.put(make_cache(n), source=chance.choice([None, "a text"])),
            "append": lambda cache_id, n: mine.put(make_cache(n), parent_id=cache_id),
            "keep": lambda cache_id, _: mine.keep_source(cache_id, "another text"),
            "list": lambda cache_id, _: mine.list(limit=3, after=chance.choice([None, cache_id])),
            "sweep": lambda *_: mine.sweep(),
            "compact": lambda *_: mine.compact(),
            "check": lambda *_: mine.check(),
            "scrub": lambda *_: list(mine.scrub()),
        }
        for _ in range(1000):
            name, seed = chance.choice(list(operations)), chance.randrange(8)
            try:
                operations[name](ids[seed], seed)
                done.add(name)
            except (KvshelfError, CacheCorrupt) as error:
                done.add(error.code)
        assert operations.keys() <= done
        assert {"cache_corrupt", "state_conflict", "cache_not_found"} <= done
        for seed in range(5):
            if ids[seed][4:] not in {blob.name[:40] for blob in blobs[:2]}:
                require_equal(make_cache(seed), mine.get(ids[seed]))
        assert mine.check() == []
    assert contents(theirs) == before


def test_what_its_keeper_changes_below_is_seen(url: str, theirs: Path) -> None:
    with open_store(url) as mine, DiskStore.open(theirs) as shelf:
        first = shelf.cache_id(make_cache(0).identity)
        for number in range(5):
            shelf.update(first, name=str(number))
            assert mine.stat(first).name == str(number), "also while it lies in the WAL"
        added = shelf.put(make_cache(6)).id
        require_equal(make_cache(6), mine.get(added))
        shelf.delete(first)
        with pytest.raises(CacheNotFound):
            mine.stat(first)
        shelf.update(added, ttl_s=0.001)
        with pytest.raises(CacheExpired):
            mine.get(added)


def test_a_shelf_that_cannot_lie_so_is_refused_by_name(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "blobs").mkdir()
    (tmp_path / "torn" / "shelf.sqlite3").write_bytes(b"no database at all, however long it is" * 99)
    with open_store(f"disk://{tmp_path}/other") as other:
        other.put(make_cache())
    cases = {
        f"disk://{tmp_path}/other?under=disk://{theirs}": "was not made over",
        f"disk://{theirs}?under=disk://{theirs}": "cannot lie over itself",
        f"disk://{tmp_path}/mine?under=disk://{tmp_path}/empty": "no shelf with its blobs",
        f"disk://{tmp_path}/mine?under=disk://{tmp_path}/absent": "no shelf with its blobs",
        f"disk://{tmp_path}/mine?under=redis://127.0.0.1:1/0": "under= names a folder",
        f"disk://{tmp_path}/mine?under={theirs}": "under= names a folder",
        f"disk://{tmp_path}/mine?under=disk:theirs": "must be absolute",
        f"redis://127.0.0.1:1/0?under=disk://{theirs}": "under= names a folder",
        f"disk://{tmp_path}/mine?under=disk://{theirs}&under=disk://{theirs}": "given twice",
    }
    for url, words in cases.items():
        with pytest.raises(InvalidRequest, match=words) as refusal:
            open_store(url)
        assert refusal.value.param == "store"
    with pytest.raises((InvalidRequest, StoreUnavailable), match="torn"):
        open_store(f"disk://{tmp_path}/mine?under=disk://{tmp_path}/torn")
    assert not (tmp_path / "mine").exists()


def test_a_newer_format_below_is_refused_by_name(theirs: Path, url: str) -> None:
    with closing(sqlite3.connect(theirs / "shelf.sqlite3")) as connection:
        connection.execute("UPDATE meta SET value = x'3939' WHERE name = 'format'")
        connection.commit()
    with pytest.raises(StoreUnavailable, match=f"the shelf at {theirs} has home format 99"):
        open_store(url)


def test_copies_in_memory_may_stand_before_it_and_nothing_is_left_behind(
    url: str, tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    store: Store
    with open_store(f"ram:1MB+{url}") as store:
        cache_id = store.cache_id(make_cache(3).identity)
        for place in ("home", "ram"):
            with store.open_cache(cache_id) as arriving:
                arriving.read()
                assert arriving.place == place
        assert len(os.listdir(tmp_path / "tmp")) == 1
    assert os.listdir(tmp_path / "tmp") == []
    with Overlay.open_over(tmp_path / "mine", theirs, rules=Rules()) as again:
        assert again.stat(cache_id).id == cache_id
