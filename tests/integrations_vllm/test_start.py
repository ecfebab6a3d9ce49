"""Settings of vLLM under which stored entries would be wrong are refused before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.request import Request

from kvshelf.errors import InternalError, InvalidRequest, PolicyUnsupported
from kvshelf.integrations.vllm.scheduling import ShelfScheduler
from kvshelf.integrations.vllm.settings import ShelfSettings, require_supported


def config(folder: Path, *, policy: str = "fail", **given: Any) -> Any:
    """vLLM's own configuration."""
    connector = KVTransferConfig(
        kv_connector="ShelfConnector",
        kv_connector_module_path="kvshelf.integrations.vllm",
        kv_role="kv_consumer",
        kv_load_failure_policy=policy,
    )
    args = EngineArgs(str(folder), dtype="float32", max_model_len=1024, kv_transfer_config=connector, **given)
    return args.create_engine_config()


def test_plain_settings_are_taken(model_folder: Path) -> None:
    require_supported(config(model_folder), 1)


def test_stand_ins_must_not_be_recomputed(model_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be fail"):
        require_supported(config(model_folder, policy="recompute"), 1)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, "hf_overrides"),
        ({"kv_cache_dtype": "fp8"}, "the KV cache in fp8"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
    ],
)
def test_settings_that_change_entries_are_named(model_folder: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(PolicyUnsupported, match=named):
        require_supported(config(model_folder, **given), 1)


def test_several_groups_of_pages_are_refused(model_folder: Path) -> None:
    with pytest.raises(PolicyUnsupported, match="windows or states"):
        require_supported(config(model_folder), 2)


def test_a_vllm_that_computes_what_was_refused_is_ended(shelf: dict[str, str]) -> None:
    extra = {"kv_transfer_params": {"kvshelf": {"cache_id": "kvs_" + "0" * 40}}}
    request = Request("lost", [0] * 8, SamplingParams(extra_args=extra), None)
    scheduler = ShelfScheduler(ShelfSettings.parse(shelf), page=128, rows=True)
    scheduler.arrived(request)
    assert scheduler.matched(request, 0) == (1, True)
    assert scheduler.take_step(["other"]).loads == []
    with pytest.raises(InternalError, match="computes the request lost"):
        scheduler.take_step(["other", "lost"])
    scheduler.close()
