"""The ladder of a whole service, as its callers see it; and which settings are refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.samples.tasks import make_document
from kvshelf.service.settings import load_settings
from tests.conftest import LiveService


@pytest.mark.slow
def test_a_cache_cools_under_its_id(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    document = make_document("multikey", "prose", 220, 2, lambda text: len(text.split()))
    full = {"policy": "full", "codec": "none", "quality": False}
    with (
        start_service(tmp_path, tiny_folder, ladder="none:3s,int8:30d,int2", sweep_interval_s=0.5) as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        created = http.post("/v1/caches", json={"document": document.text, **full}).raise_for_status()
        cache = created.json()
        assert (cache["codec"], cache["recoded"]) == ("none", None)
        path = f"/v1/caches/{cache['id']}"
        blob = http.get(f"{path}/blob").raise_for_status().content

        def cooled() -> httpx.Response:
            ends_at = time.monotonic() + 60
            while (now := http.get(path)).json()["codec"] == "none" and time.monotonic() < ends_at:
                time.sleep(0.5)
            return now

        now = cooled()
        assert (now.json()["codec"], now.json()["recoded"]["codec"]) == ("int8", "none")
        assert now.json()["bytes"]["stored"] < cache["bytes"]["stored"]
        assert now.json()["warnings"][0].startswith("made under codec none, and since coded as int8")
        assert now.headers["etag"] != created.headers["etag"]
        stale = http.patch(path, json={"name": "x"}, headers={"if-match": created.headers["etag"]})
        assert stale.status_code == 412
        body = {"prompt": document.questions[0].text, "max_tokens": 8}
        answer = http.post(f"{path}/query", json=body).raise_for_status().json()
        assert answer["usage"]["cache_read_tokens"] == cache["tokens"]["document"]
        export = http.get(f"{path}/blob", params={"about": True}).raise_for_status().content
        binary = {"content-type": "application/octet-stream"}
        other = http.post("/v1/caches/import", content=export, headers=binary)
        assert (other.status_code, other.json()["codec"]) == (201, "int8"), "what came with it is of this blob"
        again = http.post("/v1/caches", json={"document": document.text, **full})
        assert (again.status_code, again.json()["id"], again.json()["codec"]) == (200, cache["id"], "none")
        assert cooled().json()["codec"] == "int8"
        imported = http.post("/v1/caches/import", content=blob, headers=binary)
        assert (imported.status_code, imported.json()["codec"], imported.json()["recoded"]) == (200, "none", None)
        time.sleep(3)  # until the replica has added to the store what it has used
        (row,) = http.get("/v1/usage").json()["data"]
        saved = cache["bytes"]["stored"] - now.json()["bytes"]["stored"]
        assert row["recoded"] >= 2
        assert row["recoded_bytes"] == row["recoded"] * saved


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ("none:1d", "two rungs at least"),
        ("none:1d,int9", "setting ladder: unknown codec 'int9'"),
        ("int8:1d,lossless", "gives back nothing"),
    ],
)
def test_a_ladder_that_means_nothing_is_refused(ladder: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_settings(ladder=ladder)


def test_a_model_of_several_processes_has_no_ladder() -> None:
    with pytest.raises(InvalidRequest, match="a ladder is of replicas of one process"):
        load_settings(ladder="none:1d,int8", gpus_per_replica=2)
