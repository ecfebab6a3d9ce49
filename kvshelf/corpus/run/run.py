"""One batch from its first row to its last: started, watched, paused and ended from any thread."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

import ray
import ray.exceptions as ray_errors
import structlog

from kvshelf.corpus.input.sources import Shard, Source
from kvshelf.corpus.output.results import Journal, Result
from kvshelf.corpus.run.control import Gate, Order, Report
from kvshelf.corpus.run.pipeline import Calls, stream
from kvshelf.corpus.run.progress import Progress, RunOptions, RunState, Summary
from kvshelf.corpus.run.tally import Tally
from kvshelf.errors import InternalError, KvshelfError, StoreError
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.remote import RemoteEngine

log = structlog.get_logger("kvshelf.corpus")

ProgressT = TypeVar("ProgressT", bound=Progress)

IN_FLIGHT_PER_REPLICA: Final = 3
"""One document is being prefilled while the next one is tokenized and the last one is stored."""

_TICK_S: Final = 0.5
_LET_GO_S: Final = 1.5
_STOP_S: Final = 60.0
"""How long a cancelled pipeline has for its end. What it does after that, nobody waits for."""


class Run:
    """A batch at work. `start` it once; Ray must be connected. Every method may be called from any thread.

    engines: by the name a row's `model` gives; the first one is for rows that name none. store: how every process
    opens the shelf that the engines write to.

    One thread takes the pipeline's results; another one gives orders, keeps the results in the journal and counts them.
    So a journal that cannot be written holds up the rows, and no result is lost.
    """

    def __init__(
        self,
        source: Source,
        engines: Mapping[str, RemoteEngine],
        store: StoreConfig,
        journal: Journal,
        options: RunOptions,
    ) -> None:
        self._source = source
        self._engines = engines
        self._store = store
        self._journal = journal
        self._options = options
        self._lock = threading.Lock()
        self._arrived: list[Result] = []
        self._tally = Tally()
        self._state = RunState.RUNNING
        self._reason = ""
        self._times = {RunState.RUNNING.value: time.time()}
        self._cancelled: str | None = None
        self._left_rows = False
        self._failure: KvshelfError | None = None
        self._leave = threading.Event()
        self._drained = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin on a thread of its own."""
        threading.Thread(target=self._run, name=f"run-{self._options.batch_id}", daemon=True).start()

    def cancel(self, reason: str = "cancelled") -> None:
        """End within a layer of the model. What is done stays done."""
        self._cancelled = self._cancelled or reason

    def progress(self) -> Progress:
        """Where it stands. Cheap."""
        return self._snapshot(Progress)

    def wait(self, timeout: float | None = None) -> Summary | None:
        """How it ended, or None if it has not within `timeout` seconds. Raises nothing: a failure is a state."""
        return self._snapshot(Summary) if self._ended.wait(timeout) else None

    def _snapshot(self, kind: type[ProgressT]) -> ProgressT:
        with self._lock:
            return kind(state=self._state, reason=self._reason, times=dict(self._times), **self._tally.counts())

    # What follows runs on the run's own threads.

    def _run(self) -> None:
        try:
            self._work(self._source.shards())
        except Exception as exc:
            self._failure = _named(exc)
        self._leave.set()
        self._enter(*self._end())
        log.info("batch ended", batch=self._options.batch_id, state=self._state, reason=self._reason)
        self._ended.set()

    def _work(self, shards: Sequence[Shard]) -> None:
        self._tally.expect(shards)
        gate = ray.remote(num_cpus=0, max_restarts=-1)(Gate).remote()
        calls = Calls(self._engines, self._store, self._options, time.time(), gate)
        threading.Thread(target=self._take, args=(shards, calls), name="pipeline", daemon=True).start()
        try:
            self._follow(gate)
        finally:
            ray.kill(gate)  # Ray keeps of an ended pipeline what holds its handle: its process would stay with ours

    def _follow(self, gate: Any) -> None:
        """Give orders and keep results until the pipeline has ended, or was told to and does not."""
        stopped: float | None = None
        while True:
            drained = self._drained.is_set()  # asked before the results are taken: then none can come after them
            trouble = self._keep()
            if drained and trouble is None:
                return
            order, state, reason = self._orders(trouble)
            said = _told(gate, order)
            if state is RunState.RUNNING and said.trouble:
                state, reason = RunState.WAITING, said.trouble
            self._enter(state, reason)
            if order is Order.STOP:
                stopped = stopped or time.monotonic()
                since_s = time.monotonic() - stopped
                if since_s > _LET_GO_S and not said.at_work:
                    self._leave.set()
                if since_s > _STOP_S:
                    return
            time.sleep(_TICK_S) if drained else self._drained.wait(_TICK_S)
            self._tally.tick(_TICK_S if state is RunState.RUNNING else 0.0)

    def _take(self, shards: Sequence[Shard], calls: Calls) -> None:
        """Take what the pipeline brings until its end."""
        try:
            results = stream(self._source, shards, calls, in_flight=self._in_flight())
            with closing(results):
                for result in results:
                    if result is None or self._leave.is_set():
                        self._left_rows = True
                    if self._leave.is_set():
                        break
                    if result is not None:
                        with self._lock:
                            self._arrived.append(result)
        except Exception as exc:
            self._failure = _named(exc)
        self._drained.set()

    def _in_flight(self) -> int:
        if self._options.in_flight is not None:
            return self._options.in_flight
        # Not those that run now: a run begins with the first of them, and the pipeline keeps its width to the end.
        return IN_FLIGHT_PER_REPLICA * sum(engine.wanted for engine in self._engines.values())

    def _keep(self) -> StoreError | None:
        """Put what has arrived into the journal, or say why that cannot be done now."""
        with self._lock:
            new, self._arrived = self._arrived, []
        try:
            if new:
                self._journal.append(new)
        except StoreError as error:
            with self._lock:
                self._arrived = new + self._arrived
            return error
        with self._lock:
            for result in new:
                self._tally.add(result)
        return None

    def _orders(self, trouble: StoreError | None) -> tuple[Order, RunState, str]:
        """What the callers are to do now, and what that makes of the run."""
        options = self._options
        if options.max_gpu_hours is not None and self._tally.seconds >= options.max_gpu_hours * 3600:
            self.cancel(f"{options.max_gpu_hours:g} GPU hours are used up")
        if self._cancelled is not None:
            return Order.STOP, RunState.CANCELLING, self._cancelled
        if options.window is not None and not options.window.open_at(datetime.datetime.now().time()):
            return Order.HOLD, RunState.WAITING, f"it works in its window {options.window} only"
        if trouble is not None:
            return Order.HOLD, RunState.WAITING, trouble.message
        return Order.GO, RunState.RUNNING, ""

    def _enter(self, state: RunState, reason: str) -> None:
        with self._lock:
            if state is not self._state:
                self._times[state.value] = time.time()
                log.info("batch", batch=self._options.batch_id, state=state, reason=reason)
            self._state, self._reason = state, reason

    def _end(self) -> tuple[RunState, str]:
        if self._failure is not None:
            return RunState.FAILED, self._failure.message
        if self._cancelled is not None and (self._left_rows or not self._drained.is_set()):
            return RunState.CANCELLED, self._cancelled
        self._tally.complete()
        if self._tally.failed and not self._tally.done:
            return RunState.FAILED, f"none of the {self._tally.failed} rows succeeded"
        return RunState.COMPLETED, ""


def _told(gate: Any, order: Order) -> Report:
    try:
        said: Report = ray.get(gate.give.remote(order), timeout=5)
    except ray_errors.RayError:
        return Report()  # it is being started again, and will hear the order in the next round
    return said


def _named(exc: Exception) -> KvshelfError:
    """What broke a run, as one of ours."""
    if isinstance(exc, KvshelfError):
        return exc
    log.error("a run broke", exc_info=exc)
    return InternalError(f"the batch's pipeline broke ({type(exc).__name__}); the log has the details. Run it again")
