"""vLLM as a server: the scheduler and two workers that share the heads are processes of their own, and there are so few
pages that two requests push each other out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from kvshelf.engine.engine import Engine
from kvshelf.integrations.vllm import shelf_request
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import REREAD_S
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from tests.integrations_vllm.conftest import Serving, document, served

PAGES = 19
"""One is vLLM's own. Two of the documents below take 9 each with their questions, and 10 with their answers."""

LONG = 150

REFUSED = "code="
"""What only the line of a refused request has."""


@dataclass(frozen=True)
class Server:
    http: httpx.Client
    own: Serving
    log: Path
    model: str
    keys: KeyFile
    key: str
    """Of the tenant `default`."""

    def body(self, cache: Manifest, question: str, *, api_key: str | None = None, **fields: Any) -> dict[str, Any]:
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        request = shelf_request(cache, question, tokenizer, api_key=api_key or self.key)
        return request.body(self.model, temperature=0, ignore_eos=True, **fields)

    def refusal(self, body: dict[str, Any]) -> str:
        """The line of the log that says why a request is refused."""
        before = self.log.read_text(errors="replace").count(REFUSED)
        answer = self.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if REFUSED in line]
        assert len(lines) > before, "of the scheduler, or of each worker"
        return lines[-1]

    def preemptions(self) -> float:
        return float(re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", self.http.get("/metrics").text, re.M)[0])


@pytest.fixture(scope="module")
def server(
    tiny: Engine, model_folder: Path, shelf: dict[str, str], store: Store, tmp_path_factory: Any
) -> Iterator[Server]:
    options = ["--max-model-len", "2048", "--tensor-parallel-size", "2", "--num-gpu-blocks-override", str(PAGES)]
    folder = tmp_path_factory.mktemp("server")
    keys = KeyFile(folder / "keys")
    _, key = keys.create("default", ["read"])
    options.append("--enable-log-requests")
    with (
        served(model_folder, shelf | {"api_key_file": str(keys.path)}, folder / "log", *options) as (_, url),
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        own = Serving(None, tiny, store, Path(shelf["store"].removeprefix("disk://")))
        yield Server(http, own, folder / "log", str(model_folder), keys, key)


def test_two_workers_load_the_heads_of_each(server: Server) -> None:
    asked = document(60)
    for how in ({"policy": "full"}, {"policy": "snapkv", "compression_ratio": 0.5}):
        cache = server.own.put(asked.text, **how)
        for question in asked.questions:
            body = server.body(cache, question.text, max_tokens=12, return_token_ids=True)
            (choice,) = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            assert choice["token_ids"] == server.own.own(cache, question.text)


def test_the_caller_of_a_refused_request_gets_a_500_and_the_log_says_why(server: Server) -> None:
    asked = document(61)
    ragged = server.own.put(asked.text, policy="kvzip", compression_ratio=0.5)
    good = server.own.put(asked.text, policy="keydiff", compression_ratio=0.5)
    assert "code=policy_unsupported" in server.refusal(server.body(ragged, "Why?"))
    assert "code=cache_not_found" in server.refusal(server.body(_unknown(good), "Why?"))
    assert server.http.post("/v1/completions", json=server.body(good, "Why?", max_tokens=1)).is_success


def _unknown(cache: Manifest) -> Manifest:
    return cache.model_copy(update={"id": "kvs_" + "1" * 40})


def test_a_key_opens_the_caches_of_its_tenant_and_no_others(server: Server) -> None:
    """Also where vLLM logs every request, no line has a key, and another tenant's id is refused like an unknown one."""
    asked, (_, key), (_, writes) = (
        document(64),
        server.keys.create("acme", ["read"]),
        server.keys.create("acme", ["write"]),
    )
    revoked, old = server.keys.create("acme", ["read"])
    server.keys.revoke(revoked.id)
    mine, theirs = (server.own.put(asked.text, policy="full", tenant=tenant) for tenant in ("acme", "default"))
    time.sleep(2 * REREAD_S)
    for cache, opens in ((mine, key), (theirs, server.key)):
        body = server.body(cache, "Why?", api_key=opens, max_tokens=12, return_token_ids=True)
        (choice,) = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        assert choice["token_ids"] == server.own.own(cache, "Why?")
    words = [
        re.sub(r"kvs_\w+|request_id=\S+|^.*?refused", "", server.refusal(server.body(cache, "Why?", api_key=opens)))
        for cache, opens in ((mine, server.key), (theirs, key), (_unknown(mine), key))
    ]
    assert "code=cache_not_found" in words[0]
    assert len(set(words)) == 1
    for wrong, code in ((old, "unauthorized"), (key[:-4] + "0000", "unauthorized"), (writes, "forbidden")):
        assert f"code={code}" in server.refusal(server.body(mine, "Why?", api_key=wrong))
    keyless = server.body(mine, "Why?")
    del keyless["kv_transfer_params"]["kvshelf"]["api_key"]
    assert "code=unauthorized" in server.refusal(keyless)
    said = server.log.read_text(errors="replace")
    assert "api_key': 'kvsk_...'" in said, "vLLM logs requests"
    assert [secret for secret in (key, server.key, writes, old) if secret[22:] in said] == []


@pytest.mark.parametrize(
    "given",
    [
        {"kv_transfer_params": {"kvshelf": "kvs_1"}},
        {"kv_transfer_params": {"kvshelf": None}},
        {"kv_transfer_params": {"kvshelf": {"cache_id": "kvs_1", "api_key": ["kvsk_1"]}}},
        {"vllm_xargs": {"kv_transfer_params": "kvshelf"}},
    ],
    ids=str,
)
def test_parameters_of_another_kind_fail_their_request_alone(server: Server, given: dict[str, Any]) -> None:
    plain = {"model": server.model, "prompt": "Why?", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=plain | given).status_code >= 400
    assert server.http.post("/v1/completions", json=plain).is_success


def _streamed(server: Server, body: dict[str, Any], begun: Barrier) -> tuple[list[int], str]:
    """The tokens of an answer, and how it ended. `begun` waits for the first token of each."""
    ids: list[int] = []
    with server.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as answer:
        for line in answer.iter_lines():
            data = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if "error" in data:
                return ids, "error"
            for choice in data.get("choices", ()):
                if not ids:
                    begun.wait(60)
                ids += choice["token_ids"]
                if choice["finish_reason"]:
                    return ids, choice["finish_reason"]
    raise AssertionError("the answer did not end")


def _both(server: Server, *, delete: bool) -> tuple[list[str], bool]:
    """How two answers end that push each other out, and whether their caches were gone by then, if they were to be.
    Every token is checked."""
    question = "What is the access code of the amber falcon?"
    caches = [server.own.put(document(number).text, policy="full") for number in (62, 78)]
    own = [server.own.own(cache, question, LONG) for cache in caches]
    before, in_time = server.preemptions(), True

    def remove() -> None:
        nonlocal in_time
        for cache in caches if delete else ():
            server.own.store.delete(cache.id)
        in_time = server.preemptions() == before

    begun = Barrier(2, action=remove)
    bodies = [server.body(cache, question, max_tokens=LONG) for cache in caches]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(_streamed, [server] * 2, bodies, [begun] * 2))
    assert server.preemptions() > before
    for (ids, end), right in zip(ends, own, strict=True):
        assert ids == (right if end == "length" else right[: len(ids)])
    return sorted(end for _, end in ends), in_time


def test_a_preempted_request_loads_again(server: Server) -> None:
    ends, _ = _both(server, delete=False)
    assert ends == ["length", "length"]


def test_a_preempted_request_fails_if_its_cache_has_gone(server: Server) -> None:
    """Never does it compute on stand-ins. The request that was not preempted is answered."""
    for _ in range(5):  # on a busy machine the caches may be deleted too late
        ends, in_time = _both(server, delete=True)
        if in_time:
            break
    assert in_time
    assert ends == ["error", "length"]
