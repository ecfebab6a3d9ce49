"""Blobs that come in: imported and verified, or refused by name; and stored ones that are read through."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import CompressedCache
from kvshelf.artifact.exported import about_part
from tests.qualities import quality_of
from tests.service.conftest import created, other_model, refused
from tests.store.hostile import Parts

if TYPE_CHECKING:
    from tests.conftest import LiveService

DOCUMENT = "Every chest in the hold has a number and a seal. " * 12
IMPORT = "/v1/caches/import"


@pytest.fixture(scope="module")
def blob(http: httpx.Client) -> bytes:
    """A cache that was exported, and is no longer on the shelf."""
    cache = created(http, document=DOCUMENT, policy="lagkv", compression_ratio=0.5, codec="int8", name="chests")
    data = http.get(f"/v1/caches/{cache['id']}/blob").content
    http.delete(f"/v1/caches/{cache['id']}")
    return data


def post(http: httpx.Client, blob: bytes | Iterator[bytes], **params: Any) -> httpx.Response:
    return http.post(IMPORT, content=blob, params=params, headers={"content-type": "application/octet-stream"})


def test_an_exported_cache_comes_back_as_it_was(http: httpx.Client, blob: bytes) -> None:
    first = post(http, blob, **{"label.kind": "cargo", "name": "hold", "ttl_s": "500"})
    assert first.status_code == 201, first.text
    cache = first.json()
    assert first.headers["location"] == f"/v1/caches/{cache['id']}"
    assert (cache["codec"], cache["policy"], cache["existing"]) == ("int8", "lagkv", False)
    assert (cache["name"], cache["labels"], cache["bytes"]["stored"]) == ("hold", {"kind": "cargo"}, len(blob))
    assert cache["expires_at"] == pytest.approx(cache["created_at"] + 500, abs=5)
    assert http.get(f"/v1/caches/{cache['id']}/blob").content == blob
    answer = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Which seal?", "max_tokens": 4})
    assert answer.json()["usage"]["cache_read_tokens"] == cache["tokens"]["document"]

    again = post(http, blob, **{"label.deck": "2", "name": "another name", "ttl_s": 5000})
    assert (again.status_code, again.json()["existing"], again.json()["name"]) == (200, True, "another name")
    assert again.json()["labels"] == {"kind": "cargo", "deck": "2"}
    assert post(http, blob).json()["name"] == "another name"
    assert again.json()["expires_at"] > cache["expires_at"] + 4000
    made = created(http, document=DOCUMENT, policy="lagkv", compression_ratio=0.5, codec="int8")
    assert (made["id"], made["existing"]) == (cache["id"], True)


def test_a_deleted_cache_can_be_imported_again(http: httpx.Client, blob: bytes) -> None:
    for _ in range(2):
        cache_id = post(http, blob).json()["id"]
        http.delete(f"/v1/caches/{cache_id}")
    assert post(http, blob).status_code == 201


def _flipped(blob: bytes) -> bytes:
    return blob[: len(blob) // 2] + bytes([blob[len(blob) // 2] ^ 1]) + blob[len(blob) // 2 + 1 :]


@pytest.mark.parametrize(
    ("damage", "miss_reason"),
    [
        (lambda _: b"", "corrupt"),
        (lambda _: b"{}", "corrupt"),
        (lambda _: bytes(range(256)) * 100, "corrupt"),
        (lambda blob: blob[:100], "corrupt"),
        (lambda blob: blob[:-1], "corrupt"),
        (lambda blob: blob + b"\0", "corrupt"),
        (_flipped, "corrupt"),
        (lambda blob: blob[:8] + b"\xff\x7f" + blob[10:], "version"),
        (lambda blob: b"KVSEALED" + blob[8:], "corrupt"),
    ],
    ids=["empty", "json", "garbage", "head only", "cut off", "too long", "flipped", "newer", "sealed"],
)
def test_bytes_that_are_no_sound_blob(
    http: httpx.Client, blob: bytes, damage: Callable[[bytes], bytes], miss_reason: str
) -> None:
    before = http.get("/v1/caches").json()
    error = refused(post(http, damage(blob)), 424, "cache_corrupt")
    assert error["miss_reason"] == miss_reason
    assert error["details"]["reason"]
    assert http.get("/v1/caches").json() == before


def test_a_cache_of_a_model_that_is_not_served(http: httpx.Client, tiny_folder: Path) -> None:
    foreign = other_model(tiny_folder).compress("Another model's. " * 9).to_bytes()
    before = http.get("/v1/caches").json()
    error = refused(post(http, foreign), 409, "model_mismatch")
    assert (error["miss_reason"], error["details"]["field"]) == ("model_changed", "weights")
    assert http.get("/v1/caches").json() == before


def test_blobs_over_the_cap(http: httpx.Client) -> None:
    cap = http.get("/v1/limits").json()["max_import_bytes"]
    assert str(cap) in refused(post(http, bytes(cap + 1)), 413, "body_too_large")["message"]
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in itertools.count():
            sent += 1 << 16
            yield bytes(1 << 16)

    refused(post(http, endless()), 413, "body_too_large")
    assert sent >= cap
    # The cap of documents does not hold for blobs.
    refused(post(http, bytes(2 << 20)), 424, "cache_corrupt")


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"ttl_s": "0"}, "ttl_s"),
        ({"ttl_s": "nan"}, "ttl_s"),
        ({"ttl_s": "1e999"}, "ttl_s"),
        ({"ttl_s": "soon"}, "ttl_s"),
        ({"expires_at": "1"}, "expires_at"),
        ({"ttl_s": "5", "expires_at": "5e9"}, "expires_at"),
        ({"name": "x" * 300}, "name"),
        ({"label.a b": "x"}, "labels.a b"),
        ({"labels": "x"}, "labels"),
        ({"pinned": "true"}, "pinned"),
        ({"name": ["x", "y"]}, "name"),
    ],
    ids=str,
)
def test_what_is_said_about_a_blob_is_checked(
    http: httpx.Client, blob: bytes, params: dict[str, Any], param: str
) -> None:
    assert refused(post(http, blob, **params), 400, "invalid_request")["param"] == param


def test_media_types_of_an_import(http: httpx.Client, blob: bytes) -> None:
    for headers in (
        {},
        {"content-type": "application/json"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/octet-stream", "content-encoding": "gzip"},
    ):
        refused(http.post(IMPORT, content=blob, headers=headers), 415, "unsupported_media_type")
    assert post(http, blob).status_code in (200, 201)
    refused(http.get(IMPORT), 404, "cache_not_found")


def test_a_sound_cache_is_verified_with_its_source(http: httpx.Client) -> None:
    plain = created(http, document=DOCUMENT + "to be verified")
    assert http.post(f"/v1/caches/{plain['id']}/verify").json() == {
        "id": plain["id"],
        "object": "cache.verification",
        "ok": True,
        "bytes": plain["bytes"]["stored"],
        "reason": None,
        "problem": None,
    }
    document = DOCUMENT + "ünd kept"
    kept = created(http, document=document, keep_source=True)
    verified = http.post(f"/v1/caches/{kept['id']}/verify").json()
    assert verified["bytes"] == kept["bytes"]["stored"] + len(document.encode())


def test_a_damaged_source_is_found_and_dropped(http: httpx.Client, service: LiveService) -> None:
    document = "The source of this one rots. " * 9
    cache = created(http, document=document, keep_source=True)
    blobs = (service.home / "shelf" / "blobs").iterdir()
    (path,) = [file for file in blobs if file.read_bytes() == document.encode()]
    path.write_bytes(_flipped(path.read_bytes()))
    found = http.post(f"/v1/caches/{cache['id']}/verify").json()
    assert (found["ok"], found["bytes"], found["reason"]) == (False, 0, "digest_mismatch")
    assert cache["id"] in found["problem"]
    assert not http.get(f"/v1/caches/{cache['id']}").json()["has_source"], "the cache itself is sound"
    assert http.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]
    again = created(http, document=document, keep_source=True)
    assert (again["existing"], again["has_source"]) == (True, True)


def test_a_damaged_cache_is_found_and_set_aside(http: httpx.Client, service: LiveService) -> None:
    document = "The blob of this one rots. " * 9
    cache = created(http, document=document, keep_source=True)
    (path,) = (service.home / "shelf" / "blobs").glob(f"{cache['id'].removeprefix('kvs_')}-*")
    path.write_bytes(_flipped(path.read_bytes()))
    found = http.post(f"/v1/caches/{cache['id']}/verify").json()
    assert (found["ok"], found["bytes"], found["reason"]) == (False, 0, "digest_mismatch")
    assert cache["id"] in found["problem"]
    refused(http.get(f"/v1/caches/{cache['id']}"), 424, "cache_corrupt")
    again = http.post(f"/v1/caches/{cache['id']}/verify").json()
    assert (again["ok"], again["reason"]) == (False, "quarantined")
    assert not created(http, document=document, keep_source=True)["existing"]
    assert http.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]


def test_only_what_is_there_is_verified(http: httpx.Client) -> None:
    for cache_id in ("kvs_" + "0" * 40, "kvs_x", "a" * 500):
        refused(http.post(f"/v1/caches/{cache_id}/verify"), 404, "cache_not_found")
    assert http.post("/v1/caches/..%2Fimport/verify").status_code == 404


QUALITY = quality_of(0.9).model_dump()
CARGO = {"document": DOCUMENT, "policy": "lagkv", "compression_ratio": 0.5, "codec": "int8"}


def exported(blob: bytes, source: bytes = b"", **about: Any) -> bytes:
    """An export of this blob that says this about it."""
    return blob + about_part(blob[-32:], json.dumps(about).encode(), source)


@pytest.fixture
def gone(http: httpx.Client, blob: bytes) -> bytes:
    """The blob of a cache that is not on the shelf."""
    http.delete(f"/v1/caches/{post(http, blob).json()['id']}")
    return blob


@pytest.mark.parametrize(
    "document",
    [
        {"document": DOCUMENT + "ünd a name"},
        {"messages": [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": "Aye."}]},
    ],
    ids=str,
)
def test_an_export_keeps_what_the_shelf_knew(http: httpx.Client, document: dict[str, Any]) -> None:
    wanted = CARGO | {"document": None, "name": "Chests ü", "labels": {"kind": "cargo", "ship": "Amber Falcon"}}
    cache = created(http, **wanted | document, keep_source=True)
    assert cache["quality"] is not None
    url = f"/v1/caches/{cache['id']}/blob"
    blob, whole = http.get(url), http.get(url, params={"about": "true"})
    assert whole.content.startswith(blob.content)
    assert len(blob.content) == cache["bytes"]["stored"] < len(whole.content) == int(whole.headers["content-length"])
    assert CompressedCache.from_bytes(whole.content).to_bytes() == blob.content
    http.delete(f"/v1/caches/{cache['id']}")
    again = post(http, whole.content).json()
    for field in ("id", "name", "labels", "quality", "has_source", "bytes"):
        assert again[field] == cache[field], field
    assert http.get(f"/v1/caches/{cache['id']}/kept").status_code == 200  # reads the source, which is the document
    assert http.get(url, params={"about": "true"}).content == whole.content
    http.delete(f"/v1/caches/{cache['id']}")
    renamed = post(http, whole.content, **{"name": "", "label.kind": "freight"}).json()
    assert (renamed["name"], renamed["labels"]) == ("", {"kind": "freight", "ship": "Amber Falcon"})


def test_an_export_changes_with_its_labels_and_its_blob_does_not(http: httpx.Client) -> None:
    cache = created(http, document=DOCUMENT + "relabelled")
    url = f"/v1/caches/{cache['id']}/blob"
    before = [http.get(url), http.get(url, params={"about": "true"})]
    http.patch(f"/v1/caches/{cache['id']}", json={"labels": {"a": "b"}})
    after = [http.get(url), http.get(url, params={"about": "true"})]
    assert [one.content == two.content for one, two in zip(before, after, strict=True)] == [True, False]
    assert [one.headers["etag"] == two.headers["etag"] for one, two in zip(before, after, strict=True)] == [True, False]
    size = cache["bytes"]["stored"]
    for first, last in ((size - 5, size + 5), (size + 3, size + 9), (0, size - 1)):
        part = http.get(url, params={"about": "true"}, headers={"range": f"bytes={first}-{last}"})
        assert (part.status_code, part.content) == (206, after[1].content[first : last + 1])


@pytest.mark.parametrize(
    ("about", "param"),
    [
        ({"name": "x" * 300}, "name"),
        ({"name": 5}, "name"),
        ({"labels": {"a b": "x"}}, "labels.a b"),
        ({"labels": {"a": "x" * 513}}, "labels.a"),
        ({"labels": {f"a{n}": "" for n in range(65)}}, "labels"),
        ({"quality": QUALITY | {"agreement": 1.5}}, "quality"),
        ({"quality": QUALITY | {"low": 0.93}}, "quality"),
        ({"quality": QUALITY | {"kl": float("nan")}}, "quality"),
        ({"quality": QUALITY | {"kl": float("inf")}}, "quality"),
        ({"quality": {"agreement": 1.0}}, "quality.low"),
        ({"pinned": True}, "pinned"),
        ({"tenant": "another"}, "tenant"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_an_export_says_is_checked_as_in_a_creation(
    http: httpx.Client, gone: bytes, about: dict[str, Any], param: str
) -> None:
    before = http.get("/v1/caches").json()
    assert refused(post(http, exported(gone, **about)), 400, "invalid_request")["param"] == param
    assert http.get("/v1/caches").json() == before


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        (b"Another document. " * 40, 409, "state_conflict"),
        (DOCUMENT.encode()[:-1], 409, "state_conflict"),
        (b"\xff\xfe", 400, "invalid_request"),
        (b"x" * (1 << 20), 413, "document_too_long"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_source_must_be_the_cache_s_document(
    http: httpx.Client, gone: bytes, source: bytes, status: int, code: str
) -> None:
    """A wrong one would make another document's cache when the cache is made again."""
    before = http.get("/v1/caches").json()
    refused(post(http, exported(gone, source)), status, code)
    assert http.get("/v1/caches").json() == before
    assert post(http, exported(gone, DOCUMENT.encode())).json()["has_source"]


def test_a_source_that_comes_later_is_kept(http: httpx.Client, gone: bytes) -> None:
    assert not post(http, gone).json()["has_source"]
    again = post(http, exported(gone, DOCUMENT.encode(), name="late")).json()
    assert (again["existing"], again["has_source"], again["name"]) == (True, True, "")


def test_a_claim_belongs_to_one_blob(http: httpx.Client, gone: bytes) -> None:
    """A quality measured on another cache, or on this one before it was altered, is refused with the export."""
    assert post(http, exported(gone, quality=QUALITY)).json()["quality"] == QUALITY
    other = created(http, document=DOCUMENT + "of another ship", policy="full")
    blob = http.get(f"/v1/caches/{other['id']}/blob").content
    moved = blob + exported(gone, quality=QUALITY)[len(gone) :]
    whole = exported(gone, quality=QUALITY)
    for damaged in (moved, whole[:-60] + b"9" + whole[-59:], whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:]):
        error = refused(post(http, damaged), 424, "cache_corrupt")
        assert error["details"]["reason"] == "digest_mismatch"
    for short in (whole[-8:], whole[-56:], whole[-20:]):
        assert refused(post(http, short), 424, "cache_corrupt")["details"]["reason"] == "truncated"


def test_imported_and_downloaded_are_the_same_cache(http: httpx.Client, blob: bytes) -> None:
    cache_id = post(http, blob).json()["id"]
    mine = CompressedCache.from_bytes(http.get(f"/v1/caches/{cache_id}/blob").content)
    assert (mine.codec, mine.to_bytes()) == ("int8", blob)


def test_a_cache_in_streams_comes_back_where_its_transforms_are_known(http: httpx.Client) -> None:
    cache = created(http, document=DOCUMENT + "Streams.", policy="full", codec="klt")
    blob = http.get(f"/v1/caches/{cache['id']}/blob").content
    ask = {"prompt": "Which seal?", "max_tokens": 8}
    before = http.post(f"/v1/caches/{cache['id']}/query", json=ask).json()["text"]
    http.delete(f"/v1/caches/{cache['id']}")
    again = post(http, blob).json()
    assert http.post(f"/v1/caches/{again['id']}/query", json=ask).json()["text"] == before
    parts = Parts(blob)
    parts.fields["identity"]["transforms"] = "ab" * 32
    response = post(http, parts.join())
    refused(response, 409, "model_mismatch")
    assert response.json()["error"]["details"]["transforms"] == "ab" * 32
