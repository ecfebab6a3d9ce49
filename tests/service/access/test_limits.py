"""Limits of tenants: the bucket, what is open at once, and turns. No service is started here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from kvshelf import open_store
from kvshelf.api import CreateCache, Query, Usage
from kvshelf.api.answers import Answer, Phase, Piece, Served
from kvshelf.errors import DeadlineExceeded, InternalError, InvalidRequest, QueueFull, RateLimited, RequestTimeout
from kvshelf.service.access.limits import RateLimiter, TenantLimits
from kvshelf.service.engines import MAX_UNREAD_PIECES, EngineClient
from kvshelf.service.jobs.background import Background
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestTable
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.api import Created, ReplicaApi, Stored
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.queues import Rounds


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    clock = Clock()
    limiter = RateLimiter(6, clock=clock)
    assert limiter.left("acme") == (6, 0)
    assert [limiter.take("acme") for _ in range(6)] == [0] * 6
    assert limiter.take("acme") == pytest.approx(10)
    assert limiter.take("other") == 0
    assert limiter.left("acme") == (0, pytest.approx(60))
    clock.now += 4
    assert limiter.take("acme") == pytest.approx(6)
    clock.now += 6
    assert limiter.take("acme") == 0
    assert limiter.take("acme") == pytest.approx(10)
    clock.now += 3600
    assert limiter.left("acme") == (6, 0)


def test_no_minute_has_more_than_its_requests_and_the_bucket() -> None:
    """What is refused costs nothing, however often it is tried: over ten minutes the rate is met within one bucket."""
    clock, chance = Clock(), random.Random(3)
    limiter = RateLimiter(30, clock=clock)
    granted = 0
    for _ in range(6000):
        clock.now += chance.expovariate(10)
        granted += limiter.take("acme") == 0
    minutes = (clock.now - 1000) / 60
    assert 30 * minutes - 1 <= granted <= 30 * minutes + 30


def test_a_bucket_goes_below_zero_for_what_was_used_already() -> None:
    clock = Clock()
    limiter = RateLimiter(600, clock=clock)
    limiter.spend("acme", 600)
    assert (limiter.debt_s("acme"), limiter.left("acme")) == (0, (0, pytest.approx(60)))
    limiter.spend("acme", 50)
    assert limiter.debt_s("acme") == pytest.approx(5)
    assert limiter.left("acme") == (0, pytest.approx(65))
    assert limiter.debt_s("other") == 0
    clock.now += 5
    assert limiter.debt_s("acme") == pytest.approx(0)
    clock.now += 6
    assert (limiter.debt_s("acme"), limiter.left("acme")) == (0, (60, pytest.approx(54)))


def test_tokens_are_counted_after_the_work_and_then_new_work_waits() -> None:
    limits = TenantLimits(9, None, 60_000, max_held_bytes=1 << 20)
    limits.require_tokens("acme")
    assert limits.headers("acme")["x-ratelimit-remaining-tokens"] == "60000"
    limits.spend_tokens("acme", 70_000)  # it was allowed to begin
    with pytest.raises(RateLimited, match="60000 tokens a minute") as refused:
        limits.require_tokens("acme")
    assert 9 < refused.value.details["retry_after_s"] <= 10
    with limits.request("acme"):  # what takes no tokens goes on
        headers = limits.headers("acme")
    assert headers.keys() == {f"x-ratelimit-{kind}-tokens" for kind in ("limit", "remaining", "reset")}
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("60000", "0")
    assert 69 < float(headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 70
    assert (limits.token_rate("acme").used, limits.token_rate("acme").left) == (60_000, 0)
    limits.require_tokens("other")
    free = TenantLimits(9, None, max_held_bytes=1 << 20)
    free.spend_tokens("acme", 10**9)
    free.require_tokens("acme")
    assert (free.headers("acme"), free.token_rate("acme").used) == ({}, None)


def test_so_many_requests_are_open_and_no_more() -> None:
    limits = TenantLimits(2, None, max_held_bytes=1 << 20)
    with limits.request("acme"), limits.request("acme"):
        with pytest.raises(RateLimited) as refused, limits.request("acme"):
            pass
        assert refused.value.details["retry_after_s"] > 0
        with limits.request("other"):
            pass
    with pytest.raises(ZeroDivisionError), limits.request("acme"):
        raise ZeroDivisionError
    with limits.request("acme"), limits.request("acme"):
        pass
    assert limits.headers("acme") == {}


def test_a_request_beyond_the_rate_is_told_when_to_come_back() -> None:
    limits = TenantLimits(1, 60, max_held_bytes=1 << 20)
    for left in range(59, -1, -1):
        with limits.request("acme"):
            assert limits.headers("acme")["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(RateLimited) as refused, limits.request("acme"):
        pass
    assert 0 < refused.value.details["retry_after_s"] <= 1
    headers = limits.headers("acme")
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert 59 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert limits.headers("other")["x-ratelimit-remaining-requests"] == "60"


def test_a_request_that_is_refused_for_others_that_are_open_costs_nothing() -> None:
    limits = TenantLimits(1, 60, max_held_bytes=1 << 20)
    with limits.request("acme"):
        for _ in range(100):
            with pytest.raises(RateLimited), limits.request("acme"):
                pass
        assert limits.headers("acme")["x-ratelimit-remaining-requests"] == "59"


def test_lines_are_served_in_turn() -> None:
    rounds: Rounds[int] = Rounds()
    for number in range(4):
        rounds.add("a", number)
    rounds.add("b", 10)
    rounds.add("c", 20)
    rounds.add("c", 21)
    rounds.remove("a", 1)
    rounds.remove("nobody", 1)
    assert len(rounds) == 6
    assert [rounds.take() for _ in range(6)] == [0, 10, 20, 2, 21, 3]
    with pytest.raises(IndexError):
        rounds.take()


class Work:
    """Requests of tenants to a queue, and the order in which they got their slots."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, deadline_s: float = 60) -> None:
        """A request of the tenant that its name begins with. Returns once it has its slot or waits for it."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, deadline_s))
        await settle()

    async def _run(self, name: str, deadline_s: float) -> None:
        async with self.queue.turn(name[0], deadline_s) as left_s:
            assert 0 <= left_s <= deadline_s
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def drop(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_one_request_waits_for_one_slot_behind_a_thousand_of_another_tenant() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 2, 2000))
        for number in range(1000):
            await work.ask(f"a{number}")
        assert work.began == ["a0", "a1"]
        await work.ask("b0")
        await work.end("a0")
        assert work.began == ["a0", "a1", "a2"]
        await work.end("a1")
        assert work.began[-1] == "b0"

    run(test())


def test_tenants_get_slots_alike_and_their_own_in_order() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 100))
        await work.ask("x")
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
            await work.ask(name)
        order = ["x", "a0", "b0", "c0", "a1", "b1", "a2", "a3"]
        for name in order:
            await work.end(name)
        assert work.began == order
        await work.ask("b9")
        assert work.began[-1] == "b9"

    run(test())


def test_who_leaves_takes_no_slot_along() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 100))
        for name in ("a0", "a1", "b0", "b1"):
            await work.ask(name)
        await work.drop("a1")
        await work.end("a0")
        assert work.began[-1] == "b0"
        await work.drop("b0")
        assert work.began[-1] == "b1"
        await work.end("b1")
        await work.ask("c0")
        assert work.began[-1] == "c0"

    run(test())


def test_who_leaves_makes_room_in_the_queue() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 1))
        await work.ask("a0")
        await work.ask("a1")
        await work.drop("a1")
        await work.ask("b0")
        await work.end("a0")
        assert work.began == ["a0", "b0"]

    run(test())


def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 100))
        for name in ("a0", "b0", "c0"):
            await work.ask(name)
        work.ends["a0"].set()
        await asyncio.sleep(0)  # a0 ends and hands over; b0 has not noticed yet
        work.tasks["b0"].cancel()
        await settle()
        assert work.began == ["a0", "c0"]

    run(test())


def test_slots_are_neither_lost_nor_made_by_chance() -> None:
    """Requests come, end and leave at random: never are more at work than there are slots, and then all are free."""

    async def test() -> None:
        chance = random.Random(7)
        queue = FairQueue("work", 3, 5)
        at_work = most = 0

        async def request(tenant: str) -> None:
            nonlocal at_work, most
            async with queue.turn(tenant, chance.choice([0.0, 0.001, 60])):
                at_work += 1
                most = max(most, at_work)
                try:
                    await asyncio.sleep(chance.random() / 1000)
                finally:
                    at_work -= 1

        tasks = []
        for _ in range(3000):
            tasks.append(asyncio.create_task(request(chance.choice("aaaabbc"))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() / 2000)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds == {type(None), asyncio.CancelledError, DeadlineExceeded, QueueFull}
        assert (most, at_work) == (3, 0)
        work = Work(queue)
        for name in ("a0", "b0", "c0"):
            await work.ask(name)
        assert len(work.began) == 3

    run(test())


def test_the_tenant_with_most_requests_makes_room() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 3))
        for name in ("a0", "a1", "a2", "a3"):
            await work.ask(name)
        await work.ask("a4")
        refused = work.tasks["a4"].exception()
        assert isinstance(refused, QueueFull)
        assert refused.details["retry_after_s"] >= 0.5
        await work.ask("b0")
        assert isinstance(work.tasks["a3"].exception(), QueueFull)
        await work.ask("b1")
        assert isinstance(work.tasks["b1"].exception(), QueueFull)  # two and two would be two and one
        await work.ask("c0")
        assert isinstance(work.tasks["a2"].exception(), QueueFull)
        for name in ("a0", "a1", "b0", "c0"):
            await work.end(name)
        assert work.began == ["a0", "a1", "b0", "c0"]

    run(test())


def test_who_waits_too_long_is_told() -> None:
    async def test() -> None:
        work = Work(FairQueue("work", 1, 3))
        await work.ask("a0")
        await work.ask("b0", deadline_s=0.01)
        await asyncio.wait([work.tasks["b0"]])
        assert isinstance(work.tasks["b0"].exception(), DeadlineExceeded)
        await work.end("a0")
        await work.ask("c0")
        assert work.began == ["a0", "c0"]

    run(test())


class Creator:
    """Stands for the workers: remembers whose creations it is asked for, which fail for good."""

    def __init__(self, requests: RequestTable) -> None:
        self.asked: list[str] = []
        self._requests = requests

    async def create(self, _: CreateCache, *, caller: Caller, request_id: str, **__: Any) -> None:
        self.asked.append(caller.tenant)
        attempt = self._requests.start(request_id, worker="test", lease_s=9)
        self._requests.fail(request_id, attempt, code="internal", message="a test", final=True)
        raise InternalError("a test")


def test_creations_in_the_background_take_turns_too(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        creator = Creator(store.requests)
        background = Background(store, {"m": cast(EngineClient, creator)}, deadline_s=9, max_unfinished=20)
        for number in range(20):
            await background.submit(CreateCache(model="m", document=str(number)), "a")
        await background.submit(CreateCache(model="m", document="0"), "b")
        background.start()
        while len(creator.asked) < 21:
            await asyncio.sleep(0.01)
        await background.stop()
        assert "b" in creator.asked[:3]
        assert creator.asked.count("a") == 20

    with open_store(f"disk://{tmp_path}/shelf") as store:
        run(test(store))


ANSWER = Answer(
    "0 1",
    [5, 6, 7],
    "stop",
    Usage(cache_read_tokens=1000, read_tokens=500, prefill_tokens=20, completion_tokens=3),
    served=Served(id="ans_1", cache_id="kvs", phases=(Phase("prefill", 0.0, 1.0),)),
)


MANIFEST = Manifest.model_construct(
    id="kvs",
    identity={"model": {"dtype": "float32"}},
    policy="full",
    num_tokens=400,
    kept_tokens=400,
    bytes_full=9,
    bytes_stored=9,
    quality=None,
)


class Talker:
    """Stands for the workers: says what it is told to, and remembers whether it was let go."""

    model, parent = "talker", None
    closed = False

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.asked: list[str] = []

    def require_bounded(self, *_: Any) -> None:
        """Texts are short here."""

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Piece | Answer, None]:
        try:
            for number in range(self.pieces):
                yield Piece(str(number))
                await asyncio.sleep(0)
            yield ANSWER
        finally:
            self.closed = True

    async def call(self, method: Callable[..., Any], asked: Any, *rest: Any, **_: Any) -> Created | Answer:
        if method is ReplicaApi.query:
            (query,) = rest
            self.asked.append(query.prompt)
            await asyncio.sleep(0)
            return ANSWER
        known = asked.document == "on the shelf"
        phases = () if known else (Phase("prefill", 0.0, 1.0),)
        prefilled = 0 if known else MANIFEST.num_tokens
        return Created(tuple(Stored(MANIFEST, existing=False) for _ in range(2)), phases, prefilled_tokens=prefilled)


def fair(talker: Talker, **told: Any) -> EngineClient:
    settings = cast(
        Settings, SimpleNamespace(replicas=1, max_open_generations=1, max_ongoing_requests=9, max_queued_requests=9)
    )
    return EngineClient(cast(RemoteEngine, talker), settings, Metrics(), NoOpTracer(), **told)


ASKED = Query(prompt="?")


def test_a_reader_who_takes_nothing_holds_no_slot_and_is_cut_off() -> None:
    async def test() -> None:
        talker = Talker(MAX_UNREAD_PIECES + 10)
        engine = fair(talker)
        slow = engine.stream("kvs", ASKED, caller=Caller("a", 60))
        assert await anext(slow) == "0"
        while not talker.closed:
            await asyncio.sleep(0)
        quick = engine.stream("kvs", ASKED, caller=Caller("b", 60))
        assert [piece async for piece in quick] == [*(str(number) for number in range(talker.pieces)), ANSWER]
        for number in range(1, MAX_UNREAD_PIECES + 1):
            assert await anext(slow) == str(number)
        with pytest.raises(RequestTimeout):
            await anext(slow)

    run(test())


def test_a_reader_who_leaves_ends_the_work() -> None:
    async def test() -> None:
        talker = Talker(10**9)
        engine = fair(talker)
        stream = engine.stream("kvs", ASKED, caller=Caller("a", 60))
        assert await anext(stream) == "0"
        await stream.aclose()
        assert talker.closed
        again = engine.stream("kvs", ASKED, caller=Caller("a", 60))
        assert await anext(again) == "0"
        await again.aclose()

    run(test())


def test_each_prompt_of_a_question_takes_a_turn_of_its_own() -> None:
    """256 prompts took one turn together, and another tenant's question waited for all of them."""

    async def test() -> None:
        talker = Talker(0)
        engine = fair(talker)
        many = Query(prompt=[f"many {number}" for number in range(256)])
        asking = asyncio.create_task(engine.query("kvs", many, caller=Caller("a", 60)))
        while not talker.asked:
            await asyncio.sleep(0)
        before = len(talker.asked)
        await engine.query("kvs", ASKED, caller=Caller("b", 60))
        assert talker.asked.index("?") <= before + 1
        assert len(await asking) == 256
        assert [prompt for prompt in talker.asked if prompt != "?"] == many.prompt

    run(test())


def test_the_first_error_of_a_prompt_ends_the_others() -> None:
    async def test() -> None:
        talker = Talker(0)

        async def call(_: Callable[..., Any], __: str, query: Query, **___: Any) -> Answer:
            if query.prompt == "bad":
                raise InvalidRequest("bad")
            await asyncio.sleep(60)
            return ANSWER

        talker.call = call  # type: ignore[assignment, method-assign]
        prompts = Query(prompt=["bad", "good", "good"])
        with pytest.raises(InvalidRequest, match="bad"):
            await asyncio.wait_for(fair(talker).query("kvs", prompts, caller=Caller("a", 60)), 5)

    run(test())


def test_a_tenant_s_tokens_are_those_that_went_through_the_model_and_came_out() -> None:
    async def test() -> None:
        spent: list[tuple[str, int]] = []
        engine = fair(Talker(5), spend=lambda tenant, tokens: spent.append((tenant, tokens)))
        call: dict[str, Any] = {"caller": Caller("a", 60)}
        await engine.create(CreateCache(document="new"), **call)
        await engine.create(CreateCache(document="on the shelf"), **call)
        await engine.query("kvs", Query(prompt=["one", "two"]), **call)
        assert [piece async for piece in engine.stream("kvs", ASKED, **call)][-1] == ANSWER
        assert spent == [("a", 400), ("a", 0), ("a", 23), ("a", 23), ("a", 23)]
        left = fair(Talker(10**9), spend=lambda tenant, tokens: spent.append((tenant, tokens)))
        stream = left.stream("kvs", ASKED, **call)
        assert [await anext(stream) for _ in range(3)] == ["0", "1", "2"]
        await stream.aclose()
        assert spent[-1][1] >= 3

    run(test())
