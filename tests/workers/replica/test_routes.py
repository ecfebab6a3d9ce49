"""Questions that a replica sends to the one or two of several caches that they are about."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import CreateCache, JointQuery
from kvshelf.api.answers import Answer
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheUnusable, DeadlineExceeded
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.memory.residents import ResidentLimits
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler

DEFAULT = Caller("default")

pytestmark = pytest.mark.anyio

DOCUMENTS = [
    f"The {thing} of the harbour is kept in room {room}. " * 15 for thing, room in (("crane", 11), ("lamp", 12))
]
DOCUMENTS += ["A ferry crosses the sound twice a day. " * 20, "Nobody has seen the keeper since March. " * 12]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture
async def replica(engine: Engine, tmp_path: Path) -> AsyncIterator[Replica]:
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine))
    replica.start()
    yield replica
    replica.stop()


async def made(replica: Replica) -> list[str]:
    specs = [CreateCache(document=document, policy="full") for document in DOCUMENTS]
    return [(await replica.create(spec, caller=DEFAULT)).manifest.id for spec in specs]


def asked(ids: list[str], route: str | None, **fields: Any) -> JointQuery:
    return JointQuery.model_validate({"cache_ids": ids, "prompt": "Who keeps the lamp?", "route": route} | fields)


def users(replica: Replica) -> dict[str, int]:
    return {id: resident.users for (_, id), resident in replica.questions.residents.caches.items()}


@pytest.mark.parametrize("route", ["likelihood", "attention"])
async def test_the_answer_is_the_engine_s_and_the_others_are_let_go(
    replica: Replica, engine: Engine, route: str
) -> None:
    ids = await made(replica)
    caches = [replica.store.get(id) for id in ids]
    right = engine.answer(caches, "Who keeps the lamp?", max_new_tokens=8, route=route)
    cold = await replica.query(ids, asked(ids, route, max_tokens=8), caller=DEFAULT)
    stream = replica.stream(ids, asked(ids, route, max_tokens=8), caller=DEFAULT)
    await anext(stream)
    read = {id for id, share in zip(ids, right.sources, strict=True) if share}
    assert {id for id, count in users(replica).items() if count} == read
    *_, warm = [piece async for piece in stream]
    assert isinstance(warm, Answer)
    for answer in (cold, warm):
        assert (answer.text, answer.token_ids) == (right.text, right.token_ids)
        assert answer.usage.prefill_tokens == right.usage.prefill_tokens
        assert list(answer.sources) == pytest.approx(list(right.sources), abs=1e-6)
        assert answer.served.cache_ids == tuple(ids)
        assert set(answer.served.read_ids) == read
        assert [phase.name for phase in answer.served.phases] == ["load", "route", "queue", "prefill", "decode"]
    assert not any(users(replica).values())


async def test_all_readings_are_within_one_deadline(replica: Replica, engine: Engine) -> None:
    ids = await made(replica)
    await replica.query(ids, asked(ids, None), caller=DEFAULT)
    slow = engine.asker.read

    def read(*args: Any) -> Answer:
        time.sleep(0.3)
        return slow(*args)

    engine.asker.read = read  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await replica.query(ids, asked(ids, "likelihood"), caller=Caller("default", 0.5))
    assert time.monotonic() - began < 1.1
    assert not any(users(replica).values())


async def test_a_cache_whose_logits_are_no_numbers_is_named(replica: Replica) -> None:
    ids = await made(replica)
    cache = replica.engine.compress("The lamp burns whale oil. " * 20, policy="full")
    cache.layers[0].values[:] = math.nan
    broken = replica.store.put(cache, tenant="default").id
    with pytest.raises(CacheUnusable) as unusable:
        await replica.query([*ids[:2], broken], asked([*ids[:2], broken], "likelihood"), caller=DEFAULT)
    assert unusable.value.details["cache_id"] == broken


async def test_where_memory_is_just_enough_questions_with_and_without_a_route_all_end(
    engine: Engine, tmp_path: Path
) -> None:
    """Who has chosen among all holds two while others wait for room."""
    nbytes = sum(engine.attach(engine.compress(document, policy="full")).nbytes for document in DOCUMENTS)
    limits = ResidentLimits(max_bytes=int(1.2 * nbytes))
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine), limits)
    replica.start()
    try:
        ids = await made(replica)
        others = [
            (await replica.create(CreateCache(document=text + "!", policy="full"), caller=DEFAULT)).manifest.id
            for text in DOCUMENTS
        ]
        sets = [(ids, "likelihood"), (others, None), (others, "attention"), (ids, None)] * 3
        calls = (replica.query(of, asked(of, route, max_tokens=4), caller=DEFAULT) for of, route in sets)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*calls)
        assert len(answers) == 12
    finally:
        replica.stop()
