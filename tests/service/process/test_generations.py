"""Two generations of a model beside each other, and the caches of the old one made again under the new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvshelf.cli import app
from tests.service.conftest import DOCUMENT, created, other_model

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]


@pytest.mark.slow
def test_caches_of_the_old_generation_answer_until_their_successors_are_there(
    start_service: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    new, old = tmp_path / "new" / "llama", tmp_path / "old" / "llama"
    shutil.copytree(tiny_folder, old)
    shutil.copytree(tiny_folder, new)
    other_model(tiny_folder).model.save_pretrained(new)
    (tmp_path / "llama-old").symlink_to(old)
    with start_service(tmp_path, old) as service, httpx.Client(base_url=service.url, timeout=120) as http:
        kept = [
            created(http, document=DOCUMENT + "text", policy="knorm", keep_source=True, labels={"of": "1"}),
            created(http, document=DOCUMENT + "ids", codec="int8", keep_source="tokens", labels={"of": "2"}),
        ]
        bare = created(http, document=DOCUMENT + "not kept", labels={"of": "3"})
    both = (new, tmp_path / "llama-old")
    with start_service(tmp_path, *both) as service, httpx.Client(base_url=service.url, timeout=120) as http:

        def answers(cache_id: str) -> str:
            response = http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "When?", "max_tokens": 2})
            assert response.status_code == 200, response.text
            return str(response.json()["text"])

        def remake() -> Result:
            return CliRunner().invoke(app, ["remake", "--model", "llama", "--url", service.url])

        before = [answers(cache["id"]) for cache in (*kept, bare)]
        first = remake()
        assert first.exit_code == 2, first.output
        assert bare["id"] in first.stderr
        assert "2 new, 1 not made" in first.stderr
        successors = dict(line.split() for line in first.stdout.splitlines())
        assert successors.keys() == {cache["id"] for cache in kept}
        for cache in kept:
            made = http.get(f"/v1/caches/{successors[cache['id']]}").json()
            assert (made["model"], made["labels"], made["policy"]) == ("llama", cache["labels"], cache["policy"])
            assert (made["codec"], made["has_source"]) == (cache["codec"], True)
            answers(made["id"])
        assert [answers(cache["id"]) for cache in (*kept, bare)] == before, "the old replica still answers"
        again = remake()
        assert (again.exit_code, again.stdout) == (2, first.stdout)
        assert "2 there, 2 already of this generation, 1 not made" in again.stderr
    with start_service(tmp_path, new) as service, httpx.Client(base_url=service.url, timeout=120) as http:
        error = http.post(f"/v1/caches/{kept[0]['id']}/query", json={"prompt": "When?"})
        assert json.loads(error.text)["error"]["code"] == "model_mismatch"
        late = http.post(f"/v1/caches/{kept[0]['id']}/query", json={"prompt": "When?", "on_miss": "recompute"}).json()
        assert (late["recomputed"], late["cache_id"]) == ("model_changed", successors[kept[0]["id"]])
