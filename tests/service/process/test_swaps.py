"""One machine serves one model after another: the caches of each wait on the shelf, and one command warms them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf.cli import app
from tests.conftest import save_random_model
from tests.service.conftest import created, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.slow

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


def test_caches_outlive_the_swap_of_their_model(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    other = save_random_model(tmp_path / "other", seed=1)
    asked = {"prompt": "Which book?", "max_tokens": 4}
    with start_service(tmp_path, tiny_folder) as service, httpx.Client(base_url=service.url, timeout=120) as http:
        cache = created(http, document=DOCUMENT, labels={"team": "law"})
        before = http.post(f"/v1/caches/{cache['id']}/query", json=asked).json()
    with start_service(tmp_path, other) as service, httpx.Client(base_url=service.url, timeout=120) as http:
        refused(http.post(f"/v1/caches/{cache['id']}/query", json=asked), 409, "model_mismatch")
        assert created(http, document=DOCUMENT)["id"] != cache["id"]
    with start_service(tmp_path, tiny_folder) as service, httpx.Client(base_url=service.url, timeout=120) as http:
        warmed = CliRunner().invoke(app, ["warm", "--label", "team=law", "--url", service.url])
        assert warmed.exit_code == 0, warmed.output
        after = http.post(f"/v1/caches/{cache['id']}/query", json=asked).json()
        assert after["text"] == before["text"]
        assert 'kvshelf_cache_hits_total{read_from="memory"} 1.0' in http.get("/metrics").text
        assert after["usage"]["cache_read_tokens"] == before["usage"]["cache_read_tokens"] > 0
