"""A replica without Ray: a real engine, a real shelf on disk, and its own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshelf.api import AppendCache, CreateCache, Query
from kvshelf.api.answers import Answer
from kvshelf.api.usage import today
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.prefill.prefill import Prefill
from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheNotFound,
    DeadlineExceeded,
    DocumentTooLong,
    DocumentTooShort,
    InternalError,
    InvalidRequest,
    ModelMismatch,
    QuotaExceeded,
    StateConflict,
    StoreUnavailable,
)
from kvshelf.store.disk import DiskStore
from kvshelf.store.index import Quota
from kvshelf.store.jobs.metering import Meter, Metering
from kvshelf.store.rules import Rules
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.memory.residents import ResidentLimits
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler

DEFAULT = Caller("default")

pytestmark = pytest.mark.anyio

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


class WatchedCompressor(Compressor):
    """Counts its prefills and calls `on_layer` after each layer of one."""

    runs = 0
    on_layer: Callable[[], None] = staticmethod(lambda: None)

    def prefill(
        self, group: Sequence[Level], *, checkpoint: Callable[[], None] | None = None, **options: Any
    ) -> Prefill:
        self.runs += 1

        def watched() -> None:
            self.on_layer()
            if checkpoint is not None:
                checkpoint()

        return super().prefill(group, **options, checkpoint=watched)


class Watched(Engine):
    _compressor: ClassVar = WatchedCompressor
    compressor: WatchedCompressor


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine(tiny_folder: Path) -> Watched:
    engine = Watched.load(str(tiny_folder), device="cpu")
    assert isinstance(engine, Watched)
    return engine


@pytest.fixture
async def replica(engine: Watched, tmp_path: Path) -> AsyncIterator[Replica]:
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine))
    replica.start()
    yield replica
    replica.stop()


def spec(**fields: Any) -> CreateCache:
    return CreateCache(**({"document": DOCUMENT} | fields))


def asked(prompt: str, max_tokens: int = 8) -> Query:
    return Query(prompt=prompt, max_tokens=max_tokens)


async def test_what_is_created_is_on_the_shelf_and_is_not_made_again(replica: Replica, engine: Watched) -> None:
    created = await replica.create(spec(labels={"kind": "log"}, name="tides"), caller=DEFAULT)
    assert not created.existing
    stored = replica.store.get(created.manifest.id)
    assert stored.to_bytes() == engine.encoded(engine.compress(DOCUMENT), "int8").to_bytes()
    assert created.manifest.labels == {"kind": "log"}
    assert created.manifest.timings.prefill_s > 0
    runs = engine.compressor.runs
    again = await replica.create(spec(), caller=DEFAULT)
    assert (again.existing, again.manifest.id, engine.compressor.runs) == (True, created.manifest.id, runs)


async def test_what_a_tenant_uses_is_counted(replica: Replica) -> None:
    """Seconds of the model for whoever it works, tokens of what ended, and the prefills that answers did without."""
    began = time.monotonic()
    made = (await replica.create(spec(), caller=Caller("me"))).manifest
    await replica.create(spec(), caller=Caller("me"))  # it is there
    replies = [await replica.query(made.id, asked("When?"), caller=Caller("me")) for _ in range(2)]
    grown = await replica.append(made.id, AppendCache(document=" And more."), caller=Caller("me"))
    replies.append(await replica.query(grown.manifest.id, asked("What?"), caller=Caller("me")))
    with pytest.raises(CacheNotFound):
        await replica.query(made.id, asked("When?"), caller=Caller("you"))
    passed_s = time.monotonic() - began
    await asyncio.sleep(0.1)  # answers are counted on a thread
    replica.meter.flush()
    (day,) = replica.store.metering.days(today(), today(), tenant=None)
    used, added_s = day.by_model[replica.engine.name], grown.manifest.timings.prefill_s
    assert (day.tenant, used.answers, used.caches_created) == ("me", 3, 2)
    assert used.cache_read_tokens == sum(reply.usage.cache_read_tokens for reply in replies)
    assert used.completion_tokens == sum(reply.usage.completion_tokens for reply in replies)
    appended = grown.manifest.num_tokens - made.num_tokens
    assert used.prefill_tokens == made.num_tokens + appended + sum(reply.usage.prefill_tokens for reply in replies)
    assert used.saved_s == pytest.approx(3 * made.timings.prefill_s + added_s)
    assert made.timings.prefill_s < used.worker_s < passed_s


class Losing(Metering):
    """Adds, and loses some of the answers."""

    lost = 2

    def add(self, *args: Any, **number: Any) -> None:
        super().add(*args, **number)
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("the answer was lost")


def test_what_the_store_has_taken_is_not_counted_again(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "home") as store:
        meter = Meter(Losing(store.index.jobs, store.index.key), "tiny")
        for answers in (1, 10):
            meter.add("me", answers=answers)
            with pytest.raises(StoreUnavailable):
                meter.flush()
        meter.flush()
        (day,) = store.metering.days(today(), today(), tenant="me")
        assert day.by_model["tiny"].answers == 11


async def test_equal_creations_at_the_same_time_are_one_prefill(replica: Replica, engine: Watched) -> None:
    many = await asyncio.gather(*(replica.create(spec(), caller=DEFAULT) for _ in range(20)))
    assert engine.compressor.runs == 1
    assert len({created.manifest.id for created in many}) == 1
    assert [created.existing for created in many].count(False) == 1


async def test_one_of_two_equal_creations_leaves_and_the_other_is_done(replica: Replica, engine: Watched) -> None:
    first = asyncio.ensure_future(replica.create(spec(), caller=DEFAULT))
    second = asyncio.ensure_future(replica.create(spec(), caller=DEFAULT))
    while not len(replica.creations.flights):
        await asyncio.sleep(0)
    first.cancel()
    assert (await second).manifest.id.startswith("kvs_")
    assert engine.compressor.runs == 1


async def test_a_creation_that_everybody_left_stops_within_a_layer(replica: Replica, engine: Watched) -> None:
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    layers: list[int] = []

    def on_layer() -> None:
        layers.append(1)
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(_cancelled(task), loop).result(30)

    engine.compressor.on_layer = on_layer
    task = asyncio.ensure_future(replica.create(spec(), caller=DEFAULT))
    await reached.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.compressor.on_layer = lambda: None
    assert not (await replica.create(spec(), caller=DEFAULT)).existing  # the thread is free, and nothing was stored
    assert len(layers) == 1


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"document": ""}, DocumentTooShort),
        ({"document": None, "token_ids": [5] * 16385}, DocumentTooLong),
        ({"policy": "magic"}, InvalidRequest),
        ({"policy_params": {"windows": 3}}, InvalidRequest),
        ({"policy": "full", "compression_ratio": 0.5}, InvalidRequest),
    ],
)
async def test_what_cannot_be_compressed_is_refused_before_any_work(
    replica: Replica, engine: Watched, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await replica.create(spec(**fields), caller=DEFAULT)
    assert engine.compressor.runs == 0


async def test_answers_at_once_are_those_that_each_prompt_gets(replica: Replica, engine: Watched) -> None:
    cache_id = (await replica.create(spec(policy="keydiff", compression_ratio=0.5), caller=DEFAULT)).manifest.id
    cache = replica.store.get(cache_id)
    prompts = ("tide", "Who keeps the green book?", "1984", "a b c d")
    asking = (replica.query(cache_id, asked(prompt), caller=DEFAULT) for prompt in prompts)
    replies = await asyncio.gather(*asking)
    answers = [engine.answer(cache, prompt, max_new_tokens=8) for prompt in prompts]
    told = [(reply.text, reply.token_ids, reply.finish_reason, reply.usage.model_dump()) for reply in replies]
    assert told == [(each.text, each.token_ids, each.finish_reason, dict(each.usage)) for each in answers]
    assert all(reply.served.load_ms > 0 and reply.served.compression_ratio == 0.5 for reply in replies)


async def test_a_stream_is_the_answer_in_pieces(replica: Replica) -> None:
    cache_id = (await replica.create(spec(), caller=DEFAULT)).manifest.id
    whole = await replica.query(cache_id, asked("tide", max_tokens=30), caller=DEFAULT)
    pieces = [piece async for piece in replica.stream(cache_id, asked("tide", max_tokens=30), caller=DEFAULT)]
    *texts, last = pieces
    assert isinstance(last, Answer)
    assert (last.text, last.token_ids, last.usage) == (whole.text, whole.token_ids, whole.usage)
    assert len(texts) > 10
    assert "".join(texts) == whole.text  # type: ignore[arg-type]  # all but the last are text


async def test_work_that_takes_longer_than_its_caller_waits(replica: Replica) -> None:
    with pytest.raises(DeadlineExceeded):
        await replica.create(spec(), caller=Caller("default", 1e-6))
    cache_id = (await replica.create(spec(), caller=DEFAULT)).manifest.id
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await replica.query(cache_id, asked("tide", max_tokens=10_000), caller=Caller("default", 0.1))
    assert await replica.query(cache_id, asked("tide"), caller=DEFAULT)


async def test_leaving_a_stream_ends_its_work(replica: Replica) -> None:
    cache_id = (await replica.create(spec(), caller=DEFAULT)).manifest.id
    stream = replica.stream(cache_id, asked("tide", max_tokens=10_000), caller=DEFAULT)
    await anext(stream)
    await stream.aclose()
    end = time.monotonic() + 30
    while replica.scheduler.open and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert not replica.scheduler.open


async def test_no_room_for_a_cache_is_an_error_in_time(engine: Watched, tmp_path: Path) -> None:
    """Memory for less than one cache: while one is being asked, another waits, and not for ever."""
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine), ResidentLimits(max_bytes=1))
    replica.start()
    try:
        first, second = [
            (await replica.create(spec(document=DOCUMENT + text), caller=DEFAULT)).manifest.id for text in "ab"
        ]
        stream = replica.stream(first, asked("tide", max_tokens=10_000), caller=DEFAULT)
        await anext(stream)
        with pytest.raises(DeadlineExceeded, match="memory for caches is full"):
            await replica.query(second, asked("tide"), caller=Caller("default", 0.3))
        await stream.aclose()
        assert await replica.query(second, asked("tide"), caller=DEFAULT)
    finally:
        replica.stop()


async def several(replica: Replica) -> list[str]:
    """Three caches: of different lengths, policies and codecs."""
    specs = [
        spec(policy="full"),
        spec(document=DOCUMENT * 2, policy="keydiff", codec="int4"),
        spec(document="A lighthouse stands on the point. " * 9, policy="full", codec="int8"),
    ]
    return [(await replica.create(each, caller=DEFAULT)).manifest.id for each in specs]


async def test_several_documents_are_one_question(replica: Replica, engine: Watched) -> None:
    """The engine's answer over the same caches, whole and in pieces, cold and from memory; and the ids of sources."""
    ids = await several(replica)
    caches = [replica.store.get(id) for id in ids]
    right = engine.answer(caches, "Who keeps the green book?", max_new_tokens=8)
    query = asked("Who keeps the green book?")
    cold = await replica.query(ids, query, caller=DEFAULT)
    *texts, warm = [piece async for piece in replica.stream(ids, query, caller=DEFAULT)]
    assert isinstance(warm, Answer)
    assert "".join(texts) == warm.text  # type: ignore[arg-type]  # all but the last are text
    for reply in (cold, warm):
        assert (reply.text, reply.token_ids, reply.usage) == (right.text, right.token_ids, right.usage)
        assert [source.cache_id for source in reply.shares] == ids
        assert list(reply.sources) == pytest.approx(list(right.sources), abs=1e-6)
        assert reply.served.cache_id == ids[1]
    assert (cold.served.read_from, warm.served.read_from) == ("home", "memory")
    assert len(replica.questions.residents) == 3
    assert not any(resident.users for resident in replica.questions.residents.caches.values())


async def test_an_error_names_the_cache_that_it_is_of(replica: Replica, other_engine: Engine, tmp_path: Path) -> None:
    """A flipped bit, found while layers arrive; another model; deleted or expired after the service looked."""
    ids = await several(replica)
    blob = max((tmp_path / "home" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    damaged = max(ids, key=lambda id: replica.store.stat(id, tenant="default").bytes_stored)
    with pytest.raises(CacheCorrupt) as corrupt:
        await replica.query(ids, asked("tide"), caller=DEFAULT)
    assert corrupt.value.details["cache_id"] == damaged
    sound = [id for id in ids if id != damaged]
    assert await replica.query(sound, asked("tide"), caller=DEFAULT)

    put, compress = replica.store.put, other_engine.compress
    foreign = put(compress(DOCUMENT), tenant="default").id
    late = put(replica.engine.compress(DOCUMENT + "!"), tenant="default", expires_at=time.time() + 0.01).id
    await asyncio.sleep(0.02)
    for error, named in ((ModelMismatch, foreign), (CacheExpired, late), (CacheNotFound, "kvs_" + "0" * 40)):
        with pytest.raises(error) as refused:
            await replica.query([sound[0], named, sound[1]], asked("tide"), caller=DEFAULT)
        assert refused.value.details["cache_id"] == named
    assert not any(resident.users for resident in replica.questions.residents.caches.values())


async def test_leaving_a_stream_about_several_ends_its_work_and_lets_go_of_all(replica: Replica) -> None:
    ids = await several(replica)
    stream = replica.stream(ids, asked("tide", max_tokens=10_000), caller=DEFAULT)
    await anext(stream)
    assert all(replica.questions.residents.caches["default", id].users == 1 for id in ids)
    await stream.aclose()
    end = time.monotonic() + 30
    while replica.scheduler.open and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert not replica.scheduler.open
    assert not any(resident.users for resident in replica.questions.residents.caches.values())


async def test_documents_that_memory_never_holds_together_are_refused_at_once(engine: Watched, tmp_path: Path) -> None:
    """And the others wait for no one: questions about two of three, with memory for two, all come through."""
    documents = [DOCUMENT + text for text in "abc"]
    nbytes = engine.attach(engine.compress(documents[0], policy="full")).nbytes
    limits = ResidentLimits(max_bytes=int(2.5 * nbytes))
    replica = Replica(engine, DiskStore.open(tmp_path / "home"), Scheduler(engine), limits)
    replica.start()
    try:
        made = [await replica.create(spec(document=text, policy="full"), caller=DEFAULT) for text in documents]
        ids = [each.manifest.id for each in made]
        with pytest.raises(InvalidRequest, match="of the 3 documents of this question, 2 take"):
            await replica.query(ids, asked("tide"), caller=Caller("default", 20))
        pairs = [[ids[0], ids[1]], [ids[1], ids[2]], [ids[2], ids[0]], [ids[1], ids[0]]]
        asking = (replica.query(pair, asked("tide"), caller=Caller("default", 60)) for pair in pairs)
        assert len(await asyncio.gather(*asking)) == 4
    finally:
        replica.stop()


async def test_a_flipped_bit_never_reaches_the_model(replica: Replica, tmp_path: Path) -> None:
    cache_id = (await replica.create(spec(), caller=DEFAULT)).manifest.id
    (blob,) = (tmp_path / "home" / "blobs").iterdir()
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CacheCorrupt):
        await replica.query(cache_id, asked("tide"), caller=DEFAULT)
    assert not (await replica.create(spec(), caller=DEFAULT)).existing  # it is made anew
    assert await replica.query(cache_id, asked("tide"), caller=DEFAULT)


async def test_a_cache_of_another_model_or_tenant_is_refused(replica: Replica, other_engine: Engine) -> None:
    foreign = replica.store.put(other_engine.compress(DOCUMENT), tenant="default").id
    with pytest.raises(ModelMismatch) as refused:
        await replica.query(foreign, asked("tide"), caller=DEFAULT)
    assert refused.value.details["field"] == "weights"
    with pytest.raises(CacheNotFound):
        await replica.query(foreign, asked("tide"), caller=Caller("somebody else"))


async def test_a_cache_lives_as_long_as_its_newest_request_asks(replica: Replica) -> None:
    expiries = []
    for fields in ({"ttl_s": 100.0}, {"ttl_s": 1000.0}, {"ttl_s": 10.0}, {}):
        expiries.append((await replica.create(spec(**fields), caller=DEFAULT)).manifest.expires_at)
    assert expiries[0] < expiries[1] == expiries[2]
    assert expiries[3] is None


async def test_a_used_up_quota_is_said_before_the_prefill(engine: Watched, tmp_path: Path) -> None:
    store = DiskStore.open(tmp_path / "home", rules=Rules(quota=Quota(max_caches=1)))
    replica = Replica(engine, store, Scheduler(engine))
    replica.start()
    try:
        await replica.create(spec(), caller=DEFAULT)
        runs = engine.compressor.runs
        with pytest.raises(QuotaExceeded):
            await replica.create(spec(policy="knorm"), caller=DEFAULT)
        assert engine.compressor.runs == runs
        assert (await replica.create(spec(), caller=DEFAULT)).existing
        assert not (await replica.create(spec(policy="knorm"), caller=Caller("another"))).existing
        store.requests.open("req_1", tenant="default", body=b"{}")
        with pytest.raises(QuotaExceeded):
            await replica.create(spec(policy="knorm"), caller=DEFAULT, request_id="req_1")
        assert store.requests.get("req_1", tenant="default").state == "failed"  # trying again frees nothing
    finally:
        replica.stop()


async def test_a_default_lifetime_prolongs_and_never_shortens(engine: Watched, tmp_path: Path) -> None:
    now = [1000.0]
    rules = Rules(default_ttl_s=100)
    replica = Replica(engine, DiskStore.open(tmp_path / "home", rules=rules, now=lambda: now[0]), Scheduler(engine))
    replica.start()
    try:
        expiries = []
        for fields in ({}, {"ttl_s": 500.0}, {}):
            expiries.append((await replica.create(spec(**fields), caller=DEFAULT)).manifest.expires_at)
            now[0] += 50
        assert expiries == [1100, 1550, 1550]
    finally:
        replica.stop()


async def test_a_source_is_kept_once_for_new_and_for_old_caches(replica: Replica) -> None:
    store = replica.store
    bare = (await replica.create(spec(), caller=DEFAULT)).manifest
    kept = await asyncio.gather(*(replica.create(spec(keep_source=True), caller=DEFAULT) for _ in range(5)))
    assert [bare.has_source, *(created.manifest.has_source for created in kept)] == [False] + [True] * 5
    assert store.source(bare.id) == DOCUMENT
    many = [replica.create(spec(keep_source=True, policy="knorm"), caller=DEFAULT) for _ in range(5)]
    ids = {created.manifest.id for created in await asyncio.gather(*many)}
    assert store.source(ids.pop()) == DOCUMENT
    assert not ids


async def test_an_attempt_is_counted_before_the_work_and_its_end_recorded(replica: Replica, engine: Watched) -> None:
    requests = replica.store.requests
    states: list[tuple[str, int]] = []

    def on_layer() -> None:
        record = requests.get("req_1", tenant="default")
        states.append((record.state, record.attempts))

    engine.compressor.on_layer = on_layer
    requests.open("req_1", tenant="default", body=b"{}")
    created = await replica.create(spec(), caller=DEFAULT, request_id="req_1")
    assert set(states) == {("running", 1)}
    record = requests.get("req_1", tenant="default")
    assert (record.state, record.cache_ids) == ("done", (created.manifest.id,))
    with pytest.raises(StateConflict):
        await replica.create(spec(), caller=DEFAULT, request_id="req_1")


async def test_a_failure_of_the_caller_is_final_and_one_of_ours_is_tried_again(
    replica: Replica, engine: Watched
) -> None:
    requests = replica.store.requests
    requests.open("req_bad", tenant="default", body=b"{}")
    with pytest.raises(DocumentTooShort):
        await replica.create(spec(document=""), caller=DEFAULT, request_id="req_bad")
    record = requests.get("req_bad", tenant="default")
    assert record.error is not None
    assert (record.state, record.error.code) == ("failed", "document_too_short")

    def broken() -> None:
        raise ZeroDivisionError

    engine.compressor.on_layer = broken
    for _ in range(2):  # asked for once more it has all its tries again
        requests.open("req_bug", tenant="default", body=b"{}")
        seen = []
        for _ in range(3):
            with pytest.raises(InternalError):
                await replica.create(spec(), caller=DEFAULT, request_id="req_bug")
            seen.append(requests.get("req_bug", tenant="default").state)
        assert seen == ["queued", "queued", "failed"]


@pytest.fixture
def other_engine(tiny_folder: Path) -> Engine:
    """The same architecture and tokenizer with one other weight."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    return Engine(model, AutoTokenizer.from_pretrained(tiny_folder), name="other")
