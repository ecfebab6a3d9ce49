"""What a replica creates beyond one cache: measured, in several levels, and the smallest that is good enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kvshelf.api import AppendCache, CreateCache, Estimate, JointQuery, PolicyEstimate, Tried
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.prefill.prefill import Prefill
from kvshelf.errors import CacheNotFound, DocumentTooLong, InvalidRequest, PolicyUnsupported, QualityBelowFloor
from kvshelf.samples.tasks import make_document
from kvshelf.store.disk import DiskStore
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf
from kvshelf.store.types import TokenIds
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.create.auto import SizeTarget, auto, candidates
from kvshelf.workers.replica.create.creations import NegativeCache
from kvshelf.workers.replica.create.recreation import recreation
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from scripts.conversations import make_conversation
from tests.amounts import in_turn
from tests.qualities import quality_of

DEFAULT = Caller("default")

pytestmark = pytest.mark.anyio


class CountingCompressor(Compressor):
    """Counts its prefills."""

    prefills = 0

    def prefill(
        self, group: Sequence[Level], *, checkpoint: Callable[[], None] | None = None, **options: Any
    ) -> Prefill:
        self.prefills += 1
        return super().prefill(group, **options, checkpoint=checkpoint)


class Counting(Engine):
    _compressor: ClassVar = CountingCompressor
    compressor: CountingCompressor


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine() -> Counting:
    engine = Counting.load("kvshelf-tiny", device="cpu")
    assert isinstance(engine, Counting)
    return engine


@pytest.fixture(scope="module")
def document(engine: Counting) -> str:
    assert engine.text is not None
    return make_document("multikey", "prose", 900, 1, engine.text.count_tokens).text


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return DiskStore.open(tmp_path / "home")


@pytest.fixture
async def replica(engine: Counting, shelf: Shelf) -> AsyncIterator[Replica]:
    replica = Replica(engine, shelf, Scheduler(engine), quality="full")
    replica.start()
    yield replica
    replica.stop()


async def create(replica: Replica, document: str | None = None, **fields: Any) -> Created:
    spec = CreateCache(document=document, **fields)
    return await replica.create(spec, caller=DEFAULT)


def ids(created: Created) -> list[str]:
    return [cache.manifest.id for cache in created.caches]


async def test_what_a_compression_costs_is_written_down_with_it(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    made = (await create(replica, document, compression_ratio=0.75, codec="int4")).manifest
    (alone,) = engine.run_levels([Level(engine.prepare(document, compression_ratio=0.75), "int4")])
    assert alone.quality is not None
    assert made.quality is not None
    assert made.quality.agreement == alone.quality.agreement < 1
    assert made.quality.kl == pytest.approx(alone.quality.kl, rel=1e-6)
    assert (made.quality.version, made.tried) == (alone.quality.version, ())
    assert shelf.stat(made.id).quality == made.quality
    assert shelf.get(made.id).to_bytes() == alone.cache.to_bytes()


async def test_levels_are_the_caches_of_single_creations_from_one_prefill(
    replica: Replica, engine: Counting, document: str
) -> None:
    before = engine.compressor.prefills
    levels = await create(replica, document, levels=[0.75, 0.25, 0.5], ttl_s=100.0)
    assert engine.compressor.prefills == before + 1
    assert [cache.manifest.compression_ratio for cache in levels.caches] == [0.75, 0.25, 0.5]
    qualities = [cache.manifest.quality.kl for cache in levels.caches]
    assert qualities[1] < qualities[2] < qualities[0]
    single = await create(replica, document, compression_ratio=0.5, ttl_s=1000.0, keep_source=True)
    assert (ids(single), single.existing, engine.compressor.prefills) == ([ids(levels)[2]], True, before + 1)
    more = await create(replica, document, levels=[0.5, 0.9, 0.75], ttl_s=500.0)
    assert [cache.existing for cache in more.caches] == [True, False, True]
    assert engine.compressor.prefills == before + 2
    assert not more.existing
    # What is there already lives on at least as long as asked for, and not shorter.
    lives = [cache.manifest.expires_at - levels.manifest.created_at for cache in more.caches]
    assert lives == [pytest.approx(1000, abs=60), pytest.approx(500, abs=60), pytest.approx(500, abs=60)]


async def test_one_way_is_stored_only_if_it_is_good_enough(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    with pytest.raises(QualityBelowFloor) as refused:
        await create(replica, document, compression_ratio=0.9, min_quality=0.99)
    (tried,) = refused.value.details["tried"]
    assert tried["quality"]["low"] < 0.99
    assert shelf.list().data == ()
    # Few cues showed that 0.99 is out of reach. They say nothing of a floor that all cues may show.
    assert not tried["quality"]["full"]
    made = await create(replica, document, compression_ratio=0.9, min_quality=tried["quality"]["low"] + 0.01)
    assert made.manifest.quality.full
    assert made.manifest.quality.low > tried["quality"]["low"] + 0.01
    before = engine.compressor.prefills
    again = await create(replica, document, compression_ratio=0.9, min_quality=0.0)
    assert (ids(again), again.existing) == (ids(made), True)
    with pytest.raises(QualityBelowFloor, match=r"the closest is policy 'keydiff' at 0\.9"):
        await create(replica, document, compression_ratio=0.9, min_quality=0.99)
    assert engine.compressor.prefills == before  # its manifest says it all


async def test_a_refusal_is_remembered_by_the_worker(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    asked: dict[str, Any] = {"levels": [0.9, 0.95], "min_quality": 1.0}
    before = engine.compressor.prefills
    with pytest.raises(QualityBelowFloor) as first:
        await create(replica, document, **asked)
    # In another order, alone, or with another floor that nothing meets: it is known what would come of it.
    for again in (asked, asked | {"levels": [0.95, 0.9]}, {"compression_ratio": 0.95, "min_quality": 0.999}):
        with pytest.raises(QualityBelowFloor) as second:
            await create(replica, document, **again)
        for tried in second.value.details["tried"]:
            assert tried in first.value.details["tried"]
    assert engine.compressor.prefills == before + 1
    with pytest.raises(QualityBelowFloor):  # one level more is another question
        await create(replica, document, levels=[0.9, 0.95, 0.85], min_quality=1.0)
    assert engine.compressor.prefills == before + 2
    least = min(one["quality"]["low"] for one in first.value.details["tried"])
    made = await create(replica, document, **asked | {"min_quality": least})
    assert (made.existing, engine.compressor.prefills) == (False, before + 3)
    assert [cache.id for cache in shelf.list().data] == ids(made)


async def test_a_refusal_is_remembered_of_one_tenant(replica: Replica, engine: Counting, document: str) -> None:
    spec = CreateCache(document=document, compression_ratio=0.9, min_quality=1.0)
    before = engine.compressor.prefills
    for tenant in ("default", "another", "default", "another"):
        with pytest.raises(QualityBelowFloor):
            await replica.create(spec, caller=Caller(tenant))
    assert engine.compressor.prefills == before + 2


def test_the_oldest_refusals_are_forgotten_first() -> None:
    def refusal(*ratios: float) -> QualityBelowFloor:
        quality = quality_of(0.5)
        way = Tried(policy="keydiff", compression_ratio=0.5, codec="none", bytes=100, quality=quality).model_dump()
        return QualityBelowFloor("too little", tried=[way | {"compression_ratio": ratio} for ratio in ratios])

    refusals = NegativeCache(3)
    refusals.remember(["a", "b"], refusal(0.1, 0.2, 0.3))  # the third was dropped before it had an id
    refusals.remember(["c"], refusal(0.3))
    refusals.remember(["a", "d"], refusal(0.1, 0.4))
    found = refusals.of(["a", "b", "c", "d"])
    assert {key: tried.compression_ratio for key, tried in found.items()} == {"a": 0.1, "c": 0.3, "d": 0.4}


async def test_a_cache_that_was_never_measured_is_made_again_and_then_known(
    engine: Counting, shelf: Shelf, document: str
) -> None:
    unmeasured = Replica(engine, shelf, Scheduler(engine), quality=False)
    unmeasured.start()
    try:
        bare = await create(unmeasured, document)
        assert bare.manifest.quality is None
        before = engine.compressor.prefills
        assert (await create(unmeasured, document)).manifest.quality is None  # a plain creation leaves it so
        measured = await create(unmeasured, document, min_quality=0.1)
        assert (ids(measured), measured.existing, engine.compressor.prefills) == (ids(bare), True, before + 1)
        assert measured.manifest.quality.low >= 0.1
        assert shelf.stat(bare.manifest.id).quality == measured.manifest.quality
        await create(unmeasured, document, min_quality=0.1)
        assert engine.compressor.prefills == before + 1
    finally:
        unmeasured.stop()


async def test_of_levels_with_a_floor_only_the_smallest_good_one_is_kept(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    levels = [0.95, 0.25, 0.0]
    made = engine.run_levels([Level(engine.prepare(document, compression_ratio=ratio)) for ratio in levels])
    qualities = [one.quality.low for one in made if one.quality is not None and one.quality.low is not None]
    assert qualities[0] < qualities[1]
    before = engine.compressor.prefills
    kept = await create(replica, document, levels=levels, min_quality=qualities[1])
    assert kept.manifest.compression_ratio == 0.25
    assert [cache.id for cache in shelf.list().data] == ids(kept)
    tried = kept.manifest.tried
    assert [one.compression_ratio for one in tried] == levels
    assert tried[1].cache_id == kept.manifest.id
    assert [one.quality is None for one in tried] == [False, False, True]  # the full cache could not be smaller
    again = await create(replica, document, levels=levels, min_quality=qualities[1])
    assert (ids(again), again.existing, again.manifest.tried) == (ids(kept), True, tried)
    assert engine.compressor.prefills == before + 1
    smaller = await create(replica, document, levels=levels, min_quality=qualities[0])
    assert smaller.manifest.compression_ratio == 0.95
    assert engine.compressor.prefills == before + 2  # known to be good enough, but not on the shelf


@pytest.mark.slow
async def test_auto_is_found_again_without_a_prefill(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    choice = auto(engine, document, target=SizeTarget(0.9)).run(engine)
    before = engine.compressor.prefills
    kept = await create(replica, document, policy="auto", min_quality=0.9)
    spent = engine.compressor.prefills - before
    way = choice.level.job.identity
    assert (kept.manifest.policy, kept.manifest.compression_ratio) == (way.policy, way.compression_ratio)
    assert kept.manifest.codec == choice.level.codec
    assert [(one.policy, one.compression_ratio or None, one.codec) for one in kept.manifest.tried] == list(
        candidates(True)
    )
    assert shelf.stat(kept.manifest.id).tried == kept.manifest.tried
    again = await create(replica, document, policy="auto", min_quality=0.9)
    assert (ids(again), again.existing, engine.compressor.prefills) == (ids(kept), True, before + spent)
    shelf.delete(kept.manifest.id)
    assert ids(await create(replica, document, policy="auto", min_quality=0.9)) == ids(kept)
    assert engine.compressor.prefills == before + 2 * spent


async def test_equal_creations_at_once_are_one_piece_of_work(replica: Replica, engine: Counting, document: str) -> None:
    for fields, prefills in (({"levels": [0.5, 0.75]}, 1), ({"levels": [0.9, 0.0], "min_quality": 1.0}, 1)):
        before = engine.compressor.prefills
        many = await asyncio.gather(*(create(replica, document, **fields) for _ in range(50)))
        assert engine.compressor.prefills == before + prefills
        assert len({tuple(ids(created)) for created in many}) == 1
        assert [created.existing for created in many].count(False) == 1


async def test_a_request_of_the_job_table_names_every_level(replica: Replica, shelf: Shelf, document: str) -> None:
    shelf.requests.open("req_levels", tenant="default", body=b"{}")
    spec = CreateCache(document=document, levels=[0.5, 0.75])
    created = await replica.create(spec, caller=DEFAULT, request_id="req_levels")
    record = shelf.requests.get("req_levels", tenant="default")
    assert (record.state, list(record.cache_ids)) == ("done", ids(created))
    shelf.requests.open("req_floor", tenant="default", body=b"{}")
    with pytest.raises(QualityBelowFloor):
        await replica.create(spec.model_copy(update={"min_quality": 1.0}), caller=DEFAULT, request_id="req_floor")
    record = shelf.requests.get("req_floor", tenant="default")
    assert (record.state, record.tries) == ("failed", 1)  # it would come out the same
    assert record.error is not None
    assert record.error.details is not None
    assert [one["compression_ratio"] for one in record.error.details["tried"]] == [0.5, 0.75]
    assert (record.error.code, record.error.param) == ("quality_below_floor", "min_quality")


async def test_where_nothing_can_be_measured(replica: Replica, engine: Counting, shelf: Shelf) -> None:
    short = "The gate is 48."
    before = engine.compressor.prefills
    with pytest.raises(PolicyUnsupported, match="no quality can be measured") as refused:
        await create(replica, short, compression_ratio=0.5, min_quality=0.5)
    assert refused.value.param == "min_quality"
    assert engine.compressor.prefills == before  # refused before any work
    kept = await create(replica, short, policy="auto")
    assert (kept.manifest.policy, kept.manifest.codec, kept.manifest.quality) == ("full", "none", None)
    again = await create(replica, short, policy="auto")
    assert (ids(again), again.existing, engine.compressor.prefills) == (ids(kept), True, before + 1)
    assert (await create(replica, short, compression_ratio=0.5)).manifest.quality is None
    assert len(shelf.list().data) == 2


async def test_a_document_that_is_longer_than_the_service_takes_is_refused_before_any_work(
    engine: Counting, shelf: Shelf
) -> None:
    narrow = Replica(engine, shelf, Scheduler(engine), max_document_tokens=60)
    narrow.start()
    before = engine.compressor.prefills
    fits, long = ({"token_ids": [5] * tokens} for tokens in (60, 61))
    try:
        assert (await narrow.estimate(Estimate(**fits), caller=Caller("t"))).tokens == 60
        assert (await create(narrow, **fits)).manifest.num_tokens == 60
        for work in (create(narrow, **long), narrow.estimate(Estimate(**long), caller=Caller("t"))):
            with pytest.raises(DocumentTooLong, match=r"has 61 tokens.*takes 60 \(max_document_tokens\)") as refused:
                await work
            assert refused.value.param == "document"
    finally:
        narrow.stop()
    assert (engine.compressor.prefills, len(shelf.list().data)) == (before + 1, 1)


@in_turn({"policy": ["full", "snapkv", "kvzip"], "codec": ["none", "int4"]})
async def test_token_ids_make_the_very_same_bytes(
    replica: Replica, shelf: Shelf, document: str, policy: str, codec: str
) -> None:
    """On one machine, with one number of threads and in one dtype."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = (await create(replica, document, policy=policy, codec=codec, keep_source="tokens")).manifest
        entry = shelf.index.find(first.id, "default")
        assert entry is not None
        assert shelf.index.bury(entry, "evicted", time.time())
        manifest, source = shelf.original(first.id)
        assert isinstance(source, TokenIds)
        spec = recreation(manifest, source, keep=False, now=time.time())
        again = (await replica.create(spec, caller=DEFAULT)).manifest
    finally:
        torch.set_num_threads(threads)
    assert (again.id, again.blob_digest, again.source) == (first.id, first.blob_digest, first.source)


async def test_a_source_is_not_kept_longer_than_the_shelf_allows(
    engine: Counting, document: str, tmp_path: Path
) -> None:
    strict = Replica(engine, DiskStore.open(tmp_path / "strict", rules=Rules(max_ttl_s=100)), Scheduler(engine))
    strict.start()
    before = engine.compressor.prefills
    try:
        with pytest.raises(InvalidRequest, match="source_ttl_s: caches are kept for 100 s at most") as refusal:
            await create(strict, document, keep_source="tokens", source_ttl_s=101.0, ttl_s=50.0)
    finally:
        strict.stop()
    assert (refusal.value.param, engine.compressor.prefills) == ("source_ttl_s", before), "before any work"


async def test_a_cache_that_is_there_gets_the_labels_and_the_name_of_its_newest_creation(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    levels: dict[str, Any] = {"levels": [0.5, 0.75], "labels": {"team": "law", "year": "2025"}, "name": "draft"}
    first = await create(replica, document, **levels)
    before, revision = engine.compressor.prefills, first.manifest.revision
    same = await create(replica, document, compression_ratio=0.5)
    assert (same.manifest.name, same.manifest.revision) == ("draft", revision)  # a request that says nothing
    again = await create(replica, document, compression_ratio=0.5, labels={"team": "tax", "new": ""}, name="final")
    assert (ids(again), again.existing, engine.compressor.prefills) == (ids(first)[:1], True, before)
    assert (again.manifest.labels, again.manifest.name) == ({"team": "tax", "year": "2025", "new": ""}, "final")
    assert shelf.stat(ids(first)[0]) == again.manifest
    assert shelf.stat(ids(first)[1]).labels == {"team": "law", "year": "2025"}  # nobody asked for the other level
    await create(replica, document, **levels)
    stored = {manifest.id: manifest for manifest in shelf.list(name="draft").data}
    assert [stored[id_].labels for id_ in ids(first)] == [{**levels["labels"], "new": ""}, levels["labels"]]
    appended = (await append(replica, ids(first)[0], labels={"a": "1"})).manifest
    assert (await append(replica, ids(first)[0], labels={"b": "2"}, name="more")).manifest.id == appended.id
    assert (shelf.stat(appended.id).labels, shelf.stat(appended.id).name) == ({"a": "1", "b": "2"}, "more")


async def append(replica: Replica, cache_id: str, **fields: Any) -> Created:
    return await replica.append(cache_id, AppendCache(document=" The gate code is 4711.", **fields), caller=DEFAULT)


async def test_labels_that_many_creations_give_at_once_are_all_there(replica: Replica, document: str) -> None:
    for _ in ("a new cache", "one that is there"):
        given = [{f"label-{number}": str(number)} for number in range(20)]
        made = await asyncio.gather(*(create(replica, document, policy="full", labels=one) for one in given))
    assert {one.manifest.id for one in made} == {made[0].manifest.id}
    stored = replica.store.stat(made[0].manifest.id)
    assert stored.labels == {name: value for one in given for name, value in one.items()}
    with pytest.raises(InvalidRequest, match="has 20 labels and would have 65 with these; at most 64"):
        await create(replica, document, policy="full", labels={f"other-{number}": "" for number in range(45)})
    assert replica.store.stat(stored.id).labels == stored.labels


async def test_a_split_document_is_a_cache_for_each_part_and_they_are_found_by_their_labels(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    before = engine.compressor.prefills
    fields: dict[str, Any] = {"policy": "full", "name": "ledger.txt", "labels": {"team": "law"}, "keep_source": True}
    split = {"max_tokens": 300, "overlap_tokens": 40}
    made = await create(replica, document, split=split, **fields)
    count = len(made.caches)
    assert count >= 4
    assert engine.compressor.prefills == before + count
    manifests = [cache.manifest for cache in made.caches]
    assert all(manifest.num_tokens <= 300 for manifest in manifests)
    assert made.prefilled_tokens == sum(manifest.num_tokens for manifest in manifests)
    (split_id,) = {manifest.labels["split"] for manifest in manifests}
    assert [manifest.labels for manifest in manifests] == [
        {"document": "ledger.txt", "part": f"{number}/{count}", "split": split_id, "team": "law"}
        for number in range(1, count + 1)
    ]
    texts = [shelf.source(manifest.id) for manifest in manifests]
    assert document.startswith(str(texts[0]))
    assert document.endswith(str(texts[-1]))
    again = await create(replica, document, split=split, **fields)
    assert (ids(again), again.existing, again.prefilled_tokens) == (ids(made), True, 0)
    assert engine.compressor.prefills == before + count
    nameless = await create(replica, document, split=split, **fields | {"name": ""})
    assert {cache.manifest.labels["document"] for cache in nameless.caches} == {"ledger.txt"}
    # Another way to keep it is another split, also of a document without a name.
    other = await create(replica, document, split=split)
    labels = other.caches[0].manifest.labels
    assert labels["document"] == labels["split"] != split_id


async def test_a_creation_that_is_watched_tells_its_phases_and_then_its_caches(
    replica: Replica, engine: Counting, document: str
) -> None:
    async def watched(**fields: Any) -> list[Any]:
        spec = CreateCache(document=document, **fields)
        return [event async for event in replica.watch(spec, caller=DEFAULT)]

    *events, made = await watched(policy="knorm", compression_ratio=0.5)
    assert isinstance(made, Created)
    layers = engine.model.config.num_hidden_layers
    ends = [(event.phase, event.done, event.total) for event in events if event.done == event.total]
    assert list(dict.fromkeys(ends)) == [("prefill", layers, layers), ("quality", 1, 1), ("store", 1, 1)]
    assert all(event.seconds >= 0 and event.part is None for event in events)
    assert next(event.done for event in events if event.phase == "prefill") == 0
    assert len(await watched(policy="knorm", compression_ratio=0.5)) == 1, "it is on the shelf"
    *events, made = await watched(policy="knorm", split={"max_tokens": 600})
    assert list(dict.fromkeys(event.part for event in events)) == [
        cache.manifest.labels["part"] for cache in made.caches
    ]
    with pytest.raises(InvalidRequest, match="max_tokens is 20000"):
        await watched(split={"max_tokens": 20000})


async def test_a_part_that_two_versions_share_belongs_to_the_newest(
    replica: Replica, engine: Counting, shelf: Shelf, document: str
) -> None:
    split = {"max_tokens": 300, "overlap_tokens": 40}
    fields: dict[str, Any] = {"policy": "full", "name": "ledger.txt", "split": split}
    old = await create(replica, document, **fields, labels={"year": "2025"})
    before = engine.compressor.prefills
    new = await create(replica, document + " One more line was added.", **fields)
    assert ids(new)[:-1] == ids(old)[:-1]
    assert engine.compressor.prefills == before + 1
    (split_id,) = {cache.manifest.labels["split"] for cache in new.caches}
    stored = [shelf.stat(cache_id).labels for cache_id in ids(new)]
    assert [labels["split"] for labels in stored] == [split_id] * len(stored)
    assert [labels.get("year") for labels in stored] == ["2025"] * (len(stored) - 1) + [None]
    assert shelf.stat(ids(old)[-1]).labels["split"] != split_id


async def test_what_is_wrong_with_a_split_is_named_and_so_is_the_part_that_fails(
    replica: Replica, engine: Counting, document: str
) -> None:
    before = engine.compressor.prefills
    with pytest.raises(InvalidRequest, match="a quarter") as refused:
        await create(replica, document, split={"max_tokens": 300, "overlap_tokens": 200})
    assert refused.value.param == "split"
    with pytest.raises(InvalidRequest, match=r"max_tokens is 20000, and 'kvshelf-tiny' takes 16384"):
        await create(replica, document, split={"max_tokens": 20000})
    assert engine.compressor.prefills == before
    with pytest.raises(QualityBelowFloor, match=r"part 1/\d of the document: no level agrees") as unmeasured:
        await create(replica, document, split={"max_tokens": 300}, compression_ratio=0.95, min_quality=0.99)
    assert unmeasured.value.param == "min_quality"
    with pytest.raises(DocumentTooLong, match="--split"):
        await create(replica, document * 40)


async def test_levels_of_a_policy_that_keeps_all_are_refused(replica: Replica, document: str) -> None:
    with pytest.raises(InvalidRequest, match="takes no levels") as refused:
        await create(replica, document, policy="full", levels=[0.5])
    assert refused.value.param == "levels"


async def test_an_estimate_has_a_row_for_each_level_and_for_each_way_of_auto(replica: Replica, document: str) -> None:
    async def rows(**fields: Any) -> list[PolicyEstimate]:
        return (await replica.estimate(Estimate(document=document, **fields), caller=Caller("t"))).policies

    levels = [0.75, 0.25]
    said = await rows(policy="keydiff", levels=levels)
    made = await create(replica, document, levels=levels)
    for row, cache in zip(said, made.caches, strict=True):
        assert (row.compression_ratio, row.kept) == (
            cache.manifest.compression_ratio,
            cache.manifest.kept_tokens,
        )
        assert row.bytes_stored is not None
        assert row.bytes_stored["none"] == pytest.approx(cache.manifest.bytes_stored, rel=0.05)
    ways = await rows(policy="auto")
    told = [(row.policy, row.compression_ratio or None, codec) for row in ways for codec in row.bytes_stored or ()]
    assert told == list(candidates(True))


async def test_a_missing_cache_stays_missing_to_others(replica: Replica, shelf: Shelf, document: str) -> None:
    """What was tried names caches that are not there; and another tenant's shelf says nothing of this one's."""
    kept = await create(replica, document, levels=[0.95, 0.0], min_quality=1.0)
    other = next(one.cache_id for one in kept.manifest.tried if one.cache_id != kept.manifest.id)
    with pytest.raises(CacheNotFound):
        shelf.stat(other)
    spec = CreateCache(document=document, levels=[0.95, 0.0], min_quality=1.0)
    theirs = await replica.create(spec, caller=Caller("another"))
    assert (theirs.existing, theirs.manifest.id != kept.manifest.id) == (False, True)


async def test_episodes_are_caches_of_the_whole_document_and_a_question_goes_to_the_nearest(
    replica: Replica, engine: Counting, shelf: Shelf
) -> None:
    talk = make_conversation(3, 900, 0, engine.encoder.require_text("text").count_tokens)
    fields: dict[str, Any] = {
        "compression_ratio": 0.8, "name": "talk", "labels": {"team": "law"}, "policy_params": {"chunk": 256}
    }  # fmt: skip
    made = await create(replica, talk.text, episodes={"count": 3}, **fields)
    manifests = [cache.manifest for cache in made.caches]
    (set_id,) = {manifest.labels["episodes"] for manifest in manifests}
    assert [manifest.labels for manifest in manifests] == [
        {"team": "law", "episode": f"{number}/3", "episodes": set_id} for number in (1, 2, 3)
    ]
    assert {manifest.document_id for manifest in manifests} == {manifests[0].document_id}
    here = engine.episodes(talk.text, 3, compression_ratio=0.8, chunk=256)
    assert [shelf.get(manifest.id).to_bytes() for manifest in manifests] == [cache.to_bytes() for cache in here]
    again = await create(replica, talk.text, episodes={"count": 3}, **fields)
    assert (ids(again), again.existing, again.prefilled_tokens) == (ids(made), True, 0)
    for _, question in talk.questions[:4]:
        expected = engine.answer(here, question.text, max_new_tokens=8, route="nearest")
        asked = JointQuery(cache_ids=ids(made), prompt=question.text, max_tokens=8, route="nearest")
        answer = await replica.query(ids(made), asked, caller=DEFAULT)
        assert answer.text == expected.text
        assert list(answer.served.cache_ids) == ids(made)
        assert answer.sources == expected.sources
    plain = await create(replica, talk.text)
    asked = JointQuery(cache_ids=[*ids(made), *ids(plain)], prompt="Who?", route="nearest")
    with pytest.raises(InvalidRequest) as refused:
        await replica.query(asked.cache_ids, asked, caller=DEFAULT)
    assert refused.value.param == "cache_ids[3]"


async def test_what_is_wrong_with_episodes_is_named(replica: Replica, document: str) -> None:
    with pytest.raises(InvalidRequest, match="different windows") as refused:
        await create(replica, "One. Two. Three.", episodes={"count": 2})
    assert refused.value.param == "episodes.count"
    with pytest.raises(PolicyUnsupported, match=r"episode 1/2 of the document: the budget") as full:
        await create(replica, document, episodes={"count": 2}, budget_tokens=1)
    assert full.value.param == "compression_ratio"
