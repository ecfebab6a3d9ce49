"""A shelf over another's of which it takes what a trusted key has signed: everything else there is refused by name."""

from __future__ import annotations

import json
import random
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvshelf.api import Timings
from kvshelf.errors import CacheCorrupt, CacheNotFound, InvalidRequest, SourceNotKept
from kvshelf.store.about import export_part
from kvshelf.store.base import Store
from kvshelf.store.bundles.bundle import push
from kvshelf.store.bundles.places import BundleFolder
from kvshelf.store.bundles.trust import Trust
from kvshelf.store.disk import DiskStore
from kvshelf.store.erasure.signing import Signer
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.types import FilterFields
from kvshelf.store.url import open_store
from tests.amounts import few
from tests.store.caches import make_cache, require_equal

SIGNER, OTHER = (Signer(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
SEEDS = range(3)


class Shelves:
    """One's own over theirs, which is signed by `SIGNER`."""

    def __init__(self, folder: Path) -> None:
        self.theirs, self.bundle, self.keys = folder / "theirs", folder / "theirs" / "signed", folder / "trust.json"
        self.url = f"disk://{folder}/mine?under=disk://{self.theirs}&signed={self.bundle}&trust={self.keys}"
        with DiskStore.open(self.theirs) as shelf:
            for seed in SEEDS:
                shelf.put(make_cache(seed), name=f"report {seed}", labels={"of": "acme"}, source="a text")
            self.ids = [shelf.cache_id(make_cache(seed).identity) for seed in SEEDS]
        self.trust("acme", SIGNER)
        self.sign()

    def trust(self, name: str, signer: Signer) -> None:
        Trust(self.keys).add(name, signer.signature("")["public_key"])

    def sign(self, name: str = "all", signer: Signer = SIGNER, seeds: list[int] | None = None) -> None:
        def export(shelf: DiskStore, id: str) -> bytes:
            with shelf.open_blob(id) as stored:
                return stored.file.read() + export_part(shelf, shelf.stat(id))

        with DiskStore.open(self.theirs) as shelf:
            ids = [self.ids[seed] for seed in (SEEDS if seeds is None else seeds)]
            push(BundleFolder(self.bundle), name, (export(shelf, id) for id in ids), signer, signed_ids=ids)

    def tell(self, sql: str) -> None:
        """Change their index, as whoever has its file can."""
        with closing(sqlite3.connect(self.theirs / "shelf.sqlite3")) as connection:
            assert connection.execute(sql).rowcount
            connection.commit()


@pytest.fixture
def shelves(tmp_path: Path) -> Shelves:
    return Shelves(tmp_path)


def require_refused(mine: Store, cache_id: str, words: str) -> None:
    reads: list[Callable[[str], object]] = [mine.stat, mine.get, mine.open_blob, mine.open_cache, mine.open_parts]
    for read in reads:
        with pytest.raises(CacheCorrupt, match=words) as refused:
            read(cache_id)
        assert refused.value.param == "cache_id"


def test_what_is_signed_is_read_where_it_lies(shelves: Shelves) -> None:
    with open_store(shelves.url) as mine, DiskStore.open(shelves.theirs) as shelf:
        for seed, cache_id in enumerate(shelves.ids):
            require_equal(make_cache(seed), mine.get(cache_id))
            there = shelf.stat(cache_id)
            assert mine.stat(cache_id) == there.model_copy(update={"source": None, "timings": Timings()})
        assert {cache.id for cache in mine.list().data} == set(shelves.ids)
        assert mine.usage().caches == 0
    assert not list(shelves.bundle.glob("blobs/sha256/*"))[2:], "what is said and its manifest, and no cache again"


def test_a_cache_that_nobody_signed_is_refused_and_can_be_made_here(shelves: Shelves) -> None:
    with open_store(shelves.url) as mine:
        with DiskStore.open(shelves.theirs) as shelf:
            added = shelf.put(make_cache(7)).id
        require_refused(mine, added, "no bundle that a trusted key has signed has these bytes")
        assert added not in {cache.id for cache in mine.list().data}
        with pytest.raises(CacheNotFound):
            mine.delete(added)
        assert mine.put(make_cache(7)).id == added
        require_equal(make_cache(7), mine.get(added))
        assert (mine.usage().caches, mine.stat(added).name) == (1, "")
        with pytest.raises(CacheNotFound):
            mine.stat("kvs_" + "0" * 40)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("""manifest = json_set(manifest, '$.name', 'another')""", "its name is not what was signed"),
        ("""manifest = json_set(manifest, '$.labels.of', 'us')""", "its labels is not what was signed"),
        ("""manifest = json_set(manifest, '$.num_tokens', 3)""", "its num_tokens is not what was signed"),
        ("""manifest = json_set(manifest, '$.identity.model.weights', 'ab')""", "its content is not what was signed"),
        ("""manifest = json_remove(manifest, '$.identity.model')""", "its content is not what was signed"),
        ("""manifest = json_set(manifest, '$.unknown', 1)""", "its row in the index cannot be read"),
        ("""manifest = json_set(manifest, '$.recoded', json('{"codec":"int4","at":1}'))""", "made under is not what"),
        ("""manifest = json_set(manifest, '$.blob_digest', printf('%064d', 0))""", "has these bytes"),
    ],
)
def test_what_is_told_of_a_cache_must_be_what_was_signed(shelves: Shelves, change: str, words: str) -> None:
    with open_store(shelves.url) as mine:
        first, second, _ = shelves.ids
        shelves.tell(f"UPDATE caches SET {change} WHERE id = '{first}'")
        require_refused(mine, first, words)
        assert {cache.id for cache in mine.list().data} == {*shelves.ids} - {first}
        require_equal(make_cache(1), mine.get(second))


FORGED: dict[str, object] = {
    "id": "kvs_" + "0" * 40,
    "parent_id": "kvs_" + "1" * 40,
    "document_id": "doc_" + "0" * 40,
    "tenant": "b",
    "identity": {"model": {"dtype": "float32"}, "document": "ff"},
    "model": "another",
    "layout": "chat",
    "policy": "another",
    "policy_params": {"x": 1},
    "compression_ratio": 0.125,
    "codec": "int4",
    "num_tokens": 3,
    "kept_tokens": 1,
    "bytes_full": 1,
    "bytes_stored": 1,
    "blob_digest": "0" * 64,
    "segment_digests": [],
    "quality": {
        "version": 1,
        "agreement": 1.0,
        "low": 1.0,
        "high": 1.0,
        "worst": None,
        "kl": 0.0,
        "cues": 9,
        "probe_s": 0.0,
    },
    "tried": [{"policy": "full", "compression_ratio": 0.0, "codec": "none"}],
    "certificate": {"name": "sure", "alpha": 0.1, "digest": "00"},
    "min_quality": 0.9,
    "recoded": {"codec": "int4", "at": 1.0},
    "timings": {"prefill_s": 9999.0},
    "created_at": 1.0,
    "expires_at": 9e9,
    "ttl_renew_s": 60.0,
    "last_used_at": 1.0,
    "pinned": True,
    "guaranteed_until": 9e9,
    "name": "another",
    "labels": {"of": "us"},
    "source": {"form": "text", "nbytes": 1, "digest": "00"},
    "uses": 7,
}
TIMES = {"created_at", "expires_at", "ttl_renew_s"}
"""The documentation names them: they say when, and nothing of what a cache holds."""


@pytest.mark.parametrize("field", few(12, list(Manifest.model_fields)))
def test_nothing_that_an_index_says_alone_is_taken(shelves: Shelves, field: str) -> None:
    first = shelves.ids[0]
    with open_store(shelves.url) as mine:
        before = mine.stat(first)
    value = json.dumps(FORGED[field]).replace("'", "''")
    shelves.tell(f"UPDATE caches SET manifest = json_set(manifest, '$.{field}', json('{value}')) WHERE id = '{first}'")
    with open_store(shelves.url) as mine:
        try:
            after = mine.stat(first)
        except CacheCorrupt as error:
            problem: str | None = error.message
        else:
            problem = None
        if problem is not None:
            assert re.search("is not what was signed|has these bytes", problem)
            return
        assert (getattr(after, field) != getattr(before, field)) == (field in TIMES)
        assert after.model_copy(update={field: getattr(before, field)}) == before
        mine.update(first, name="mine")
    with DiskStore.open(shelves.theirs.parent / "mine") as own:
        assert own.stat(first) == after.model_copy(update={"name": "mine"})


def test_a_listing_has_what_was_signed_as_such(shelves: Shelves) -> None:
    first = shelves.ids[0]
    shelves.tell(f"INSERT INTO labels SELECT seq, tenant, 'tier', 'hot' FROM caches WHERE id = '{first}'")
    shelves.tell(f"UPDATE caches SET policy = 'snapkv', model = 'gpt', document_id = 'doc' WHERE id = '{first}'")
    with open_store(shelves.url) as mine:
        wrong: list[FilterFields] = [
            {"labels": {"tier": "hot"}}, {"policy": "snapkv"}, {"model": "gpt"}, {"document_id": "doc"},
        ]  # fmt: skip
        for filters in wrong:
            assert mine.list(**filters).data == ()
        ids = [cache.id for cache in mine.list(labels={"of": "acme"}, limit=2).data]
        assert len(ids) == 2
        rest = mine.list(labels={"of": "acme"}, limit=2, after=ids[-1])
        assert ({*ids, rest.data[0].id}, rest.has_more) == ({*shelves.ids}, False)


def test_a_listing_goes_on_behind_what_lost_its_signature(shelves: Shelves) -> None:
    with open_store(shelves.url) as mine:
        last = mine.list(limit=1).data[0].id
        shelves.sign(seeds=[seed for seed, id in enumerate(shelves.ids) if id != last])
        assert {cache.id for cache in mine.list(after=last).data} == {*shelves.ids} - {last}


def test_a_signature_is_for_one_tenant(shelves: Shelves) -> None:
    first, cache = shelves.ids[0], make_cache(0)
    with DiskStore.open(shelves.theirs) as shelf:
        moved = shelf.cache_id(cache.identity, tenant="b")
    with open_store(shelves.url) as mine:
        for id in (first, moved):
            shelves.tell(f"UPDATE caches SET tenant = 'b', id = '{id}' WHERE id = '{first}'")
            for read in (mine.stat, mine.get):
                with pytest.raises(CacheCorrupt, match=r"its tenant or|has these bytes"):
                    read(id, tenant="b")
            assert mine.list(tenant="b").data == ()


def test_tenants_and_bundles_may_say_different_things_of_one_document(shelves: Shelves) -> None:
    first, cache = shelves.ids[0], make_cache(0)
    with DiskStore.open(shelves.theirs) as shelf:
        theirs = shelf.put(cache, tenant="b", name="of b").id
        with shelf.open_blob(theirs, tenant="b") as stored:
            export = stored.file.read() + export_part(shelf, shelf.stat(theirs, tenant="b"))
    push(BundleFolder(shelves.bundle), "of-b", [export], SIGNER, signed_ids=[theirs])
    with open_store(shelves.url) as mine:
        assert mine.stat(theirs, tenant="b").name == "of b"
        assert mine.stat(first).name == "report 0"
        with DiskStore.open(shelves.theirs) as shelf:
            shelf.update(first, name="renamed")
        shelves.sign("later", seeds=[0])
        assert mine.stat(first).name == "renamed"
        shelves.sign("last", seeds=[1])
        assert mine.stat(first).name == "renamed"


def test_a_bundle_of_exports_signs_for_no_shelf(shelves: Shelves) -> None:
    with DiskStore.open(shelves.theirs) as shelf:
        added = shelf.put(make_cache(7)).id
        with shelf.open_blob(added) as stored:
            push(BundleFolder(shelves.bundle), "exports", [stored.file.read()], SIGNER)
    with open_store(shelves.url) as mine:
        require_refused(mine, added, "has these bytes")


def test_what_no_bundle_says_is_not_said_here(shelves: Shelves) -> None:
    first = shelves.ids[0]
    with DiskStore.open(shelves.theirs) as shelf:
        shelf.keep_judgement(first, Judgement(min_quality=0.99))
        assert shelf.stat(first).min_quality == 0.99
    with open_store(shelves.url) as mine:
        listed = {cache.id: cache for cache in mine.list().data}[first]
        assert mine.stat(first) == listed
        assert (listed.min_quality, listed.source) == (None, None)


def test_signed_bytes_under_another_id_are_refused(shelves: Shelves) -> None:
    first, second, _ = shelves.ids
    shelves.tell(
        "UPDATE caches SET (name, nbytes, manifest) = (SELECT name, nbytes, json_set(manifest, '$.id', "
        f"'{first}') FROM caches WHERE id = '{second}') WHERE id = '{first}'"
    )
    with open_store(shelves.url) as mine, pytest.raises(CacheCorrupt, match="has these bytes"):
        mine.get(first)


def test_a_source_stays_below_when_ones_own_copy_has_expired(shelves: Shelves) -> None:
    first = shelves.ids[0]
    with open_store(shelves.url) as mine:
        expired = mine.now() + 0.2
        mine.update(first, expires_at=expired)
        while mine.now() <= expired:
            time.sleep(0.05)
        assert mine.stat(first).name == "report 0"
        with pytest.raises(SourceNotKept, match="no signature covers it"):
            mine.source(first)


def test_no_signature_covers_a_source(shelves: Shelves) -> None:
    with open_store(shelves.url) as mine:
        for read in (mine.source, mine.original):
            with pytest.raises(SourceNotKept, match="no signature covers it"):
                read(shelves.ids[0])
        assert mine.update(shelves.ids[0], name="mine").source is None
        with pytest.raises(SourceNotKept):
            mine.source(shelves.ids[0])


def test_bundles_that_are_not_as_they_were_signed_are_refused_at_once(shelves: Shelves) -> None:
    index = shelves.bundle / "index.json"
    good = index.read_bytes()
    shelves.sign("others", OTHER)
    with pytest.raises(InvalidRequest, match="signed with the key") as refused:
        open_store(shelves.url)
    assert refused.value.details["reason"] == "untrusted_key"
    shelves.trust("others", OTHER)
    open_store(shelves.url).close()
    said = json.loads(good)
    said["manifests"][0]["annotations"]["org.kvshelf.signature"] = "0" * 128
    index.write_text(json.dumps(said, sort_keys=True, separators=(",", ":")))
    with pytest.raises(InvalidRequest, match="the signature is not that of acme"):
        open_store(shelves.url)


def test_a_rollback_is_refused_and_a_newer_bundle_counts_at_once(shelves: Shelves) -> None:
    index = shelves.bundle / "index.json"
    with open_store(shelves.url) as mine:
        older = index.read_bytes()
        shelves.sign(seeds=[0, 1])
        newer = index.read_bytes()
        require_refused(mine, shelves.ids[2], "has these bytes")
        own = mine.put(make_cache(9)).id
        index.write_bytes(older)
        require_refused(mine, shelves.ids[0], "this is an older one")
        require_equal(make_cache(9), mine.get(own))
        with pytest.raises(CacheNotFound):
            mine.stat("kvs_" + "0" * 40)
        with pytest.raises(InvalidRequest, match="an older one"):
            open_store(shelves.url)
        index.write_bytes(newer)
        shelves.sign()
        require_equal(make_cache(2), mine.get(shelves.ids[2]))


def test_a_file_of_keys_that_can_only_be_read_is_enough(shelves: Shelves) -> None:
    """Opening the shelf failed, as it noted the newest bundle there."""
    with shelves.keys.open("rb") as file:
        url = shelves.url.replace(f"trust={shelves.keys}", f"trust=/proc/self/fd/{file.fileno()}")
        with open_store(url) as mine:
            require_equal(make_cache(0), mine.get(shelves.ids[0]))
            index = shelves.bundle / "index.json"
            older = index.read_bytes()
            shelves.sign(seeds=[0, 1])
            require_equal(make_cache(0), mine.get(shelves.ids[0]))
            index.write_bytes(older)
            require_refused(mine, shelves.ids[0], "this is an older one")


def test_a_key_that_is_trusted_no_longer_counts_at_once(shelves: Shelves) -> None:
    with open_store(shelves.url) as mine:
        require_equal(make_cache(0), mine.get(shelves.ids[0]))
        trusted = json.loads(shelves.keys.read_text())
        shelves.keys.write_text(json.dumps(trusted | {"keys": {}}))
        require_refused(mine, shelves.ids[0], "signed with the key")


@pytest.mark.slow
def test_any_flipped_bit_of_theirs_is_refused(shelves: Shelves, soak: bool) -> None:
    """Of caches and bundles; 10,000 tries in a soak."""
    chance = random.Random(53)
    caches = [file for file in (shelves.theirs / "blobs").iterdir() if file.stat().st_size > 100]  # and no sources
    files = [*caches, *(file for file in shelves.bundle.rglob("*") if file.is_file())]
    for _ in range(10_000 if soak else 150):
        file = chance.choice(files)
        before = file.read_bytes()
        bit = chance.randrange(8 * len(before))
        changed = bytearray(before)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises((CacheCorrupt, InvalidRequest)), open_store(shelves.url) as mine:
            list(map(mine.get, shelves.ids))
        file.write_bytes(before)
    with open_store(shelves.url) as mine:
        for seed, cache_id in enumerate(shelves.ids):
            require_equal(make_cache(seed), mine.get(cache_id))


def test_urls_that_say_half_of_it_are_refused(shelves: Shelves, tmp_path: Path) -> None:
    over = f"disk://{tmp_path}/other?under=disk://{shelves.theirs}"
    cases = {
        f"{over}&signed={shelves.bundle}": "trust= that of the keys",
        f"{over}&trust={shelves.keys}": "signed= is the absolute path",
        f"{over}&signed=signed&trust={shelves.keys}": "signed= is the absolute path",
        f"disk://{tmp_path}/other?signed={shelves.bundle}&trust={shelves.keys}": "write under=",
        f"{over}&signed={tmp_path}/absent&trust={shelves.keys}": "there is none",
        f"{over}&signed={shelves.bundle}&trust={tmp_path}/absent": "cannot",
    }
    for url, words in cases.items():
        with pytest.raises(InvalidRequest, match=words):
            open_store(url)
    assert not (tmp_path / "other").exists()
