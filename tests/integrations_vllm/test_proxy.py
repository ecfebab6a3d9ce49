"""The proxy before a real vLLM: OpenAI's client through it, and what is left when one of the two is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.engine.engine import Engine
from tests.integrations_vllm.conftest import Serving, document, served

LONG = 1000


@dataclass(frozen=True)
class Real:
    """A vLLM, its address and log, the shelf that it reads, and kvshelf's engine."""

    vllm: subprocess.Popen[bytes]
    url: str
    log: Path
    shelf: dict[str, str]
    own: Serving

    @contextmanager
    def proxied(self) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
        """A proxy before it, and a client of the proxy."""
        command = [sys.executable, "-m", "kvshelf", "vllm-proxy", "--upstream", self.url, "--model", "kvshelf-tiny"]
        command += ["--store", self.shelf["store"], "--encryption-key-file", self.shelf["encryption_key_file"]]
        process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield process, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def real(
    tiny: Engine, model_folder: Path, shelf: dict[str, str], store: Store, tmp_path_factory: Any
) -> Iterator[Real]:
    log = tmp_path_factory.mktemp("proxy") / "log"
    with served(model_folder, shelf, log, "--max-model-len", "3072") as (process, url):
        own = Serving(None, tiny, store, Path(shelf["store"].removeprefix("disk://")))
        yield Real(process, url, log, shelf, own)


def _long(client: openai.OpenAI, cache: Manifest) -> Any:
    """A stream that goes on behind the model's end."""
    behind = {"cache_id": cache.id, "ignore_eos": True}
    return client.completions.create(
        model=cache.model, prompt="Why?", max_tokens=LONG, stream=True, temperature=0, extra_body=behind
    )


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
    ragged = real.own.put(document(81).text, policy="kvzip", compression_ratio=0.5)
    with real.proxied() as (_, client):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as refused:
                client.chat.completions.create(
                    model=ragged.model, messages=[{"role": "user", "content": "?"}], stream=stream,
                    extra_body={"cache_id": ragged.id},
                )  # fmt: skip
            assert (refused.value.status_code, refused.value.code) == (424, "cache_unusable")
            told = [line for line in real.log.read_text(errors="replace").splitlines() if "policy_unsupported" in line]
            assert str(refused.value.request_id) in told[-1]


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
