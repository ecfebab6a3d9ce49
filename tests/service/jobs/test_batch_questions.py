"""Questions as rows of a batch, by OpenAI's own client: each answered once, as the live route answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.service.conftest import created
from tests.service.jobs.test_batches import awaited, ended, lines, rows_of

if TYPE_CHECKING:
    from openai.types import Batch

    from tests.conftest import LiveService

ENDPOINT: Any = "/v1/chat/completions"
MANY = 200  # as many as the shared service takes


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as found:
        yield found


def body(cache_id: str, number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What does page {number} of the green book say?"}]
    return {"cache_id": cache_id, "messages": messages, "max_tokens": 8, **fields}


def line(custom_id: str, of: dict[str, Any], url: str = ENDPOINT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": of}


def questions(cache_id: str, count: int, **fields: Any) -> bytes:
    return lines(*(line(f"q-{n}", body(cache_id, n, **fields)) for n in range(count)))


def begun(client: openai.OpenAI, data: bytes) -> Batch:
    file = client.files.create(file=("questions.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def content(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a result file by custom id, each of which stands there once."""
    assert file_id is not None
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    assert all(each.keys() >= {"id", "custom_id", "response", "error"} for each in found)
    assert len({each["id"] for each in found}) == len(found)
    return by_id


@pytest.mark.timeout(300)
def test_a_batch_of_questions_answers_as_the_live_route(
    client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]
) -> None:
    other = created(http, document="The lamp of the lighthouse is lit at dusk. " * 9, policy="full")["id"]
    good = {f"q-{n}": body(other if n % 2 else cache["id"], n) for n in range(6)}
    good["kept"] = body(other, 1, store=True)
    good["both"] = body("", 9, cache_ids=[cache["id"], other])
    del good["both"]["cache_id"]
    bad = {
        "stream": line("stream", body(other, 1, stream=True)),
        "recompute": line("recompute", body(other, 1, on_miss="recompute")),
        "unknown": line("unknown", body("kvs_nothing", 1)),
        "model": line("model", body(other, 1, model="gpt-17")),
        "field": line("field", body(other, 1, colour="red")),
        "document": line("document", {"document": "x"}, "/v1/caches"),
        "plain": {"custom_id": "plain", "document": "x"},
    }
    data = lines(*(line(*each) for each in good.items()), *bad.values(), b"no JSON")
    batch = client.batches.retrieve(ended(http, begun(client, data).id)["id"])
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (batch.status, batch.endpoint) == ("completed", ENDPOINT)
    assert (counts.total, counts.completed, counts.failed) == (16, 8, 8)

    done, failed = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert done.keys() == good.keys()
    assert failed.keys() == bad.keys() | {None}
    for custom_id, asked in good.items():
        response = done[custom_id]["response"]
        assert (response["status_code"], done[custom_id]["error"]) == (200, None)
        live = http.post(ENDPOINT, json=asked).json()
        for own in (response["body"], live):
            assert own.pop("id").startswith("chatcmpl-")
            assert own.pop("created")
        assert response["body"] == live
    # A question that is asked again, here by the live route, keeps its turn once: equal turns are one cache.
    turns = [each for each in http.get("/v1/caches").json()["data"] if each["parent_id"] == other]
    assert [each["id"] for each in turns] == [done["kept"]["response"]["body"]["stored_cache_id"]]
    codes = {each["custom_id"]: each["response"]["status_code"] for each in failed.values()}
    assert codes == dict.fromkeys([*bad, None], 400) | {"unknown": 404}
    live = http.post(ENDPOINT, json=bad["unknown"]["body"]).json()
    assert failed["unknown"]["response"]["body"]["error"]["code"] == live["error"]["code"]
    assert "leave stream out" in failed["stream"]["response"]["body"]["error"]["message"]
    assert failed[None]["line"] == 16  # type: ignore[index]  # there is no custom id in what is no JSON


def test_a_batch_of_questions_takes_no_options_of_documents(
    client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]
) -> None:
    file = client.files.create(file=("questions.jsonl", questions(cache["id"], 1)), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": ENDPOINT, "compression_ratio": 0.5}
    error = http.post("/v1/batches", json=asked).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "compression_ratio")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_cancelled_batch_that_is_tried_again_asks_no_question_twice(
    client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]
) -> None:
    batch = begun(client, questions(cache["id"], MANY, max_tokens=64))
    awaited(http, batch.id, lambda now: now["request_counts"]["completed"] >= 8)
    client.batches.cancel(batch.id)
    assert ended(http, batch.id)["status"] == "cancelled"
    cancelled = client.batches.retrieve(batch.id)
    first, undone = content(client, cancelled.output_file_id), content(client, cancelled.error_file_id)
    assert 8 <= len(first) < MANY
    assert len(first.keys() | undone.keys()) == len(first) + len(undone) == MANY
    assert {(each["response"], each["error"]["code"]) for each in undone.values()} == {(None, "batch_cancelled")}
    http.post(f"/v1/batches/{batch.id}/retry")
    after = ended(http, batch.id)
    assert (after["status"], after["request_counts"]["completed"], after["request_counts"]["reused"]) == (
        "completed", MANY, 0
    )  # fmt: skip
    whole = content(client, after["output_file_id"])
    assert len(whole) == MANY
    assert {custom_id: whole[custom_id] for custom_id in first} == first, "the same answers, with their ids"


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_questions_go_on_after_the_death_of_the_service(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    with start_service(tmp_path / "home", tiny_folder) as service:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            cache = created(http, document="The lamp is lit at dusk. " * 20)["id"]
            with openai.OpenAI(base_url=f"{service.url}/v1", api_key="anything", max_retries=0) as client:
                batch = begun(client, questions(cache, MANY, max_tokens=64))
            awaited(http, batch.id, lambda now: now["request_counts"]["completed"] >= 8)
        service.kill()
    with (
        start_service(tmp_path / "home", tiny_folder) as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        after = ended(http, batch.id)
        assert (after["status"], after["request_counts"]["completed"]) == ("completed", MANY)
        assert after["progress"]["workers"] == {}
        found = rows_of(http, after["output_file_id"])
        assert sorted(each["custom_id"] for each in found) == sorted(f"q-{n}" for n in range(MANY))
