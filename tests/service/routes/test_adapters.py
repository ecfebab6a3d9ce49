"""LoRA adapters beside their model in one service: chosen by name, and never one for another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from kvshelf import Client, Engine, open_store
from kvshelf.cli import app
from kvshelf.model.loading import load
from tests.model.weights.test_adapter import save_adapter
from tests.service.conftest import created, refused
from tests.service.jobs.test_batch_questions import begun as asked_in_a_batch
from tests.service.jobs.test_batch_questions import body, content, line
from tests.service.jobs.test_batches import begun, ended, lines, rows_of

if TYPE_CHECKING:
    from tests.conftest import LiveService

DOCUMENT = "Ana keeps the ledger of the Larkfield Tool Library in a green book. " * 12
QUESTIONS = ("What does Ana keep?", "Where is the ledger?", "Who founded it?", "How many are there?")
BASE = "kvshelf-tiny"
FIELDS: dict[str | None, dict[str, Any]] = {None: {}, "law": {"adapter": "law"}, "tax": {"adapter": "tax"}}

Starts = Callable[..., AbstractContextManager["LiveService"]]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("law", "tax"), 1):
        save_adapter(home / name, seed)
    return {name: home / name for name in ("law", "tax")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def http(start_service: Starts, folders: dict[str, Path], home: Path) -> Iterator[httpx.Client]:
    adapters = ",".join(f"{name}={folder}" for name, folder in folders.items())
    with (
        start_service(home, BASE, adapters=adapters) as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def ids(http: httpx.Client) -> dict[str | None, str]:
    """The cache of one document without an adapter and under each."""
    return {
        name: created(http, document=DOCUMENT, policy="full", codec="none", **fields)["id"]
        for name, fields in FIELDS.items()
    }


@pytest.mark.timeout(600)
def test_two_hundred_questions_at_once_cross_nowhere(
    http: httpx.Client, ids: dict[str | None, str], folders: dict[str, Path]
) -> None:
    """Each answer is, token for token, that of a new engine with the one adapter."""
    alone: dict[str | None, list[str]] = {}
    for name in FIELDS:
        engine = Engine.load(BASE if name is None else f"{BASE}+{folders[name]}", device="cpu", dtype="float32")
        cache = engine.compress(DOCUMENT, policy="full")
        alone[name] = [engine.answer(cache, question, max_new_tokens=8).text for question in QUESTIONS]
    assert all(len(set(texts)) == 3 for texts in zip(*alone.values(), strict=True))  # a crossed answer would be seen
    assert len(set(ids.values())) == 3

    draw = random.Random(7)
    draws = [(draw.choice(list(FIELDS)), draw.randrange(len(QUESTIONS)), draw.random() < 0.5) for _ in range(200)]

    def ask(drawn: tuple[str | None, int, bool]) -> str:
        name, number, by_name = drawn  # the cache's own adapter answers, named or not
        fields = FIELDS[name] if by_name else {}
        asked = {"prompt": QUESTIONS[number], "max_tokens": 8} | fields
        answered = http.post(f"/v1/caches/{ids[name]}/query", json=asked)
        assert answered.status_code == 200, answered.text
        said: str = answered.json()["text"]
        return said

    with ThreadPoolExecutor(12) as threads:
        for (name, number, _), said in zip(draws, threads.map(ask, draws), strict=True):
            assert said == alone[name][number]


def test_an_adapter_is_a_model_by_its_name_as_in_vllm(http: httpx.Client, ids: dict[str | None, str]) -> None:
    models = {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}
    assert models == {BASE: None, "law": BASE, "tax": BASE}
    assert created(http, document=DOCUMENT, policy="full", codec="none", model="law")["id"] == ids["law"]
    cache = http.get(f"/v1/caches/{ids['law']}").json()
    assert cache["model"] == "law"
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]

        def complete(model: str, **fields: Any) -> str | None:
            more = {"cache_id": ids["law"]} | fields
            completion = client.chat.completions.create(model=model, messages=messages, max_tokens=8, extra_body=more)
            return completion.choices[0].message.content

        assert complete("law") == complete(BASE, adapter="law") == complete("law", adapter="law")
        marked = {"type": "text", "text": DOCUMENT * 6, "prompt_cache_breakpoint": {"mode": "explicit"}}
        messages = [{"role": "user", "content": [marked, {"type": "text", "text": QUESTIONS[0]}]}]
        for named in ({"model": BASE, "adapter": "law"}, {"model": "law"}):  # a document that the request brings
            begun = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **named}).json()
            assert begun["model"] == "law", begun
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        for model, fields in ((BASE, {}), ("tax", {}), ("law", {"adapter": "tax"}), (BASE, {"adapter": "tax"})):
            with pytest.raises(openai.BadRequestError, match="is of"):
                complete(model, **fields)


def test_another_adapter_is_refused_by_name(http: httpx.Client, ids: dict[str | None, str]) -> None:
    def param(path: str, **fields: Any) -> tuple[str, str]:
        error = refused(http.post(path, json=fields), 400, "invalid_request")
        return error["param"], error["message"]

    for cache_id in (ids[None], ids["tax"]):
        at, message = param(f"/v1/caches/{cache_id}/query", prompt="a", adapter="law")
        assert at == "adapter"
        assert "not of the adapter 'law'" in message
    both = [ids["law"], ids[None]]
    assert param("/v1/query", prompt="a", cache_ids=both)[0] == "cache_ids"
    for path, fields in {
        "/v1/caches": {"document": DOCUMENT},
        "/v1/estimate": {"document": DOCUMENT},
        "/v1/caches/kvs_nothing/query": {"prompt": "a"},  # before the cache is looked for
        "/v1/query": {"prompt": "a", "cache_ids": both},
        "/v1/chat/completions": body(ids["law"], 1),
        "/v1/responses": {"input": "a", "cache_id": ids["law"]},
    }.items():
        assert param(path, adapter="sales", **fields) == (
            "adapter",
            "adapter 'sales' is not served here; there is law, tax",
        )
    assert param("/v1/caches", document=DOCUMENT, adapter="law", model="tax")[1].startswith(
        f"the adapter 'law' is of the model '{BASE}'"
    )


def test_nothing_answers_for_an_adapter_that_is_gone_unless_it_is_named(
    http: httpx.Client, home: Path, tmp_path: Path
) -> None:
    """Removed, renamed with other weights, or trained again under its name: caches of weights that nobody runs."""
    save_adapter(tmp_path / "old", 3)
    loaded = load(f"{BASE}+{tmp_path / 'old'}", device="cpu", dtype="float32")
    texts = {name: f"{DOCUMENT} Of {name}." for name in ("contracts", "law")}
    with open_store(f"disk://{home}/shelf") as store:
        gone, again = (
            store.put(Engine(*loaded, name=name).compress(text, policy="full"), source=text)
            for name, text in texts.items()
        )
    asked = {"prompt": QUESTIONS[0], "max_tokens": 8, "on_miss": "recompute"}
    chat = body(gone.id, 1, on_miss="recompute")
    for path, fields in ((f"/v1/caches/{gone.id}/query", asked), ("/v1/chat/completions", chat)):
        refused(http.post(path, json=fields), 409, "model_mismatch")
    law = [created(http, document=text, policy="full", codec="none", adapter="law")["id"] for text in texts.values()]
    error = refused(http.post("/v1/query", json=asked | {"cache_ids": [law[0], gone.id]}), 409, "model_mismatch")
    assert error["details"]["cache_id"] == gone.id
    refused(http.post(f"/v1/caches/{again.id}/query", json=asked | FIELDS["tax"]), 400, "invalid_request")

    for cache, fields, made in ((gone, FIELDS["law"], law[0]), (again, {}, law[1]), (again, FIELDS["law"], law[1])):
        answer = http.post(f"/v1/caches/{cache.id}/query", json=asked | fields).json()
        assert (answer["recomputed"], answer["cache_id"]) == ("model_changed", made)


def test_rows_of_a_batch_name_their_adapter(http: httpx.Client, ids: dict[str | None, str]) -> None:
    same: dict[str, Any] = {"document": DOCUMENT, "policy": "full", "codec": "none"}
    rows = lines(
        {"custom_id": "base", **same},
        {"custom_id": "tax", "adapter": "tax", **same},
        {"custom_id": "none", "adapter": "sales", **same},
    )
    batch = ended(http, begun(http, rows)["id"])
    made = {row["custom_id"]: row for row in rows_of(http, batch["output_file_id"])}
    assert {name: row["cache_id"] for name, row in made.items()} == {"base": ids[None], "tax": ids["tax"]}
    (failed,) = rows_of(http, batch["error_file_id"])
    assert "adapter 'sales' is not served here" in json.dumps(failed)

    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        asked = {"own": {}, "named": {"adapter": "law"}, "other": {"adapter": "tax"}}
        data = lines(*(line(custom_id, body(ids["law"], 1, **fields)) for custom_id, fields in asked.items()))
        batch_of_questions = client.batches.retrieve(ended(http, asked_in_a_batch(client, data).id)["id"])
        done = content(client, batch_of_questions.output_file_id)
        assert done["own"]["response"]["body"]["choices"] == done["named"]["response"]["body"]["choices"]
        assert content(client, batch_of_questions.error_file_id).keys() == {"other"}


def test_clients_and_commands_name_an_adapter(http: httpx.Client, ids: dict[str | None, str], tmp_path: Path) -> None:
    url, report = str(http.base_url), tmp_path / "report.txt"
    report.write_text(DOCUMENT)
    with Client(url) as client:
        cache = client.caches.create(document=DOCUMENT, policy="full", codec="none", adapter="law")
        assert cache.id == ids["law"]
        said = client.caches.query(cache.id, QUESTIONS[0], adapter="law", max_tokens=8).text

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--url", url])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    put = run("put", str(report), "--adapter", "law", "--policy", "full", "--codec", "none")
    assert put == ids["law"]
    assert run("ask", put, QUESTIONS[0], "--adapter", "law", "--max-tokens", "8") == said.strip()


def test_the_same_name_with_another_folder_is_another_model(
    start_service: Starts, folders: dict[str, Path], tmp_path: Path
) -> None:
    asked = {"prompt": QUESTIONS[0], "max_tokens": 8, "adapter": "law"}
    made = []
    for folder in folders.values():
        with (
            start_service(tmp_path, BASE, adapters=f"law={folder}") as service,
            httpx.Client(base_url=service.url, timeout=120) as http,
        ):
            made.append(created(http, document=DOCUMENT, policy="full", adapter="law")["id"])
            assert http.post(f"/v1/caches/{made[-1]}/query", json=asked).status_code == 200
            if len(made) == 2:
                refused(http.post(f"/v1/caches/{made[0]}/query", json=asked), 409, "model_mismatch")
    assert made[0] != made[1]
