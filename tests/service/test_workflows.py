"""What a step's question tells, by model and tenant. No service runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from kvshelf.api import Asking, Usage
from kvshelf.api.answers import Answer, Phase, Served
from kvshelf.api.workflows import AtStep, Workflow
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheNotFound, DeadlineExceeded, InvalidRequest, ModelMismatch, WorkflowNotFound
from kvshelf.service.access.keyfile import Scope
from kvshelf.service.access.keys import KeyCaller
from kvshelf.service.engines import EngineClient
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.questions import AskedCache, CacheQuestion
from kvshelf.service.settings import Settings
from kvshelf.service.workflows import hints_for, models_of
from kvshelf.store.disk import DiskStore
from kvshelf.store.jobs.named import KeptWorkflow
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.calls import Caller
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


class Workers:
    """Stand for replicas that answer only when they may, and of which one cannot be told anything."""

    model, parent = "tiny", None

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.may = asyncio.Event()

    def require_bounded(self, *_: Any) -> None:
        """Texts are short here."""

    async def call(self, *_: Any, **__: Any) -> Answer:
        self.said.append("asked")
        await self.may.wait()
        usage = Usage(cache_read_tokens=9, read_tokens=9, prefill_tokens=2, completion_tokens=1)
        return Answer("0", [5], "stop", usage, served=SERVED)

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Answer, None]:
        yield await self.call()

    async def broadcast(self, _: float, __: Any, hints: Any, **___: Any) -> list[dict[str, int]]:
        self.said.append(hints)
        raise RuntimeError("no replica can be told")


SERVED = Served(id="ans_1", cache_id="kvs_1", phases=(Phase("prefill", 0.0, 1.0),))
HINTS = [Hint("kvs_2", 5.0, 0.0, "w//write")]


def question_to(workers: Workers, deadline_s: float = 60.0, **fields: Any) -> CacheQuestion:
    settings = SimpleNamespace(replicas=1, max_open_generations=1, max_ongoing_requests=9, max_queued_requests=9)
    engine = EngineClient(
        cast(RemoteEngine, workers), cast(Settings, settings), Metrics(), NoOpTracer(), lambda *_: None
    )
    service: Any = SimpleNamespace(engines={"tiny": engine}, within=lambda caller: caller.within(deadline_s))
    caller = KeyCaller("ours", frozenset({"read", "write"}), "key")
    caches = (AskedCache("kvs_1", Manifest.model_construct(id="kvs_1")),)
    return CacheQuestion(service, caller, Asking(prompt="?", **fields), caches, engine, {"tiny": HINTS})


def test_a_question_tells_once_when_it_has_its_turn_and_no_answer_waits_for_that_or_fails_with_it() -> None:
    async def test() -> None:
        workers = Workers()
        question = question_to(workers, n=2)
        holder = asyncio.ensure_future(question.engine.query("kvs_0", Asking(prompt="!"), caller=Caller("ours", 60.0)))
        await asyncio.sleep(0.01)
        assert workers.said == ["asked"]
        answering = asyncio.ensure_future(question.answered())
        await asyncio.sleep(0.05)
        assert workers.said == ["asked"], "another question has the slot"
        workers.may.set()
        await holder
        _, answers = await answering
        assert [answer.text for answer in answers] == ["0", "0"]
        assert workers.said == ["asked", "asked", HINTS, "asked"]
        assert [one.hints for one in question.each_alone()] == [{"tiny": HINTS}, {}]
        assert [piece.text async for piece in question_to(workers).pieces() if isinstance(piece, Answer)] == ["0"]
        assert workers.said[4:] == ["asked", HINTS]

    asyncio.run(test())


def test_a_question_that_gets_no_turn_tells_nothing() -> None:
    async def test() -> None:
        workers = Workers()
        question = question_to(workers, deadline_s=0.05)
        holder = asyncio.ensure_future(question.engine.query("kvs_0", Asking(prompt="!"), caller=Caller("ours", 60.0)))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await question.answered()
        with pytest.raises(DeadlineExceeded):
            await anext(question.pieces())
        workers.may.set()
        await holder
        assert workers.said == ["asked"]

    asyncio.run(test())


def test_only_a_key_that_may_write_tells_and_a_comparison_tells_once(engine: Engine, store: DiskStore) -> None:
    made = store.put(engine.compress(list(range(10, 90)), policy="full"), tenant="ours").id
    store.workflows.keep("w", KeptWorkflow(id="w", workflow=graph(made), models={made: "tiny"}), tenant="ours")
    asking = Asking(prompt="?", workflow=AtStep(id="w", step="plan"))
    queries: list[tuple[list[str], set[str]]] = []

    async def query(cache_ids: list[str], _: Asking, **options: Any) -> list[Answer]:
        queries.append((cache_ids, set(options)))
        return []

    asker = SimpleNamespace(model="tiny", query=query)
    service: Any = SimpleNamespace(
        store=store, metrics=Metrics(), engines={}, identities={}, engine=lambda *_, **__: asker,
        engine_for_all=lambda *_, **__: asker, within=lambda caller: caller.within(60.0),
    )  # fmt: skip

    async def asked(*scopes: Scope) -> CacheQuestion:
        return await CacheQuestion.find(service, KeyCaller("ours", frozenset(scopes), "key"), [made], asking)

    async def test() -> None:
        told = await asked("read", "write")
        assert told.hints == {"tiny": [Hint(made, 5.0, 0.0, "w//write")]}
        await told.full_answers()
        assert queries == [([made], {"caller"})], "no hint with its turn"
        assert (await asked("read")).hints == {}
        with pytest.raises(InvalidRequest, match="no step"):
            await CacheQuestion.find(
                service,
                KeyCaller("ours", frozenset({"read"}), "key"),
                [made],
                asking.model_copy(update={"workflow": AtStep(id="w", step="plann")}),
            )

    asyncio.run(test())
