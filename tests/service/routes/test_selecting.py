"""Questions that read a part of their caches: `select` on queries, joint queries and chat completions."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import CompressedCache, Engine
from kvshelf.engine.decode.generation import Sampling
from kvshelf.methods.selectors import names
from tests.service.conftest import created, refused
from tests.service.observe.test_logs import the_line
from tests.service.routes.test_queries import events
from tests.service.scrape import moving

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUEST = {"method": "quest", "tokens": 128, "params": {}}


@pytest.fixture(scope="module")
def cache(http: httpx.Client) -> dict[str, Any]:
    return created(http, document="The lamp of the lighthouse burns whale oil. " * 40, policy="full", codec="int4")


@pytest.fixture(scope="module")
def other(http: httpx.Client) -> dict[str, Any]:
    return created(http, document="A ferry crosses the sound twice a day. " * 30, policy="full")


def post(http: httpx.Client, cache: dict[str, Any], **body: Any) -> httpx.Response:
    return http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Who lit it?", "max_tokens": 12} | body)


@pytest.mark.parametrize(
    "select", [QUEST, {"method": "sage", "tokens": 128}, {"method": "policy:snapkv", "tokens": 128}]
)
def test_the_answer_is_the_engine_s(
    http: httpx.Client, cache: dict[str, Any], tiny_folder: Path, select: dict[str, Any]
) -> None:
    answer = post(http, cache, select=select).json()
    stored = CompressedCache.from_bytes(http.get(f"/v1/caches/{cache['id']}/blob").content)
    engine = Engine.load(str(tiny_folder), device="cpu")
    here = engine.answer(stored, "Who lit it?", max_new_tokens=12, select=select["method"], select_tokens=128)
    assert (answer["text"], answer["usage"]["read_tokens"]) == (here.text, here.usage.read_tokens)
    assert answer["usage"]["read_tokens"] <= 128 < answer["usage"]["cache_read_tokens"]
    assert post(http, cache).json()["usage"]["read_tokens"] == cache["tokens"]["kept"]


def test_a_cache_with_an_index_is_read_in_part(http: httpx.Client, tiny_folder: Path) -> None:
    """The first question finds it on the shelf, and the tokens of the question read what it selects, too."""
    text = "".join(f"Lamp {number} of the lighthouse burns whale oil. " for number in range(60))
    cache = created(http, document=text, policy="infllm", policy_params={"block": 32}, codec="int4")
    select = {"method": "infllm", "tokens": 256, "params": {"recent": 32}}
    answer = post(http, cache, select=select).json()
    stored = CompressedCache.from_bytes(http.get(f"/v1/caches/{cache['id']}/blob").content)
    engine = Engine.load(str(tiny_folder), device="cpu")
    here = engine.answer(
        stored,
        "Who lit it?",
        max_new_tokens=12,
        select="infllm",
        select_tokens=256,
        select_params={"recent": 32},
    )
    assert (answer["text"], answer["usage"]["read_tokens"]) == (here.text, here.usage.read_tokens)
    assert answer["usage"]["read_tokens"] <= 256 < answer["usage"]["cache_read_tokens"]
    assert post(http, cache).json()["text"] == engine.answer(stored, "Who lit it?", max_new_tokens=12).text


def test_streams_prompts_chats_and_several_caches(
    http: httpx.Client, cache: dict[str, Any], other: dict[str, Any]
) -> None:
    one = post(http, cache, select=QUEST).json()
    *_, last = events(post(http, cache, select=QUEST, stream=True))
    assert (last["text"], last["usage"]) == (one["text"], one["usage"])
    both = post(http, cache, prompt=["Who lit it?", "tide"], select=QUEST).json()["data"]
    assert (both[0]["text"], both[0]["usage"]) == (one["text"], one["usage"])
    body = {"messages": [{"role": "user", "content": "Who lit it?"}], "max_tokens": 12, "cache_id": cache["id"]}
    chat = http.post("/v1/chat/completions", json=body | {"select": QUEST}).json()
    assert chat["choices"][0]["message"]["content"] == one["text"]
    ids = [cache["id"], other["id"]]
    asked = {"cache_ids": ids, "prompt": "tide", "max_tokens": 8, "select": QUEST | {"tokens": 192}}
    joint = http.post("/v1/query", json=asked).json()
    assert joint["usage"]["read_tokens"] <= 192
    assert [source["cache_id"] for source in joint["sources"]] == ids


def test_an_answer_says_what_it_read_if_asked(
    http: httpx.Client, cache: dict[str, Any], other: dict[str, Any], tiny_folder: Path
) -> None:
    told = QUEST | {"passages": True}
    answer = post(http, cache, select=told).json()
    stored = CompressedCache.from_bytes(http.get(f"/v1/caches/{cache['id']}/blob").content)
    engine = Engine.load(str(tiny_folder), device="cpu")
    query = engine.encode_query(document := engine.attach(stored), "Who lit it?")
    selection = engine.select(document, "quest", question_tokens=len(query), tokens=128)
    here, batch = engine.start(document, query, Sampling(12), selection, passages=True), engine.batch()
    while not here.finished:
        batch.step([here])
    shares = here.answer().passages
    assert shares is not None
    expected = {"cache_id": cache["id"], "tokens": cache["tokens"]["document"]}
    assert answer["passages"] == [expected | {"shares": base64.b64encode(shares[0]).decode()}]
    *pieces, last = events(post(http, cache, select=told, stream=True))
    assert last["passages"] == answer["passages"]
    assert not any("passages" in piece for piece in pieces)
    first, second = post(http, cache, prompt=["Who lit it?", "tide"], select=told).json()["data"]
    assert first["passages"] == answer["passages"] != second["passages"]
    assert "passages" not in post(http, cache, select=QUEST).json()
    assert "passages" not in post(http, cache).json()
    ids = [other["id"], cache["id"]]
    joint = http.post("/v1/query", json={"cache_ids": ids, "prompt": "tide", "max_tokens": 8, "select": told}).json()
    assert [(each["cache_id"], each["tokens"]) for each in joint["passages"]] == [
        (each["id"], each["tokens"]["document"]) for each in (other, cache)
    ]
    assert all(any(base64.b64decode(each["shares"])) for each in joint["passages"])


def test_a_chat_completion_has_no_passages(http: httpx.Client, cache: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Who lit it?"}], "cache_id": cache["id"]}
    response = http.post("/v1/chat/completions", json=body | {"select": QUEST | {"passages": True}})
    error = refused(response, 400, "invalid_request")
    assert error["param"] == "select.passages"
    assert "POST /v1/caches/{id}/query" in error["message"]


@pytest.mark.parametrize(
    ("select", "param", "words"),
    [
        ({"method": "quset"}, "select.method", "did you mean 'quest'"),
        ({"method": "policy:keydiff"}, "select.method", "unknown selector"),
        ({"method": "quest", "tokens": 0}, "select.tokens", "greater than or equal to 1"),
        ({"method": "quest", "tokens": 40}, "select.tokens", "always reads"),
        ({"method": "quest", "params": {"pages": 3}}, "select.params.pages", "has no parameter"),
        ({"method": "quest", "params": {"page": 0}}, "select.params.page", "from 1"),
        ({"method": "sage", "params": {"probe": "x"}}, "select.params.probe", "takes no probe"),
        ({"method": "quest", "budget": 3}, "select.budget", "unknown field"),
        ({"method": "quest", "passages": "all"}, "select.passages", "boolean"),
        ("quest", "select", "object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_selections_name_their_field(
    http: httpx.Client, cache: dict[str, Any], select: Any, param: str, words: str, stream: bool
) -> None:
    error = refused(post(http, cache, select=select, stream=stream), 400, "invalid_request")
    assert error["param"] == param
    assert words in error["message"]


def test_caches_that_cannot_be_read_in_part_are_refused(http: httpx.Client, cache: dict[str, Any]) -> None:
    merged = created(http, document="Nobody has seen the keeper since March. " * 40, policy="ems")
    error = refused(post(http, merged, select=QUEST), 422, "policy_unsupported")
    assert "merged tokens" in error["message"]
    error = refused(post(http, cache, select={"method": "fasa"}), 422, "policy_unsupported")
    assert "--only chunks" in error["message"]


def test_what_an_answer_read_is_counted_and_logged(
    http: httpx.Client, service: LiveService, cache: dict[str, Any]
) -> None:
    with moving(http) as moved:
        response = post(http, cache, select=QUEST)
    read = response.json()["usage"]["read_tokens"]
    assert moved("kvshelf_read_tokens_total", model="random-tiny") == read > 0
    assert the_line(service, response)["read_tokens"] == read


def test_the_selectors_are_listed(http: httpx.Client) -> None:
    listed = http.get("/v1/selectors").json()["data"]
    assert [selector["id"] for selector in listed] == names()
    quest = listed[0]
    assert quest["object"] == "selector"
    assert quest["parameters"]["page"]["legal"] == "int or null from 1"
    assert all(row["select"] == "quest" for row in quest["measured"])
