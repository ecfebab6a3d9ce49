from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.api import Timings
from kvshelf.artifact import blob
from kvshelf.errors import CacheExpired, CacheNotFound, InvalidRequest, StoreUnavailable
from kvshelf.store import housekeeping
from kvshelf.store.disk import DiskStore
from kvshelf.store.manifest import Manifest
from tests.store.caches import make_cache, require_equal
from tests.store.places import Clock

DAY = 86400.0


def put_many(store: DiskStore, count: int, **kwargs: Any) -> list[Manifest]:
    return [store.put(make_cache(seed), **kwargs) for seed in range(count)]


def blob_files(home: Path) -> list[Path]:
    return sorted((home / "blobs").iterdir())


def test_what_is_put_is_got(store: DiskStore) -> None:
    cache = make_cache()
    manifest = store.put(cache)
    require_equal(cache, store.get(manifest.id))


def test_a_manifest_says_what_was_stored(store: DiskStore, clock: Clock) -> None:
    cache = make_cache()
    timings = Timings(queue_s=1, prefill_s=2, compress_s=3)
    manifest = store.put(cache, ttl_s=60, labels={"team": "search"}, name="report", pinned=True, timings=timings)
    data = cache.to_bytes()
    header = blob.inspect(data).header
    assert (
        manifest.model_dump(exclude={"timings"})
        == {
            "id": store.cache_id(cache.identity),
            "parent_id": None,
            "document_id": store.document_id(cache.identity),
            "tenant": "default",
            "identity": cache.identity.to_dict(),
            "model": "tiny",
            "layout": "plain",
            "policy": "keydiff",
            "policy_params": {"sink": 4, "window": 8, "beta": 0.5, "pooling": "mean"},
            "compression_ratio": 0.5,
            "codec": "none",
            "num_tokens": 40,
            "kept_tokens": 20,
            "bytes_full": 2 * 2 * 40 * (8 + 8) * 4,  # layers, heads, tokens, key and value width, float32
            "bytes_stored": len(data),
            "blob_digest": data[-32:].hex(),
            "segment_digests": tuple(layer.digest.hex() for layer in header.layers),
            "quality": None,
            "tried": (),
            **dict.fromkeys(("certificate", "min_quality", "recoded", "guaranteed_until")),
            "created_at": clock.time,
            "expires_at": clock.time + 60,
            "ttl_renew_s": None,
            "last_used_at": None,
            "pinned": True,
            "name": "report",
            "labels": {"team": "search"},
            "source": None,
            "uses": 0,
        }
    )
    assert (manifest.timings.queue_s, manifest.timings.prefill_s, manifest.timings.compress_s) == (1, 2, 3)
    assert 0 < manifest.timings.store_s < 60
    assert store.stat(manifest.id) == manifest


def test_a_restart_finds_everything(home: Path) -> None:
    with DiskStore.open(home) as store:
        manifests = put_many(store, 3, labels={"a": "b"})
        deleted = store.delete(manifests[1].id)
    with DiskStore.open(home) as store:
        assert store.stat(manifests[0].id) == manifests[0]
        require_equal(make_cache(2), store.get(manifests[2].id))
        assert store.put(make_cache(0)) == manifests[0], "ids are the same: the key is kept"
        with pytest.raises(CacheNotFound):
            store.get(deleted.id)


@pytest.mark.parametrize("wrong", [None, b"a blob", "kvs_1"])
def test_what_is_no_cache_is_not_put(store: DiskStore, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="no CompressedCache"):
        store.put(wrong)


def test_putting_twice_writes_once(store: DiskStore, home: Path) -> None:
    first = store.put(make_cache(), labels={"a": "b"})
    files = [(path.name, path.stat().st_mtime_ns) for path in blob_files(home)]
    assert store.put(make_cache(), labels={"c": "d"}, ttl_s=5) == first
    assert [(path.name, path.stat().st_mtime_ns) for path in blob_files(home)] == files


def test_ids_tell_apart_what_differs_and_only_that(store: DiskStore, tmp_path: Path) -> None:
    identity = make_cache().identity
    assert store.cache_id(identity) == store.cache_id(make_cache().identity)
    other = make_cache(policy="lagkv").identity
    assert store.cache_id(identity) != store.cache_id(other)
    assert store.document_id(identity) == store.document_id(other)
    assert store.document_id(identity) != store.document_id(make_cache(1).identity)
    assert store.cache_id(identity) != store.cache_id(identity, tenant="b")
    assert store.document_id(identity) != store.document_id(identity, tenant="b")
    with DiskStore.open(tmp_path / "another") as another:
        assert another.cache_id(identity) != store.cache_id(identity), "every home has a key of its own"


def test_zero_and_zero_point_zero_are_one_ratio(store: DiskStore) -> None:
    manifest = store.put(make_cache(compression_ratio=0))
    assert store.cache_id(make_cache(compression_ratio=0.0).identity) == manifest.id
    store.get(manifest.id)


# Tenants


def test_tenants_do_not_see_each_other(store: DiskStore) -> None:
    mine = store.put(make_cache(), tenant="me", labels={"a": "b"})
    yours = store.put(make_cache(), tenant="you")
    assert mine.id != yours.id
    assert [m.id for m in store.list(tenant="me").data] == [mine.id]
    assert (store.usage(tenant="me").caches, store.usage().caches) == (1, 2)
    store.touch(mine.id, tenant="you")
    assert store.stat(mine.id, tenant="me").last_used_at is None
    messages = set()
    for cache_id, tenant in ((mine.id, "you"), ("kvs_" + "0" * 40, "you"), ("kvs_" + "0" * 40, "me")):
        for call in (store.get, store.stat, store.open_blob, store.delete, store.update):
            with pytest.raises(CacheNotFound) as refusal:
                call(cache_id, tenant=tenant)
            messages.add(refusal.value.message.replace(cache_id, "<id>"))
    assert len(messages) == 1, "another tenant's cache and none at all must look the same"
    assert store.stat(mine.id, tenant="me") == mine


@pytest.mark.parametrize(
    "cache_id", ["", "kvs_", "../../etc/passwd", "kvs_" + "0" * 39 + "/", "kvs_" + "0" * 41, "\0", "x" * 9999]
)
def test_what_cannot_be_an_id_is_not_found(store: DiskStore, cache_id: str) -> None:
    for call in (store.get, store.stat, store.open_blob, store.delete, store.update):
        with pytest.raises(CacheNotFound, match="there is no cache"):
            call(cache_id)


# Listing


def test_listing_goes_from_newest_to_oldest_in_pages(store: DiskStore) -> None:
    ids = [m.id for m in put_many(store, 7)][::-1]
    pages, after = [], None
    while True:
        page = store.list(limit=3, after=after)
        pages.append([m.id for m in page.data])
        after = page.data[-1].id
        if not page.has_more:
            break
    assert pages == [ids[:3], ids[3:6], ids[6:]]
    assert store.list(limit=7).has_more is False


def test_a_cursor_survives_what_happens_to_the_shelf(store: DiskStore, clock: Clock) -> None:
    ids = [m.id for m in put_many(store, 5)][::-1]
    assert [m.id for m in store.list(limit=2).data] == ids[:2]
    store.delete(ids[1])
    store.put(make_cache(99))
    store.update(ids[3], name="renamed")
    assert [m.id for m in store.list(limit=9, after=ids[1]).data] == ids[2:]
    store.update(ids[2], ttl_s=1)
    clock.time += 2
    store.sweep()
    assert [m.id for m in store.list(limit=9, after=ids[2]).data] == ids[3:]


def test_filters_are_joined(store: DiskStore) -> None:
    a = store.put(make_cache(1), labels={"team": "x", "year": "2026"})
    b = store.put(make_cache(1, policy="lagkv"), labels={"team": "x"})
    c = store.put(make_cache(2, policy="lagkv"))

    def ids(**filters: Any) -> list[str]:
        return [m.id for m in store.list(**filters).data]

    assert a.document_id == b.document_id
    assert ids(document_id=a.document_id) == [b.id, a.id]
    assert ids(policy="lagkv") == [c.id, b.id]
    assert ids(policy="lagkv", document_id=a.document_id) == [b.id]
    assert ids(model="tiny") == [c.id, b.id, a.id]
    assert ids(model="other") == ids(document_id="doc_1") == ids(policy="' OR 1=1 --") == []
    assert ids(labels={"team": "x"}) == [b.id, a.id]
    assert ids(labels={"team": "x", "year": "2026"}) == [a.id]
    assert ids(labels={"team": "x", "year": "2025"}) == ids(labels={"year": "x"}) == []


@pytest.mark.parametrize("limit", [0, -1, 1001, True, "5", 2.0])
def test_a_page_has_a_size(store: DiskStore, limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="limit must be a number from 1 to 1000"):
        store.list(limit=limit)


def test_a_cursor_of_nobody_or_of_another_tenant_is_refused(store: DiskStore) -> None:
    theirs = store.put(make_cache(), tenant="you")
    for after in (theirs.id, "kvs_" + "0" * 40, "nonsense"):
        with pytest.raises(InvalidRequest) as refusal:
            store.list(after=after)
        assert refusal.value.param == "after"


# Expiry


def test_an_expired_cache_is_gone_at_once_and_says_so(store: DiskStore, clock: Clock, home: Path) -> None:
    manifest = store.put(make_cache(), ttl_s=10)
    clock.time += 9.9
    store.get(manifest.id)
    clock.time += 0.1
    assert store.list().data == ()
    for swept in (False, True):
        if swept:
            assert store.sweep().expired == 1
            assert blob_files(home) == []
        for call in (store.get, store.stat, store.open_blob, store.update):
            with pytest.raises(CacheExpired, match=f"{manifest.id} has expired"):
                call(manifest.id)
        with pytest.raises(CacheNotFound):
            store.get(manifest.id, tenant="you")
    clock.time += 31 * DAY
    assert store.sweep().tombstones == 1
    with pytest.raises(CacheNotFound):
        store.get(manifest.id)


@pytest.mark.parametrize("swept", [False, True])
def test_an_expired_cache_can_be_put_again(store: DiskStore, clock: Clock, home: Path, swept: bool) -> None:
    old = store.put(make_cache(), ttl_s=10, name="old")
    clock.time += 10
    if swept:
        store.sweep()
    new = store.put(make_cache(), name="new")
    assert (new.id, new.name, new.expires_at, new.created_at) == (old.id, "new", None, clock.time)
    require_equal(make_cache(), store.get(new.id))
    assert len(blob_files(home)) == 1


def test_an_expired_cache_can_be_deleted(store: DiskStore, clock: Clock, home: Path) -> None:
    manifest = store.put(make_cache(), ttl_s=10)
    clock.time += 10
    assert store.delete(manifest.id).bytes_freed == manifest.bytes_stored
    assert blob_files(home) == []
    with pytest.raises(CacheNotFound):
        store.get(manifest.id)


def test_expiry_by_a_point_in_time(store: DiskStore, clock: Clock) -> None:
    assert store.put(make_cache(), expires_at=clock.time + 5).expires_at == clock.time + 5


@pytest.mark.parametrize(
    "expiry",
    [
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": True},
        {"ttl_s": "10"},
        {"expires_at": 1_800_000_000.0},
        {"ttl_s": 5, "expires_at": 1_800_000_005.0},
    ],
)
def test_an_expiry_that_means_nothing_is_refused(store: DiskStore, home: Path, expiry: dict[str, Any]) -> None:
    for call in (lambda: store.put(make_cache(), **expiry), lambda: store.update("kvs_" + "0" * 40, **expiry)):
        with pytest.raises(InvalidRequest) as refusal:
            call()
        assert refusal.value.param in expiry
    assert blob_files(home) == []


# Changing and deleting


def test_update_changes_what_it_is_given_and_nothing_else(store: DiskStore, clock: Clock) -> None:
    first = store.put(make_cache(), ttl_s=50, labels={"a": "b"}, name="one")
    fields: Any = {"name": "two", "pinned": 1}  # as numbers of 0 and 1 were always taken
    changed = store.update(first.id, **fields)
    assert changed == first.model_copy(update={"name": "two", "pinned": True})
    assert store.update(first.id, labels={"c": "d"}).labels == {"c": "d"}
    assert store.list(labels={"a": "b"}).data == ()
    assert store.update(first.id, ttl_s=None).expires_at is None
    assert store.update(first.id, expires_at=clock.time + 9).expires_at == clock.time + 9
    assert store.update(first.id) == store.stat(first.id)
    clock.time += 9
    assert store.sweep().expired == 1, "pinned guards against eviction, not against the expiry that was asked for"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", {"": "x"}),
        ("labels", {"k": "x" * 513}),
        ("labels", {"k": 3}),
        ("labels", {f"k{i}": "" for i in range(65)}),
        ("labels", ["k"]),
        ("name", "x" * 513),
        ("name", "half \ud800"),
        ("name", "zero \0"),
        ("tenant", ""),
        ("codec", "int3"),
        ("pinned", "false"),
    ],
)
def test_text_that_cannot_be_kept_is_refused(store: DiskStore, home: Path, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        store.put(make_cache(), **{field: value})
    assert (refusal.value.param or "").startswith(field)
    assert blob_files(home) == []


@pytest.mark.parametrize(
    "params", [{"beta": float("nan")}, {"beta": {1, 2}}, {"text": "\ud800"}, {"pair": (1, 2)}, {"big": 2**64}]
)
def test_parameters_that_cannot_be_written_down_are_refused(
    store: DiskStore, home: Path, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written"):
        store.put(make_cache(policy_params=params))
    assert blob_files(home) == []


@pytest.mark.parametrize("codec", ["int8", "int4:group=8,residual=3", "int2:residual=0", "mixed:share=0.25"])
def test_a_cache_is_kept_under_a_codec(store: DiskStore, home: Path, codec: str) -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80), (70, 60)))
    ranked = [replace(layer, importance=torch.rand(layer.entries)) for layer in cache.layers]
    cache = replace(cache, layers=tuple(ranked))
    plain, manifest = store.put(cache), store.put(cache, codec=codec)
    assert (manifest.codec, plain.codec) == (codec, "none")
    assert manifest.id == store.cache_id(cache.identity, codec=codec) != plain.id
    assert (manifest.bytes_full, manifest.kept_tokens) == (plain.bytes_full, plain.kept_tokens)
    assert manifest.bytes_stored < plain.bytes_stored
    read_cache = store.get(manifest.id)
    require_equal(cache.encoded(codec), read_cache)
    assert read_cache.codec == codec
    assert store.put(read_cache).id == store.put(read_cache, codec=codec).id == manifest.id, "nothing is encoded twice"
    assert len(blob_files(home)) == 2


def test_texts_of_one_codec_are_one_cache(store: DiskStore, home: Path) -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80),))
    manifests = [store.put(cache, codec=text) for text in ("int4", "int4:group=32", "int4:residual=032,group=32")]
    assert {(manifest.id, manifest.codec) for manifest in manifests} == {(manifests[0].id, "int4")}
    assert store.cache_id(cache.identity, codec="int4:residual=32") == manifests[0].id
    assert len(blob_files(home)) == 1


@pytest.mark.parametrize("codec", ["int3", "int4:group=7", "none:group=32", "", None])
def test_no_id_is_made_of_what_is_no_codec(store: DiskStore, codec: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        store.cache_id(make_cache().identity, codec=codec)
    assert refusal.value.param == "codec"


@pytest.mark.parametrize("codec", ["int8", "int4:group=64", "mixed"])
def test_an_encoded_cache_is_not_kept_under_another_codec(store: DiskStore, home: Path, codec: str) -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80),)).encoded("int4")
    with pytest.raises(InvalidRequest, match="not encoded again") as refusal:
        store.put(cache, codec=codec)
    assert refusal.value.param == "codec"
    assert blob_files(home) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_a_codec_cannot_hold_are_not_kept(store: DiskStore, home: Path, value: float) -> None:
    cache = make_cache()
    layer = replace(cache.layers[1], keys=torch.full((40, 8), value))
    cache = replace(cache, layers=(cache.layers[0], layer))
    with pytest.raises(InvalidRequest, match="layer 1") as refusal:
        store.put(cache, codec="int4")
    assert refusal.value.param == "codec"
    assert blob_files(home) == []
    assert store.put(cache).codec == "none", "without a codec any number is kept"


def test_deleting_is_final_for_a_sweep_that_was_under_way(store: DiskStore, clock: Clock) -> None:
    """The sweep has seen that the cache expired; before it says so, its owner deletes it."""
    manifest = store.put(make_cache(), ttl_s=5)
    clock.time += 5
    (seen,) = store.index.expired(clock.time, 10)
    store.delete(manifest.id)
    assert not housekeeping.bury(store.index, store.blobs, seen, "expired", clock.time)
    with pytest.raises(CacheNotFound):
        store.get(manifest.id)


def test_delete_gives_a_receipt_and_frees_the_disk(store: DiskStore, clock: Clock, home: Path) -> None:
    manifest = store.put(make_cache(), name="secret name", labels={"secret": "label"})
    assert store.usage().bytes == manifest.bytes_stored == blob_files(home)[0].stat().st_size
    receipt = store.delete(manifest.id)
    assert receipt.model_dump() == {
        "id": manifest.id,
        "deleted_at": clock.time,
        "bytes_freed": manifest.bytes_stored,
        "descendants": (),
        "homes": ("disk",),
    }
    assert (blob_files(home), store.usage().bytes, store.list().data) == ([], 0, ())
    for call in (store.get, store.stat, store.delete):
        with pytest.raises(CacheNotFound):
            call(manifest.id)
    assert store.put(make_cache()).id == manifest.id


def test_touch_records_the_last_use(store: DiskStore, clock: Clock) -> None:
    manifest = store.put(make_cache())
    clock.time += 5
    store.touch(manifest.id)
    assert store.stat(manifest.id) == manifest.model_copy(update={"last_used_at": clock.time, "uses": 1})
    assert store.list().data[0].last_used_at == clock.time
    store.update(manifest.id, name="x")
    assert store.stat(manifest.id).last_used_at == clock.time
    store.touch("kvs_" + "0" * 40)


def test_a_download_is_the_blob_and_outlives_its_cache(store: DiskStore) -> None:
    cache = make_cache()
    manifest = store.put(cache)
    with store.open_blob(manifest.id) as opened:
        assert (opened.nbytes, opened.digest) == (manifest.bytes_stored, manifest.blob_digest)
        store.delete(manifest.id)
        assert opened.file.read() == cache.to_bytes()


# Housekeeping


def test_a_sweep_removes_orphans_but_not_what_may_still_be_written(store: DiskStore, home: Path) -> None:
    kept = store.put(make_cache())
    orphan = home / "blobs" / f"{'0' * 40}-{'0' * 16}.kvb"
    orphan.write_bytes(b"half a blob")
    os.utime(orphan, (0, time.time() - 3590))
    assert store.sweep().orphans == 0
    assert orphan.exists()
    os.utime(orphan, (0, time.time() - 3601))
    assert [problem for problem in store.check() if "belongs to no cache" in problem]
    assert store.sweep().orphans == 1
    assert not orphan.exists()
    store.get(kept.id)


def test_a_put_that_a_sweep_overtook_is_refused_and_not_published(home: Path) -> None:
    """A writer that is stopped for longer than the grace period must not publish a file that is gone."""
    sweeper = DiskStore.open(home, now=lambda: 4e9)
    with sweeper, DiskStore.open(home, on_step=lambda step: sweeper.sweep() if step == "verified" else None) as store:
        with pytest.raises(StoreUnavailable, match="put it again"):
            store.put(make_cache())
        assert store.list().data == ()
        assert store.check() == []


def test_only_the_owner_may_read_the_home(store: DiskStore, home: Path) -> None:
    store.put(make_cache())
    for path in (home, *home.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) in (0o700, 0o600), path


def test_file_names_say_nothing_of_what_the_caller_wrote(store: DiskStore, home: Path) -> None:
    store.put(make_cache(), tenant="../tenant", name="../name", labels={"../key": "../value"})
    (file,) = blob_files(home)
    assert file.name.startswith(store.cache_id(make_cache().identity, tenant="../tenant").removeprefix("kvs_"))
    assert "name" not in file.name


def test_a_closed_shelf_does_nothing_in_the_folder_of_another(home: Path, tmp_path: Path) -> None:
    """The other one's descriptors have the numbers of those that were closed."""
    closed = DiskStore.open(home)
    closed.close()
    with DiskStore.open(tmp_path / "other") as store:
        kept = store.put(make_cache())
        for file in blob_files(tmp_path / "other"):
            os.utime(file, (0, 1))
        closed.close()
        for call in (closed.sweep, lambda: closed.put(make_cache(1))):
            with pytest.raises(StoreUnavailable, match="was closed; open it again"):
                call()
        store.get(kept.id)
        assert len(blob_files(tmp_path / "other")) == 1
