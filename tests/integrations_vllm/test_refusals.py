"""Requests that cannot be answered from the shelf fail by name, beside others that are answered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvshelf.engine.engine import Engine
from kvshelf.integrations.vllm import shelf_request
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.url import open_store
from tests.conftest import save_random_model
from tests.integrations_vllm import losing
from tests.integrations_vllm.conftest import Serving, document

QUESTION = "What is the code of Oslo?"


@pytest.fixture
def good(serving: Serving) -> Manifest:
    return serving.put(document(50).text, policy="keydiff", compression_ratio=0.5)


@pytest.fixture
def refused(serving: Serving, good: Manifest) -> Iterator[Any]:
    """A check that a request fails with a code, and that one beside it and one after it are answered."""
    own = serving.own(good, QUESTION)

    def check(request: Any, code: str, **sampling: Any) -> str:
        with structlog.testing.capture_logs() as logs:
            bad, beside = serving.ask(request, serving.request(good, QUESTION), **sampling)
        assert bad.outputs[0].finish_reason == "error"
        assert bad.outputs[0].text == ""
        said = [entry for entry in logs if entry["event"] == "refused" and bad.request_id in entry["request_id"]]
        assert [entry["code"] for entry in said] == [code]
        (after,) = serving.ask(serving.request(good, QUESTION))
        for output in (after,) if sampling else (beside, after):
            assert list(output.outputs[0].token_ids) == own
        return str(said[0]["error"])

    yield check
    assert serving.llm.llm_engine.get_num_unfinished_requests() == 0


def test_an_unknown_cache(serving: Serving, good: Manifest, refused: Any) -> None:
    refused(replace(serving.request(good, QUESTION), cache_id="kvs_" + "0" * 40), "cache_not_found")


def test_a_text_that_is_no_id(serving: Serving, good: Manifest, refused: Any) -> None:
    refused(replace(serving.request(good, QUESTION), cache_id="kvs_nonsense"), "cache_not_found")


def test_an_expired_cache_also_if_vllm_still_has_its_pages(serving: Serving, refused: Any) -> None:
    cache = serving.put(document(51).text, policy="snapkv", budget_tokens=256, ttl_s=5)
    request = serving.request(cache, QUESTION)
    (output,) = serving.ask(request)
    assert output.outputs[0].finish_reason == "length"
    time.sleep(max(0, (cache.expires_at or 0) - time.time()) + 0.1)
    refused(request, "cache_expired")


@pytest.mark.parametrize("policy", ["keydiff", "kvzip"])
def test_a_cache_that_is_deleted_after_it_was_scheduled(serving: Serving, policy: str, refused: Any) -> None:
    cache = serving.put(document(52).text, policy=policy, compression_ratio=0.5)
    losing.before_load.append(lambda: serving.store.delete(cache.id))
    refused(serving.request(cache, QUESTION), "cache_not_found")


def test_a_cache_that_expires_after_it_was_scheduled(serving: Serving, refused: Any) -> None:
    cache = serving.put(document(59).text, policy="full", ttl_s=8)
    losing.before_load.append(lambda: time.sleep(max(0, (cache.expires_at or 0) - time.time()) + 0.1))
    refused(serving.request(cache, QUESTION), "cache_expired")


def test_another_tenant_than_the_only_one(serving: Serving, good: Manifest, refused: Any) -> None:
    refused(replace(serving.request(good, QUESTION), tenant="you"), "forbidden")


def test_a_key_where_none_is_asked_for_is_in_no_log(serving: Serving, good: Manifest, refused: Any) -> None:
    said = refused(
        replace(serving.request(good, QUESTION), api_key="kvsk_secret", cache_id="kvs_none"), "cache_not_found"
    )
    assert "secret" not in said


@pytest.mark.parametrize("policy", ["keydiff", "kvzip"])
def test_a_damaged_layer_behind_sound_ones(serving: Serving, policy: str, refused: Any) -> None:
    cache = serving.put(document(53).text, policy=policy, compression_ratio=0.5)
    blob = serving.blob(cache)
    data = bytearray(blob.read_bytes())
    data[int(0.9 * len(data))] ^= 16
    blob.write_bytes(data)
    refused(serving.request(cache, QUESTION), "cache_corrupt")


def test_a_cache_sealed_with_another_key(serving: Serving, shelf: dict[str, str], refused: Any) -> None:
    with open_store(shelf["store"], rules=Rules(keyring=Keyring([os.urandom(32)]))) as other:
        cache = other.put(serving.engine.compress(document(54).text, policy="full"))
    assert "key" in refused(serving.request(cache, QUESTION), "store_unavailable")


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"seed": 5}], ids=["dtype", "weights"])
def test_a_cache_of_another_model(serving: Serving, model_folder: Path, tmp_path: Path, how: Any, refused: Any) -> None:
    folder = save_random_model(tmp_path / "other", seed=how["seed"]) if "seed" in how else model_folder
    other = Engine.load(str(folder), device="cpu", dtype=how.get("dtype", "float32"))
    cache = serving.store.put(other.compress(document(55).text, policy="full"))
    request = replace(serving.request(serving.put(document(55).text, policy="full"), QUESTION), cache_id=cache.id)
    assert "weights differs" in refused(replace(request, entries=cache.kept_tokens), "model_mismatch")


def test_a_cache_with_merged_tokens(serving: Serving, refused: Any) -> None:
    cache = serving.put(document(56).text, policy="ems", compression_ratio=0.75)
    refused(serving.request(cache, QUESTION), "policy_unsupported")


def test_a_ragged_cache_without_its_places(serving: Serving, refused: Any) -> None:
    """Pages of another size, or stand-ins as for a cache with one length, of which vLLM would share too many pages."""
    cache = serving.put(document(56).text, policy="kvzip", compression_ratio=0.75)
    small = shelf_request(cache, QUESTION, serving.llm.get_tokenizer(), page=32)
    assert "page=128" in refused(small, "invalid_request")
    refused(replace(small, entries=cache.kept_tokens, ragged=False), "invalid_request")
    prompt, extra = serving.request(cache, QUESTION).offline
    named = extra["kv_transfer_params"]["kvshelf"]
    for wrong in ("many", "9" * 5000, "0"):
        refused((prompt, {"kv_transfer_params": {"kvshelf": named | {"ragged": wrong}}}), "invalid_request")


def test_a_request_without_the_salt_or_with_another(serving: Serving, good: Manifest, refused: Any) -> None:
    prompt, extra = serving.request(good, QUESTION).offline
    other = serving.put(document(57).text, policy="full")
    assert "cache_salt" in refused(({"prompt_token_ids": prompt["prompt_token_ids"]}, extra), "invalid_request")
    assert other.id in refused((prompt | {"cache_salt": other.id}, extra), "invalid_request")


def test_the_salt_without_the_cache(serving: Serving, good: Manifest, refused: Any) -> None:
    """Otherwise whoever knows an id would read the pages of a cache that has expired, or compute on stand-ins."""
    prompt, _ = serving.request(good, QUESTION).offline
    refused((prompt, {}), "invalid_request")


@pytest.mark.parametrize("change", ["a text", "one stand-in fewer", "no question", "an unknown field"])
def test_a_prompt_that_is_not_of_shelf_request(serving: Serving, good: Manifest, change: str, refused: Any) -> None:
    prompt, extra = serving.request(good, QUESTION).offline
    ids = prompt["prompt_token_ids"]
    given = {
        "a text": serving.engine.encode_document(document(50).text).token_ids + ids[good.kept_tokens :],
        "one stand-in fewer": ids[1:],
        "no question": ids[: good.kept_tokens],
    }
    if change == "an unknown field":
        extra = {"kv_transfer_params": {"kvshelf": {"cache_id": good.id, "user": "you"}}}
    refused((prompt | {"prompt_token_ids": given.get(change, ids)}, extra), "invalid_request")


def test_logprobs_of_the_prompt(serving: Serving, refused: Any) -> None:
    """vLLM does not look for pages then, and would compute the stand-ins."""
    other = serving.put(document(58).text, policy="full")
    refused(serving.request(other, QUESTION), "invalid_request", prompt_logprobs=1)
