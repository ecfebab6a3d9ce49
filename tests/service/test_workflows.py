"""What a step's question tells, by model and tenant. No service runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvshelf.api.workflows import AtStep, Workflow
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheNotFound, InvalidRequest, ModelMismatch, WorkflowNotFound
from kvshelf.service.workflows import hints_for, models_of
from kvshelf.store.disk import DiskStore
from kvshelf.store.jobs.workflows import KeptWorkflow
from kvshelf.workers.replica.memory.retention import Hint


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore.open(tmp_path / "shelf") as shelf:
        yield shelf


def graph(*cache_ids: str) -> Workflow:
    steps = {"plan": {"next": ["write"]}, "write": {"cache_ids": list(cache_ids)}}
    return Workflow.model_validate({"steps": steps})


def test_a_cache_of_another_tenant_is_as_one_that_never_was(engine: Engine, store: DiskStore) -> None:
    theirs = store.put(engine.compress(list(range(10, 90)), policy="full"), tenant="theirs").id
    said = []
    for cache_id in (theirs, "kvs_" + "0" * 40):
        with pytest.raises(CacheNotFound) as refusal:
            models_of(store, {"tiny": engine.identity}, graph(cache_id), "ours")
        assert refusal.value.param == "steps.write.cache_ids"
        said.append(refusal.value.message.replace(cache_id, "ID"))
    assert said[0] == said[1]
    assert models_of(store, {"tiny": engine.identity}, graph(theirs), "theirs") == {theirs: "tiny"}


def test_a_cache_that_no_served_model_can_use_is_refused_by_its_step(engine: Engine, store: DiskStore) -> None:
    made = store.put(engine.compress(list(range(10, 90)), policy="full"), tenant="ours").id
    other = replace(engine.identity, weights="0" * 64)
    with pytest.raises(ModelMismatch) as refusal:
        models_of(store, {"other": other}, graph(made), "ours")
    assert refusal.value.param == "steps.write.cache_ids"


def test_each_model_is_told_of_its_own_caches_by_the_tenant_s_workflow_alone(store: DiskStore) -> None:
    kept = KeptWorkflow(id="w", workflow=graph("kvs_1", "kvs_2"), models={"kvs_1": "one", "kvs_2": "two"})
    store.workflows.keep("w", kept, tenant="ours")
    plan = AtStep(id="w", step="plan")
    assert hints_for(store, plan, "run", "ours") == {
        "one": [Hint("kvs_1", 5.0, 0.0, "w/run/write")],
        "two": [Hint("kvs_2", 5.0, 0.0, "w/run/write")],
    }
    assert hints_for(store, AtStep(id="w", step="write"), None, "ours") == {
        "one": [Hint("kvs_1", None, 0.0, "w//write")],
        "two": [Hint("kvs_2", None, 0.0, "w//write")],
    }
    with pytest.raises(InvalidRequest, match=r"no step 'plann' \(did you mean 'plan'\?\); it has plan, write"):
        hints_for(store, AtStep(id="w", step="plann"), None, "ours")
    with pytest.raises(WorkflowNotFound):
        hints_for(store, plan, None, "theirs")
