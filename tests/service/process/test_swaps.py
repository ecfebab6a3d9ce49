"""One machine serves one model after another: the caches of each wait on the shelf, and one command warms them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
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


def test_caches_of_several_models_are_warmed_at_once_and_at_no_other_hours(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    models = tiny_folder, save_random_model(tmp_path / "other", seed=1)
    hour = datetime.now(UTC) + timedelta(hours=3)
    hours = f"{hour:%H:%M}-{hour + timedelta(hours=1):%H:%M}"
    schedule = {"warm": "team=law", "warm_interval_s": 0.2, "warm_hours": hours}
    with (
        start_service(tmp_path, *models, **schedule) as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        names = [model["id"] for model in http.get("/v1/models").json()["data"]]
        for name in names:
            created(http, document=DOCUMENT, model=name, labels={"team": "law"})
        time.sleep(2.0)
        assert "caches are warm" not in service.log.read_text(), "the schedule has other hours"
        warmed = CliRunner().invoke(app, ["warm", "--label", "team=law", "--json", "--url", service.url])
        assert warmed.exit_code == 0, warmed.output
        rows = [json.loads(line) for line in warmed.stdout.splitlines()]
        assert [(row["model"], row["caches"]) for row in rows] == [(name, 1) for name in reversed(names)]
