"""One batch from its first row to its last: started, watched and cancelled from any thread."""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import ray
import ray.exceptions as ray_errors
import structlog

from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.caller import Asks
from kvshelf.corpus.run.journal import Journal
from kvshelf.corpus.run.pipeline import CallerSetup, Control, Order, Report, stream
from kvshelf.corpus.run.progress import Progress, RunOptions, RunState, Summary, Tally
from kvshelf.errors import InternalError, KvshelfError, StoreError
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.remote import RemoteEngine, called

log = structlog.get_logger("kvshelf.corpus")

ProgressT = TypeVar("ProgressT", bound=Progress)

IN_FLIGHT_PER_REPLICA: Final = 3
"""One document is in prefill while the next one is tokenized and the last one stored."""

_TICK_S: Final = 0.5
_LET_GO_S: Final = 1.5
_STOP_S: Final = 60.0
"""How long a cancelled pipeline may take to end. After that the run no longer waits for it."""


@dataclass(eq=False)
class BatchRun:
    """A batch at work. `start` it once; Ray must be connected. Every method may be called from any thread. engines: by
    model name; the first one serves rows that name none. store: how every process opens the shelf that the engines
    write to. asks: for questions.

    One thread takes ended rows from the pipeline; another one gives orders, records the rows in the journal and counts
    them. So a journal that cannot be written holds up the batch, and no row is lost.
    """

    shards: Sequence[Shard]
    engines: Mapping[str, RemoteEngine]
    store: StoreConfig
    journal: Journal
    options: RunOptions
    asks: Asks | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[Row] = []
        self._tally = Tally(next(iter(self.engines.values())).gpus)
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
        """Begin on a new thread."""
        threading.Thread(target=self._run, name=f"run-{self.options.batch_id}", daemon=True).start()

    def cancel(self, reason: str = "cancelled") -> None:
        """End within a layer of the model. Finished rows stay finished."""
        self._cancelled = self._cancelled or reason

    def progress(self) -> Progress:
        """A snapshot. Cheap."""
        return self._snapshot(Progress)

    def wait(self, timeout: float | None = None) -> Summary | None:
        """The summary at its end, or None if it has not ended within `timeout` seconds. A failure is a state, not an
        exception."""
        return self._snapshot(Summary) if self._ended.wait(timeout) else None

    def _snapshot(self, kind: type[ProgressT]) -> ProgressT:
        with self._lock:
            return kind(state=self._state, reason=self._reason, times=dict(self._times), **self._tally.counts())

    # Everything below runs on the run's own threads.

    def _run(self) -> None:
        try:
            self._work()
        except Exception as exc:  # whoever waits for the run gets it
            self._failure = _named(exc)
        self._leave.set()
        self._enter(*self._end())
        log.info("batch ended", batch=self.options.batch_id, state=self._state, reason=self._reason)
        self._ended.set()

    def _work(self) -> None:
        self._tally.expect(self.shards)
        name = f"control-{secrets.token_hex(8)}"
        control = ray.remote(num_cpus=0, max_restarts=-1)(Control).options(name=name).remote()
        setup = CallerSetup(self.engines, self.store, self.options, time.time(), name, self.asks)
        threading.Thread(target=self._take, args=(setup,), name="pipeline", daemon=True).start()
        try:
            self._follow(control)
        finally:
            ray.kill(control)

    def _follow(self, control: Any) -> None:
        """Give orders and record rows until the pipeline has ended, or was stopped and does not end."""
        stopped: float | None = None
        began = time.monotonic()
        while True:
            drained = self._drained.is_set()  # read before `_keep`, so that no row can arrive after it
            trouble = self._keep()
            if drained and trouble is None:
                return
            order, state, reason = self._orders(trouble)
            report = give_order(control, order)
            if state is RunState.RUNNING and report.trouble:
                state, reason = RunState.WAITING, report.trouble
            self._enter(state, reason)
            if order is Order.STOP:
                stopped = stopped or time.monotonic()
                since_s = time.monotonic() - stopped
                if since_s > _LET_GO_S and not report.at_work:
                    self._leave.set()
                if since_s > _STOP_S:
                    return
            time.sleep(_TICK_S) if drained else self._drained.wait(_TICK_S)
            ended = time.monotonic()
            self._tally.tick(ended - began if state is RunState.RUNNING else 0.0)
            began = ended

    def _take(self, setup: CallerSetup) -> None:
        """Take ended rows from the pipeline until it ends."""
        try:
            # Not `running`: a run begins with the first replica, and the pipeline keeps its width to the end.
            width = IN_FLIGHT_PER_REPLICA * sum(engine.target_replicas for engine in self.engines.values())
            in_flight = width if self.options.in_flight is None else self.options.in_flight
            rows = stream(self.shards, setup, in_flight=in_flight)
            with closing(rows):
                for row in rows:
                    if row is None or self._leave.is_set():
                        self._left_rows = True
                    if self._leave.is_set():
                        break
                    if row is not None:
                        with self._lock:
                            self._arrived.append(row)
        except Exception as exc:  # as above
            self._failure = _named(exc)
        self._drained.set()

    def _keep(self) -> StoreError | None:
        """Record the rows that have arrived in the journal, or return why that fails now."""
        with self._lock:
            new, self._arrived = self._arrived, []
        try:
            if new:
                self.journal.append(new)
        except StoreError as error:
            with self._lock:
                self._arrived = new + self._arrived
            return error
        with self._lock:
            for row in new:
                self._tally.add(row)
        return None

    def _orders(self, trouble: StoreError | None) -> tuple[Order, RunState, str]:
        """The order for the callers now, and the run's state with its reason."""
        options = self.options
        if options.max_gpu_hours is not None and self._tally.gpu_hours >= options.max_gpu_hours:
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
                log.info("batch", batch=self.options.batch_id, state=state, reason=reason)
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


def give_order(control: Any, order: Order) -> Report:
    try:
        report: Report = ray.get(called(control, Control.give, order), timeout=5)
    except ray_errors.RayTaskError:
        raise  # a bug in `Control`, which would hold the run for ever
    except ray_errors.RayError:
        return Report()  # the control restarts, and gets the order in the next round
    return report


def _named(exc: Exception) -> KvshelfError:
    """The exception that broke a run, as an error of kvshelf."""
    if isinstance(exc, KvshelfError):
        return exc
    log.error("a run broke", exc_info=exc)
    return InternalError(f"the batch's pipeline broke ({type(exc).__name__}); the log has the details. Run it again")
