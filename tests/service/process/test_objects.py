"""A service whose blobs are in object storage, while the server of these is killed, and while it is gone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import pytest

from tests.service.conftest import created, refused
from tests.store.objects.servers import S3Server, SeaweedServer

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.faults

DOCUMENT = "The lamp was lit although nobody was on the island. " * 9
QUESTION = {"prompt": "Who lit it?", "max_tokens": 2}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def remote(
    start_service: Callable[..., AbstractContextManager[LiveService]], s3: S3Server, tiny_folder: Path, tmp_path: Path
) -> Iterator[httpx.Client]:
    blobs = quote(s3.url(secrets.token_hex(4), timeout_s=2), safe="")
    store = f"disk://{tmp_path}/shelf?blobs={blobs}"
    with (
        start_service(tmp_path, tiny_folder, store=store, resident_bytes=1) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield client


def test_the_server_is_killed_under_a_service(remote: httpx.Client, s3: S3Server) -> None:
    cache = created(remote, document=DOCUMENT, keep_source=True)
    ask = f"/v1/caches/{cache['id']}/query"
    answer = remote.post(ask, json=QUESTION)
    assert answer.json()["usage"]["cache_read_tokens"] == cache["tokens"]["document"]
    waiting = remote.post("/v1/caches", json={"document": DOCUMENT + "once more"}, headers={"prefer": "respond-async"})

    s3.kill()
    refused(remote.post("/v1/caches", json={"document": DOCUMENT + "again"}), 503, "store_unavailable")
    refused(remote.get(f"/v1/caches/{cache['id']}/blob"), 503, "store_unavailable")
    assert remote.get("/readyz").status_code == 503
    assert [each["id"] for each in remote.get("/v1/caches").json()["data"]][-1] == cache["id"]

    s3.start()
    deadline = time.monotonic() + 90
    while remote.post("/v1/caches", json={"document": DOCUMENT + "again"}).status_code != 201:
        assert time.monotonic() < deadline, "the store is not used again"
        time.sleep(0.5)
    assert remote.get("/readyz").status_code == 200
    assert remote.post(ask, json=QUESTION).json()["text"] == answer.json()["text"]
    assert remote.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]
    request = remote.get(f"/v1/requests/{waiting.json()['id']}", params={"wait_s": 60}).json()
    assert request["state"] == "done", request
