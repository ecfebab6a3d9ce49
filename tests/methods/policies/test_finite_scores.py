"""What is NaN or infinite never counts silently, be it a score or a logit: it is refused, and nothing is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from kvshelf.api import CreateCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of
from kvshelf.methods.policies import POLICIES
from kvshelf.model import loading as models
from kvshelf.store.disk import DiskStore
from kvshelf.store.jobs.requests import RequestRecord
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.amounts import few, in_turn

DOCUMENT = "The harbour master keeps the tide tables in a green book; the pilots ask for it. " * 16
# compresskv refuses broken weights before the prefill: its calibration is of others.
WITHOUT = ("full", "kvdirect", "streaming_llm", "duo_attention", "compresskv")
SCORING = [name for name in POLICIES if name not in WITHOUT]
CHUNKED = {"prefill": "chunked", "lag": 16}


def plain_engine(name: str) -> Engine:
    """Of a model whose weights can be changed."""
    model, tokenizer = models.load(name, device="cpu", dtype="auto")
    return Engine(model, tokenizer, name=name)


@pytest.fixture(scope="module")
def broken() -> Engine:
    """The bundled model, with NaN in the keys of one head of its last layer."""
    engine = plain_engine("kvshelf-tiny")
    with torch.no_grad():
        engine.model.model.layers[-1].self_attn.k_proj.weight[5] = torch.nan
    return engine


@pytest.fixture(scope="module")
def overflowing() -> Engine:
    """The bundled model in float16, with keys of one layer that are beyond its largest number, 65,504."""
    engine = Engine.load("kvshelf-tiny", device="cpu", dtype="float16")
    with torch.no_grad():
        engine.model.model.layers[1].self_attn.k_proj.weight *= 2.0**14
    return engine


@pytest.mark.parametrize(("name", "params"), [*((name, {}) for name in SCORING), ("lagkv", CHUNKED)])
def test_nan_in_one_layer_is_refused_and_named(broken, name, params):
    ratio = {"compression_ratio": 0.75} if POLICIES[name].takes_budget else {}
    with pytest.raises(PolicyUnsupported, match="bfloat16") as refused:
        broken.compress(DOCUMENT, policy=name, **ratio, **params)
    assert refused.value.status == 422
    assert f"policy '{name}'" in str(refused.value)
    # CAKE's shares need the weight of a layer at once; all others look at the whole cache when the last layer is done.
    # What SirLLM's model foretells depends on every layer.
    where = {"cake": "the weight of layer 3", "sirllm": "in 4 of 4 layers (0, 1, 2, 3)"}
    assert where.get(name, "in 1 of 4 layers (3)") in str(refused.value)


@pytest.mark.parametrize("ratio", few(1, [0.02, 0.5, 0.95]))
@pytest.mark.parametrize(
    ("name", "params"),
    [("snapkv", {}), ("keydiff", {}), ("layer_defensivekv", {}), ("ada", {"across": "cache"}), ("ems", {}),
     ("lagkv", {"lag": 8, "sink": 0}), ("lagkv", CHUNKED | {"lag": 8, "sink": 0})],
)  # fmt: skip
def test_an_overflow_of_float16_is_refused_whatever_the_ratio(overflowing, name, params, ratio):
    with pytest.raises(PolicyUnsupported, match="came out as NaN or infinity"):
        overflowing.compress(DOCUMENT, policy=name, compression_ratio=ratio, **params)


def test_policies_that_look_at_no_scores_do_not_care(broken):
    assert broken.compress(DOCUMENT, policy="full").kept_tokens > 0
    assert broken.compress(DOCUMENT, policy="streaming_llm", compression_ratio=0.5).kept_tokens > 0


@pytest.fixture(scope="module", params=[torch.nan, torch.inf], ids=["nan", "inf"])
def mute(request, tiny_folder: Path) -> Engine:
    """A random model whose keys and values are numbers, and whose logits are not: a weight of its output is broken."""
    engine = plain_engine(str(tiny_folder))
    with torch.no_grad():
        engine.model.lm_head.weight[700, 3] = request.param
    return engine


@in_turn({"name": ["keydiff", "full", "streaming_llm"], "codec": ["none", "int8"]})
def test_logits_that_are_no_numbers_are_refused_where_quality_is_measured(mute, name, codec):
    job = mute.prepare(DOCUMENT, policy=name)
    with pytest.raises(PolicyUnsupported, match=r"are not numbers.*bfloat16") as refused:
        mute.run_levels([Level(job, codec)])
    assert (refused.value.status, refused.value.param) == (422, "model")


def refused_creation(engine: Engine, home: Path, **fields: Any) -> tuple[PolicyUnsupported, RequestRecord]:
    """How a creation by a replica ends that is refused, and its request of the job table. Nothing may be stored."""
    store = DiskStore.open(home)
    replica = Replica(engine, store, Scheduler(engine))
    spec = CreateCache(document=DOCUMENT, compression_ratio=0.75, **fields)

    async def create() -> None:
        replica.start()
        await replica.create(spec, caller=Caller("default"), request_id="req_1")

    store.requests.open("req_1", tenant="default", body=b"{}")
    try:
        with pytest.raises(PolicyUnsupported) as refused:
            anyio.run(create)
    finally:
        replica.stop()
    assert store.list(tenant="default").data == ()
    return refused.value, store.requests.get("req_1", tenant="default")


@pytest.mark.parametrize(("name", "params"), [("snapkv", {}), ("layer_defensivekv", {}), ("lagkv", CHUNKED)])
def test_nothing_is_stored(broken, tmp_path: Path, name, params):
    refused, _ = refused_creation(broken, tmp_path / "home", policy=name, policy_params=params)
    assert "came out as NaN" in refused.message


def test_a_creation_with_all_defaults_ends_by_name_and_is_not_tried_again(mute, tmp_path: Path):
    refused, record = refused_creation(mute, tmp_path / "home")
    assert "are not numbers" in refused.message
    assert (record.state, record.tries) == ("failed", 1)
    assert record.error is not None
    assert (record.error.code, record.error.param) == ("policy_unsupported", "model")


def test_importance_is_infinite_only_where_protected():
    scores = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 2.0]])
    protected = torch.tensor([False, False, False, False, True])
    importance = importance_of(scores, protected)
    assert importance.isnan().tolist() == [[False, True, True, True, False]]
    assert importance[0, [0, 4]].tolist() == [1.0, torch.inf]
    assert scores[0, 4] == 2.0, "the scores themselves are not changed"
