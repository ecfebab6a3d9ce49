"""A score that is NaN or infinite never selects silently: the document is refused, and nothing is stored."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch

from kvshelf.client.types import CreateCache
from kvshelf.errors import PolicyUnsupported
from kvshelf.store.disk import DiskStore
from kvshelf.workers.engine import Engine
from kvshelf.workers.policies import POLICIES
from kvshelf.workers.policies.base import importance_of
from kvshelf.workers.replica import Replica
from kvshelf.workers.scheduler import Scheduler

DOCUMENT = "The harbour master keeps the tide tables in a green book; the pilots ask for it. " * 16
# compresskv refuses broken weights before the prefill: its calibration is of others.
SCORING = [name for name in POLICIES if name not in ("full", "streaming_llm", "compresskv")]
CHUNKED = {"prefill": "chunked", "lag": 16}


@pytest.fixture(scope="module")
def broken() -> Engine:
    """The bundled model, with NaN in the keys of one head of its last layer."""
    engine = Engine.load("kvshelf-tiny", device="cpu")
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


@pytest.mark.parametrize(("name", "params"), [(name, {}) for name in SCORING] + [("lagkv", CHUNKED)])
def test_nan_in_one_layer_is_refused_and_named(broken, name, params):
    with pytest.raises(PolicyUnsupported, match="bfloat16") as refused:
        broken.compress(DOCUMENT, policy=name, compression_ratio=0.75, **params)
    assert refused.value.status == 422
    assert f"policy '{name}'" in str(refused.value)
    # CAKE's shares need the weight of a layer at once; all others look at the whole cache when the last layer is done.
    assert ("the weight of layer 3" if name == "cake" else "in 1 of 4 layers (3)") in str(refused.value)


@pytest.mark.parametrize("ratio", [0.02, 0.5, 0.95])
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


@pytest.mark.parametrize(("name", "params"), [("snapkv", {}), ("layer_defensivekv", {}), ("lagkv", CHUNKED)])
def test_nothing_is_stored(broken, tmp_path: Path, name, params):
    store = DiskStore.open(tmp_path / "home")
    replica = Replica(broken, store, Scheduler(broken))

    async def create() -> None:
        replica.start()
        spec = CreateCache(document=DOCUMENT, policy=name, policy_params=params, compression_ratio=0.75)
        with pytest.raises(PolicyUnsupported, match="came out as NaN"):
            await replica.create(spec.model_dump(mode="json"), tenant="default")

    try:
        anyio.run(create)
    finally:
        replica.stop()
    assert store.list(tenant="default").data == ()


def test_importance_is_infinite_only_where_protected():
    scores = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 2.0]])
    protected = torch.tensor([False, False, False, False, True])
    importance = importance_of(scores, protected)
    assert importance.isnan().tolist() == [[False, True, True, True, False]]
    assert importance[0, [0, 4]].tolist() == [1.0, torch.inf]
    assert scores[0, 4] == 2.0, "the scores themselves are not changed"
