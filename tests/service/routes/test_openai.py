"""OpenAI's own client against a live service: what it sends is understood, and what comes back is what it expects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import openai
import pytest

from tests.service.conftest import created, refused
from tests.store.redis.servers import ValkeyServer

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUESTION: Any = [{"role": "user", "content": "Where is the green book?"}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as found:
        yield found


def extra(cache: dict[str, Any]) -> dict[str, Any]:
    return {"cache_id": cache["id"]}


def test_a_completion(client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any]) -> None:
    said = client.chat.completions.create(
        model=cache["model"], messages=QUESTION, max_tokens=8, extra_body=extra(cache)
    )
    body = {"messages": QUESTION, "max_tokens": 8}
    answer = http.post(f"/v1/caches/{cache['id']}/query", json=body).json()
    assert said.choices[0].message.content == answer["text"]
    assert (said.choices[0].message.role, said.choices[0].finish_reason) == ("assistant", answer["finish_reason"])
    assert said.usage is not None
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.cached_tokens == cache["tokens"]["document"]
    assert said.usage.completion_tokens == 8
    assert said._request_id


def test_a_stream(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": cache["model"], "messages": QUESTION, "max_tokens": 8, "extra_body": extra(cache)}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


@pytest.mark.anyio
async def test_the_asynchronous_client(service_url: str, client: openai.OpenAI, cache: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": cache["model"], "messages": QUESTION, "max_tokens": 8, "extra_body": extra(cache)}
    async with openai.AsyncOpenAI(base_url=f"{service_url}/v1", api_key="anything") as aclient:
        said = await aclient.chat.completions.create(**asked)
        stream = await aclient.chat.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        missing = asked | {"extra_body": {"cache_id": "kvs_" + "0" * 40}}
        for streamed in (False, True):
            with pytest.raises(openai.NotFoundError) as unknown:
                await aclient.chat.completions.create(**missing, stream=streamed)
            assert unknown.value.code == "cache_not_found"
    assert said.choices[0].message.content == text == client.chat.completions.create(**asked).choices[0].message.content


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_is_prefilled_with_the_question(
    client: openai.OpenAI, http: httpx.Client, cache: dict[str, Any], role: str
) -> None:
    """What most frameworks send. The document's tokens still come from the shelf; the system text is the question's."""
    system: dict[str, Any] = {"role": role, "content": "Be exact."}
    turns = [*QUESTION, {"role": "assistant", "content": "On the shelf."}, {"role": "user", "content": "Which shelf?"}]
    for messages in (QUESTION, turns):
        asked: dict[str, Any] = {
            "model": cache["model"], "messages": [system, *messages], "max_tokens": 8, "extra_body": extra(cache)
        }  # fmt: skip
        said = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        first = {"role": "user", "content": "Be exact.\n\n" + messages[0]["content"]}
        body = {"messages": [first, *messages[1:]], "max_tokens": 8}
        answer = http.post(f"/v1/caches/{cache['id']}/query", json=body).json()
        assert said.choices[0].message.content == answer["text"]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer["text"]
        assert said.usage == chunks[-1].usage
        assert said.usage is not None
        assert said.usage.prompt_tokens_details is not None
        cached = said.usage.prompt_tokens_details.cached_tokens
        assert cached == cache["tokens"]["document"]
        assert said.usage.prompt_tokens - cached == answer["usage"]["prefill_tokens"]
        without = client.chat.completions.create(**asked | {"messages": messages}).usage
        assert without is not None
        assert said.usage.prompt_tokens > without.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_system_message_is_refused(client: openai.OpenAI, cache: dict[str, Any], stream: bool) -> None:
    system = {"role": "system", "content": "Be exact."}
    messages: Any = [system, *QUESTION, {"role": "developer", "content": "Be brief."}]
    with pytest.raises(openai.BadRequestError, match="second system message") as raised:
        client.chat.completions.create(model=cache["model"], messages=messages, stream=stream, extra_body=extra(cache))
    assert (raised.value.param, raised.value.code) == ("messages[2].role", "invalid_request")


def test_a_system_message_is_a_turn_after_a_cached_conversation(client: openai.OpenAI, http: httpx.Client) -> None:
    """As the template of this model writes it: the cached turns are closed, so no question of theirs can take it."""
    talk = created(http, messages=[*QUESTION, {"role": "assistant", "content": "On the shelf. " * 20}], policy="full")
    messages: Any = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Which shelf?"}]
    said = client.chat.completions.create(model=talk["model"], messages=messages, max_tokens=4, extra_body=extra(talk))
    assert said.usage is not None
    assert said.usage.prompt_tokens > talk["tokens"]["document"]


def test_the_models(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == (cache["model"], "model", "kvshelf")
    assert model.created > 1e9


def test_sampling_options_reach_the_service(client: openai.OpenAI, cache: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": cache["model"], "messages": QUESTION, "extra_body": extra(cache)}
    plain = client.chat.completions.create(**asked, max_completion_tokens=12).choices[0].message.content or ""
    drawn = [
        client.chat.completions.create(**asked, max_tokens=12, temperature=2.0, top_p=0.99, seed=seed)
        for seed in (1, 1, 2)
    ]
    texts = [one.choices[0].message.content for one in drawn]
    assert texts[0] == texts[1] != texts[2]
    stopped = client.chat.completions.create(**asked, max_tokens=12, stop=[plain[4:7]])
    assert stopped.choices[0].message.content == plain[: plain.index(plain[4:7])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"extra_body": {"cache_id": "kvs_" + "0" * 40}}, openai.NotFoundError, "cache_not_found"),
        ({"extra_body": {}}, openai.BadRequestError, "invalid_request"),
        ({"n": 17}, openai.BadRequestError, "invalid_request"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_request"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "invalid_request"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openai_s_exceptions(
    client: openai.OpenAI, cache: dict[str, Any], change: dict[str, Any], error: type[openai.APIStatusError],
    code: str, stream: bool,
) -> None:  # fmt: skip
    asked = {"model": cache["model"], "messages": QUESTION, "extra_body": extra(cache), "stream": stream} | change
    with pytest.raises(error) as raised:
        client.chat.completions.create(**asked)
    assert raised.value.code == code
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"] in str(raised.value)


def test_an_expired_cache_says_why(client: openai.OpenAI, http: httpx.Client) -> None:
    gone = created(http, document="This is gone in a moment. " * 20, ttl_s=0.2)
    time.sleep(0.3)
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(model=gone["model"], messages=QUESTION, extra_body=extra(gone))
    assert (raised.value.status_code, raised.value.code) == (410, "cache_expired")
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["miss_reason"] == "expired"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def use_up_tokens(http: httpx.Client) -> None:
    """Have a document compressed that has 400 tokens more than a minute's; what takes none is answered as before."""
    cache = created(http, token_ids=[5 + n % 600 for n in range(6400)], policy="streaming_llm")
    rate = http.get("/v1/limits").json()["tenant"]["tokens_per_minute"]
    assert rate == {"limit": 6000, "used": 6000, "left": 0}
    for response in (
        http.post("/v1/caches", json={"document": "One more."}),
        http.post("/v1/caches", json={"document": "One more."}, headers={"prefer": "respond-async"}),
        http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "?"}),
    ):
        refused(response, 429, "rate_limited")


def ask_until_refused(client: openai.OpenAI, asked: dict[str, Any]) -> NoReturn:
    """Where the bucket was empty a moment ago, one request may be let in again, but not one after the other."""
    while True:
        client.chat.completions.create(**asked, max_tokens=2)


@pytest.mark.faults
def test_what_is_busy_or_broken_is_tried_again(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    valkey: ValkeyServer,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    """429 and 503 carry Retry-After, which the package waits for: its caller sees an answer."""
    limits = {"store": valkey.url, "tenant_requests_per_minute": 60, "tenant_tokens_per_minute": 6000}
    with (
        start_service(tmp_path, tiny_folder, **limits) as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        cache = created(http, document="A service with a rate. " * 20)
        asked: dict[str, Any] = {"model": cache["model"], "messages": QUESTION, "extra_body": extra(cache)}
        hasty = openai.OpenAI(base_url=f"{service.url}/v1", api_key="anything", max_retries=0)
        patient = hasty.with_options(max_retries=20)
        use_up_tokens(http)
        with pytest.raises(openai.RateLimitError, match="6000 tokens a minute") as spent:
            hasty.chat.completions.create(**asked, max_tokens=2)
        with pytest.raises(openai.RateLimitError, match="6000 tokens a minute"):
            hasty.responses.create(model=cache["model"], input="?", extra_body=extra(cache))
        assert 1 <= int(spent.value.response.headers["retry-after"]) <= 6
        assert spent.value.response.headers["x-ratelimit-limit-tokens"] == "6000"
        assert spent.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
        assert 60 < float(spent.value.response.headers["x-ratelimit-reset-tokens"].removesuffix("s")) < 66
        assert patient.chat.completions.create(**asked, max_tokens=2).choices[0].message.content
        while http.get("/v1/models").status_code == 200:
            pass
        with pytest.raises(openai.RateLimitError) as busy:
            ask_until_refused(hasty, asked)
        assert busy.value.code == "rate_limited"
        assert int(busy.value.response.headers["retry-after"]) >= 1
        raw = patient.chat.completions.with_raw_response.create(**asked, max_tokens=2)
        assert raw.parse().choices[0].message.content
        assert raw.headers["x-ratelimit-limit-requests"] == "60"
        assert int(raw.headers["x-ratelimit-remaining-requests"]) < 60
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")

        time.sleep(5)  # a few requests are allowed again
        valkey.pause()
        try:
            with pytest.raises(openai.InternalServerError) as broken:
                hasty.chat.completions.create(**asked, max_tokens=2)
        finally:
            threading.Timer(2.0, valkey.resume).start()
        assert (broken.value.status_code, broken.value.code) == (503, "store_unavailable")
        assert int(broken.value.response.headers["retry-after"]) >= 1
        assert patient.chat.completions.create(**asked, max_tokens=2).choices[0].message.content
