"""Requests to vLLM, and settings of its connector: what needs no vLLM."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from kvshelf import Engine, open_store
from kvshelf.errors import Forbidden, InvalidRequest, ModelMismatch, PolicyUnsupported, Unauthorized
from kvshelf.integrations.vllm import shelf_request
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.ragged.plugin import is_tested
from kvshelf.integrations.vllm.request import CacheReference
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.tenants import HiddenKeys, Tenants
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import REREAD_S
from tests.conftest import TOKENIZER, save_random_model

CHAT = [{"role": "user", "content": "Why?"}]


def test_a_request_has_a_stand_in_for_each_entry_and_the_engines_question(tiny: Engine, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    with open_store(f"disk://{tmp_path}/home") as store:
        for layout in ("chat", "plain"):
            cache = tiny.compress("One code is 17. " * 40, policy="keydiff", compression_ratio=0.5, layout=layout)
            manifest = store.put(cache)
            for prompt in ("Which code?", [5, 6]) if layout == "plain" else ("Which code?", CHAT):
                request = shelf_request(manifest, prompt, tokenizer)
                assert request.prompt_token_ids == [0] * cache.kept_tokens + tiny.encode_query(cache, prompt)
    salted = {
        "cache_salt": manifest.id,
        "kv_transfer_params": {"kvshelf": {"cache_id": manifest.id, "tenant": "default"}},
    }
    assert request.body("m", max_tokens=3) == salted | {
        "model": "m",
        "prompt": request.prompt_token_ids,
        "max_tokens": 3,
    }
    prompt, extra = request.offline
    assert prompt | extra == salted | {"prompt_token_ids": request.prompt_token_ids}
    keyed = shelf_request(manifest, "Which code?", tokenizer, api_key="kvsk_1_2")
    assert keyed.kv_transfer_params == {"kvshelf": {"cache_id": manifest.id, "api_key": "kvsk_1_2"}}
    assert "kvsk" not in repr(keyed)


def test_another_tokenizer_or_template_and_an_empty_question_are_refused(tiny: Engine, tmp_path: Path) -> None:
    with open_store(f"disk://{tmp_path}/home") as store:
        manifest = store.put(tiny.compress("One code is 17.", policy="full"))
    other = AutoTokenizer.from_pretrained(save_random_model(tmp_path / "other"))
    with pytest.raises(ModelMismatch, match="another tokenizer"):
        shelf_request(manifest, "Why?", other)
    changed = AutoTokenizer.from_pretrained(TOKENIZER)
    changed.chat_template = changed.chat_template + " "
    with pytest.raises(ModelMismatch, match="another template"):
        shelf_request(manifest, "Why?", changed)
    with pytest.raises(InvalidRequest, match="empty"):
        shelf_request(manifest, "", AutoTokenizer.from_pretrained(TOKENIZER))


def test_settings_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSHELF_STORE", raising=False)
    for given, said in (
        ({}, "needs store"),
        ({"stor": "disk:///x"}, "stor is unknown .did you mean 'store'"),
        ({"store": "disk:///x", "tenant": 3}, "tenant must be a text"),
        ({"store": "disk:///x", "trust_tenant": "yes"}, "trust_tenant must be true or false"),
        ({"store": "disk:///x", "tenant": "a", "api_key_file": "/k"}, "one of tenant and api_key_file"),
        ({"service": "http://x", "store": "disk:///x"}, "store does not go together with service"),
        ({"service": "http://x", "encryption_key_file": "/k"}, "encryption_key_file does not go together"),
        ({"service": "http://x", "api_key_file": "/k"}, "api_key_file does not go together"),
        ({"service": "http://x", "trust_tenant": True}, "trust_tenant does not go together"),
        ({"service": "disk:///x"}, "service must be an address"),
        ({"service": "http://:kvsk_secret@x"}, "service must be an address"),
        ({"service": "http://x?key=kvsk_secret"}, "service must be an address"),
    ):
        with pytest.raises(InvalidRequest, match=said) as refused:
            ShelfSettings.parse(given)
        assert "secret" not in str(refused.value)
    monkeypatch.setenv("KVSHELF_STORE", "disk:///y")
    assert ShelfSettings.parse({"tenant": "you"}) == ShelfSettings("disk:///y", tenant="you")
    assert ShelfSettings.parse({"service": "http://x"}).store is None, "the environment is not asked"


def test_the_tenant_is_that_of_the_settings_the_key_or_the_request(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    record, key = file.create("acme", ["read"])
    _, writer = file.create("acme", ["write"])
    keyed = Tenants(ShelfSettings("disk:///x", api_key_file=str(file.path)))
    assert keyed.of(CacheReference("c", api_key=key)) == "acme"
    assert keyed.of(CacheReference("c", tenant="others", api_key=key)) == "acme"
    for given, error in ((None, Unauthorized), (key[:-1] + "x", Unauthorized), (writer, Forbidden)):
        with pytest.raises(error) as refused:
            keyed.of(CacheReference("c", tenant="acme", api_key=given))
        assert key[22:] not in str(refused.value)
    file.revoke(record.id)
    time.sleep(2 * REREAD_S)
    with pytest.raises(Unauthorized, match="revoked"):
        keyed.of(CacheReference("c", api_key=key))
    assert Tenants(ShelfSettings("disk:///x", trust_tenant=True)).of(CacheReference("c", tenant="acme")) == "acme"
    for nobody in (None, ""):
        with pytest.raises(InvalidRequest, match="name the tenant"):
            Tenants(ShelfSettings("disk:///x", trust_tenant=True)).of(CacheReference("c", tenant=nobody))
    assert Tenants(ShelfSettings("disk:///x")).of(CacheReference("c")) == "default"
    with pytest.raises(Forbidden, match="another tenant"):
        Tenants(ShelfSettings("disk:///x", tenant="acme")).of(CacheReference("c", tenant="default"))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Tenants(ShelfSettings("disk:///x", api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("given", [None, "kvs_1", {}, {"cache_id": 1}, {"cache_id": "c", "api_key": ["kvsk_secret"]},
                                   {"cache_id": "c", "kvsk_secret": "x"}])  # fmt: skip
def test_what_names_no_cache_is_refused_without_what_it_holds(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="object of texts") as refused:
        CacheReference.parse(given)
    assert "secret" not in str(refused.value)


def test_no_log_line_of_vllm_has_a_key() -> None:
    line = logging.LogRecord("vllm", logging.INFO, "", 1, "params: %s", ({"api_key": "kvsk_ab_cd", "n": 1},), None)
    assert HiddenKeys().filter(line)
    assert line.getMessage() == "params: {'api_key': 'kvsk_...', 'n': 1}"


def test_versions_are_told_apart_by_their_first_two_numbers() -> None:
    assert [is_tested(version) for version in ("0.31.0", "0.32.1", "0.33.0", "0.3.2", "0.320.1")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_model_whose_pages_would_be_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "windows"
    config = MistralConfig(
        vocab_size=3409, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    with pytest.raises(PolicyUnsupported, match=r"layer 0 of .*window"):
        ReadingModel.of(str(folder), "float32")


@pytest.mark.slow
def test_without_vllm_the_connector_says_what_to_install() -> None:
    code = """
import sys
sys.modules["vllm"] = None
from kvshelf.integrations import vllm
vllm.shelf_request
vllm.ShelfConnector
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "MissingExtra" in done.stderr
    assert "[serve,vllm]" in done.stderr
