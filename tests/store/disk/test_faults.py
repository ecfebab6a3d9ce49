"""Damaged files, planted links, full and read-only disks: each is a named error, and nothing is half-stored."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import CacheCorrupt, CacheNotFound, StorageFull, StoreUnavailable
from kvshelf.store.disk import DiskStore
from kvshelf.store.manifest import Manifest
from tests.store.caches import make_cache, require_equal
from tests.store.processes import run_in_child


@pytest.fixture
def shelf(home: Path) -> Iterator[DiskStore]:
    with DiskStore.open(home, busy_s=0.2) as store:
        yield store


def file_of(home: Path, manifest: Manifest) -> Path:
    (path,) = (home / "blobs").glob(f"{manifest.id.removeprefix('kvs_')}-*.kvb")
    return path


def flip(path: Path, at: float) -> None:
    """Turn one bit over, `at` a fraction of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    path.write_bytes(data)


def other_blob(path: Path) -> None:
    other = make_cache(1).to_bytes()
    assert len(other) == path.stat().st_size, "so that only the digests tell them apart"
    path.write_bytes(other)


def link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "magic": ("bad_magic", lambda path: flip(path, 0)),
    "header": ("digest_mismatch", lambda path: flip(path, 0.05)),
    "first layer": ("digest_mismatch", lambda path: flip(path, 0.3)),
    "last layer": ("digest_mismatch", lambda path: flip(path, 0.9)),
    "trailer": ("digest_mismatch", lambda path: flip(path, 1)),
    "cut off": ("truncated", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "emptied": ("truncated", lambda path: os.truncate(path, 0)),
    "longer": ("trailing_bytes", lambda path: os.truncate(path, path.stat().st_size + 1)),
    "another blob": ("wrong_blob", other_blob),
    "removed": ("missing", Path.unlink),
    "link": ("missing", link),
    "pipe": ("missing", pipe),
    "folder": ("missing", folder),
}


@pytest.mark.parametrize("way", ["get", "open_blob"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_quarantined_and_never_used(shelf: DiskStore, home: Path, name: str, way: str) -> None:
    reason, damage = DAMAGE[name]
    manifest = shelf.put(make_cache())
    path = file_of(home, manifest)
    damage(path)
    with pytest.raises(CacheCorrupt, match=manifest.id) as refusal:
        getattr(shelf, way)(manifest.id)
    assert refusal.value.details["reason"] == reason
    assert not path.exists()
    if name != "removed":
        assert os.path.lexists(home / "quarantine" / path.name)
    for call in (shelf.get, shelf.stat, shelf.open_blob, shelf.update):
        with pytest.raises(CacheCorrupt) as refusal:
            call(manifest.id)
        assert refusal.value.details["reason"] == "quarantined"
    with pytest.raises(CacheNotFound):
        shelf.get(manifest.id, tenant="you")
    assert shelf.list().data == ()
    assert shelf.usage().caches == 0
    assert [problem for problem in shelf.check() if manifest.id in problem]


@pytest.mark.parametrize("cure", ["put", "delete"])
def test_a_corrupt_cache_is_cured_by_putting_or_deleting_it(shelf: DiskStore, home: Path, cure: str) -> None:
    manifest = shelf.put(make_cache())
    flip(file_of(home, manifest), 0.5)
    with pytest.raises(CacheCorrupt):
        shelf.get(manifest.id)
    if cure == "put":
        assert shelf.put(make_cache()).id == manifest.id
        require_equal(make_cache(), shelf.get(manifest.id))
    else:
        shelf.delete(manifest.id)
        with pytest.raises(CacheNotFound):
            shelf.get(manifest.id)
    assert list((home / "quarantine").iterdir()) == []
    assert shelf.check() == []


@pytest.mark.parametrize("damage", ["removed", "cut off"])
def test_a_put_notices_that_the_file_is_gone_or_short(shelf: DiskStore, home: Path, damage: str) -> None:
    manifest = shelf.put(make_cache())
    DAMAGE[damage][1](file_of(home, manifest))
    shelf.put(make_cache())
    require_equal(make_cache(), shelf.get(manifest.id))
    assert shelf.check() == []


@pytest.mark.parametrize("read", [DiskStore.get, DiskStore.open_blob])
@pytest.mark.parametrize("other", [{"cache": make_cache(1)}, {"cache": make_cache(0), "codec": "int4"}])
def test_a_blob_under_another_id_is_refused(
    shelf: DiskStore, home: Path, other: dict[str, Any], read: Callable[..., object]
) -> None:
    """An index that was tampered with: the row names another cache's file, or that of the same cache under another
    codec, with a manifest that fits it."""
    mine, theirs = shelf.put(make_cache(0), tenant="me"), shelf.put(**other, tenant="me")
    with sqlite3.connect(home / "shelf.sqlite3") as connection:
        connection.execute(
            "UPDATE caches SET (name, nbytes, manifest) = (SELECT name, nbytes, manifest FROM caches WHERE id = ?) "
            "WHERE id = ?",
            (theirs.id, mine.id),
        )
    connection.close()
    with pytest.raises(CacheCorrupt) as refusal:
        read(shelf, mine.id, tenant="me")
    assert refusal.value.details["reason"] == "wrong_identity"


def test_a_file_name_in_the_index_cannot_lead_out_of_the_home(shelf: DiskStore, home: Path) -> None:
    manifest = shelf.put(make_cache())
    (home / "secret").write_bytes(make_cache().to_bytes())
    with sqlite3.connect(home / "shelf.sqlite3") as connection:
        connection.execute("UPDATE caches SET name = '../secret'")
    connection.close()
    for act in (shelf.get, shelf.delete):
        with pytest.raises(StoreUnavailable, match="not the name of a blob file"):
            act(manifest.id)
    assert (home / "secret").exists()


@pytest.mark.parametrize("name", ["blobs", "quarantine", "shelf.sqlite3"])
def test_links_inside_the_home_are_refused(home: Path, tmp_path: Path, name: str) -> None:
    home.mkdir()
    (home / name).symlink_to(tmp_path / "elsewhere")
    if name != "shelf.sqlite3":
        (tmp_path / "elsewhere").mkdir()
    with pytest.raises(StoreUnavailable):
        DiskStore.open(home)
    assert not (tmp_path / "elsewhere").is_file()


def test_foreign_files_are_reported_and_left_alone(shelf: DiskStore, home: Path) -> None:
    (home / "blobs" / "notes.txt").write_text("mine")
    (home / "blobs" / "link").symlink_to("/etc/passwd")
    shelf.sweep(4e9)
    problems = shelf.check()
    assert len(problems) == 2
    assert all("is not a blob file" in problem for problem in problems)


def test_what_the_disk_did_not_keep_is_not_published(home: Path) -> None:
    """A disk that changes a bit between the write and the reading back."""

    def lose_a_bit(step: str) -> None:
        if step == "synced":
            flip(next((home / "blobs").iterdir()), 0.5)

    with DiskStore.open(home, on_step=lose_a_bit) as store:
        with pytest.raises(StoreUnavailable, match="does not keep what is written to it"):
            store.put(make_cache())
        assert store.list().data == ()
        assert list((home / "blobs").iterdir()) == []


# Places that do not work


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    for home in (tmp_path / "home", tmp_path / "home" / "deeper"):
        with pytest.raises(StoreUnavailable, match="does not work"):
            DiskStore.open(home)


def test_an_index_that_is_not_one(home: Path) -> None:
    home.mkdir()
    (home / "shelf.sqlite3").write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreUnavailable, match="file is not a database"):
        DiskStore.open(home)


def test_a_home_of_a_later_version(home: Path) -> None:
    DiskStore.open(home).close()
    with sqlite3.connect(home / "shelf.sqlite3") as connection:
        connection.execute("UPDATE meta SET value = x'39' WHERE name = 'format'")
    connection.close()
    with pytest.raises(StoreUnavailable, match=r"home format 9.*works with 6"):
        DiskStore.open(home)


def test_a_home_that_is_removed_under_a_server(shelf: DiskStore, home: Path) -> None:
    manifest = shelf.put(make_cache())
    shutil.rmtree(home)
    for act in (lambda: shelf.put(make_cache(1)), lambda: shelf.get(manifest.id), shelf.sweep, shelf.list):
        with pytest.raises(StoreUnavailable):
            act()
    assert not home.exists(), "no empty new shelf appears in its place"


def test_an_index_that_another_process_holds(shelf: DiskStore, home: Path) -> None:
    manifest = shelf.put(make_cache())
    other = sqlite3.connect(home / "shelf.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        shelf.put(make_cache(1))
    require_equal(make_cache(), shelf.get(manifest.id))
    other.execute("ROLLBACK")
    other.close()
    shelf.put(make_cache(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(store: DiskStore, **kwargs: float) -> dict[str, int]:
    """Put caches until the disk is full; returns the seed of each that was acknowledged."""
    put: dict[str, int] = {}
    for seed in range(1000):
        try:
            put[store.put(big_cache(seed), **kwargs).id] = seed
        except StorageFull:
            break
    assert 1 < len(put) < 1000
    return put


def big_cache(seed: int):  # type: ignore[no-untyped-def]
    return make_cache(seed, num_tokens=512, lengths=((256, 256),), dims=(64, 64))


def test_a_full_disk_stores_nothing_by_halves(small_disk: Path) -> None:
    with DiskStore.open(small_disk / "home") as store:
        put = fill(store)
        assert len(list((small_disk / "home" / "blobs").iterdir())) == len(put)
        assert store.check() == []
        for cache_id, seed in put.items():
            require_equal(big_cache(seed), store.get(cache_id))
        for cache_id in list(put)[:2]:
            store.delete(cache_id)
        store.put(big_cache(2000))
        assert store.check() == []


def test_a_full_disk_can_be_swept(small_disk: Path) -> None:
    with DiskStore.open(small_disk / "home") as store:
        put = fill(store, ttl_s=3600)
        assert store.sweep(time.time() + 7200).expired == len(put)
        assert store.check() == []
        fill(store)


def test_a_read_only_disk(small_disk: Path) -> None:
    DiskStore.open(small_disk / "home").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for home in (small_disk / "home", small_disk / "another"):
        with pytest.raises(StoreUnavailable, match=r"[Rr]ead-only"):
            DiskStore.open(home)


def test_a_limit_on_file_sizes_is_a_full_store(home: Path) -> None:
    """Works for every user and on every file system, unlike a small disk."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))  # an empty index needs most of it
        with DiskStore.open(home) as store:
            small = store.put(make_cache())
            with pytest.raises(StorageFull, match="may not grow further"):
                store.put(big_cache(0))
            require_equal(make_cache(), store.get(small.id))
            assert len(list((home / "blobs").iterdir())) == 1
            assert store.check() == []

    run_in_child(child)
