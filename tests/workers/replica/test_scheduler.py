"""The scheduler with a real engine. Where a test needs work to wait, it holds the scheduler's thread itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.reduction import SuffixReducer
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.prefill.prefill import Prefill
from kvshelf.engine.summary import Codes
from kvshelf.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    QueueFull,
    StateConflict,
    StoreUnavailable,
)
from kvshelf.store.url import open_store
from kvshelf.workers.replica.create.spec import Levels
from kvshelf.workers.replica.queues import UNMEASURED_RETRY_S, AnswerOrder, Pace
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf.workers.replica.ticket import Ticket
from kvshelf_bench.models.small import small_model

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20
WAIT_S = 60.0


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def job(engine: Engine) -> Job:
    return engine.prepare(DOCUMENT)


@pytest.fixture(scope="module")
def cache(engine: Engine, job: Job) -> CompressedCache:
    return engine.run(job).cache


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, SchedulerLimits(max_open=4, max_waiting=4, max_compressions=2))
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()


Started = Callable[[Engine, SchedulerLimits], Scheduler]


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts schedulers that end with the test, whatever its end: a thread that is left would hold the engine."""
    with ExitStack() as stack:

        def start(engine: Engine, limits: SchedulerLimits) -> Scheduler:
            scheduler = Scheduler(engine, limits)
            scheduler.start()
            stack.callback(scheduler.stop)
            return scheduler

        yield start


def test_one_scheduler_runs_an_engine(scheduler: Scheduler, engine: Engine, cache: CompressedCache) -> None:
    """Two corrupted the heap. A scheduler that was refused may start once the first one has stopped."""
    other = Scheduler(engine)
    with pytest.raises(StateConflict, match="is run by another scheduler"):
        other.start()
    assert not other.alive
    with pytest.raises(NoWorker):
        other.generate(cache, engine.encode_query(cache, "What?"), Sampling(max_tokens=2))
    scheduler.stop()
    other.start()
    try:
        assert other.generate(cache, engine.encode_query(cache, "What?"), Sampling(max_tokens=2)).future.result(WAIT_S)
    finally:
        other.stop()


def alone(job: Job) -> Levels:
    """The work of one level, not measured."""
    return Levels((Level(job),), quality=False)


class Gate:
    """Holds the scheduler's thread inside the first piece of text of a generation until it is opened."""

    def __init__(self, scheduler: Scheduler, engine: Engine, cache: CompressedCache) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()
        query = engine.encode_query(cache, "hold on")
        self.ticket = scheduler.generate(cache, query, Sampling(max_tokens=8), order=AnswerOrder(on_text=self._hold))
        assert self.entered.wait(WAIT_S)

    def _hold(self, _: str) -> None:
        self.entered.set()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


def test_a_compression_through_the_scheduler_is_the_engine_s_own(
    scheduler: Scheduler, engine: Engine, job: Job
) -> None:
    ticket = scheduler.compress(alone(job))
    assert ticket.future.result(WAIT_S)[0].cache.to_bytes() == engine.run(job).cache.to_bytes()
    assert ticket.queue_s >= 0


def test_concurrent_answers_are_those_of_one_after_the_other(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache
) -> None:
    questions = ["tide", "Who keeps the green book?", "1984", "a b c d"]
    alone = [engine.answer(cache, question, max_new_tokens=12) for question in questions]
    pieces: dict[str, list[str]] = {question: [] for question in questions}
    tickets = [
        scheduler.generate(
            cache,
            engine.encode_query(cache, question),
            Sampling(max_tokens=12),
            order=AnswerOrder(on_text=pieces[question].append),
        )
        for question in questions
    ]
    together = [ticket.future.result(WAIT_S) for ticket in tickets]
    assert together == alone
    assert ["".join(pieces[question]) for question in questions] == [answer.text for answer in alone]
    assert len({answer.text for answer in alone}) == 4  # equal answers could not tell a mix-up


def test_a_question_is_answered_inside_a_compression(
    scheduler: Scheduler, engine: Engine, job: Job, cache: CompressedCache
) -> None:
    gate = Gate(scheduler, engine, cache)
    order: list[str] = []
    compressing = scheduler.compress(alone(job))
    asking = scheduler.generate(cache, engine.encode_query(cache, "When?"), Sampling(max_tokens=2))
    compressing.future.add_done_callback(lambda _: order.append("compression"))
    asking.future.add_done_callback(lambda _: order.append("answer"))
    gate.open()
    wait([compressing.future, asking.future], WAIT_S)
    assert order == ["answer", "compression"]


def test_a_pass_runs_between_two_layers_of_a_compression(scheduler: Scheduler, engine: Engine, job: Job) -> None:
    """Inside the model's own pass over the document: neither disturbs the other."""
    token_ids = engine.searcher.encode("Who keeps the tide tables?")
    alone = engine.searcher.codes(token_ids)
    tickets: list[Ticket[list[Codes]]] = []

    class Searched:
        num_tokens = job.num_tokens

        def run(self, engine: Engine, *, checkpoint: Callable[[], None]) -> tuple[bytes, list[bool]]:
            done = []

            def between() -> None:
                tickets.append(scheduler.pass_of(lambda: engine.searcher.codes(token_ids)))
                checkpoint()
                done.append(tickets[-1].future.done())

            return engine.run(job, checkpoint=between).cache.to_bytes(), done

    data, done = scheduler.compress(Searched()).future.result(WAIT_S)
    assert data == engine.run(job).cache.to_bytes()
    assert done == [True] * len(engine.kinds)
    for ticket in tickets:
        for found, expected in zip(ticket.future.result(), alone, strict=True):
            assert (found == expected).all()


def test_a_pass_that_fails_or_waits_too_long_gets_its_own_error(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache
) -> None:
    gate = Gate(scheduler, engine, cache)
    late = scheduler.pass_of(lambda: 1, deadline_s=0.01)
    failing = scheduler.pass_of(lambda: 1 // 0)
    more = [scheduler.pass_of(lambda: 1) for _ in range(2)]
    with pytest.raises(QueueFull, match="4 searches are waiting"):
        scheduler.pass_of(lambda: 1)
    time.sleep(0.02)
    gate.open()
    assert [ticket.future.result(WAIT_S) for ticket in more] == [1, 1]
    with pytest.raises(DeadlineExceeded):
        late.future.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        failing.future.result(WAIT_S)
    scheduler.stop()
    with pytest.raises(NoWorker):
        scheduler.pass_of(lambda: 1)


def test_generations_keep_stepping_while_a_compression_runs(engine: Engine, job: Job, cache: CompressedCache) -> None:
    """With next to no share for online work there is still one round of steps between two layers."""
    scheduler = Scheduler(engine, SchedulerLimits(batch_share=0.999))
    layers: list[int] = []
    steps = 0

    def on_text(_: str) -> None:
        nonlocal steps
        steps += 1
        if scheduler._compressing is not None:
            layers.append(steps)

    scheduler.start()
    try:
        asking = scheduler.generate(
            cache, engine.encode_query(cache, "Go on"), Sampling(max_tokens=5000), order=AnswerOrder(on_text=on_text)
        )
        scheduler.compress(alone(job)).future.result(WAIT_S)
        asking.cancel()
        with pytest.raises(Cancelled):
            asking.future.result(WAIT_S)
    finally:
        scheduler.stop()
    assert layers


def test_an_error_fails_its_own_work_only(
    scheduler: Scheduler, engine: Engine, job: Job, cache: CompressedCache
) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    query = engine.encode_query(cache, "What?")
    fine = scheduler.generate(cache, query, Sampling(max_tokens=8))
    failing = scheduler.generate(cache, query, Sampling(max_tokens=8), order=AnswerOrder(on_text=broken))
    with pytest.raises(InvalidRequest):
        scheduler.generate(cache, [], Sampling(max_tokens=8))
    with pytest.raises(ZeroDivisionError):
        failing.future.result(WAIT_S)
    assert fine.future.result(WAIT_S).usage.completion_tokens == 8
    assert scheduler.compress(alone(job)).future.result(WAIT_S)[0].cache.num_tokens == job.num_tokens
    assert scheduler.alive


def test_a_cancelled_generation_leaves_within_one_step(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache
) -> None:
    pieces: list[str] = []
    ready = threading.Event()

    def on_text(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            ticket.cancel()
            ready.set()

    query = engine.encode_query(cache, "Go on")
    with scheduler._queues.changed:  # the thread takes the work once `ticket` is bound
        ticket = scheduler.generate(cache, query, Sampling(max_tokens=5000), order=AnswerOrder(on_text=on_text))
    assert ready.wait(WAIT_S)
    with pytest.raises(Cancelled):
        ticket.future.result(WAIT_S)
    assert len(pieces) == 3


class WatchedCompressor(Compressor):
    """Calls `on_layer` after each layer of a compression, before the scheduler's turn."""

    on_layer: Callable[[], None]

    def prefill(
        self, group: Sequence[Level], *, checkpoint: Callable[[], None] | None = None, **options: Any
    ) -> Prefill:
        def watched() -> None:
            self.on_layer()
            assert checkpoint is not None
            checkpoint()

        return super().prefill(group, **options, checkpoint=watched)


class Watched(Engine):
    _compressor: ClassVar = WatchedCompressor
    compressor: WatchedCompressor


@pytest.fixture
def watched(tiny_folder: Path) -> Watched:
    return Watched.load(str(tiny_folder), device="cpu")  # type: ignore[return-value]  # `load` is a classmethod


@pytest.mark.parametrize(
    ("deadline_s", "error"), [(None, Cancelled), (1.0, DeadlineExceeded)], ids=["cancelled", "out of time"]
)
def test_a_compression_that_shall_not_go_on_leaves_after_its_layer(
    watched: Watched, deadline_s: float | None, error: type[Exception]
) -> None:
    layers = 0

    def on_layer() -> None:
        nonlocal layers
        layers += 1
        if deadline_s is None:
            ticket.cancel()
        else:
            while ticket.overdue_s == 0:
                time.sleep(0.01)

    watched.compressor.on_layer = on_layer
    scheduler = Scheduler(watched)
    scheduler.start()
    try:
        with scheduler._queues.changed:  # the thread takes the work once `ticket` is bound
            ticket = scheduler.compress(alone(watched.prepare(DOCUMENT)), deadline_s=deadline_s)
        with pytest.raises(error):
            ticket.future.result(WAIT_S)
    finally:
        scheduler.stop()
    assert layers == 1
    assert watched.model.config.num_hidden_layers > 1


def test_behind_a_document_that_hangs_nothing_recorded_is_taken_up(watched: Watched) -> None:
    """Its process will be replaced, and what waited there would be blamed for the end."""
    let_go = threading.Event()
    watched.compressor.on_layer = lambda: let_go.wait(WAIT_S)
    scheduler = Scheduler(watched)
    scheduler.start()
    try:
        ticket = scheduler.compress(alone(watched.prepare(DOCUMENT)), deadline_s=0.2)
        scheduler.require_room()
        while scheduler.overdue_s < 1.1:
            time.sleep(0.05)
        with pytest.raises(NoWorker, match="hangs in a document") as refused:
            scheduler.require_room()
        assert refused.value.details["retry_after_s"] > 0
        let_go.set()
        with pytest.raises(DeadlineExceeded):
            ticket.future.result(WAIT_S)
        while scheduler.overdue_s:
            time.sleep(0.01)
        scheduler.require_room()
    finally:
        let_go.set()
        scheduler.stop()


def test_cancelled_and_late_work_leaves_the_queue(scheduler: Scheduler, engine: Engine, cache: CompressedCache) -> None:
    gate = Gate(scheduler, engine, cache)
    query = engine.encode_query(cache, "What?")
    cancelled = scheduler.generate(cache, query, Sampling(max_tokens=500))
    late = scheduler.generate(cache, query, Sampling(max_tokens=500), order=AnswerOrder(deadline_s=1e-6))
    cancelled.cancel()
    gate.open()
    with pytest.raises(Cancelled):
        cancelled.future.result(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        late.future.result(WAIT_S)


def test_a_full_queue_refuses_and_says_when_to_come_back(
    scheduler: Scheduler, engine: Engine, job: Job, cache: CompressedCache
) -> None:
    query = engine.encode_query(cache, "What?")
    assert scheduler.idle
    scheduler.generate(cache, query, Sampling(max_tokens=4)).future.result(WAIT_S)
    gate = Gate(scheduler, engine, cache)
    assert not scheduler.idle
    waiting = [scheduler.generate(cache, query, Sampling(max_tokens=2)) for _ in range(4)]
    with pytest.raises(QueueFull) as refused:
        scheduler.generate(cache, query, Sampling(max_tokens=2))
    assert refused.value.details["queued"] == 4
    assert refused.value.details["retry_after_s"] > 0
    documents = [scheduler.compress(alone(job)) for _ in range(2)]
    with pytest.raises(QueueFull):
        scheduler.compress(alone(job))
    gate.open()
    for ticket in (*waiting, *documents):
        ticket.future.result(WAIT_S)
    assert scheduler.generate(cache, query, Sampling(max_tokens=2)).future.result(WAIT_S)


def test_a_pace_tells_how_long_units_take() -> None:
    pace = Pace()
    assert pace.estimate(1000) == UNMEASURED_RETRY_S
    pace.record(6.0, units=3)
    assert pace.estimate(10) == 20.0
    pace.record(12.0)  # the newest counts three tenths
    assert pace.estimate(10) == pytest.approx(50.0)
    assert pace.estimate(0) == 0.1


def test_stopping_leaves_nobody_waiting(started: Started, engine: Engine, job: Job, cache: CompressedCache) -> None:
    scheduler = started(engine, SchedulerLimits(max_open=1))
    query = engine.encode_query(cache, "Go on")
    tickets = [scheduler.generate(cache, query, Sampling(max_tokens=5000)) for _ in range(3)]
    tickets += [scheduler.compress(alone(job)) for _ in range(3)]  # type: ignore[misc]  # their futures are looked at
    scheduler.stop()
    assert not wait([ticket.future for ticket in tickets], timeout=0).not_done
    for ticket in tickets[:3]:
        error = ticket.future.exception()
        assert isinstance(error, NoWorker)
        assert error.details["retry_after_s"] == 1.0
    with pytest.raises(NoWorker):
        scheduler.compress(alone(job))
    assert not scheduler.alive


def test_stopping_with_time_to_drain_finishes_what_was_taken(
    started: Started, engine: Engine, job: Job, cache: CompressedCache
) -> None:
    scheduler = started(engine, SchedulerLimits())
    answer = scheduler.generate(cache, engine.encode_query(cache, "What?"), Sampling(max_tokens=30))
    compression = scheduler.compress(alone(job))
    scheduler.stop(drain_s=WAIT_S)
    assert answer.future.result(0).usage.completion_tokens == 30
    assert compression.future.result(0)[0].cache.num_tokens == job.num_tokens


def test_questions_wait_for_bytes_and_are_refused_where_there_will_never_be_enough(
    engine: Engine, cache: CompressedCache
) -> None:
    """Room for two suffixes of 64 tokens: of five questions two are open at a time, and all are answered."""
    room = 2 * 64 * engine.kv_bytes_per_token
    scheduler = Scheduler(engine, SchedulerLimits(max_suffix_bytes=room))
    open_at_once: list[int] = []
    queued = threading.Event()
    query = engine.encode_query(cache, "Who?")

    def hear(_: str) -> None:
        assert queued.wait(WAIT_S)
        open_at_once.append(len(scheduler.open))

    scheduler.start()
    try:
        order = AnswerOrder(on_text=hear)
        tickets = [scheduler.generate(cache, query, Sampling(max_tokens=8), order=order) for _ in range(5)]
        queued.set()
        answers = [ticket.future.result(WAIT_S) for ticket in tickets]
        assert len({answer.text for answer in answers}) == 1
        assert max(open_at_once) == 2
        assert scheduler.batch.nbytes <= room
        with pytest.raises(InvalidRequest, match=r"take \d+ bytes beside the document") as refused:
            scheduler.generate(cache, query, Sampling(max_tokens=1000))
        assert refused.value.param == "prompt"
    finally:
        scheduler.stop()
    assert scheduler.batch.nbytes == 0


def test_the_copy_of_a_document_s_entries_counts(engine: Engine, cache: CompressedCache) -> None:
    """Under scope cache: of two answers one is open at a time, and without room for one the scope is to blame."""
    document, query = engine.attach(cache), engine.encode_query(cache, "Who?")
    sampling, params = Sampling(max_tokens=20), {"every": 4, "leaving": 30}

    def bound() -> SuffixReducer:
        return engine.bound("window", question_tokens=len(query), params=params, document=document)

    needed = 64 * engine.kv_bytes_per_token + bound().table_bytes
    assert bound().table_bytes > 0
    with pytest.raises(InvalidRequest, match="copy of 30 entries of the document") as refused:
        Scheduler(engine, SchedulerLimits(max_suffix_bytes=needed - 1)).generate(
            document, query, sampling, reducer=bound()
        )
    assert refused.value.param == "suffix.scope"
    scheduler = Scheduler(engine, SchedulerLimits(max_suffix_bytes=needed))
    open_at_once: list[int] = []
    scheduler.start()
    try:
        tickets = [
            scheduler.generate(
                document,
                query,
                sampling,
                reducer=bound(),
                order=AnswerOrder(on_text=lambda _: open_at_once.append(len(scheduler.open))),
            )
            for _ in range(2)
        ]
        first, second = (ticket.future.result(WAIT_S) for ticket in tickets)
        assert first.token_ids == second.token_ids
        assert set(open_at_once) == {1}
        assert [ticket.suffix_bytes for ticket in tickets] == [needed] * 2
    finally:
        scheduler.stop()
    assert scheduler.batch.nbytes == 0


def test_what_an_answer_has_beside_its_suffix_counts_and_goes_with_it(engine: Engine) -> None:
    """Of layers with numbers of their own: before it runs, at its end, and no longer."""
    document = engine.attach(engine.compress(DOCUMENT, policy="d2o", budget_tokens=40, keep_scores=True))
    query, sampling = engine.encode_query(document, "Who?"), Sampling(max_tokens=30)

    def bound() -> SuffixReducer:
        return engine.bound("d2o", question_tokens=len(query), params={"every": 64}, document=document)

    reducer, slab = bound(), 64 * engine.kv_bytes_per_token
    tail, needed = ref(reducer.tail), slab + reducer.beside * engine.kv_bytes_per_token + reducer.table_bytes
    with pytest.raises(InvalidRequest, match="copy of 36 entries of the document"):
        Scheduler(engine, SchedulerLimits(max_suffix_bytes=needed - 1)).generate(
            document, query, sampling, reducer=bound()
        )
    scheduler = Scheduler(engine, SchedulerLimits(max_suffix_bytes=needed))
    scheduler.start()
    try:
        ticket = scheduler.generate(document, query, sampling, reducer=reducer)
        ticket.future.result(WAIT_S)
        assert slab + engine.kv_bytes_per_token <= ticket.suffix_bytes <= needed
        del reducer
    finally:
        scheduler.stop()
    assert tail() is None


def test_tokens_that_share_entries_count(engine: Engine) -> None:
    """They have no key and no value of their own, and a place and a factor."""
    document = engine.attach(engine.compress(DOCUMENT, policy="ems", budget_tokens=40, keep_scores=True))
    query = engine.encode_query(document, "Who?")
    params = {"every": 8, "window": 8, "tau": 0.1}  # dissimilar entries merge, too
    reducer = engine.bound("ems", question_tokens=len(query), params=params, document=document)
    scheduler = Scheduler(engine, SchedulerLimits())
    scheduler.start()
    try:
        ticket = scheduler.generate(document, query, Sampling(max_tokens=30), reducer=reducer)
        ticket.future.result(WAIT_S)
    finally:
        scheduler.stop()
    slab = 64 * engine.kv_bytes_per_token
    assert reducer.held_bytes > reducer.table_bytes
    assert ticket.suffix_bytes == slab + reducer.held_bytes


def test_states_count() -> None:
    engine = Engine(small_model("lfm2"))
    scheduler = Scheduler(engine, SchedulerLimits())
    scheduler.start()
    try:
        ticket = scheduler.generate(engine.compress(list(range(1, 60))), [5, 6, 7], Sampling(max_tokens=4))
        ticket.future.result(WAIT_S)
    finally:
        scheduler.stop()
    assert engine.passes.state_bytes > 0
    assert ticket.suffix_bytes == 64 * engine.kv_bytes_per_token + engine.passes.state_bytes


@pytest.mark.slow
def test_a_bounded_suffix_counts_with_its_bound(engine: Engine, cache: CompressedCache) -> None:
    """1,000 tokens have no room, and with a suffix policy they have: the slab is as large as the bound."""
    room = 64 * engine.kv_bytes_per_token
    scheduler = Scheduler(engine, SchedulerLimits(max_suffix_bytes=room))
    query = engine.encode_query(cache, "Who?")
    held: list[int] = []
    scheduler.start()
    try:
        reducer = engine.bound("window", question_tokens=len(query), budget=48, params={"every": 16})
        ticket = scheduler.generate(
            cache,
            query,
            Sampling(max_tokens=1000),
            reducer=reducer,
            order=AnswerOrder(on_text=lambda _: held.append(scheduler.batch.nbytes)),
        )
        usage = ticket.future.result(WAIT_S).usage
        assert usage.suffix_tokens is not None
        assert usage.suffix_tokens <= 64
        assert max(held) <= room
        for policy, budget in (("window", 49), ("ems", 48)):  # of ems, tokens that share entries count too
            larger = engine.bound(policy, question_tokens=len(query), budget=budget, params={"every": 16})
            with pytest.raises(InvalidRequest, match=r"take \d+ bytes beside the document"):
                scheduler.generate(cache, query, Sampling(max_tokens=1000), reducer=larger)
    finally:
        scheduler.stop()


def test_new_questions_join_while_others_are_answered(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache
) -> None:
    """A short answer asked for in the middle of a long one is done long before it."""
    steps: list[str] = []
    joined: list[object] = []

    def on_text(text: str) -> None:
        steps.append(text)
        if len(steps) == 5:
            query = engine.encode_query(cache, "When?")
            joined.append(scheduler.generate(cache, query, Sampling(max_tokens=3)))
            joined[0].future.add_done_callback(lambda _: joined.append(len(steps)))  # type: ignore[attr-defined]

    long = scheduler.generate(
        cache, engine.encode_query(cache, "Go on"), Sampling(max_tokens=100), order=AnswerOrder(on_text=on_text)
    )
    assert long.future.result(WAIT_S).usage.completion_tokens == 100
    assert 5 < joined[1] < 30  # type: ignore[operator]


def test_a_user_s_question_goes_before_those_of_a_batch(engine: Engine, cache: CompressedCache) -> None:
    """The batch takes part in one of ten steps while the user's question is open, and goes on behind it. It has fewer
    places than there are, and its full queue refuses no user."""
    scheduler = Scheduler(engine, SchedulerLimits(max_open=8, max_waiting=8))
    query, most = engine.encode_query(cache, "Go on"), Sampling(max_tokens=100)
    open_at_once, seen, asked = [], [], []  # type: ignore[var-annotated]

    def on_text(_: str) -> None:
        open_at_once.append(len(scheduler.open))
        if len(open_at_once) == 5:
            batch.extend(scheduler.generate(cache, query, most, order=AnswerOrder(of_batch=True)) for _ in range(8))
            with pytest.raises(QueueFull):
                scheduler.generate(cache, query, most, order=AnswerOrder(of_batch=True))
            when = engine.encode_query(cache, "When?")
            asked.append(scheduler.generate(cache, when, Sampling(max_tokens=60)))
            asked[0].future.add_done_callback(lambda _: seen.append(len(open_at_once)))

    scheduler.start()
    try:
        batch = [scheduler.generate(cache, query, most, order=AnswerOrder(on_text=on_text, of_batch=True))]
        answers = [ticket.future.result(WAIT_S) for ticket in batch]
        assert asked[0].future.result(WAIT_S).usage.completion_tokens == 60
    finally:
        scheduler.stop()
    assert len(answers) == 9
    assert {answer.text for answer in answers} == {engine.answer(cache, "Go on", max_new_tokens=100).text}
    assert max(open_at_once) == 7
    assert 5 < seen[0] <= 5 + 60 / 10 + 1
    assert len(open_at_once) > seen[0]


def test_a_document_that_arrives_slowly_holds_nobody_up(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache, tmp_path: Path
) -> None:
    with open_store(f"disk://{tmp_path}/home") as store:
        arriving = store.open_cache(store.put(cache).id)
        slow = scheduler.generate(engine.attach(arriving), engine.encode_query(cache, "tide"), Sampling(max_tokens=5))
        query = engine.encode_query(cache, "Who?")
        others = [scheduler.generate(cache, query, Sampling(max_tokens=9)) for _ in range(3)]
        for ticket in others:
            assert ticket.future.result(WAIT_S).usage.completion_tokens == 9
        assert not slow.future.done()
        arriving.read()
        assert slow.future.result(WAIT_S) == engine.answer(cache, "tide", max_new_tokens=5)


def test_a_document_that_never_arrives_can_be_left(
    scheduler: Scheduler, engine: Engine, cache: CompressedCache, tmp_path: Path
) -> None:
    with open_store(f"disk://{tmp_path}/home") as store:
        manifest_id = store.put(cache).id
        query = engine.encode_query(cache, "tide")
        with store.open_cache(manifest_id) as arriving:
            hanging = scheduler.generate(
                engine.attach(arriving), query, Sampling(max_tokens=5), order=AnswerOrder(deadline_s=0.3)
            )
            with pytest.raises(DeadlineExceeded):
                hanging.future.result(WAIT_S)
            second = scheduler.generate(engine.attach(arriving), query, Sampling(max_tokens=5))
            arriving.close()  # whoever reads it gave up
            with pytest.raises(StoreUnavailable):
                second.future.result(WAIT_S)
    assert scheduler.generate(cache, query, Sampling(max_tokens=5)).future.result(WAIT_S)
