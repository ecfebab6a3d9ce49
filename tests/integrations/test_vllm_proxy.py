"""The proxy as a process, before servers that speak vLLM's completions and fail on demand."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvshelf import Engine, open_store
from kvshelf.errors import InvalidRequest
from kvshelf.integrations.vllm.upstreams import REST_S, SLACK, ProxyMetrics, Upstream, Upstreams
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from tests.conftest import TOKENIZER, save_random_model

QUESTION = [{"role": "user", "content": "Which code?"}]
FAILS, FAILS_LATER, REFUSES, BREAKS_OFF, SAYS_NOTHING, WAITS = 500, 501, 400, 502, 503, 7
"""What a server does with a request of this seed."""


class Peer:
    """A server with vLLM's `/v1/completions`. Its answers are two words."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.left_by: list[str] = []
        self.go_on = threading.Event()
        self.meanwhile: Callable[[], object] = lambda: None
        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[str]:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(10)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(data) for _, _, data in self.seen if data]

    async def _answer(self, request: Request) -> Response:
        data = await request.body()
        self.seen.append((request.url.path, dict(request.headers), data))
        self.meanwhile()
        body = json.loads(data or b"{}")
        what = body.get("seed")
        if what in (FAILS, REFUSES):
            return JSONResponse({"error": {"message": "no", "type": "E", "param": None, "code": what}}, what)
        if body.get("stream"):
            return StreamingResponse(self._events(what), media_type="text/event-stream")
        while what == WAITS and not self.go_on.is_set():
            if await request.is_disconnected():
                self.left_by.append(request.url.path)
                break
            await asyncio.sleep(0.01)
        choices = [{"index": 0, "text": "amber falcon", "finish_reason": "stop"}]
        return JSONResponse({"id": "cmpl-1", "choices": choices, "usage": {"completion_tokens": 2}})

    async def _events(self, what: int | None) -> AsyncIterator[str]:
        yield _event(choices=[{"index": 0, "text": "amber", "finish_reason": None}])
        if what == FAILS_LATER:
            yield _event(error={"message": "later", "type": "E", "param": None, "code": 500})
        elif what == BREAKS_OFF:
            raise ConnectionError
        elif what != SAYS_NOTHING:
            yield _event(choices=[{"index": 0, "text": " falcon", "finish_reason": "stop"}])
            yield _event(choices=[], usage={"completion_tokens": 2})
        yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@contextmanager
def proxy(
    store: str, upstreams: Sequence[str], *options: str, log: IO[str] | None = None, **environment: str
) -> Iterator[str]:
    """The address of a running proxy."""
    command = [sys.executable, "-m", "kvshelf", "vllm-proxy", "--store", store, "--model", "kvshelf-tiny"]
    command += ["--port", "0", *options, *(part for url in upstreams for part in ("--upstream", url))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVSHELF_", "VLLM_"))}
    process = subprocess.Popen(command, env=clean | environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(30)


def dead() -> str:
    """The address of a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"disk://{tmp_path_factory.mktemp('proxy')}/home"


@pytest.fixture(scope="module")
def store(home: str) -> Iterator[Store]:
    with open_store(home) as opened:
        yield opened


@pytest.fixture(scope="module")
def cache(store: Store, tiny: Engine) -> Manifest:
    return store.put(tiny.compress("One code is 17. " * 40, policy="keydiff", compression_ratio=0.5))


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    with ExitStack() as stack:
        made = [Peer(), Peer()]
        yield {stack.enter_context(peer.running()): peer for peer in made}


@pytest.fixture(scope="module")
def url(home: str, peers: dict[str, Peer]) -> Iterator[str]:
    with proxy(home, [dead(), *peers], KVSHELF_MAX_BODY_BYTES="100000", VLLM_API_KEY="theirs") as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, cache_id: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": QUESTION, "cache_id": cache_id} | fields)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.slow
def test_openais_client_asks_a_cache(url: str, cache: Manifest, peers: dict[str, Peer], tiny: Engine) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    named: Any = {"model": cache.model, "messages": QUESTION, "extra_body": {"cache_id": cache.id}}
    said = client.chat.completions.create(**named, max_tokens=9)
    assert said.choices[0].message.content == "amber falcon"
    stream = client.chat.completions.create(**named, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "amber falcon"
    assert chunks[-1].choices[0].finish_reason == said.choices[0].finish_reason == "stop"
    question = tiny.encode_query(tiny.compress("One code is 17.", policy="full"), QUESTION)
    assert last.usage == said.usage
    assert said.usage is not None
    assert said.usage.prompt_tokens == cache.num_tokens + len(question)
    (bodies,) = [peer.bodies for peer in peers.values() if peer.bodies]
    assert bodies[0] == {
        "model": None, "prompt": [0] * cache.kept_tokens + question, "cache_salt": cache.id, "max_tokens": 9,
        "kv_transfer_params": {"kvshelf": {"cache_id": cache.id, "tenant": "default"}}, "temperature": 0.0,
        "top_p": 1.0,
    }  # fmt: skip


def test_a_completion_with_a_cache_keeps_vllms_fields(http: httpx.Client, cache: Manifest, peers: Any) -> None:
    body = {"cache_id": cache.id, "prompt": "Which code?", "top_k": 3, "model": "other"}
    answer = http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "amber falcon"
    (sent,) = [sent for peer in peers.values() for sent in peer.bodies if sent.get("top_k") == 3]
    assert (sent["model"], sent["cache_salt"]) == ("other", cache.id)
    streamed = http.post("/v1/completions", json=body | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.text.count("data: {") == 3


def test_other_requests_pass_unchanged_with_the_servers_key(http: httpx.Client, peers: dict[str, Peer]) -> None:
    data = b'{ "messages": [], "seed": 12, "odd":1}'
    headers = {"authorization": "Bearer mine", "content-type": "application/json", "x-other": "kept"}
    assert http.post("/v1/chat/completions", content=data, headers=headers).json()["id"] == "cmpl-1"
    ((path, seen, _),) = [each for peer in peers.values() for each in peer.seen if each[2] == data]
    assert path == "/v1/chat/completions"
    assert (seen["authorization"], seen["x-other"]) == ("Bearer theirs", "kept")
    assert code(http.post("/v1/completions", json={"seed": REFUSES})) == (400, REFUSES)
    assert http.get("/v1/models").is_success
    assert http.get("/health").is_success
    streamed = http.post("/v1/completions", json={"stream": True})
    assert streamed.text.endswith("[DONE]\n\n")
    with pytest.raises(httpx.RemoteProtocolError):
        http.post("/v1/completions", json={"stream": True, "seed": BREAKS_OFF})


def test_what_cannot_be_asked_is_refused_by_name(
    http: httpx.Client, store: Store, cache: Manifest, tiny: Engine, tmp_path: Path
) -> None:
    brief = store.put(tiny.compress("One code is 18.", policy="full"), ttl_s=0.05)
    other = Engine.load(str(save_random_model(tmp_path / "other"))).compress("One code is 17.", policy="full")
    time.sleep(0.1)
    assert code(ask(http, "kvs_" + "0" * 40)) == (404, "cache_not_found")
    assert code(ask(http, brief.id)) == (410, "cache_expired")
    assert code(ask(http, store.put(other).id)) == (409, "model_mismatch")
    assert code(ask(http, cache.id, messages=[])) == (400, "invalid_request")
    assert code(ask(http, cache.id, tools=[{}])) == (400, "invalid_request")
    assert code(ask(http, cache.id, user="x" * 100_000)) == (413, "body_too_large")
    for field in ({"echo": True}, {"kv_transfer_params": {}}, {"prompt": ["a", "b"]}, {"prompt": "a", "suffix": "b"}):
        refused = http.post("/v1/completions", json={"cache_id": cache.id, "prompt": [1]} | field)
        assert code(refused) == (400, "invalid_request"), field
    for path, question in (("completions", {"prompt": "?"}), ("chat/completions", {"messages": QUESTION})):
        several = http.post(f"/v1/{path}", json=question | {"cache_ids": [cache.id]})  # vLLM would ignore the field
        assert (several.status_code, several.json()["error"]["param"]) == (400, "cache_ids")
    not_passed = {"select": {"method": "quest"}, "tool": "search", "store": True, "choices": ["a"], "n": 2}
    for field, value in not_passed.items():
        other = http.post("/v1/chat/completions", json={"messages": QUESTION, "cache_id": cache.id, field: value})
        assert (other.status_code, other.json()["error"]["param"]) == (400, field)
    past = http.post("/v1/completions", json={"kv_transfer_params": {"kvshelf": {"cache_id": cache.id}}})
    assert code(past) == (400, "invalid_request")
    assert code(http.get("/v1/caches")) == (404, "not_found")


def test_a_failure_of_vllm_is_explained(http: httpx.Client, cache: Manifest) -> None:
    failed = ask(http, cache.id, seed=FAILS)
    assert code(failed) == (424, "cache_unusable")
    assert failed.headers["x-request-id"] in failed.json()["error"]["message"]
    refused = ask(http, cache.id, seed=REFUSES)
    assert code(refused) == (400, "invalid_request")
    assert code(ask(http, cache.id, seed=FAILS, stream=True)) == (424, "cache_unusable")
    ends = ((FAILS_LATER, "cache_unusable"), (SAYS_NOTHING, "cache_unusable"), (BREAKS_OFF, "worker_crashed"))
    for seed, named in ends:
        *_, event, done = ask(http, cache.id, seed=seed, stream=True).text.strip().split("\n\n")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == named
        assert done == "data: [DONE]"


def test_a_cache_that_goes_meanwhile_is_named(
    http: httpx.Client, store: Store, tiny: Engine, peers: dict[str, Peer]
) -> None:
    for stream in (False, True):
        gone = store.put(tiny.compress("One code is 19.", policy="full"))
        for peer in peers.values():
            peer.meanwhile = partial(store.delete, gone.id)
        assert code(ask(http, gone.id, seed=FAILS, stream=stream)) == (404, "cache_not_found")
        assert gone.id in [body.get("cache_salt") for peer in peers.values() for body in peer.bodies]
    for peer in peers.values():
        peer.meanwhile = lambda: None


def test_one_document_stays_on_one_server_until_it_has_too_many(
    http: httpx.Client, cache: Manifest, peers: dict[str, Peer]
) -> None:
    before = {url: len(peer.seen) for url, peer in peers.items()}
    with ThreadPoolExecutor(2 * SLACK) as pool:
        waiting = [pool.submit(ask, http, cache.id, seed=WAITS) for _ in range(2 * SLACK)]
        end = time.monotonic() + 30
        while sum(len(peer.seen) for peer in peers.values()) < sum(before.values()) + len(waiting):
            assert time.monotonic() < end
            time.sleep(0.02)
        counts = sorted(len(peer.seen) - before[url] for url, peer in peers.items())
        for peer in peers.values():
            peer.go_on.set()
        assert all(answer.result().is_success for answer in waiting)
    assert counts[0] in (1, 2)  # the own one has SLACK + 1 before another gets the first; both then take turns
    assert sum(counts) == 2 * SLACK


@pytest.mark.slow
def test_a_caller_that_hangs_up_frees_the_server(http: httpx.Client, cache: Manifest, peers: dict[str, Peer]) -> None:
    for peer in peers.values():
        peer.go_on.clear()
    for body in ({"messages": QUESTION, "cache_id": cache.id}, {"messages": QUESTION}):
        with pytest.raises(httpx.ReadTimeout):  # not before the request has reached its server, on a busy machine too
            http.post("/v1/chat/completions", json=body | {"seed": WAITS}, timeout=2.5)
    end = time.monotonic() + 30
    while {path for peer in peers.values() for path in peer.left_by} != {"/v1/completions", "/v1/chat/completions"}:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_server_that_does_not_connect_rests() -> None:
    now = [0.0]
    urls = [f"http://s{number}:1/v1/" for number in range(4)]
    upstreams = Upstreams(urls, silence_s=1, metrics=ProxyMetrics(), clock=lambda: now[0])
    first, second, *_ = upstreams.order("a")
    assert Upstream("http://me:secret@host:1/one").name == "host:1/one"
    assert first.url.endswith(":1")
    assert {upstreams.order(f"{key}")[0] for key in range(64)} == set(upstreams.order(None))
    first.rests_until = REST_S
    assert upstreams.order("a")[0] is second
    assert upstreams.order("a")[-1] is first
    now[0] = REST_S
    first.open = SLACK
    assert upstreams.order("a")[0] is first
    first.open += 1
    assert upstreams.order("a")[0] is not first
    with pytest.raises(InvalidRequest, match="address"):
        Upstreams(["localhost:8000"], silence_s=1, metrics=ProxyMetrics())


@pytest.mark.slow
def test_with_all_servers_down_and_with_keys(home: str, cache: Manifest, tmp_path: Path) -> None:
    _, key = KeyFile(tmp_path / "keys").create("default", ["read"])
    _, others = KeyFile(tmp_path / "keys").create("others", ["read"])
    with (
        proxy(home, [dead()], "--api-key-file", str(tmp_path / "keys")) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        assert code(ask(http, cache.id)) == (401, "unauthorized")
        assert code(http.get("/health")) == (503, "no_worker")
        http.headers["authorization"] = f"Bearer {others}"
        assert code(ask(http, cache.id)) == (404, "cache_not_found")
        http.headers["authorization"] = f"Bearer {key}"
        assert code(ask(http, cache.id)) == (503, "no_worker")
        assert code(http.post("/v1/completions", json={})) == (503, "no_worker")


@pytest.mark.slow
def test_metrics_and_one_log_line_per_request(
    home: str, cache: Manifest, peers: dict[str, Peer], tmp_path: Path
) -> None:
    peer = next(iter(peers))
    gone = next(url for url in iter(dead, None) if Upstream(url).weight(cache.id) > Upstream(peer).weight(cache.id))
    file = KeyFile(tmp_path / "keys")
    (_, key), (_, admin) = file.create("default", ["read"]), file.create("ops", ["admin"])
    with (
        (tmp_path / "log").open("w") as log,
        proxy(home, [gone, peer], "--api-key-file", str(file.path), log=log) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        assert code(ask(http, cache.id)) == (401, "unauthorized")
        http.headers["authorization"] = f"Bearer {key}"
        assert ask(http, cache.id).is_success
        assert ask(http, cache.id, stream=True).is_success
        assert http.post("/v1/completions", json={"cache_id": cache.id, "prompt": "Which code?"}).is_success
        assert code(ask(http, "kvs_" + "0" * 40)) == (404, "cache_not_found")
        assert code(ask(http, cache.id, seed=FAILS)) == (424, "cache_unusable")
        assert ask(http, cache.id, seed=BREAKS_OFF, stream=True).is_success
        assert http.post("/v1/completions", json={"seed": REFUSES}).status_code == 400
        assert code(http.get("/metrics")) == (403, "forbidden")
        text = http.get("/metrics", headers={"authorization": f"Bearer {admin}"}).text
    written = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert not any(secret in written for secret in (key[22:], admin[22:], "Which code", "amber"))
    numbers = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    results = {labels[0]: value for (name, *labels), value in numbers.items() if name == "kvshelf_queries_total"}
    assert results == {
        "answered": 3, "cache_not_found": 1, "cache_unusable": 1, "unauthorized": 1, "worker_crashed": 1
    }  # fmt: skip
    assert numbers["kvshelf_cache_misses_total", "not_found"] == 1
    assert numbers["kvshelf_tokens_saved_total", cache.model] == 3 * cache.num_tokens
    assert numbers["kvshelf_http_requests_total", "POST", "/v1/chat/completions", "424"] == 1
    name, down = peer.removeprefix("http://"), gone.removeprefix("http://")
    sent = {labels[0]: value for (each, *labels), value in numbers.items()
            if each == "kvshelf_upstream_requests_total" and labels[1] == name}  # fmt: skip
    assert sent == {"200": 3, "400": 1, "500": 1, "worker_crashed": 1}
    assert (numbers["kvshelf_upstream_up", name], numbers["kvshelf_upstream_up", down]) == (1, 0)
    assert numbers["kvshelf_upstream_in_flight", name] == 0
    assert numbers["kvshelf_upstream_requests_total", "not_connected", down] >= 1
    told = [line for line in lines if line["event"] == "request"]
    assert [(line["status"], line.get("code")) for line in told] == [
        (401, "unauthorized"), (200, None), (200, None), (200, None), (404, "cache_not_found"),
        (424, "cache_unusable"), (200, "worker_crashed"), (400, None), (403, "forbidden"), (200, None),
    ]  # fmt: skip
    about = {"cache_id": cache.id, "upstream": name, "tenant": "default", "cache_read_tokens": cache.num_tokens}
    assert about.items() <= told[1].items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "host"),
        (("--upstream", "localhost"), "upstream"),
        (("--model", "./none"), "does not exist"),
    ],
)
def test_settings_are_refused_before_it_listens(options: tuple[str, ...], named: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvshelf", "vllm-proxy", "--model", str(TOKENIZER), "--upstream", dead()]
    command += ["--store", f"disk://{tmp_path}/home", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert named in done.stderr
