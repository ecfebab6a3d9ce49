"""The guard of a replica: what it asks again, what it finds, and what it does not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.api import CreateCache, JointQuery, Query
from kvshelf.api.answers import Answer, Guarded
from kvshelf.api.usage import Metered, today
from kvshelf.engine.certify.recheck import Recheck
from kvshelf.engine.engine import Engine
from kvshelf.engine.quality import exact
from kvshelf.errors import CacheNotFound, QueueFull
from kvshelf.samples.tasks import TaskDocument, make_document
from kvshelf.store.disk import DiskStore
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.housekeeping import bury
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.calls import Caller, tenant_at_work
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.guard import JOINT, AnswerToCheck, Drift, Guard, GuardRules, measured
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.amounts import amount

DEFAULT = Caller("default")
BAD = {"policy": "streaming_llm", "compression_ratio": 0.9, "codec": "none", "quality": False}

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("kvshelf-tiny", device="cpu")


@pytest.fixture
async def guarded(engine: Engine, tmp_path: Path) -> AsyncIterator[Callable[..., Replica]]:
    """Replicas of one shelf, by the rules of their guards."""
    replicas: list[Replica] = []

    def start(**rules: Any) -> Replica:
        for replica in replicas:
            replica.stop()
        rules = {"share": 1.0, "time_share": 1.0} | rules
        replicas.append(
            Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine), guard=GuardRules(**rules))
        )
        replicas[-1].start()
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.stop()


def document(seed: int) -> TaskDocument:
    return make_document("multikey", "prose", 220, seed, lambda text: len(text.split()))


async def made(replica: Replica, seed: int, **options: Any) -> Manifest:
    options = {"keep_source": True} | options
    return (await replica.create(CreateCache(document=document(seed).text, **options), caller=DEFAULT)).manifest


async def ask(replica: Replica, manifest: Manifest, seed: int, question: int = 0) -> Answer:
    """An answer; and the guard has seen it, if it is to."""
    prompt = document(seed).questions[question].text
    answer = await replica.query(manifest.id, Query(prompt=prompt, max_tokens=12), caller=DEFAULT)
    await settled(replica)
    return answer


async def settled(replica: Replica) -> None:
    """Until the guard has asked again what it wants to."""
    async with asyncio.timeout(60):
        while replica.questions.guard.open:
            await asyncio.sleep(0.01)


async def ask_all(replica: Replica, manifest: Manifest, seed: int, questions: int) -> list[Guarded]:
    """What the guard found, as the replica tells it with the next answer."""
    answers = [await ask(replica, manifest, seed, question) for question in range(questions)]
    return [*(one for answer in answers for one in answer.served.guarded), *replica.questions.guard.take_results()]


def used(replica: Replica) -> tuple[int, int, float]:
    """Answers that were asked again, those of them that differ, and the seconds that took."""
    replica.meter.flush()
    metered = replica.store.metering.days(today(), today(), tenant="default")[0].by_model["kvshelf-tiny"]
    return metered.guarded, metered.guard_differed, metered.guard_s


async def test_a_cache_that_answers_as_the_full_one_stays_as_it_is(guarded: Callable[..., Replica]) -> None:
    replica = guarded()
    manifest = await made(replica, 1)
    told = await ask_all(replica, manifest, 1, 3)
    checked, differed, seconds = used(replica)
    assert (checked, differed) == (3, 0)
    assert 0 < seconds < 60
    assert replica.store.stat(manifest.id).quality == manifest.quality
    assert [(one.policy, one.differs, one.below, one.drifts) for one in told] == [("full", False, False, False)] * 3


async def test_a_bad_cache_is_recorded_as_one(guarded: Callable[..., Replica]) -> None:
    replica = guarded()
    manifest = await made(replica, 2, **BAD)
    assert manifest.quality is None
    told = await ask_all(replica, manifest, 2, 4)
    quality = replica.store.stat(manifest.id).quality
    assert quality is not None
    assert quality.reason == "measured by the guard"
    assert quality.high is not None
    assert quality.high < 0.9
    assert quality.cues >= 8
    assert sum(one.below for one in told) == 1, "once"
    assert used(replica)[1] >= 2
    assert replica.store.stat(manifest.id).revision != manifest.revision


async def test_a_finding_is_not_written_onto_another_blob(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ladder has put one in the place of the blob that was asked."""
    replica, ladder, run = guarded(), Ladder.parse("none:1s,int8"), Recheck.run
    manifest = await made(replica, 2, **BAD)
    table, coders = replica.store.ladder, replica.engine.coders

    def late(work: Recheck, engine: Engine, **checkpoint: Any) -> Any:
        result = run(work, engine, **checkpoint)
        time.sleep(1.1)
        for cold in table.cold(ladder, engine.identity.fingerprint()):
            if cold is not None:
                assert table.replace(cold, coders.recoded(replica.store.get(manifest.id), "int8").pack(), None)
        return result

    monkeypatch.setattr(Recheck, "run", late)
    await ask(replica, manifest, 2)
    (told,) = replica.questions.guard.take_results()
    assert (told.differs, told.below) == (True, True)
    coded = replica.store.stat(manifest.id)
    assert (coded.codec, coded.quality) == ("int8", None)


@pytest.mark.slow
async def test_by_the_rule_remake_a_finer_cache_is_made_beside_it(guarded: Callable[..., Replica]) -> None:
    replica = guarded(below="remake")
    manifest = await made(replica, 2, labels={"kind": "log"}, name="two", **BAD)
    await ask_all(replica, manifest, 2, 4)
    others = [one for one in replica.store.list(document_id=manifest.document_id).data if one.id != manifest.id]
    (finer,) = others
    assert finer.quality is not None
    assert finer.quality.low is not None
    assert finer.quality.low >= 0.9
    assert (finer.labels, finer.name, finer.has_source) == ({"kind": "log"}, "two", True)


async def test_a_remake_that_fails_is_made_with_a_later_answer(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = guarded(below="remake")
    manifest = await made(replica, 2, **BAD)
    tries: list[str] = []
    remake = replica.creations.remake

    async def failing(*args: Any) -> Any:
        tries.append("now")
        if len(tries) == 1:
            raise QueueFull("full", retry_after_s=1)
        return await remake(*args)

    monkeypatch.setattr(replica.creations, "remake", failing)
    for question in (0, 1, 2, 3, 0, 1, 2, 3):
        await ask(replica, manifest, 2, question)
    assert len(tries) == 2, "and not made again"
    assert len(replica.store.list(document_id=manifest.document_id).data) == 2
    assert replica.store.stat(manifest.id).quality is not None


async def test_an_error_of_one_check_ends_no_other(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = guarded()
    manifest = await made(replica, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Recheck, "run", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
        await ask(replica, manifest, 1)
    assert used(replica)[0] == 0
    await ask(replica, manifest, 1)
    assert (used(replica)[0], replica.questions.guard.open) == (1, 0)


async def test_a_check_takes_the_turn_of_the_answer_s_tenant(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, seen = guarded(), []
    prepared = Guard._prepared

    def noted(guard: Guard, answered: AnswerToCheck) -> Any:
        seen.append((answered.tenant, tenant_at_work.get()))
        return prepared(guard, answered)

    monkeypatch.setattr(Guard, "_prepared", noted)
    for tenant in ("alice", "bob"):
        spec = CreateCache(document=document(1).text, keep_source=True)
        manifest = (await replica.create(spec, caller=Caller(tenant))).manifest
        query = Query(prompt=document(1).questions[0].text, max_tokens=4)
        await replica.query(manifest.id, query, caller=Caller(tenant))
        await settled(replica)
    assert seen == [("alice", "alice"), ("bob", "bob")]


async def test_off_it_asks_nothing(guarded: Callable[..., Replica]) -> None:
    replica = guarded(share=0.0)
    manifest = await made(replica, 2, **BAD)
    await ask_all(replica, manifest, 2, 3)
    assert used(replica) == (0, 0, 0.0)
    assert replica.store.stat(manifest.id).quality is None


async def test_what_cannot_be_asked_again_is_left_out(guarded: Callable[..., Replica]) -> None:
    """A cache without its source, one that was appended to another, alone or among several, and one that has gone when
    its turn comes."""
    replica = guarded()
    sourceless = await made(replica, 3, keep_source=False)
    answer = await ask(replica, sourceless, 3)
    assert answer.text
    whole = await made(replica, 5)
    grown = Query(prompt=document(5).questions[0].text, max_tokens=2, store=True)
    turn = (await replica.query(whole.id, grown, caller=DEFAULT)).served.stored_cache_id
    await settled(replica)
    assert turn is not None
    assert (used(replica)[0], len(replica.questions.guard.take_results())) == (1, 1), "of the whole one"
    for cache_ids in ((turn,), (whole.id, turn)):
        await replica.questions.guard.check(AnswerToCheck(cache_ids, "default", (1, 2), (3,)))
    gone = await made(replica, 4)
    others = sourceless.id, gone.id
    await replica.questions.guard.check(AnswerToCheck(others, "default", (1, 2), (3,)))
    replica.store.delete(gone.id)
    await replica.questions.guard.check(AnswerToCheck((gone.id,), "default", (1, 2), (3,)))
    assert used(replica)[0] == 1
    assert replica.questions.guard.take_results() == ()


async def test_a_share_of_the_answers_is_asked_again_within_a_share_of_the_time(
    guarded: Callable[..., Replica],
) -> None:
    replica = guarded(share=0.25, time_share=1e-9)
    manifest = await made(replica, 1)
    wanted = sum(replica.questions.guard.wants for _ in range(4000))
    assert 850 < wanted < 1150
    guard = replica.questions.guard
    query = tuple(replica.engine.encode_query(replica.store.get(manifest.id), document(1).questions[0].text))
    for _ in range(100):
        guard.add(AnswerToCheck((manifest.id,), "default", query, (5,)))
    assert guard.open == 64, "the oldest go"
    guarding = asyncio.ensure_future(guard.run_forever())
    await asyncio.sleep(1.0)
    guarding.cancel()
    assert used(replica)[0] == 1, "the first, and no other for a long time"


async def test_documents_go_before_the_guard(guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is running gives way, and is made later."""
    replica = guarded()
    manifest = await made(replica, 1)
    guard = Guard(replica.creations, GuardRules(share=1.0), pause_s=0.001)
    query = replica.engine.encode_query(replica.store.get(manifest.id), document(1).questions[0].text)
    answered = AnswerToCheck((manifest.id,), "default", tuple(query), (5,))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "has_documents", True)
        await guard.check(answered)
    assert (guard.open, used(replica)[0]) == (1, 0)
    await guard.check(answered)
    assert used(replica)[0] == 1


def test_without_cues_a_caches_own_answers_tell() -> None:
    told = exact(100, 0.0).model_copy(update={"low": None})
    assert measured(told, 1, 0, 2.0).high == pytest.approx(0.95)
    quality = measured(None, 3, 1, 2.0)
    assert (quality.agreement, quality.kl, quality.full) == (pytest.approx(1 / 3), 2.0, False)
    assert quality.reason == "measured by the guard: 2 of 3 answers differ from the full cache's"
    own = exact(100, 0.0)
    assert measured(own, 3, 1, 2.0) == own.model_copy(update={"reason": "measured by the guard"})


async def test_the_values_of_a_label_are_groups_and_few(guarded: Callable[..., Replica]) -> None:
    replica = guarded(label="kind")
    kinds = ["law", "law", "log"]
    told = []
    for seed, kind in enumerate(kinds):
        told += await ask_all(replica, await made(replica, 10 + seed, labels={"kind": kind}), 10 + seed, 1)
    told += await ask_all(replica, await made(replica, 13), 13, 1)
    assert [one.group for one in told] == [*kinds, ""]
    group = replica.questions.guard.group
    groups = {group(str(number)) for number in range(99)}
    assert len(groups) == 18, "beside the three of before"
    assert "other" in groups


def test_an_alarm_is_raised_where_answers_differ_more_often_and_else_not() -> None:
    """Half of the answers: within 60. One in fifty, where one in ten may: never in 10,000."""
    for seed in range(20):
        draw, drift = random.Random(seed), Drift(0.1)
        assert not any(drift.add(differs=draw.random() < 0.02) for _ in range(10_000))
        rounds = next(number for number in range(1, 1000) if drift.add(differs=draw.random() < 0.5))
        assert rounds <= 60


async def test_answers_of_several_caches_are_counted_apart_and_raise_no_alarm(guarded: Callable[..., Replica]) -> None:
    """Each compared with one prefill of its documents. Of a planted bad cache all answers differ, and none is its
    fault alone."""
    replica = guarded(label="kind")
    good = [await made(replica, seed, labels={"kind": "law"}) for seed in (20, 21)]
    bad = await made(replica, 22, labels={"kind": "log"}, **BAD)
    told = list[Guarded]()
    for caches, seed in ((good, 21), ([good[0], bad], 22)):
        for question in range(4):
            asked = JointQuery(
                cache_ids=[one.id for one in caches], prompt=document(seed).questions[question].text, max_tokens=12
            )
            answer = await replica.query(asked.cache_ids, asked, caller=DEFAULT)
            await settled(replica)
            told += [*answer.served.guarded, *replica.questions.guard.take_results()]
    assert [(one.policy, one.group) for one in told] == [(JOINT, "law")] * 4 + [(JOINT, "")] * 4
    assert not any(one.below or one.drifts for one in told)
    assert [one.differs for one in told[:4]].count(True) <= 1
    assert [one.differs for one in told[4:]].count(True) >= 3
    replica.meter.flush()
    (day,) = replica.store.metering.days(today(), today(), tenant="default")
    used_of, told_of_law = day.by_model["kvshelf-tiny"], sum(one.differs for one in told[:4])
    assert (used_of.guarded, used_of.guarded_joint) == (0, 8)
    assert used_of.guard_joint_differed == sum(one.differs for one in told)
    assert used_of.guard_groups == {"law": Metered(guarded_joint=4, guard_joint_differed=told_of_law)}
    assert replica.store.stat(bad.id).quality is None


@pytest.mark.slow
async def test_values_of_a_tenant_are_told_apart_whatever_other_tenants_have(guarded: Callable[..., Replica]) -> None:
    """Metrics have few groups for all tenants; a joint answer over many takes none of them."""
    replica = guarded(label="kind")
    law = [await made(replica, seed, labels={"kind": "law"}) for seed in (20, 21)]
    many = [await made(replica, seed, labels={"kind": f"kind {seed}"}) for seed in range(23, 45)]
    guard = replica.questions.guard
    query = tuple(replica.engine.encode_query(replica.store.get(law[0].id), "Which?"))

    async def told(*caches: Manifest) -> str:
        await guard.check(AnswerToCheck(tuple(one.id for one in caches), "default", query, (5,)))
        (result,) = guard.take_results()
        return result.group

    assert await told(*many) == ""
    assert await told(*law) == "law"
    for number in range(40):
        guard.group(f"of another tenant {number}")
    assert await told(many[0]) == "other"
    assert await told(many[0], many[1]) == "", "they are of two"
    replica.meter.flush()
    (day,) = replica.store.metering.days(today(), today(), tenant="default")
    groups = day.by_model["kvshelf-tiny"].guard_groups
    assert {name: (one.guarded, one.guarded_joint) for name, one in groups.items()} == {
        "law": (0, 1),
        "kind 23": (1, 0),
    }


async def test_documents_that_are_too_long_together_cost_no_source_and_count_in_the_share_of_time(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = guarded(time_share=1e-9)
    caches = [await made(replica, seed) for seed in (20, 21)]
    guard, sources = replica.questions.guard, []
    source = replica.store.source
    monkeypatch.setattr(replica.store, "source", lambda id, **of: (sources.append(id), source(id, **of))[1])
    monkeypatch.setattr(replica.engine.facts, "max_tokens", sum(one.num_tokens for one in caches) + 2)
    for _ in range(9):
        guard.add(AnswerToCheck(tuple(one.id for one in caches), "default", (1, 2), (3,)))
    guarding = asyncio.ensure_future(guard.run_forever())
    await asyncio.sleep(0.5)
    guarding.cancel()
    assert (guard.open, sources, guard.take_results()) == (8, [], ()), "the first, and no other for a long time"
    monkeypatch.undo()
    await guard.check(AnswerToCheck(tuple(one.id for one in caches), "default", (1, 2), (3,)))
    assert [one.policy for one in guard.take_results()] == [JOINT]


async def test_what_has_no_room_for_a_prefill_is_left_out(guarded: Callable[..., Replica]) -> None:
    """Each document has, and the two together do not."""
    replica = guarded()
    caches = [await made(replica, seed) for seed in (20, 21)]
    plan = MemoryPlan.of(replica.engine.model, replica.engine.name, torch.device("cpu"))
    room = plan.prefill_bytes(max(one.num_tokens for one in caches))
    replica.creations.plan = replace(plan, there=plan.beside + plan.weights + room)
    guard = replica.questions.guard
    for cache_ids in (tuple(one.id for one in caches), (caches[0].id,)):
        await guard.check(AnswerToCheck(cache_ids, "default", (1, 2), (3,)))
    assert [one.policy for one in guard.take_results()] == [caches[0].policy]


async def test_what_is_erased_while_it_is_asked_again_counts_for_nothing(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, run = guarded(label="kind"), Recheck.run
    manifest = await made(replica, 1, labels={"kind": "alice"})

    def late(work: Recheck, engine: Engine, **checkpoint: Any) -> Any:
        result = run(work, engine, **checkpoint)
        replica.store.delete(manifest.id)
        return result

    monkeypatch.setattr(Recheck, "run", late)
    await ask(replica, manifest, 1)
    assert (used(replica)[0], replica.questions.guard.take_results()) == (0, ())


async def test_an_erasure_while_a_finer_cache_is_made_leaves_nothing(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remake had read the source, and stored the document again, with its labels and its source."""
    replica = guarded(below="remake")
    manifest = await made(replica, 2, labels={"subject": "alice"}, **BAD)
    create, receipts = replica.creations.create, []
    erase = partial(replica.store.erase, Subject(tenant="default", labels=manifest.labels))

    async def late(spec: CreateCache, **about: Any) -> Any:
        receipts.append(erase())
        return await create(spec, **about)

    monkeypatch.setattr(replica.creations, "create", late)
    with pytest.raises(CacheNotFound):  # the next question, once an answer differed and the guard made another cache
        await ask_all(replica, manifest, 2, 4)
    assert not replica.store.list().data
    assert [erase().counts] == [receipt.counts for receipt in receipts], "nothing more is found"
    assert replica.store.check() == []


@pytest.mark.slow
async def test_a_finer_cache_stays_where_the_shelf_evicted_the_other_for_it(
    guarded: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = guarded(below="remake")
    manifest, create, home = await made(replica, 2, **BAD), replica.creations.create, replica.store

    async def evicting(spec: CreateCache, **about: Any) -> Any:
        created = await create(spec, **about)
        assert bury(home.index, home.blobs, home.index.find(manifest.id, manifest.tenant), "evicted", home.now())
        return created

    monkeypatch.setattr(replica.creations, "create", evicting)
    created = await replica.creations.remake(manifest, 0.9, Caller(manifest.tenant))
    assert [cache.manifest.id for cache in created.caches] == [kept.id for kept in home.list().data]


@pytest.mark.slow
async def test_a_bad_cache_among_many_is_found_and_no_good_one(guarded: Callable[..., Replica]) -> None:
    """Of 200 caches, with 300 questions (`make soak`); each question is asked again."""
    replica, count = guarded(), amount(12, 200)
    draw = random.Random(5)
    planted = draw.randrange(count)
    caches = [await made(replica, seed, **(BAD if seed == planted else {})) for seed in range(count)]
    found, told, asked = None, list[Guarded](), 0
    while found is None and asked < count * 3 // 2:
        for seed in draw.sample(range(count), count):
            answer = await ask(replica, caches[seed], seed, draw.randrange(4))
            told += [*answer.served.guarded, *replica.questions.guard.take_results()]
            asked += 1
            if told[-1].below:
                found = seed
                break
    print(f"\nfound after {asked} questions on {count} caches")
    assert found == planted
    assert asked <= count * 3 // 2
    for number in range(amount(30, 10_000)):
        seed = draw.choice([seed for seed in range(count) if seed != planted])
        answer = await ask(replica, caches[seed], seed, number % 4)
        told += [*answer.served.guarded, *replica.questions.guard.take_results()]
    assert len(told) == asked + amount(30, 10_000)
    assert sum(one.below for one in told) == 1
    assert not any(one.drifts for one in told)
