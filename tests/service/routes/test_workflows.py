"""/v1/workflows, and questions that name their step and their program: what is refused, and what a replica does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvshelf import AsyncClient, Client, errors
from kvshelf.api.strict import MAX_JOINT
from tests.service.conftest import created, refused
from tests.service.scrape import scrape

DOCUMENT = "The lock keeper opens the upper gate when the barge has paid. " * 12
UNKNOWN = "kvs_" + "0" * 40


@pytest.fixture(scope="module")
def caches(http: httpx.Client) -> list[str]:
    return [created(http, document=f"{DOCUMENT} Barge {number} is green.")["id"] for number in range(2)]


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture(scope="module")
def report(client: Client, caches: list[str]) -> str:
    steps = {"plan": {"cache_ids": caches[:1], "next": ["write"]}, "write": {"cache_ids": caches}}
    return client.workflows.keep("report", steps).id


def keep(http: httpx.Client, steps: dict[str, Any], id: str = "other") -> httpx.Response:
    return http.put(f"/v1/workflows/{id}", json={"steps": steps})


def test_a_workflow_is_kept_replaced_listed_and_deleted(client: Client, caches: list[str], http: httpx.Client) -> None:
    assert [keep(http, {"one": {"cache_ids": caches}}, "tax").status_code for _ in range(2)] == [201, 200]
    one = client.workflows.keep("tax", {"one": {"duration_s": 2.5, "join": "all"}})
    assert (one.id, one.steps["one"].duration_s, one.steps["one"].cache_ids) == ("tax", 2.5, [])
    assert client.workflows.retrieve("tax") == one
    assert one in client.workflows.list()
    assert client.workflows.delete("tax").deleted
    for method in ("GET", "DELETE"):
        refused(http.request(method, "/v1/workflows/tax"), 404, "workflow_not_found")


@pytest.mark.anyio
async def test_the_other_client_has_the_same_calls(service_url: str, caches: list[str]) -> None:
    async with AsyncClient(service_url) as client:
        kept = await client.workflows.keep("waits", {"one": {"cache_ids": caches}})
        assert await client.workflows.retrieve("waits") == kept
        place = {"id": "waits", "step": "one"}
        answer = await client.caches.query(caches[0], "Who?", max_tokens=2, workflow=place, program="p")
        assert answer.cache_id == caches[0]
        assert kept in await client.workflows.list()
        assert (await client.workflows.delete("waits")).id == "waits"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("steps", "param", "words"),
    [
        ({"a": {"next": ["b"]}, "b": {"next": ["a"]}}, "steps", "in a circle, "),
        ({"a": {"next": ["b"]}}, "steps.a.next", "there is no step 'b'"),
        ({"a": {"cache_ids": [7]}}, "steps.a.cache_ids[0]", "valid string"),
        ({"a": {"cache_ids": ["k"] * (MAX_JOINT + 1)}}, "steps.a.cache_ids", "at most"),
    ],
)
def test_a_bad_graph_is_refused_by_name(http: httpx.Client, steps: dict[str, Any], param: str, words: str) -> None:
    error = refused(keep(http, steps), 400, "invalid_request")
    assert error["param"] == param
    assert words in error["message"]


def test_the_caches_of_a_workflow_are_there(http: httpx.Client, caches: list[str]) -> None:
    steps = {"plan": {"cache_ids": caches, "next": ["write"]}, "write": {"cache_ids": [UNKNOWN]}}
    error = refused(keep(http, steps), 404, "cache_not_found")
    assert (error["param"], UNKNOWN in error["message"]) == ("steps.write.cache_ids", True)
    for id in ("a b", "-a", "x" * 65):
        assert keep(http, {"a": {}}, id).status_code == 400


def ways(cache_id: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"/v1/caches/{cache_id}/query", {"prompt": "Who?", "max_tokens": 2}),
        ("/v1/query", {"prompt": "Who?", "cache_ids": [cache_id], "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Who?"}], "cache_id": cache_id, "max_tokens": 2},
        ),
        ("/v1/responses", {"input": "Who?", "cache_id": cache_id, "max_output_tokens": 2}),
    ]


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize(
    ("field", "status", "code", "param"),
    [
        ({"workflow": {"id": "report", "step": "wrte"}}, 400, "invalid_request", "workflow.step"),
        ({"workflow": {"id": "nobody", "step": "plan"}}, 404, "workflow_not_found", "workflow"),
        ({"workflow": {"id": "report"}}, 400, "invalid_request", "workflow.step"),
        ({"workflow": "report:plan"}, 400, "invalid_request", "workflow"),
        ({"program": "a b"}, 400, "invalid_request", "program"),
        ({"program": ""}, 400, "invalid_request", "program"),
    ],
)
def test_a_question_of_no_step_is_refused_by_name(
    http: httpx.Client, caches: list[str], field: dict[str, Any], status: int, code: str, param: str
) -> None:
    for path, body in ways(caches[0]):
        error = refused(http.post(path, json=body | field), status, code)
        assert error["param"] == param
        if param == "workflow.step" and "step" in field["workflow"]:
            assert "did you mean 'write'" in error["message"]


def test_every_way_of_asking_takes_a_step_and_a_program(http: httpx.Client, report: str, caches: list[str]) -> None:
    """The answers are those without."""
    named = {"workflow": {"id": report, "step": "plan"}, "program": "run-1"}
    for path, body in ways(caches[0]):
        plain, told = (http.post(path, json=body | more) for more in ({}, named))
        assert plain.status_code == told.status_code == 200, told.text
        kept = {"choices", "text", "output_text"} & plain.json().keys()
        assert kept, "there is an answer"
        assert {key: plain.json()[key] for key in kept} == {key: told.json()[key] for key in kept}
        if path != "/v1/responses":
            streamed = http.post(path, json=body | named | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")


def test_the_caches_of_the_next_step_are_in_memory_before_its_question(http: httpx.Client) -> None:
    """And a question of the last step tells of none."""
    first, following = (created(http, document=DOCUMENT + words)["id"] for words in ("Ebb tide.", "Flood tide."))
    steps = {"plan": {"cache_ids": [first], "next": ["write"]}, "write": {"cache_ids": [following]}}
    assert keep(http, steps, "tides").status_code == 201
    read, end = count(http, "kvshelf_cache_retention_total", event="read_ahead"), time.monotonic() + 60
    while count(http, "kvshelf_cache_retention_total", event="read_ahead") == read:  # it is told with the next reply
        assert ask(http, first, "plan").status_code == 200
        assert time.monotonic() < end
    hits = count(http, "kvshelf_cache_hits_total", read_from="memory")
    for _ in range(2):
        assert ask(http, following, "write").status_code == 200
    assert count(http, "kvshelf_cache_hits_total", read_from="memory") == hits + 2
    assert count(http, "kvshelf_cache_retention_total", event="read_ahead") == read + 1


def ask(http: httpx.Client, cache_id: str, step: str) -> httpx.Response:
    body = {"prompt": "Who?", "max_tokens": 2, "workflow": {"id": "tides", "step": step}}
    return http.post(f"/v1/caches/{cache_id}/query", json=body)


def count(http: httpx.Client, name: str, **labels: str) -> float:
    """Over all other labels."""
    numbers = scrape(http).items()
    return sum(number for (of, has), number in numbers if of == name and labels.items() <= dict(has).items())


def test_what_the_client_sends_is_checked_before(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="in a circle"):
        client.workflows.keep("loop", {"a": {"next": ["a"]}})
