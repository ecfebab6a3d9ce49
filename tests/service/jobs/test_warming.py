"""Caches of several models, warmed at once, and by the schedule in its hours alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer
from structlog.testing import capture_logs

from kvshelf.api.caches import WarmedReplica
from kvshelf.service.engines import EngineClient
from kvshelf.service.jobs.warming import warm, warm_labelled
from kvshelf.service.loops import Hours
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from kvshelf.store.disk import DiskStore
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.calls import Caller
from tests.store.caches import MODEL, make_cache

MODELS = {name: replace(MODEL, name=name, weights=weights * 20) for name, weights in (("one", "0a"), ("two", "0b"))}
EVER, NEVER = Hours(), Hours(((0, 0),))


class Workers:
    """Replicas of one model that have read their caches once those of all models have begun."""

    def __init__(self, model: str, begun: asyncio.Barrier) -> None:
        self.model, self.parent, self.begun = model, None, begun
        self.keys: list[tuple[str, str]] = []

    async def broadcast(self, _: float, __: Any, keys: list[tuple[str, str]], **___: Any) -> list[WarmedReplica]:
        self.keys += keys
        await self.begun.wait()
        return [WarmedReplica(replica="r", model="", caches=len(keys), bytes=9, read_bytes=9, left_out=[])]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore.open(tmp_path)
    for model in MODELS.values():
        cache = make_cache(0)
        store.put(replace(cache, identity=replace(cache.identity, model=model)), labels={"team": "law"})
    return store


def engines_of(workers: Mapping[str, Workers]) -> dict[str, EngineClient]:
    settings = SimpleNamespace(replicas=1, max_open_generations=1, max_ongoing_requests=9, max_queued_requests=9)
    return {
        name: EngineClient(cast(RemoteEngine, one), cast(Settings, settings), Metrics(), NoOpTracer(), lambda *_: None)
        for name, one in workers.items()
    }


def test_models_are_warmed_at_once(store: DiskStore) -> None:
    """So all of them take no longer than the one deadline that a request has."""

    async def test() -> None:
        begun = asyncio.Barrier(2)
        engines = engines_of({name: Workers(name, begun) for name in MODELS})
        caller = Caller("default", deadline_s=5.0)
        async with asyncio.timeout(5.0):
            rows = await warm(engines, MODELS, store.list().data, caller=caller)
        assert sorted((row.model, row.caches) for row in rows) == [("one", 1), ("two", 1)]

    asyncio.run(test())


@pytest.mark.parametrize(("hours", "models"), [(EVER, ["one", "two"]), (NEVER, [])])
def test_the_schedule_warms_in_its_hours_alone(store: DiskStore, hours: Hours, models: list[str]) -> None:
    async def test() -> None:
        workers = {name: Workers(name, asyncio.Barrier(1)) for name in MODELS}
        labels = {"team": "law"}
        with capture_logs() as logs:
            await warm_labelled(store, engines_of(workers), MODELS, ["default"], labels, hours=hours, limit_s=5.0)
        assert sorted(line["model"] for line in logs if line["event"] == "caches are warm") == models
        assert [name for name in workers if workers[name].keys] == models

    asyncio.run(test())
