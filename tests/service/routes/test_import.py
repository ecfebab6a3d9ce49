"""Blobs that come in: imported and verified, or refused by name; and stored ones that are read through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import CompressedCache
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

    again = post(http, blob, name="another name", ttl_s=5000)
    assert (again.status_code, again.json()["existing"], again.json()["name"]) == (200, True, "hold")
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


@pytest.mark.parametrize("part", ["blob", "source"])
def test_a_damaged_cache_is_found_and_set_aside(http: httpx.Client, service: LiveService, part: str) -> None:
    document = f"The {part} of this one rots. " * 9
    cache = created(http, document=document, keep_source=True)
    files = sorted((service.home / "shelf" / "blobs").glob(f"{cache['id'].removeprefix('kvs_')}-*"))
    (path,) = [file for file in files if (file.stat().st_size == len(document)) == (part == "source")]
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
