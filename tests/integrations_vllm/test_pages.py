"""Whether a vLLM that no test has run reads pages as the connector writes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvshelf.errors import MissingExtra
from kvshelf.integrations.vllm import shelf_request
from kvshelf.integrations.vllm.pages import require_read_back
from tests.integrations_vllm.conftest import Serving, document, served

UNTESTED = "tests.integrations_vllm.untested"

WRONG: dict[str, Callable[[Any, Any, Any, Any], tuple[Any, ...]]] = {
    "keys and values change places": lambda k, v, cache, slots: (v, k, cache, slots),
    "slots begin elsewhere": lambda k, v, cache, slots: (k, v, cache, slots + 1),
    "pages of half the size": lambda k, v, cache, slots: (k, v, cache, slots // 2),
    "another order of heads": lambda k, v, cache, slots: (k.flip(1).contiguous(), v, cache, slots),
    "the page after": lambda k, v, cache, slots: (k, v, cache[1:], slots),
    "entries in reverse": lambda k, v, cache, slots: (k, v, cache, slots // 128 * 128 + 127 - slots % 128),
    "heads and entries change places": lambda k, v, cache, slots: (
        k, v, cache.reshape(cache.shape[0], cache.shape[2], cache.shape[1], -1).transpose(1, 2), slots
    ),
}  # fmt: skip


@pytest.fixture
def layers(serving: Serving) -> dict[str, Any]:
    return dict(_config(serving).compilation_config.static_forward_context)


def _config(serving: Serving) -> Any:
    return serving.llm.llm_engine.vllm_config


def _pages(serving: Serving) -> int:
    return int(_config(serving).cache_config.num_gpu_blocks)


def test_pages_are_read_as_they_are_written(serving: Serving, layers: dict[str, Any]) -> None:
    began = time.perf_counter()
    require_read_back(_config(serving), layers, _pages(serving), vllm.__version__)
    assert time.perf_counter() - began < 5
    assert len(layers) == len(serving.engine.passes.layer_shapes)


@pytest.mark.parametrize("how", WRONG)
def test_pages_of_another_layout_are_noticed(
    serving: Serving, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In the last layer alone."""
    name, layer = list(layers.items())[-1]
    update = layer.impl.do_kv_cache_update
    monkeypatch.setattr(
        layer.impl, "do_kv_cache_update", lambda layer, *what: update(layer, *WRONG[how](*what)), raising=False
    )
    with pytest.raises(MissingExtra, match=f"pages of vLLM 9.9: {name}"):
        require_read_back(_config(serving), layers, _pages(serving), "9.9")


def test_a_function_that_vllm_lacks_is_named(
    serving: Serving, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = type(layers[next(iter(layers))].impl).__mro__
    kind = next(each for each in kinds if "do_kv_cache_update" in vars(each))
    monkeypatch.delattr(kind, "do_kv_cache_update")
    with pytest.raises(MissingExtra, match="do_kv_cache_update"):
        require_read_back(_config(serving), layers, _pages(serving), "9.9")


def test_an_unknown_version_serves_with_one_warning(serving: Serving, tmp_path: Path, shelf: dict[str, str]) -> None:
    cache, asked = serving.put(document(1).text, policy="full"), document(1).questions[0].text
    folder, log = _config(serving).model_config.model, tmp_path / "log"
    with served(Path(folder), shelf, log, "--max-model-len", "4096", connector=("UntestedConnector", UNTESTED)) as (
        _,
        url,
    ):
        import httpx

        request = shelf_request(cache, asked, serving.llm.get_tokenizer())
        body = request.body(folder, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
        (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"]
    assert choice["token_ids"] == serving.own(cache, asked)
    assert log.read_text().count("untested_version") == 1


def test_an_unknown_version_with_other_pages_does_not_serve(
    model_folder: Path, tmp_path: Path, shelf: dict[str, str]
) -> None:
    with (
        pytest.raises(AssertionError, match="did not start"),
        served(model_folder, shelf, log := tmp_path / "log", connector=("ShiftedConnector", UNTESTED)),
    ):
        pass
    assert f"kvshelf cannot fill the pages of vLLM {vllm.__version__}" in log.read_text()
