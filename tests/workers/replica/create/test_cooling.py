"""A replica codes what has cooled smaller: what it makes, what it says of its quality, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.api import AppendCache, CertifiedBy, CreateCache, Query
from kvshelf.api.answers import Answer
from kvshelf.api.usage import today
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.certify.recheck import Remeasure
from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported, StateConflict
from kvshelf.samples.tasks import make_document
from kvshelf.service.losses import warnings_of
from kvshelf.service.service import cache_object
from kvshelf.store.disk import DiskStore
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.ladder.table import LEASE_S
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.create.auto import AutoChoice
from kvshelf.workers.replica.create.cooling import Cooling
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.create.publish import Publisher
from kvshelf.workers.replica.create.recreation import Recreation, document_fields, finer, recreation
from kvshelf.workers.replica.create.spec import appended_level, requested_levels
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.conftest import save_random_model
from tests.store.places import Clock

ME = Caller("default")
DAY = 86400.0
LADDER = Ladder.parse("none:1d,int8:7d,klt")

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
    replica = Replica(engine, store, Scheduler(engine))
    replica.start()
    yield replica
    replica.stop()
    assert store.check() == []


def spec_of(seed: int, **options: Any) -> CreateCache:
    document = make_document("multikey", "prose", 220, seed, lambda text: len(text.split()))
    measured = {} if "min_quality" in options else {"quality": False}
    return CreateCache(document=document.text, **{"policy": "full", "codec": "none"} | measured | options)


async def made(replica: Replica, seed: int = 1, *, tenant: str = "default", **options: Any) -> Manifest:
    return (await replica.create(spec_of(seed, **options), caller=Caller(tenant))).manifest


async def look(replica: Replica) -> int:
    """One look of a replica that has all of its time for it."""
    cooling = Cooling(replica.creations, share=1.0, pause_s=0.001)
    cooling.follow(LADDER)
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
    full: dict[str, Any] = {"min_quality": 0.97}
    low: dict[str, Any] = {"compression_ratio": 0.25, "min_quality": 0.05}
    lone = await made(replica, 1, policy="keydiff", **low)
    close = await made(replica, 2, keep_source=True, **full)
    loose = await made(replica, 3, policy="keydiff", keep_source=True, **low)
    assert [each.min_quality for each in (lone, close, loose)] == [0.05, 0.97, 0.05]
    clock.time += DAY + 1
    assert await look(replica) == 1
    for manifest in (lone, close):
        assert replica.store.stat(manifest.id) == manifest, "nobody can measure, or no cues show so much"
    coded = replica.store.stat(loose.id)
    assert (coded.codec, coded.min_quality) == ("int8", 0.05)
    assert coded.quality is not None
    assert coded.quality.low is not None
    assert coded.quality.low >= 0.05


async def test_a_creation_that_asks_for_more_makes_it_again(replica: Replica, clock: Clock) -> None:
    manifest = await made(replica, 1, quality="full")
    clock.time += DAY + 1
    assert await look(replica) == 1
    again = await made(replica, 1, min_quality=0.9)
    assert (again.id, again.codec, again.blob_digest) == (manifest.id, "none", manifest.blob_digest)
    assert again.quality is not None
    assert again.quality.low is not None
    assert again.quality.low >= 0.9


async def test_a_creation_has_the_codec_that_it_asks_for(replica: Replica, clock: Clock) -> None:
    manifest = await made(replica, 1, quality="full", keep_source=True)
    clock.time += DAY + 1
    assert await look(replica) == 1
    small = replica.store.stat(manifest.id)
    pruned = await made(replica, 2, policy="keydiff", compression_ratio=0.5)
    clock.time += DAY + 1
    assert await look(replica) == 1
    levels = [{"compression_ratio": 0.5, "codec": codec} for codec in ("none", "int4")]
    one, two = (await replica.create(spec_of(2, policy="keydiff", levels=levels), caller=ME)).caches
    assert (one.manifest.id, one.manifest.blob_digest, one.existing) == (pruned.id, pruned.blob_digest, True)
    assert (two.manifest.codec, two.existing) == ("int4", False)
    fields = document_fields(small, replica.store.source(small.id))
    full = Recreation.model_construct(**fields, policy="full", ttl_s=600.0)  # as a comparison asks for it
    compared = (await replica.create(full, caller=ME)).manifest
    assert (compared.id, compared.blob_digest) == (manifest.id, manifest.blob_digest)


async def test_no_figure_of_the_former_blob_is_written_onto_the_new_one(replica: Replica, clock: Clock) -> None:
    """By a creation that has found the cache before the ladder coded it smaller."""
    manifest = await made(replica, 1, quality="full")
    clock.time += DAY + 1
    assert await look(replica) == 1
    small = replica.store.stat(manifest.id)
    spec = spec_of(1, min_quality=0.5)
    work = requested_levels(replica.engine, spec, "full", None)
    late = Publisher.of(replica.store, "default", spec, work.levels).as_asked(manifest)
    assert late == replica.store.stat(manifest.id) == small.model_copy(update={"min_quality": 0.5})
    assert late.quality is not None
    assert late.quality.agreement is None


async def test_what_was_appended_to_the_former_blob_is_not_stored(replica: Replica, clock: Clock) -> None:
    manifest, engine = await made(replica, 1), replica.engine
    level = appended_level(engine, replica.store.get(manifest.id), AppendCache(document="Bells ring at noon."))
    publisher = Publisher.of(replica.store, "default", AppendCache(document="Bells ring at noon."), [level], manifest)
    appended = AutoChoice(level, engine.run_levels([level], cues=0)[0])
    clock.time += DAY + 1
    assert await look(replica) == 1
    with pytest.raises(StateConflict, match="was coded anew while it was appended to"):
        publisher.put(appended, 0.0)
    made_again = await replica.append(manifest.id, AppendCache(document="Bells ring at noon."), caller=ME)
    assert (made_again.manifest.codec, made_again.manifest.parent_id) == ("int8", manifest.id)


async def test_one_caches_error_is_its_own_and_not_met_again(
    replica: Replica, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await made(replica, seed) for seed in (1, 2)]
    recoded, tries = replica.engine.coders.recoded, list[str]()

    def broken(cache: CompressedCache, codec: str) -> CompressedCache:
        tries.append(codec)
        if cache.pack().root.hex() == first.blob_digest:
            raise RuntimeError("a bug")
        return recoded(cache, codec)

    monkeypatch.setattr(replica.engine.coders, "recoded", broken)
    clock.time += DAY + 1
    cooling = Cooling(replica.creations, share=1.0, pause_s=0.001)
    cooling.follow(LADDER)
    assert [await cooling.look() for _ in range(3)] == [1, 0, 0]
    assert tries == ["int8", "int8"]
    assert [replica.store.stat(each.id).codec for each in (first, second)] == ["none", "int8"]


async def test_what_finds_no_memory_is_tried_again(
    replica: Replica, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await made(replica, quality="full", keep_source=True)
    clock.time += DAY + 1
    cooling = Cooling(replica.creations, share=1.0, pause_s=0.001)
    cooling.follow(LADDER)
    with monkeypatch.context() as patch:
        patch.setattr(Remeasure, "run", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
        assert await cooling.look() == 0
    assert await cooling.look() == 1
    assert replica.store.stat(kept.id).codec == "int8"


async def test_what_has_no_room_for_a_prefill_is_not_measured(replica: Replica, clock: Clock) -> None:
    kept = await made(replica, quality="full", keep_source=True)
    clock.time += DAY + 1
    plan = MemoryPlan.of(replica.engine.model, replica.engine.name, torch.device("cpu"))
    replica.creations.plan = replace(plan, there=1)
    assert await look(replica) == 1
    quality = replica.store.stat(kept.id).quality
    assert quality is not None
    assert (quality.agreement, quality.reason) == (
        None, "1.000 under codec none, and not measured since it was coded as int8"
    )  # fmt: skip


async def test_what_stays_of_one_tenant_is_coded_of_another(replica: Replica, clock: Clock) -> None:
    close = await made(replica, 1, min_quality=0.97)
    other = await made(replica, 1, tenant="another")
    assert close.blob_digest == other.blob_digest
    clock.time += DAY + 1
    assert await look(replica) == 1
    codecs = [replica.store.stat(each.id, tenant=each.tenant).codec for each in (close, other)]
    assert codecs == ["none", "int8"]


async def test_a_replica_that_lost_the_lease_ends_its_look(replica: Replica, clock: Clock) -> None:
    ids = [(await made(replica, seed)).id for seed in (1, 2)]
    clock.time += DAY + 1
    cooling = Cooling(replica.creations, now=Clock(), share=0.05, pause_s=0.001, renew_s=0.0)
    cooling.follow(LADDER)
    looking = asyncio.ensure_future(cooling.look())
    async with asyncio.timeout(60):
        while all(replica.store.stat(id_).recoded is None for id_ in ids):
            await asyncio.sleep(0.01)
        clock.time += LEASE_S + 1  # in which it did not live; now it waits for its share of the time
        term, model = None, replica.engine.identity.fingerprint()
        while term is None:
            clock.time += LEASE_S + 1
            term = replica.store.ladder.take(model)
        assert await looking == 1
    replica.store.ladder.renew(model, term)  # and it has not ended the other one's


async def test_what_cannot_be_coded_stays(replica: Replica, clock: Clock) -> None:
    pruned = await made(replica, 1, policy="think")
    short = await made_of(replica, "Bells ring at noon.")
    clock.time += 2 * DAY
    assert await look(replica) == 1
    assert replica.store.stat(short.id).codec == "none", "all of it is residual, so it would be no smaller"
    clock.time += 8 * DAY
    assert await look(replica) == 1
    assert replica.store.stat(pruned.id).codec == "int8", "klt transforms whole keys"
    assert replica.store.stat(short.id).codec == "klt"
    await answer(replica, pruned)


async def made_of(replica: Replica, text: str) -> Manifest:
    spec = CreateCache(document=text, policy="full", codec="none", quality=False)
    return (await replica.create(spec, caller=ME)).manifest


async def test_a_made_again_cache_has_its_id(replica: Replica, clock: Clock) -> None:
    """From the kept source of one that has expired since it was coded smaller."""
    manifest = await made(replica, 1, keep_source=True, min_quality=0.05)
    clock.time += DAY + 1
    assert await look(replica) == 1
    replica.store.update(manifest.id, ttl_s=1.0)
    clock.time += 2
    last, source = replica.store.original(manifest.id)
    assert (last.codec, last.made_codec) == ("int8", "none")
    again = recreation(last, source, keep=False, now=clock.time)
    made_again = (await replica.create(again, caller=ME)).manifest
    assert (made_again.id, made_again.min_quality) == (manifest.id, 0.05), "what was asked of it holds on"
    certified = last.model_copy(update={"certificate": CertifiedBy(name="law", alpha=0.1, digest="0" * 64)})
    assert recreation(certified, source, keep=False, now=clock.time).judged.certificate == certified.certificate
    assert recreation(certified, source, keep=True, now=clock.time).judged.certificate is None, "of another model"
    assert finer(certified, source, 0.5, clock.time).judged == Judgement()


async def test_a_turn_behind_a_blob_that_was_replaced_meanwhile_is_not_stored(replica: Replica, clock: Clock) -> None:
    manifest = await made(replica)
    query = Query(prompt="What is said of the tide?", max_tokens=16, store=True)
    clock.time += DAY + 1
    coded = False
    async for piece in replica.stream(manifest.id, query, caller=ME):
        if not coded:
            clock.time += DAY + 1
            cold = next(
                each
                for each in replica.store.ladder.cold(LADDER, replica.engine.identity.fingerprint())
                if each is not None
            )
            smaller = replica.engine.coders.recoded(replica.store.get(manifest.id), "int8")
            assert replica.store.ladder.replace(cold, smaller.pack(), None)
            coded = True
        last = piece
    assert isinstance(last, Answer)
    assert "was coded anew while it was asked" in (last.served.not_stored or "")
    again = await replica.query(manifest.id, query, caller=ME)
    turn = replica.store.stat(again.served.stored_cache_id or "")
    assert (turn.codec, turn.parent_id) == ("int8", manifest.id)
    clock.time += 9 * DAY
    assert await look(replica) == 0, "what another extends, and what extends, stay"


async def test_klt_without_transforms_is_refused_at_the_start(tmp_path: Path) -> None:
    engine = Engine.load(str(save_random_model(tmp_path / "m", seed=9)), device="cpu")
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine))
    with pytest.raises(PolicyUnsupported, match="codec klt needs the transforms of"):
        replica.cooling.follow(Ladder.parse("none:1d,klt"))
    replica.cooling.follow(Ladder.parse("none:1d,int4"))


async def test_it_takes_its_share_of_the_time(replica: Replica, clock: Clock) -> None:
    time = Clock()
    cooling = Cooling(replica.creations, now=time, share=0.05, pause_s=0.001)
    cooling.follow(LADDER)
    ids = [(await made(replica, seed)).id for seed in (1, 2)]
    clock.time += DAY + 1
    looking = asyncio.ensure_future(cooling.look())
    await asyncio.sleep(2)
    assert sorted(replica.store.stat(id_).codec for id_ in ids) == ["int8", "none"], "time has stood still since"
    assert await Cooling(replica.creations).look() == 0, "another has the lease"
    time.time += 3600
    assert await looking == 2


async def test_it_begins_with_the_first_health_check_and_ends_with_the_replica(replica: Replica, clock: Clock) -> None:
    manifest = await made(replica)
    clock.time += DAY + 1
    replica.cooling.follow(LADDER)
    await replica.check_health()
    async with asyncio.timeout(30):
        while replica.store.stat(manifest.id).recoded is None:
            await asyncio.sleep(0.01)
    replica.cooling.stop()
