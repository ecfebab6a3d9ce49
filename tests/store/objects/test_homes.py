"""A home whose blobs are objects: which index and bucket belong together, and what happens when one of them is lost."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from kvshelf.errors import CacheNotFound, InvalidRequest, StorageFull, StoreUnavailable
from kvshelf.store import housekeeping
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.tiers.tiered import TieredStore
from kvshelf.store.url import open_store
from tests.store.caches import make_cache, require_equal
from tests.store.objects.conftest import OpenShelf
from tests.store.objects.faulty import Fault, FaultyProxy
from tests.store.objects.servers import BUCKET, S3Server, SeaweedServer
from tests.store.places import DiskPlace, Place, RedisPlace, remove_late_arrivals
from tests.store.redis.servers import ValkeyServer


@pytest.fixture
def prefix() -> str:
    return f"home-{secrets.token_hex(4)}"


def blobs_in(server: S3Server, prefix: str) -> list[str]:
    return [key for key in server.keys(prefix) if key.endswith(".kvb")]


def nested(url: str) -> str:
    return quote(url, safe="")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["shared_s3", "seaweed"])
def test_a_life(request: pytest.FixtureRequest, server: str, index: Place, prefix: str, open_shelf: OpenShelf) -> None:
    """Everything a shelf does, on both servers and with both kinds of index."""
    s3: S3Server = request.getfixturevalue(server)
    shelf = open_shelf(index, s3.url(prefix))
    caches = [make_cache(seed) for seed in range(4)]
    stored = [
        shelf.put(cache, source=f"the text {number}", codec=codec)
        for number, (cache, codec) in enumerate(zip(caches, ["none", "int8", "int4", "none"], strict=True))
    ]
    again = open_shelf(index, s3.url(prefix))
    for number, manifest in enumerate(stored):
        assert again.source(manifest.id) == f"the text {number}"
        again.get(manifest.id)
    require_equal(caches[0], again.get(stored[0].id))
    assert len(blobs_in(s3, prefix)) == 8
    assert all(scrubbed.problem is None for scrubbed in again.scrub())
    assert again.check() == []
    assert shelf.delete(stored[0].id).homes == ("objects",)
    assert shelf.put(caches[1], codec="int8") == stored[1]
    shelf.update(stored[1].id, ttl_s=0.001)
    time.sleep(0.002)
    assert shelf.sweep().expired == 1
    assert len(blobs_in(s3, prefix)) == 5, "two caches, their sources, and that of the cache that has expired"
    assert again.original(stored[1].id)[1] == "the text 1"
    assert again.usage().caches == 2
    assert again.health().faults == ()


def test_a_sealed_shelf(shared_s3: S3Server, index: Place, prefix: str, tmp_path: Path, open_shelf: OpenShelf) -> None:
    """No object holds a plain byte of a document; another key opens nothing."""
    keys = tmp_path / "keys"
    keys.write_text(f"{secrets.token_hex(32)}\n")
    keys.chmod(0o600)
    rules = Rules(keyring=Keyring.read(str(keys)))
    shelf = open_shelf(index, shared_s3.url(prefix), rules=rules)
    cache = make_cache(1)
    cache_id = shelf.put(cache, source="the secret words of the contract").id
    bodies = [shared_s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in shared_s3.keys(prefix)]
    assert not any(b"secret words" in body or b"KVSHELF\n" in body for body in bodies)
    require_equal(cache, open_shelf(index, shared_s3.url(prefix), rules=rules).get(cache_id))
    with pytest.raises(StoreUnavailable, match="no key file is set"):
        open_shelf(index, shared_s3.url(prefix)).get(cache_id)


# What belongs together


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_a_shelf_is_opened_only_with_its_own_kind_of_place(
    kind: str, tmp_path: Path, prefix: str, shared_s3: S3Server, shared_valkey: ValkeyServer
) -> None:
    """Else every cache would seem to have lost its bytes, and be marked as corrupt."""
    home = f"disk://{tmp_path}/home" if kind == "disk" else f"{shared_valkey.url}?prefix={prefix}"
    join = "?" if kind == "disk" else "&"
    with_objects = f"{home}{join}blobs={nested(shared_s3.url(prefix))}"
    cache = make_cache(1)
    with open_store(with_objects) as store:
        cache_id = store.put(cache).id
    with pytest.raises(InvalidRequest, match="lie in object storage, and the URL of the store has no blobs="):
        open_store(home)
    with open_store(with_objects) as store:
        require_equal(cache, store.get(cache_id))
    other = home.replace("/home", "/plain").replace(prefix, f"{prefix}-plain")
    with open_store(other) as store:
        store.put(cache)
    with pytest.raises(InvalidRequest, match="lie beside its index, and the URL of the store has blobs="):
        open_store(f"{other}{join}blobs={nested(shared_s3.url(prefix))}")


def test_another_bucket_or_prefix_is_refused_before_a_cache_is_marked(
    index: Place, shared_s3: S3Server, prefix: str, open_shelf: OpenShelf
) -> None:
    cache = make_cache(1)
    cache_id = open_shelf(index, shared_s3.url(prefix)).put(cache).id
    with pytest.raises(
        StoreUnavailable, match=f"the index has 1 caches, but their blobs are not in s3://{BUCKET}/other"
    ):
        open_shelf(index, shared_s3.url("other"))
    with pytest.raises(StoreUnavailable, match="there is no bucket 'nobody'"):
        open_shelf(index, shared_s3.url(prefix, bucket="nobody"))
    require_equal(cache, open_shelf(index, shared_s3.url(prefix)).get(cache_id))


def test_a_bucket_can_move(shared_s3: S3Server, index: Place, prefix: str, open_shelf: OpenShelf) -> None:
    """The objects are copied as they are; the index does not name the bucket."""
    cache = make_cache(1)
    cache_id = open_shelf(index, shared_s3.url(prefix)).put(cache).id
    client = shared_s3.client()
    for key in shared_s3.keys(prefix):
        client.copy_object(Bucket=BUCKET, CopySource={"Bucket": BUCKET, "Key": key}, Key=f"moved-{key}")
    require_equal(cache, open_shelf(index, shared_s3.url(f"moved-{prefix}")).get(cache_id))


def test_an_emptied_bucket_is_reported(shared_s3: S3Server, index: Place, prefix: str, open_shelf: OpenShelf) -> None:
    shelf = open_shelf(index, shared_s3.url(prefix))
    shelf.put(make_cache(1))
    for key in shared_s3.keys(prefix):
        shared_s3.client().delete_object(Bucket=BUCKET, Key=key)
    assert "is gone: the bucket was emptied, or replaced by another" in shelf.health().faults[0]
    assert len(shelf.check()) == 2


def test_two_shelves_in_one_prefix_do_not_meet(
    shared_s3: S3Server, tmp_path: Path, prefix: str, open_shelf: OpenShelf
) -> None:
    one, other = (open_shelf(DiskPlace(tmp_path / name), shared_s3.url(prefix)) for name in ("one", "other"))
    cache = make_cache(1)
    ids = [shelf.put(cache).id for shelf in (one, other)]
    remove_late_arrivals(one)
    remove_late_arrivals(other)
    for shelf, cache_id in zip((one, other), ids, strict=True):
        require_equal(cache, shelf.get(cache_id))
    assert "is of another index" in one.check()[0]


def test_no_credentials_and_others_than_the_server_knows(
    seaweed: S3Server, tmp_path: Path, prefix: str, open_shelf: OpenShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = seaweed.url(prefix, timeout_s=1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(
        StoreUnavailable, match=r"refuses access \(SignatureDoesNotMatch\).*AWS_ACCESS_KEY_ID"
    ) as caught:
        open_shelf(DiskPlace(tmp_path / "home"), url)
    assert "another-secret" not in caught.value.message
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # where a machine's role would be asked for
    with pytest.raises(StoreUnavailable, match=r"no credentials for .*AWS_ACCESS_KEY_ID.*no role"):
        open_shelf(DiskPlace(tmp_path / "home"), url)


# An index that is lost


def test_a_lost_index_takes_no_blob_with_it(
    shared_s3: S3Server, shared_valkey: ValkeyServer, prefix: str, open_shelf: OpenShelf
) -> None:
    """Redis is emptied under a running service, which goes on with an empty shelf and sweeps. When the backup of Redis
    is back, every cache of before answers."""
    index = RedisPlace(shared_valkey)
    url = shared_s3.url(prefix)
    shelf, cache = open_shelf(index, url), make_cache(1)
    cache_id = shelf.put(cache).id
    client = shared_valkey.client()
    keys = client.keys(f"{{{index.prefix}}}:*")
    backup = {key: client.dump(key) for key in keys}
    client.delete(*keys)
    with pytest.raises(CacheNotFound):
        shelf.get(cache_id)
    new = shelf.put(make_cache(2))
    shelf.sweep()
    remove_late_arrivals(shelf)
    assert len(blobs_in(shared_s3, prefix)) == 2
    assert "whose backup would find its blobs there" in shelf.check()[0]
    client.delete(*client.keys(f"{{{index.prefix}}}:*"))
    for key, value in backup.items():
        client.restore(key, 0, value)
    restored = open_shelf(index, url)
    require_equal(cache, restored.get(cache_id))
    with pytest.raises(CacheNotFound):
        restored.get(new.id)


def test_a_lost_folder_takes_no_blob_with_it(
    shared_s3: S3Server, tmp_path: Path, prefix: str, open_shelf: OpenShelf
) -> None:
    cache, url = make_cache(1), shared_s3.url(prefix)
    with DiskPlace(tmp_path / "home").open(blobs=None) as plain:
        assert plain.check() == []
    shelf = open_shelf(DiskPlace(tmp_path / "index"), url)
    cache_id = shelf.put(cache).id
    shelf.close()
    shutil.copytree(tmp_path / "index", tmp_path / "backup")
    shutil.rmtree(tmp_path / "index")
    fresh = open_shelf(DiskPlace(tmp_path / "index"), url)
    remove_late_arrivals(fresh)
    assert fresh.list().data == ()
    fresh.close()
    shutil.rmtree(tmp_path / "index")
    shutil.copytree(tmp_path / "backup", tmp_path / "index")
    require_equal(cache, open_shelf(DiskPlace(tmp_path / "index"), url).get(cache_id))


# Orphans


def test_orphans_are_swept_and_strange_objects_are_named(
    shared_s3: S3Server, index: Place, prefix: str, open_shelf: OpenShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = open_shelf(index, shared_s3.url(prefix))
    manifest = shelf.put(make_cache(1))
    (blob,) = blobs_in(shared_s3, prefix)
    folder = blob.rpartition("/")[0]
    client = shared_s3.client()
    client.put_object(Bucket=BUCKET, Key=f"{folder}/{'0' * 40}-{'1' * 16}.kvb", Body=b"of a dead writer")
    client.put_object(Bucket=BUCKET, Key=f"{folder}/notes.txt", Body=b"of a visitor")
    assert shelf.sweep().orphans == 0, "it may belong to a write in progress"
    monkeypatch.setattr(housekeeping, "ORPHAN_GRACE_S", -60.0)
    assert shelf.sweep().orphans == 0, "a listing costs money: the next one is made after an hour"
    shelf.walked_at -= 3600
    assert shelf.sweep().orphans == 1
    assert shelf.check() == [f"notes.txt in s3://{BUCKET}/{folder} is not a blob"]
    assert blobs_in(shared_s3, prefix) == [blob]
    shelf.get(manifest.id)


def test_lists_may_be_late(
    proxy: FaultyProxy, tmp_path: Path, prefix: str, open_shelf: OpenShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list shows what was there before: new blobs are missing in it, removed ones are still in it. Only orphans are
    looked for in lists, so nothing that counts is removed, and nothing that is gone is missed."""
    url = proxy.server.url(prefix).replace(proxy.server.endpoint, proxy.endpoint)
    shelf = open_shelf(DiskPlace(tmp_path / "home"), url)
    monkeypatch.setattr(housekeeping, "ORPHAN_GRACE_S", -60.0)
    old = shelf.put(make_cache(1))
    assert shelf.sweep().orphans == 0
    proxy.faults.append(Fault("GET", "list-type=2", stale=True))
    cache = make_cache(2)
    new = shelf.put(cache)
    shelf.delete(old.id)
    shelf.walked_at -= 3600
    shelf.sweep()
    require_equal(cache, shelf.get(new.id))
    proxy.faults.clear()
    assert shelf.check() == []


# Outages


@pytest.mark.faults
def test_kill_9_of_the_server_and_its_return(tmp_path: Path, open_shelf: OpenShelf) -> None:
    """What was acknowledged is there afterwards; meanwhile every call has a named error, and the shelf goes on."""
    with SeaweedServer(tmp_path) as server:
        shelf = open_shelf(DiskPlace(tmp_path / "home"), server.url("killed", timeout_s=1))
        caches = [make_cache(seed) for seed in range(3)]
        ids = [shelf.put(cache).id for cache in caches[:2]]
        server.kill()
        for call in (lambda: shelf.get(ids[0]), lambda: shelf.put(caches[2]), shelf.health):
            with pytest.raises(StoreUnavailable, match=r"s3://shelves/killed does not work"):
                call()
        assert [manifest.id for manifest in shelf.list().data] == ids[::-1], "the index answers"
        server.start()
        deadline = time.monotonic() + 60
        while True:
            try:
                ids.append(shelf.put(caches[2]).id)
                break
            except StoreUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        for cache, cache_id in zip(caches, ids, strict=True):
            require_equal(cache, shelf.get(cache_id))
        assert shelf.check() == []


def test_a_server_that_stands_still(shared_s3: S3Server, tmp_path: Path, prefix: str, open_shelf: OpenShelf) -> None:
    shelf = open_shelf(DiskPlace(tmp_path / "home"), shared_s3.url(prefix, timeout_s=0.5))
    manifest = shelf.put(make_cache(1))
    shared_s3.pause()
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not work"):
            shelf.get(manifest.id)
        assert time.monotonic() - started < 10
    finally:
        shared_s3.resume()
    shelf.get(manifest.id)


def test_a_full_bucket(proxy: FaultyProxy, tmp_path: Path, prefix: str, open_shelf: OpenShelf) -> None:
    url = proxy.server.url(prefix, timeout_s=1).replace(proxy.server.endpoint, proxy.endpoint)
    shelf = open_shelf(DiskPlace(tmp_path / "home"), url)
    proxy.faults.append(Fault("PUT", ".kvb", status=507, code="XMinioStorageFull"))
    with pytest.raises(StorageFull, match="space or quota is used up"):
        shelf.put(make_cache(1))
    assert shelf.list().data == ()


def test_other_bytes_come_back(proxy: FaultyProxy, tmp_path: Path, prefix: str, open_shelf: OpenShelf) -> None:
    """While a cache is written, and while it is read."""
    url = proxy.server.url(prefix, timeout_s=1).replace(proxy.server.endpoint, proxy.endpoint)
    shelf = open_shelf(DiskPlace(tmp_path / "home"), url)
    proxy.faults.append(Fault("GET", ".kvb", lie=True))
    with pytest.raises(StoreUnavailable, match="does not keep what is written to it"):
        shelf.put(make_cache(1))
    assert shelf.list().data == ()
    assert shelf.sweep().orphans == 0
    assert shelf.check() == []


# Tiers


def test_tiers_before_objects_answer_while_these_are_away(
    shared_valkey: ValkeyServer, proxy: FaultyProxy, tmp_path: Path, prefix: str
) -> None:
    """Also a new process, which finds neither bucket nor marker."""
    blobs = proxy.server.url(prefix, timeout_s=0.5).replace(proxy.server.endpoint, proxy.endpoint)
    home = f"{shared_valkey.url}?prefix={prefix}&blobs={nested(blobs)}"
    url = f"ram:64MiB+disk://{tmp_path}/tier?max=64MiB+{home}"
    cache = make_cache(1)
    with open_store(url) as store:
        cache_id = store.put(cache).id
        require_equal(cache, store.get(cache_id))
    proxy.faults += [Fault(method, status=500) for method in ("GET", "HEAD", "PUT", "POST")]
    with open_store(url) as store:
        assert isinstance(store, TieredStore)
        require_equal(cache, store.get(cache_id))
        with pytest.raises(StoreUnavailable):
            store.put(make_cache(2))
        proxy.faults.clear()
        require_equal(make_cache(2), store.get(store.put(make_cache(2)).id))
        assert store.check() == []


def test_two_processes_open_an_empty_home_at_once(
    index: Place, shared_s3: S3Server, prefix: str, open_shelf: OpenShelf
) -> None:
    """Opened twice at once, with an empty index: one marker, one key."""
    one, other = open_shelf(index, shared_s3.url(prefix)), open_shelf(index, shared_s3.url(prefix))
    assert one.key == other.key
    assert len(shared_s3.keys(prefix)) == 1
