"""Two generations of a model beside each other, and the caches of the old one made again under the new one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from kvshelf import Engine, open_store
from kvshelf.cli import app
from kvshelf.store.types import TokenIds
from tests.service.conftest import DOCUMENT, other_model

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_caches_of_the_old_generation_answer_until_their_successors_are_there(
    start_service: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "llama-old", tmp_path / "llama"
    old.symlink_to(tiny_folder)
    shutil.copytree(tiny_folder, new)
    other_model(tiny_folder).model.save_pretrained(new)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(old), AutoTokenizer.from_pretrained(old)
    engine = Engine(model, tokenizer, name="llama")  # as it was served
    texts = [DOCUMENT + part for part in ("of a text", "of ids", "not kept")]
    ids = engine.encode_document(texts[1])
    with open_store(f"disk://{tmp_path}/shelf") as store:
        kept = [
            store.put(engine.compress(texts[0], policy="knorm"), source=texts[0], labels={"of": "1"}),
            store.put(
                engine.compress(texts[1]),
                codec="int8",
                source=TokenIds(tuple(ids.token_ids), ids.protected_prefix),
                labels={"of": "2"},
            ),
        ]
        bare = store.put(engine.compress(texts[2]), labels={"of": "3"})
    with start_service(tmp_path, new, old) as service, httpx.Client(base_url=service.url, timeout=120) as http:

        def answers(cache_id: str) -> str:
            response = http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "When?", "max_tokens": 2})
            assert response.status_code == 200, response.text
            return str(response.json()["text"])

        def remake() -> Result:
            return CliRunner().invoke(app, ["remake", "--model", "llama", "--url", service.url])

        before = [answers(cache.id) for cache in (*kept, bare)]
        first = remake()
        assert first.exit_code == 2, first.output
        assert bare.id in first.stderr
        assert "2 new, 1 not made" in first.stderr
        successors = dict(line.split() for line in first.stdout.splitlines())
        assert successors.keys() == {cache.id for cache in kept}
        for cache in kept:
            made = http.get(f"/v1/caches/{successors[cache.id]}").json()
            assert (made["model"], made["labels"], made["policy"]) == ("llama", cache.labels, cache.policy)
            assert (made["codec"], made["has_source"]) == (cache.codec, True)
            answers(made["id"])
        assert [answers(cache.id) for cache in (*kept, bare)] == before, "the old replica still answers"
        again = remake()
        assert (again.exit_code, again.stdout) == (2, first.stdout)
        assert "2 there, 2 already of this generation, 1 not made" in again.stderr
