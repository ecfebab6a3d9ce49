"""The proxy before a real vLLM, on a sealed shelf in Redis behind memory: OpenAI's client through it, callers of two
tenants, and what is left when the store, the proxy or vLLM is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from kvshelf.engine.engine import Engine
from kvshelf.integrations.vllm import shelf_request
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.url import open_store
from tests.conftest import TOKENIZER
from tests.integrations_vllm import losing
from tests.integrations_vllm.conftest import MODULE, Serving, document, served
from tests.store.redis.servers import ValkeyServer, wait_until

LONG = 1900
"""Tokens of an answer that is still going on when something is killed: seconds of this small model."""


@dataclass(frozen=True)
class Real:
    """A vLLM, its address and log, the server of the shelf that it reads, and kvshelf's engine. victim: a file, see
    `losing.KILLS`."""

    vllm: subprocess.Popen[bytes]
    url: str
    log: Path
    shelf: dict[str, Any]
    valkey: ValkeyServer
    victim: Path
    own: Serving

    @contextmanager
    def proxied(self, *options: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
        """A proxy before it, and a client of the proxy."""
        command = [sys.executable, "-m", "kvshelf", "vllm-proxy", "--upstream", self.url, "--model", "kvshelf-tiny"]
        command += ["--store", self.shelf["store"], "--encryption-key-file", self.shelf["encryption_key_file"]]
        process = subprocess.Popen([*command, "--port", "0", *options], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield process, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def real(tiny: Engine, model_folder: Path, shelf: dict[str, str], tmp_path_factory: Any) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("proxy")
    log, victim, key = folder / "log", folder / "victim", shelf["encryption_key_file"]
    with ValkeyServer(folder, appendonly="yes", appendfsync="always") as valkey, pytest.MonkeyPatch.context() as patch:
        patch.setenv(losing.KILLS, str(victim))
        url = f"ram:64MiB+{valkey.url}?timeout_s=5"
        given = {"store": url, "encryption_key_file": key, "trust_tenant": True}
        with (
            served(model_folder, given, log, "--max-model-len", "3072", connector=("LosingConnector", MODULE)) as (
                process,
                address,
            ),
            open_store(url, rules=Rules(keyring=Keyring.read(key))) as store,
        ):
            own = Serving(None, tiny, store, folder)
            yield Real(process, address, log, given, valkey, victim, own)


def _refusals(real: Real) -> list[str]:
    """The lines of vLLM's log that say why."""
    return [line for line in real.log.read_text(errors="replace").splitlines() if "refused" in line and "code=" in line]


def _long(client: openai.OpenAI, cache: Manifest) -> Any:
    """A stream that goes on behind the model's end."""
    behind = {"cache_id": cache.id, "ignore_eos": True}
    return client.completions.create(
        model=cache.model, prompt="Why?", max_tokens=LONG, stream=True, temperature=0, extra_body=behind
    )


def _answer(client: openai.OpenAI, cache: Manifest) -> list[int]:
    """12 tokens."""
    said: Any = client.completions.create(
        model=cache.model, prompt="Why?", max_tokens=12, temperature=0,
        extra_body={"cache_id": cache.id, "ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    return list(said.choices[0].token_ids)


def _answer_soon(client: openai.OpenAI, cache: Manifest) -> list[int]:
    """As `_answer`, from a store that has just come back: for a second, who saw it down does not ask it again."""
    said: list[int] = []

    def answers() -> bool:
        with suppress(openai.APIStatusError):
            said.extend(_answer(client, cache))
        return bool(said)

    wait_until(answers, "the store answers again")
    return said


def _broken_off(stream: Any, act: Callable[[], object]) -> None:
    """Act after the first event, and read on."""
    next(stream)
    act()
    for _ in stream:
        pass


def test_answers_through_the_proxy_are_the_engines(real: Real) -> None:
    asked = document(80)
    full = real.own.put(asked.text, policy="full")
    half = real.own.put(asked.text, policy="keydiff", compression_ratio=0.5)
    with real.proxied() as (_, client):
        for question in asked.questions:
            turns: Any = [{"role": "user", "content": question.text}]
            right = real.own.engine.answer(real.own.store.get(full.id), turns, max_new_tokens=40)
            named: Any = {"model": full.model, "messages": turns, "max_tokens": 40, "extra_body": {"cache_id": full.id}}
            said = client.chat.completions.create(**named)
            assert said.choices[0].message.content == right.text
            stream = client.chat.completions.create(**named, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == right.text
            fields = {"cache_id": half.id, "ignore_eos": True, "return_token_ids": True}
            completed: Any = client.completions.create(
                model=half.model, prompt=question.text, max_tokens=12, temperature=0, extra_body=fields
            )
            assert completed.choices[0].token_ids == real.own.own(half, question.text)
        twice: Any = client.completions.create(
            model=half.model, prompt=question.text, max_tokens=12, n=2, extra_body=fields | {"top_k": 1}
        )
        assert [choice.token_ids for choice in twice.choices] == [real.own.own(half, question.text)] * 2
        (model,) = client.models.list().data
        plain = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "?"}], max_tokens=3
        )
        assert plain.usage is not None
        assert plain.usage.completion_tokens <= 3


def test_what_vllm_refuses_has_a_code_and_the_id_that_its_log_has(real: Real) -> None:
    merged = real.own.put(document(81).text, policy="ems", compression_ratio=0.5)
    with real.proxied() as (_, client):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as refused:
                client.chat.completions.create(
                    model=merged.model, messages=[{"role": "user", "content": "?"}], stream=stream,
                    extra_body={"cache_id": merged.id},
                )  # fmt: skip
            assert (refused.value.status_code, refused.value.code) == (424, "cache_unusable")
            told = _refusals(real)[-1]
            assert "policy_unsupported" in told
            assert str(refused.value.request_id) in told


def test_callers_of_two_tenants_ask_their_own_caches(real: Real, tmp_path: Path) -> None:
    """vLLM believes the proxy, which knows the tenant by the caller's key; the key goes no further."""
    file, asked = KeyFile(tmp_path / "keys"), document(84)
    keys = {tenant: file.create(tenant, ["read"])[1] for tenant in ("acme", "others")}
    caches = {tenant: real.own.put(asked.text, policy="full", tenant=tenant) for tenant in keys}
    with real.proxied("--api-key-file", str(file.path)) as (_, client):
        for tenant, key in keys.items():
            for owner, cache in caches.items():
                caller = client.with_options(api_key=key)
                if owner == tenant:
                    assert _answer(caller, cache) == real.own.own(cache, "Why?")
                else:
                    with pytest.raises(openai.NotFoundError) as refused:
                        _answer(caller, cache)
                    assert refused.value.code == "cache_not_found"
    assert [key for key in keys.values() if key[22:] in real.log.read_text(errors="replace")] == []


def test_a_store_that_is_killed_between_scheduling_and_load_is_named(real: Real) -> None:
    cache = real.own.put(document(85).text, policy="full")
    right = real.own.own(cache, "Why?")
    with real.proxied() as (_, client):
        real.victim.write_text(str(real.valkey.client().info("server")["process_id"]))
        with pytest.raises(openai.APIStatusError) as refused:
            _answer(client, cache)
        assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
        assert not real.victim.exists()
        told = _refusals(real)[-1]
        assert "code=store_unavailable" in told
        assert str(refused.value.request_id) in told
        real.valkey.kill()
        real.valkey.start()
        assert _answer_soon(client, cache) == right


def test_a_store_that_hangs_is_named_and_other_requests_are_answered(real: Real) -> None:
    """Asked past the proxy, which would wait for the store itself."""
    cache = real.own.put(document(88).text, policy="full")
    body = shelf_request(cache, "Why?", AutoTokenizer.from_pretrained(TOKENIZER)).body(None, max_tokens=2)
    real.valkey.pause()
    with httpx.Client(base_url=real.url, timeout=60) as http:
        assert http.post("/v1/completions", json=body).status_code == 500
        assert "code=store_unavailable" in _refusals(real)[-1]
        assert http.post("/v1/completions", json={"prompt": "Why?", "max_tokens": 2}).is_success
        real.valkey.resume()
        wait_until(lambda: http.post("/v1/completions", json=body).is_success, "the store answers again")


def test_a_killed_store_ends_no_answer_that_has_begun(real: Real) -> None:
    begun, other = (real.own.put(document(number).text, policy="full") for number in (86, 87))
    right = real.own.own(other, "Why?")
    with real.proxied() as (process, client):
        _broken_off(_long(client, begun), real.valkey.kill)
        with pytest.raises(openai.APIStatusError) as down:
            _answer(client, other)
        assert (down.value.status_code, down.value.code) == (503, "store_unavailable")
        assert process.poll() is None
        real.valkey.start()
        assert _answer_soon(client, other) == right


def test_a_killed_proxy_leaves_vllm_serving(real: Real) -> None:
    cache = real.own.put(document(82).text, policy="full")
    with real.proxied() as (process, client), pytest.raises((openai.APIConnectionError, httpx.TransportError)):
        _broken_off(_long(client, cache), process.kill)
    assert httpx.get(f"{real.url}/health").is_success
    with real.proxied() as (_, client):
        assert next(iter(_long(client, cache))).choices


def test_a_killed_vllm_is_a_typed_error_and_the_proxy_goes_on(real: Real) -> None:
    """The last test of the module: it ends its vLLM."""
    cache = real.own.put(document(83).text, policy="full")
    with real.proxied() as (process, client):
        with pytest.raises(openai.APIError) as broken:
            _broken_off(_long(client, cache), partial(os.killpg, real.vllm.pid, signal.SIGKILL))
        assert broken.value.code == "worker_crashed"
        real.vllm.wait()
        with pytest.raises(openai.APIStatusError) as down:
            _long(client, cache)
        assert (down.value.status_code, down.value.code) == (503, "no_worker")
        assert process.poll() is None
