"""What of ragged caches needs no running vLLM: pages that requests share, refusals, and the plug-in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import vllm
from vllm import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.request import Request

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.integrations.vllm.loading import ShelfWorker
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.integrations.vllm.ragged.pages import stand_ins
from kvshelf.integrations.vllm.ragged.plugin import is_registered, register
from kvshelf.integrations.vllm.scheduling import ShelfScheduler
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.step import ConnectorStep, Load
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from tests.integrations_vllm.conftest import document

PAGE = 128
CPU = AttentionBackendEnum.CPU_ATTN


@pytest.fixture(scope="module")
def cache(tiny: Engine) -> CompressedCache:
    return tiny.compress(document(90).text, policy="kvzip", compression_ratio=0.5)


@pytest.fixture(scope="module")
def made_again(tiny: Engine, cache: CompressedCache) -> CompressedCache:
    """The same cache but for the entries of its heads."""
    other = tiny.compress(document(90).text, policy="kvcues", compression_ratio=0.5)
    return replace(cache, layers=other.layers)


@pytest.fixture
def scheduler(shelf: dict[str, str]) -> Iterator[ShelfScheduler]:
    made = ShelfScheduler(ShelfSettings.parse(shelf), page=PAGE, rows=True)
    yield made
    made.close()


def request(name: str, manifest: Manifest) -> Any:
    places = stand_ins(manifest.kept_tokens, PAGE)
    extra = {"kv_transfer_params": {"kvshelf": {"cache_id": manifest.id, "ragged": str(places)}}}
    made = Request(name, [0] * places + [5] * 40, SamplingParams(extra_args=extra), None, cache_salt=manifest.id)
    made.block_hashes = [bytes([number]) * 32 for number in range((places + 40) // PAGE)]
    return made


def arrived(scheduler: ShelfScheduler, name: str, manifest: Manifest) -> Any:
    made = request(name, manifest)
    scheduler.arrived(made)
    return made


def test_requests_share_full_pages_of_the_same_blob_alone(
    scheduler: ShelfScheduler, store: Store, cache: CompressedCache, made_again: CompressedCache
) -> None:
    manifest = store.put(cache)
    first, second = (arrived(scheduler, name, manifest) for name in ("first", "second"))
    full = manifest.kept_tokens // PAGE + 1
    plain = request("plain", manifest).block_hashes
    assert first.block_hashes[:full] == second.block_hashes[:full]
    others = {*first.block_hashes[full:], *second.block_hashes[full:], *plain}
    assert len({*first.block_hashes[:full], *others}) == full + 2 * (len(plain) - full) + len(plain)
    assert scheduler.matched(first, 0) == (stand_ins(manifest.kept_tokens, PAGE), False)
    store.delete(manifest.id)
    again = store.put(made_again)
    assert again.id == manifest.id
    assert scheduler.matched(second, 0) == (1, True), "it would read pages of both"
    third = arrived(scheduler, "third", again)
    assert not {*third.block_hashes} & {*first.block_hashes}
    assert scheduler.matched(third, 0)[1] is False
    store.delete(manifest.id)


def test_a_vllm_without_page_tables_for_heads_refuses_by_the_index_alone(
    shelf: dict[str, str], store: Store, cache: CompressedCache
) -> None:
    manifest = store.put(cache)
    scheduler = ShelfScheduler(ShelfSettings.parse(shelf), page=PAGE, rows=False)
    other = request("other", manifest)
    del other.block_hashes  # an untested vLLM may have none
    scheduler.arrived(other)
    assert scheduler.matched(other, 0) == (1, True)
    with structlog.testing.capture_logs() as logs:
        scheduler.allocated(other, [1], 1)
    assert [entry["code"] for entry in logs] == ["policy_unsupported"]
    assert scheduler.take_step([]).loads == []
    scheduler.close()


def test_what_was_appended_evenly_is_refused_by_its_parents(
    scheduler: ShelfScheduler, store: Store, tiny: Engine, cache: CompressedCache
) -> None:
    appended = tiny.extend(cache, document(91).text, policy="full")
    made = arrived(scheduler, "appended", store.put(appended, parent_id=store.put(cache).id))
    assert scheduler.matched(made, 0) == (1, True)
    with structlog.testing.capture_logs() as logs:
        scheduler.allocated(made, [1], 1)
    assert [entry["code"] for entry in logs] == ["policy_unsupported"]


def test_what_a_worker_does_not_know_fails(
    shelf: dict[str, str], store: Store, cache: CompressedCache, model_folder: Path
) -> None:
    """A request whose head pages are not known, and without rows of its own any."""
    manifest = store.put(cache)
    settings, model = ShelfSettings.parse(shelf), ReadingModel.of(str(model_folder), "float32")
    worker = ShelfWorker(settings, model, rank=0, workers=1, page=PAGE)
    worker.start(ConnectorStep(ragged={7: manifest.blob_digest}), {})
    assert worker.take_failed() == {7}
    places = stand_ins(manifest.kept_tokens, PAGE)
    load = Load("a", manifest.id, manifest.tenant, 0, places, tuple(range(20, 30)), manifest.blob_digest)
    worker.start(ConnectorStep([load], ragged={20: manifest.blob_digest}), {})
    assert worker.take_failed() == set(range(20, 30))
    worker.close()


@pytest.fixture
def registry() -> Iterator[None]:
    """The attention of this process, which later tests need as it was."""
    CPU.clear_override()
    yield
    CPU.clear_override()
    register()


@pytest.mark.usefixtures("registry")
def test_the_plug_in_registers_its_attention_once() -> None:
    assert not is_registered()
    for _ in range(2):
        register()
        assert is_registered()


@pytest.mark.usefixtures("registry")
def test_the_plug_in_keeps_another_attention() -> None:
    register_backend(CPU, "somewhere.else.Backend")
    register()
    assert CPU.get_path() == "somewhere.else.Backend"
    assert not is_registered()


@pytest.mark.usefixtures("registry")
def test_the_plug_in_leaves_an_untested_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    assert not CPU.is_overridden()
    assert not is_registered()
