"""Answers whose memory is bounded: `suffix` on queries, joint queries, chat completions and streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import AsyncClient, Client, CompressedCache, Engine
from kvshelf.errors import InvalidRequest
from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES
from tests.service.conftest import created, refused
from tests.service.observe.test_logs import the_line
from tests.service.routes.test_queries import events
from tests.service.scrape import moving

if TYPE_CHECKING:
    from tests.conftest import LiveService

SUFFIX = {"policy": "lagkv", "budget": 48, "params": {"lag": 8}}
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def cache(http: httpx.Client) -> dict[str, Any]:
    return created(http, document="The lamp of the lighthouse burns whale oil. " * 20, policy="full")


@pytest.fixture(scope="module")
def other(http: httpx.Client) -> dict[str, Any]:
    return created(http, document="A ferry crosses the sound twice a day. " * 10, policy="full")


def post(http: httpx.Client, cache: dict[str, Any], **body: Any) -> httpx.Response:
    return http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Who lit it?", "max_tokens": MAX_TOKENS} | body)


def test_the_answer_is_the_engine_s(http: httpx.Client, cache: dict[str, Any], tiny_folder: Path) -> None:
    answer = post(http, cache, suffix=SUFFIX).json()
    stored = CompressedCache.from_bytes(http.get(f"/v1/caches/{cache['id']}/blob").content)
    engine = Engine.load(str(tiny_folder), device="cpu")
    here = engine.answer(stored, "Who lit it?", max_new_tokens=MAX_TOKENS, suffix=SUFFIX)
    assert (answer["text"], answer["usage"]) == (here.text, here.usage.model_dump())
    plain = post(http, cache).json()["usage"]
    everything = plain["prefill_tokens"] + plain["completion_tokens"] - 1
    assert answer["usage"]["suffix_tokens"] <= 56 < everything == plain["suffix_tokens"]


def test_streams_chats_several_caches_and_clients(
    http: httpx.Client, service_url: str, cache: dict[str, Any], other: dict[str, Any]
) -> None:
    one = post(http, cache, suffix=SUFFIX).json()
    *_, last = events(post(http, cache, suffix=SUFFIX, stream=True))
    assert (last["text"], last["usage"]) == (one["text"], one["usage"])
    body = {"messages": [{"role": "user", "content": "Who lit it?"}], "max_tokens": MAX_TOKENS}
    chat = http.post("/v1/chat/completions", json=body | {"cache_id": cache["id"], "suffix": SUFFIX}).json()
    assert chat["choices"][0]["message"]["content"] == one["text"]
    ids = [cache["id"], other["id"]]
    asked = {"cache_ids": ids, "prompt": "tide", "max_tokens": MAX_TOKENS, "suffix": SUFFIX}
    joint = http.post("/v1/query", json=asked).json()
    assert joint["usage"]["suffix_tokens"] <= 56 < joint["usage"]["completion_tokens"]
    with Client(service_url) as client:
        query: Any = {"max_tokens": MAX_TOKENS, "suffix": SUFFIX}
        assert client.caches.query(cache["id"], "Who lit it?", **query).text == one["text"]
        assert client.caches.query(ids, "tide", **query).text == joint["text"]
        with client.caches.stream(cache["id"], "Who lit it?", **query) as stream:
            assert "".join(stream) == one["text"]
        assert stream.answer.usage.suffix_tokens == one["usage"]["suffix_tokens"]


def test_the_asynchronous_client(http: httpx.Client, service_url: str, cache: dict[str, Any]) -> None:
    one = post(http, cache, suffix=SUFFIX).json()

    async def ask() -> None:
        async with AsyncClient(service_url) as client:
            query: Any = {"max_tokens": MAX_TOKENS, "suffix": SUFFIX}
            assert (await client.caches.query(cache["id"], "Who lit it?", **query)).text == one["text"]
            stream = await client.caches.stream(cache["id"], "Who lit it?", **query)
            assert "".join([piece async for piece in stream]) == one["text"]
            with pytest.raises(InvalidRequest) as unknown:
                await client.caches.query(cache["id"], "Who lit it?", suffix={"policy": "windw"})
            assert unknown.value.param == "suffix.policy"
            assert [each.id for each in await client.suffix_policies.list()] == list(SUFFIX_POLICIES)

    asyncio.run(ask())


SCOPED = {"policy": "h2o", "scope": "cache", "budget": 64, "params": {"every": 4}}


def test_document_and_answer_shrink_together(
    http: httpx.Client, service_url: str, cache: dict[str, Any], other: dict[str, Any], tiny_folder: Path
) -> None:
    """Over HTTP, in streams, chats and both clients as in the engine; the stored cache keeps its bytes. One without the
    sums that the policy goes on with is refused."""
    without = refused(post(http, cache, suffix=SCOPED), 422, "policy_unsupported")
    assert (without["param"], "keep_scores" in without["message"]) == ("suffix.scope", True)
    document = "The lamp of the lighthouse burns whale oil. " * 20
    sums = {"compression_ratio": 0.0, "policy_params": {"keep_scores": True}}
    cache = created(http, document=document, policy="h2o", **sums)
    blob = http.get(f"/v1/caches/{cache['id']}/blob").content
    plain, one = post(http, cache).json(), post(http, cache, suffix=SCOPED).json()
    stored = CompressedCache.from_bytes(blob)
    here = Engine.load(str(tiny_folder), device="cpu").answer(
        stored, "Who lit it?", max_new_tokens=MAX_TOKENS, suffix=SCOPED
    )
    assert (one["text"], one["usage"]) == (here.text, here.usage.model_dump())
    assert one["usage"]["read_tokens"] == 2, "those of the chat template stay where they are"
    assert one["usage"]["suffix_tokens"] <= 64 + 4 < plain["usage"]["read_tokens"]
    *_, last = events(post(http, cache, suffix=SCOPED, stream=True))
    body = {"messages": [{"role": "user", "content": "Who lit it?"}], "max_tokens": MAX_TOKENS, "suffix": SCOPED}
    chat = http.post("/v1/chat/completions", json=body | {"cache_id": cache["id"]}).json()
    asked: Any = {"max_tokens": MAX_TOKENS, "suffix": SCOPED}

    async def ask() -> str:
        async with AsyncClient(service_url) as client:
            return (await client.caches.query(cache["id"], "Who lit it?", **asked)).text

    with Client(service_url) as client:
        texts = [client.caches.query(cache["id"], "Who lit it?", **asked).text, asyncio.run(ask())]
    assert [last["text"], chat["choices"][0]["message"]["content"], *texts] == [one["text"]] * 4
    assert http.get(f"/v1/caches/{cache['id']}/blob").content == blob
    assert post(http, cache).json()["text"] == plain["text"]
    joint = {"cache_ids": [cache["id"], other["id"]], "prompt": "tide", "suffix": SCOPED}
    assert refused(http.post("/v1/query", json=joint), 422, "policy_unsupported")["param"] == "suffix.scope"
    kept = refused(post(http, cache, suffix=SCOPED, store=True), 400, "invalid_request")
    assert kept["param"] == "store"


@pytest.mark.parametrize(
    ("suffix", "param", "words"),
    [
        ({"policy": "lagvk"}, "suffix.policy", "did you mean 'lagkv'"),
        ({"budget": 64}, "suffix.policy", "required"),
        ({"policy": "lagkv", "budget": 0}, "suffix.budget", "greater than or equal to 1"),
        ({"policy": "lagkv", "budget": "all"}, "suffix.budget", "integer"),
        ({"policy": "lagkv", "budget": 64}, "suffix.budget", "always keeps"),
        ({"policy": "lazy_eviction", "budget": 100}, "suffix.budget", "always keeps"),
        ({"policy": "window", "budget": 2}, "suffix.budget", "of the question"),
        ({"policy": "window", "scope": "all"}, "suffix.scope", "'suffix' or 'cache'"),
        ({"policy": "window", "scope": "cache", "budget": 2}, "suffix.budget", "of the document"),
        ({"policy": "lagkv", "params": {"lagg": 3}}, "suffix.params.lagg", "did you mean 'lag'"),
        ({"policy": "lagkv", "params": {"lag": 1}}, "suffix.params.lag", "from 2"),
        ({"policy": "lagkv", "tokens": 3}, "suffix.tokens", "unknown field"),
        ("lagkv", "suffix", "object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_suffixes_name_their_field(
    http: httpx.Client, cache: dict[str, Any], suffix: Any, param: str, words: str, stream: bool
) -> None:
    error = refused(post(http, cache, suffix=suffix, stream=stream), 400, "invalid_request")
    assert error["param"] == param
    assert words in error["message"]


def test_a_joint_query_and_a_chat_name_it_too(http: httpx.Client, cache: dict[str, Any], other: dict[str, Any]) -> None:
    bad = {"suffix": {"policy": "lagkv", "budget": 64}}
    joint = http.post("/v1/query", json={"cache_ids": [cache["id"], other["id"]], "prompt": "tide"} | bad)
    chat = {"messages": [{"role": "user", "content": "tide"}], "cache_id": cache["id"]}
    for response in (joint, http.post("/v1/chat/completions", json=chat | bad)):
        assert refused(response, 400, "invalid_request")["param"] == "suffix.budget"


def test_what_answers_held_is_counted_and_logged(
    http: httpx.Client, service: LiveService, cache: dict[str, Any]
) -> None:
    with moving(http) as moved:
        response = post(http, cache, suffix=SUFFIX)
    held = response.json()["usage"]["suffix_tokens"]
    assert moved("kvshelf_suffix_tokens_total", model="random-tiny") == held > 0
    assert the_line(service, response)["suffix_tokens"] == held


def test_the_suffix_policies_are_listed(http: httpx.Client) -> None:
    listed = http.get("/v1/suffix_policies").json()["data"]
    assert [policy["id"] for policy in listed] == list(SUFFIX_POLICIES)
    assert listed[1]["object"] == "suffix_policy"
    assert listed[1]["parameters"]["lag"]["legal"] == "int from 2"
    assert listed[1]["parameters"]["protect_question"]["default"] is True
