"""The pipeline of a run on Ray: reader tasks give the rows of shards, and caller actors send each row to the engines.
Keys and values never travel: a row goes in, and it comes out ended, in a few hundred bytes.

A row is a task of its own: in one task with others it would be told of only when all before it had ended, and one that
waits, for its next attempt say, would hold back what is on the shelf long since.

Ray repeats the work of a dead process, and assumes that the values it has already seen come back unchanged. So a reader
yields the same rows in the same order each time. The job table records whether a row has ended, so that repeating the
row costs one look-up.

(Ray Data would connect the two stages as well. But it keeps the arguments of its actors in the object store, where Ray
may lose them before it restarts an actor; Ray says so on standard error in each run.)
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pydantic_core
import ray
import ray.exceptions as ray_errors
import structlog

from kvshelf.corpus.input.reading import read_rows
from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.caller import Asks, RowCaller
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.errors import StoreError
from kvshelf.store.base import Store
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.remote import RemoteEngine, called, watch

log = structlog.get_logger("kvshelf.corpus")

SLOTS_PER_CALLER: Final = 32
_READERS: Final = 2
_QUEUED_ROWS: Final = 4
"""Rows that wait at a caller, so that it has the next one when a row ends."""

_OPEN_AGAIN_S: Final = 2.0
_TELL_S: Final = 0.5
_WATCH_S: Final = 2.0

_UNSEEN: Final = 16
"""Rows that a reader may yield before the run takes the first one. Then it pauses, so memory stays bounded."""

STALE_S: Final = 5.0
"""A caller silent for this long is taken for dead."""

STOPPED: Final = b""
"""In place of a row that was stopped."""

_PROCESS: Final = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Both stages compute little. If they reserved CPUs, they would wait for ever where replicas hold all CPUs."""


class Order(StrEnum):
    """Orders to callers about their rows: begin them; begin no more; stop them at once."""

    GO = "go"
    HOLD = "hold"
    STOP = "stop"


@dataclass(frozen=True)
class Report:
    """State of callers. at_work: rows they have begun. trouble: the problem that keeps those rows waiting, or ""."""

    at_work: int = 0
    trouble: str = ""


class Control:
    """One actor per run. It may die: the run repeats its order, and callers that cannot reach it keep the last one."""

    def __init__(self) -> None:
        self._order = Order.HOLD
        self._reports: dict[str, tuple[float, Report]] = {}

    def give(self, order: Order) -> Report:
        """Set the order; returns the recent reports of all callers, added up."""
        self._order = order
        now = time.monotonic()
        self._reports = {name: (at, report) for name, (at, report) in self._reports.items() if now - at < STALE_S}
        reports = [report for _, report in self._reports.values()]
        trouble = next((report.trouble for report in reports if report.trouble), "")
        return Report(sum(report.at_work for report in reports), trouble)

    def take(self, caller: str, report: Report) -> Order:
        """Take a caller's report; returns the current order."""
        self._reports[caller] = (time.monotonic(), report)
        return self._order


@dataclass(frozen=True)
class CallerSetup:
    """The arguments of a caller, which travel to its process. control: name of the run's `Control`. Its handle would be
    a reference, which Ray may not have any more when it restarts the caller."""

    engines: Mapping[str, RemoteEngine]
    store: StoreConfig
    options: RunOptions
    began: float
    control: str
    asks: Asks | None


def stream(shards: Sequence[Shard], setup: CallerSetup, *, in_flight: int) -> Generator[Row | None, None, None]:
    """The rows of these shards as they end; None for a row that the run has stopped. Close it to end the work. Raises
    Ray's errors if the pipeline itself breaks."""
    callers = -(-in_flight // SLOTS_PER_CALLER)
    slots = -(-in_flight // callers)
    pipeline = _Pipeline(shards, setup, callers=callers, slots=slots)
    try:
        while ready := pipeline.wait():
            for stage in ready:
                data = pipeline.take(stage)
                if data is not None:
                    yield None if data == STOPPED else Row.from_dict(pydantic_core.from_json(data))
    finally:
        pipeline.end()


class _Pipeline:
    """The tasks of both stages. Ray's `ObjectRefGenerator` stands for a reader; it gives references to its rows."""

    def __init__(self, shards: Sequence[Shard], setup: CallerSetup, *, callers: int, slots: int) -> None:
        local = any(shard.local for shard in shards)
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if local else None
        self._read = ray.remote(read_rows).options(
            **_PROCESS, max_retries=-1, label_selector=here, _generator_backpressure_num_objects=_UNSEEN
        )
        actor = ray.remote(Callers).options(**_PROCESS, max_restarts=-1, max_task_retries=-1, max_concurrency=slots)
        replicas = sum(engine.target_replicas for engine in setup.engines.values()) / callers
        self._callers = [actor.remote(setup, slots, replicas) for _ in range(callers)]
        self._most = callers * (slots + _QUEUED_ROWS)
        self._unread = deque(shards)
        self._readers: list[Any] = []
        self._settling: dict[Any, Any] = {}  # the caller of each row

    def wait(self) -> list[Any]:
        """Wait until tasks have yielded or ended; returns those. Empty at the end."""
        while self._unread and len(self._readers) < _READERS:
            self._readers.append(self._read.remote(self._unread.popleft()))
        tasks = [*self._settling, *(self._readers if len(self._settling) < self._most else ())]
        if not tasks:
            return []
        ray.wait(tasks, num_returns=1, fetch_local=False)
        ready: list[Any] = ray.wait(tasks, num_returns=len(tasks), timeout=0, fetch_local=False)[0]
        return ready

    def take(self, task: Any) -> bytes | None:
        """A row that has ended; None if a reader has ended, or has read a row, which goes to a caller."""
        if self._settling.pop(task, None) is not None:
            row: bytes = ray.get(task)
            return row
        try:
            ref = next(task)
        except StopIteration:
            self._readers.remove(task)
            return None
        rows_at = Counter(self._settling.values())
        caller = min(self._callers, key=rows_at.__getitem__)
        self._settling[called(caller, Callers.settled, ref)] = caller
        return None

    def end(self) -> None:
        """End all processes of the pipeline."""
        for caller in self._callers:
            ray.kill(caller)
        for task in self._readers:
            ray.cancel(task, force=True)


def _opened(config: StoreConfig) -> Store:
    """The store, once it can be opened: a caller that fails to start would end the whole run."""
    while True:
        try:
            return config.open()
        except StoreError as error:
            log.warning("the store cannot be opened now", code=error.code, message=error.message)
            time.sleep(_OPEN_AGAIN_S)


class Callers:
    """One process of the pipeline: rows arrive on Ray's event loop and run on one of their own."""

    def __init__(self, setup: CallerSetup, slots: int, replicas: float) -> None:
        self._name = secrets.token_hex(8)
        self._setup = setup
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        store, options = _opened(setup.store), setup.options
        self._caller = RowCaller(setup.engines, store, options, setup.began, slots, setup.asks, replicas)
        self._rows: set[asyncio.Task[Row]] = set()
        threading.Thread(target=self._run, daemon=True, name="caller").start()

    async def settled(self, data: bytes) -> bytes:
        """A row as it ended, as JSON; `STOPPED` for a row that was stopped before. A coroutine: Ray runs the plain
        methods of a class that has any one after the other, whatever `max_concurrency` says."""
        row = Row.from_dict(pydantic_core.from_json(data))
        ended = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._settled(row), self._loop))
        return STOPPED if ended is None else pydantic_core.to_json(ended.to_dict())

    async def _settled(self, row: Row) -> Row | None:
        """The row as it ended; None if the run was stopped before."""
        if self._stopped:
            return None
        task = asyncio.ensure_future(self._caller.settle(row))
        self._rows.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            self._rows.discard(task)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._obey())
        self._loop.create_task(watch(self._setup.engines.values(), interval_s=_WATCH_S))
        self._loop.run_forever()

    async def _obey(self) -> None:
        """Report to the run, and follow its orders."""
        control = ray.get_actor(self._setup.control)
        while True:
            report = Report(self._caller.at_work, self._caller.trouble)
            try:
                order = await called(control, Control.take, self._name, report)
            except ray_errors.RayError:
                order = None  # the control restarts; until then the last order holds
            self._follow(order)
            await asyncio.sleep(_TELL_S)

    def _follow(self, order: Order | None) -> None:
        if order is Order.GO:
            self._caller.going.set()
        elif order is Order.HOLD:
            self._caller.going.clear()
        elif order is Order.STOP:
            self._stopped = True
            for task in list(self._rows):
                task.cancel()
