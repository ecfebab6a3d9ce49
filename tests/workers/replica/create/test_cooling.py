"""A replica codes what has cooled smaller: what it makes, what it says of its quality, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import CreateCache, Query
from kvshelf.api.usage import today
from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.samples.tasks import make_document
from kvshelf.service.losses import warnings_of
from kvshelf.service.service import cache_object
from kvshelf.store.disk import DiskStore
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.create.cooling import Cooling
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.store.places import Clock

ME = Caller("default")
DAY = 86400.0

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("kvshelf-tiny", device="cpu")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(engine: Engine, tmp_path: Path, clock: Clock) -> Iterator[Replica]:
    store = DiskStore.open(tmp_path / "home", now=clock)
    replica = Replica(engine, store, Scheduler(engine), ladder=Ladder.parse("none:1d,int8:7d,klt"))
    replica.start()
    yield replica
    replica.stop()
    assert store.check() == []


async def made(replica: Replica, seed: int = 1, *, tenant: str = "default", **options: Any) -> Manifest:
    document = make_document("multikey", "prose", 220, seed, lambda text: len(text.split()))
    spec = CreateCache(document=document.text, **{"policy": "full", "codec": "none", "quality": False} | options)
    return (await replica.create(spec, caller=Caller(tenant))).manifest


async def look(replica: Replica) -> int:
    """One look of a replica that has all of its time for it."""
    cooling = Cooling(
        replica.engine,
        replica.store,
        replica.scheduler,
        replica.cooling.threads,
        replica.meter,
        replica.cooling.ladder,
        share=1.0,
        pause_s=0.001,
    )
    async with asyncio.timeout(120):
        return await cooling.look()


async def answer(replica: Replica, manifest: Manifest, seed: int = 1) -> list[int]:
    document = make_document("multikey", "prose", 220, seed, lambda text: len(text.split()))
    query = Query(prompt=document.questions[0].text, max_tokens=12)
    return list((await replica.query(manifest.id, query, caller=Caller(manifest.tenant))).token_ids)


async def test_the_rungs_are_what_creations_under_them_make(replica: Replica, clock: Clock) -> None:
    manifest = await made(replica)
    whole = await answer(replica, manifest)  # the replica's memory has the cache now
    clock.time += DAY + 1
    assert await look(replica) == 1
    direct = await made(replica, codec="int8", tenant="another")
    int8 = replica.store.stat(manifest.id)
    assert (int8.codec, int8.blob_digest) == ("int8", direct.blob_digest)
    assert await answer(replica, manifest) == await answer(replica, direct) == whole
    assert replica.store.stat(manifest.id).uses == 2
    assert await look(replica) == 0
    fresh = await made(replica, 2)
    clock.time += 8 * DAY
    assert await look(replica) == 3, "the two of int8, and one that goes from none to klt at once"
    klt, coded = replica.store.stat(manifest.id), await made(replica, 2, codec="klt", tenant="another")
    assert klt.codec == "klt"
    assert klt.recoded is not None
    assert klt.recoded.codec == "none"
    assert klt.bytes_stored < int8.bytes_stored / 3
    assert replica.store.stat(fresh.id).blob_digest == coded.blob_digest
    assert await answer(replica, manifest) == whole
    replica.meter.flush()
    used = replica.store.metering.days(today(), today(), tenant="default")
    assert sum(day.by_model["kvshelf-tiny"].recoded for day in used) == 3
    assert sum(day.by_model["kvshelf-tiny"].recoded_bytes for day in used) > manifest.bytes_stored


async def test_what_is_said_of_a_quality(replica: Replica, clock: Clock) -> None:
    kept = await made(replica, 1, quality="full", keep_source=True)
    lone = await made(replica, 2, quality="full")
    never = await made(replica, 3, keep_source=True)
    clock.time += DAY + 1
    assert await look(replica) == 3
    measured = replica.store.stat(kept.id)
    assert measured.quality is not None
    assert measured.quality.cues > 8, "of the full cache it was known without cues"
    assert measured.quality.low is not None
    assert warnings_of(measured)[0].startswith("made under codec none, and since coded as int8; ")
    unknown = replica.store.stat(lone.id)
    assert unknown.quality is not None
    assert (unknown.quality.agreement, unknown.quality.low) == (None, None)
    said = "1.000 under codec none, and not measured since it was coded as int8"
    assert unknown.quality.reason == said
    assert said in warnings_of(unknown)[0]
    shown = cache_object(unknown)
    assert shown.recoded is not None
    assert (shown.codec, shown.recoded.codec, shown.recoded.at) == ("int8", "none", clock.time)
    assert replica.store.stat(never.id).quality is None


async def test_a_quality_that_was_asked_for_holds(replica: Replica, clock: Clock) -> None:
    floor: dict[str, Any] = {"policy": "auto", "codec": "int8", "min_quality": 0.5}
    for name in ("codec", "quality"):
        floor.setdefault(name, None)
    options = {"policy": "auto", "min_quality": 0.5}
    spec = CreateCache(document=(make_document("multikey", "prose", 220, 4, lambda text: len(text.split()))).text)
    del floor, spec
    lone = await chosen(replica, 4, **options)
    kept = await chosen(replica, 5, keep_source=True, **options)
    assert (lone.min_quality, kept.min_quality) == (0.5, 0.5)


async def chosen(replica: Replica, seed: int, **options: Any) -> Manifest:
    document = make_document("multikey", "prose", 220, seed, lambda text: len(text.split()))
    return (await replica.create(CreateCache(document=document.text, **options), caller=ME)).manifest


async def test_klt_without_transforms_is_refused_at_the_start(engine: Engine, replica: Replica) -> None:
    del engine
    assert replica
    assert PolicyUnsupported
