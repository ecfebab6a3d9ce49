"""The guard of a service that runs: what its settings do, and where it tells what it found."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvshelf.errors import InvalidRequest
from kvshelf.samples.tasks import make_document
from kvshelf.service.settings import load_settings
from tests.conftest import LiveService

pytestmark = pytest.mark.slow


def test_what_the_guard_finds_is_told(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    document = make_document("multikey", "prose", 220, 2, lambda text: len(text.split()))
    bad = {"policy": "streaming_llm", "compression_ratio": 0.9, "codec": "none", "quality": False, "keep_source": True}
    bad["labels"] = {"kind": "log"}
    with (
        start_service(tmp_path, tiny_folder, guard_share=1, guard_time_share=1, guard_label="kind") as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        cache = http.post("/v1/caches", json={"document": document.text, **bad}).raise_for_status().json()
        assert cache["quality"] is None
        ends_at = time.monotonic() + 60
        while (now := http.get(f"/v1/caches/{cache['id']}").json())["quality"] is None and time.monotonic() < ends_at:
            for question in document.questions:
                body = {"prompt": question.text, "max_tokens": 8}
                http.post(f"/v1/caches/{cache['id']}/query", json=body).raise_for_status()
            time.sleep(0.5)
        assert now["quality"]["reason"].startswith("measured by the guard: ")  # this model's documents decide nothing
        assert now["quality"]["high"] < 0.9
        assert any("answers differ from the full cache's" in line for line in now["warnings"])
        body = {"prompt": document.questions[0].text, "max_tokens": 8}
        http.post(f"/v1/caches/{cache['id']}/query", json=body).raise_for_status()
        time.sleep(3)  # until the replica has added to the store what it has used
        (row,) = http.get("/v1/usage").json()["data"]
        assert row["guarded"] >= row["guard_differed"] > 0
        assert 0 < row["guard_s"] <= row["worker_s"]
        rest, group = http.get("/v1/usage", params={"group_by": "guard_group"}).json()["data"]
        assert (rest["guard_group"], group["guard_group"]) == (None, "log")
        assert (group["guarded"], rest["guarded"], group["answers"]) == (row["guarded"], 0, 0)
        told = {
            (sample.name, sample.labels.get("result")): sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
            if "guard" in sample.name
        }
        assert told["kvshelf_guarded_answers_total", "differs"] > 0
        assert told["kvshelf_guard_caches_below_total", None] == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("guard_share", 1.5, "less than or equal to 1"),
        ("guard_floor", 1.0, "less than 1"),
        ("guard_below", "delete", "'flag' or 'remake'"),
        ("guard_time_share", 0, "greater than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_settings(**{name: value})


def test_a_model_of_several_processes_has_no_guard() -> None:
    with pytest.raises(InvalidRequest, match="replicas of one process"):
        load_settings(guard_share=0.1, gpus_per_replica=2)
