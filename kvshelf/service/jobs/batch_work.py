"""Runs one batch while this process holds its lease."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from kvshelf.api.batches import BatchError, RequestCounts
from kvshelf.backoff import backoff_s
from kvshelf.corpus.row import Shard
from kvshelf.corpus.run.progress import SUMMED, Progress, RunOptions, RunState, Summary, WorkHours
from kvshelf.corpus.run.run import BatchRun
from kvshelf.corpus.run.stored import QuestionShard, StoredJournal, StoredShard
from kvshelf.errors import FileNotFound, StateConflict, StoreError
from kvshelf.service.jobs.batch_files import BadInput, count_rows, outcome, write_results
from kvshelf.service.jobs.batch_questions import BatchAsker
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from kvshelf.service.storage import store_config
from kvshelf.store.base import Store
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.remote import RemoteEngine

log = structlog.get_logger("kvshelf.service")

Update = Callable[[BatchRecord], BatchRecord]

LEASE_S: Final = 15.0
"""How long after the last renewal another front end may take over the batch."""

_STEER_S: Final = 0.5
_STORE_PAUSE_S: Final = 2.0
_STOP_S: Final = 5.0
_PATIENCE_S: Final = 10.0  # how long a run may wait before it loses its place: time for some tries
_PAUSE_S: Final = 5.0
_MAX_PAUSE_S: Final = 300.0
_AT_WORK: Final = (RunState.RUNNING, RunState.WAITING)
_ENDING: Final = ("cancelling", "finalizing")
_OUTRANKED: Final = "a batch of higher priority goes first"


def rest_reason(record: BatchRecord, now: float) -> str:
    """Why an unfinished batch rests now; "" if it should run."""
    if now >= record.expires_at and record.state not in _ENDING:
        return ""
    if record.state == "paused":
        return "it was paused"
    since: float | None = record.progress.get("waits_from")
    if since is not None and since >= record.times[record.state] and now < since + record.progress["pause_s"]:
        return str(record.progress["waits_for"])
    if record.state in ("validating", *_ENDING):
        return ""
    window = record.body["window"]
    if window is not None and not WorkHours.parse(window).open_at(datetime.datetime.fromtimestamp(now).time()):
        return f"it is outside its window {window}"
    return ""


def outranked(record: BatchRecord, others: Iterable[BatchRecord], now: float) -> str:
    """Why a batch leaves its place to one of `others`, of the same tenant and a higher priority; "" if it may run.

    Strict: a batch waits as long as another one of higher priority works or could. One that waits for the store, its
    quota or a replica holds up nobody.
    """
    if record.state in _ENDING or now >= record.expires_at:
        return ""
    for other in others:
        higher = other.tenant == record.tenant and other.priority > record.priority
        if higher and not rest_reason(other, now) and other.progress.get("waits_for", "") in ("", _OUTRANKED):
            return _OUTRANKED
    return ""


def waiting(record: BatchRecord, reason: str, now: float) -> BatchRecord:
    """The record of a batch that gives up its place: to one of higher priority as long as that lasts, else for a pause.
    Each pause is longer than the last until the batch makes progress; a change of state ends the pause."""
    pauses = record.progress.get("pauses", 0)
    pause = {"pauses": pauses + 1, "pause_s": backoff_s(pauses, _PAUSE_S, _MAX_PAUSE_S)}
    if reason == _OUTRANKED:
        pause = {"pauses": pauses, "pause_s": 0.0}
    progress = {**record.progress, "waits_for": reason, "waits_from": now, **pause}
    return record.model_copy(update={"progress": progress})


def stuck(progress: Progress, now: float) -> str:
    """Why a run has waited too long to keep its place; "" if it makes progress."""
    since = progress.times.get(RunState.WAITING, now)
    return progress.reason if progress.state is RunState.WAITING and now - since >= _PATIENCE_S else ""


@dataclass(eq=False)
class BatchWork:
    """The work on one batch. `run` it once; the results go to the store.

    record: of the batch; only its id and tenant are used. term: of this process's lease.
    others_wait: whether batches of other tenants wait for a place. outranked: why this one leaves its place to another
    one of its tenant, or "".
    """

    record: BatchRecord
    term: int
    store: Store
    engines: Mapping[str, RemoteEngine]
    settings: Settings
    metrics: Metrics
    asks: BatchAsker
    others_wait: Callable[[], bool]
    outranked: Callable[[], str]
    _let_go: bool = field(default=False, init=False)  # whether the run was cancelled to let the batch rest
    _waits_for: str = field(default="", init=False)  # the trouble it rests for; "" if its record says to rest

    async def run(self) -> None:
        """Work until the batch ends or rests, or the lease is lost. Raises nothing."""
        renewing = asyncio.create_task(self._renew())
        working = asyncio.create_task(self._advance())
        unexpected = False
        try:
            ended, _ = await asyncio.wait({renewing, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        except StateConflict:
            log.warning("a batch was taken over by another process", batch=self.record.id)
        except Exception:
            # Keep the lease until it expires, so that a batch that fails at once is not retried every second.
            log.exception("a batch failed unexpectedly", batch=self.record.id)
            unexpected = True
        finally:
            for task in (working, renewing):
                task.cancel()
            # The first end is reported above. A second error is most likely a consequence of the cancellation.
            await asyncio.gather(working, renewing, return_exceptions=True)
            if not unexpected:
                with suppress(StoreError):  # the lease then expires
                    await asyncio.to_thread(self.store.batches.table.release, self.record.id, self.term)

    async def _renew(self) -> None:
        """Renew the lease. Raises `StateConflict` when another process has it."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await asyncio.to_thread(self.store.batches.table.renew, self.record.id, self.term, lease_s=LEASE_S)
            except StoreError as error:
                log.warning("the lease of a batch could not be renewed", batch=self.record.id, code=error.code)

    async def _advance(self) -> None:
        record = await self._change(lambda record: record)
        log.info("batch taken up", batch=self.record.id, state=record.state, attempt=record.attempts)
        try:
            await self._go_on(record)
        except StoreError as error:
            reason = error.message
            log.warning("a batch waits for the store", batch=self.record.id, code=error.code, message=reason)
            await self._change(lambda record: waiting(record, reason, self.store.now()))

    async def _go_on(self, record: BatchRecord) -> None:
        problems: tuple[BatchError, ...] = ()
        try:
            if record.state == "validating" and not _is_to_end(record, self.store.now()):
                record = await self._validate(record)
            if reason := rest_reason(record, self.store.now()):
                log.info("batch rests", batch=self.record.id, reason=reason)
                return
            if not _is_to_end(record, self.store.now()):
                before = record
                summary = await self._work(before)
                record = await self._change(lambda record: self._after(with_progress(record, summary, before), summary))
                if summary.state == RunState.CANCELLED and self._let_go and not _is_to_end(record, self.store.now()):
                    return  # it is taken up again when it is due, perhaps at once
                if summary.state == RunState.FAILED and summary.done + summary.failed < record.counts.total:
                    problems = (BatchError(code="run_failed", message=summary.reason),)
        except BadInput as bad:
            problems = (bad.problem,)
        except FileNotFound as gone:
            problems = (BatchError(code=gone.code, message=gone.message, param="input_file_id"),)
        await self._end(problems)

    async def _validate(self, record: BatchRecord) -> BatchRecord:
        """Check the whole input before any work; a fault in one row ends that row alone."""
        file_id, limit = record.body["input_file_id"], self.settings.max_batch_rows
        total = await asyncio.to_thread(count_rows, self.store, file_id, self.record.tenant, limit)

        def begin(record: BatchRecord) -> BatchRecord:
            counted = record.model_copy(update={"counts": RequestCounts(total=total), "progress": {}})
            return counted.entered("in_progress", self.store.now()) if record.state == "validating" else counted

        return await self._change(begin)

    async def _work(self, record: BatchRecord) -> Summary:
        """Run the batch until no row is left or no more work is allowed now."""
        run = await asyncio.to_thread(self._make_run, record)
        run.start()
        reported = Progress(RunState.RUNNING)
        try:
            while (summary := await asyncio.to_thread(run.wait, _STEER_S)) is None:
                with suppress(StoreError):  # the run itself waits until the store is back
                    progress = run.progress()
                    await self._steer(run, progress, record)
                    self.metrics.batch_advanced(reported, progress)
                    reported = progress
        except BaseException:
            run.cancel("the service stops")
            await asyncio.to_thread(run.wait, _STOP_S)
            raise
        self.metrics.batch_advanced(reported, summary)
        return summary

    def _make_run(self, record: BatchRecord) -> BatchRun:
        config, settings, in_flight = store_config(self.settings), self.settings, None
        if record.asks:  # half of what the replicas answer at once, so that a user's question gets a place
            of_one = min(settings.max_open_generations, settings.max_ongoing_requests)
            in_flight = max(1, of_one // 2) * sum(engine.target_replicas for engine in self.engines.values())
        options = _options(record, in_flight)
        journal = StoredJournal(self.store.batches, self.record.id, self.term)
        return BatchRun([self._shard(record, config, options)], self.engines, config, journal, options, self.asks)

    def _shard(self, record: BatchRecord, config: StoreConfig, options: RunOptions) -> Shard:
        file = self.store.files.get(record.body["input_file_id"], tenant=record.tenant)
        defaults, rows = record.body["options"], record.counts.total
        fields = (config, record.tenant, file.id, file.filename, defaults, file.nbytes, rows)
        if not record.asks:
            return StoredShard(*fields)
        recorded = sum(1 for _ in self.store.batches.journal(record.id))
        return QuestionShard(*fields, batch_id=record.id, recorded=recorded, retry_failed=options.retry_failed)

    async def _steer(self, run: BatchRun, progress: Progress, before: BatchRecord) -> None:
        """Store the progress of the run, and cancel the run if a caller or a limit demands it."""
        record = await asyncio.to_thread(self._change_now, lambda record: with_progress(record, progress, before))
        if progress.state not in _AT_WORK:
            return
        if record.state == "cancelling":
            run.cancel("it was cancelled")
        elif self.store.now() >= record.expires_at:
            run.cancel(f"its completion window of {record.body['completion_window']} is over")
        elif reason := rest_reason(record, self.store.now()):
            self._let_go = True
            run.cancel(reason)
        elif reason := self.outranked() or (stuck(progress, time.time()) if self.others_wait() else ""):
            # A stuck run leaves for another tenant alone: a restart costs seconds and remakes caches that were deleted.
            self._let_go, self._waits_for = True, reason
            run.cancel(reason)

    def _after(self, record: BatchRecord, summary: Summary) -> BatchRecord:
        """The record after a run. A run that cancelled itself has used up its GPU hours, so the batch ends."""
        if summary.state != RunState.CANCELLED or _is_to_end(record, self.store.now()):
            return record
        if self._let_go:
            return waiting(record, self._waits_for, self.store.now()) if self._waits_for else record
        reason = {**record.progress, "reason": summary.reason}
        return record.entered("cancelling", self.store.now(), progress=reason)

    async def _end(self, problems: tuple[BatchError, ...]) -> None:
        """Write the result files from the journal and end the batch."""

        def begin(record: BatchRecord) -> BatchRecord:
            changed = record.model_copy(update={"problems": problems or record.problems})
            return changed if record.state in _ENDING else changed.entered("finalizing", self.store.now())

        record = await self._change(begin)
        counts = await asyncio.to_thread(write_results, self.store, record, self.term)

        def end(record: BatchRecord) -> BatchRecord:
            state, problems = outcome(record, counts)
            numbers = {**record.progress, "waits_for": "", "eta_s": None}
            return record.entered(state, self.store.now(), counts=counts, problems=problems, progress=numbers)

        ended = await self._change(end)
        log.info("batch results written", batch=self.record.id, state=ended.state, **ended.counts.model_dump())

    async def _change(self, update: Update) -> BatchRecord:
        """Change the record. Retries while the store is down, because callers must see that the batch waits."""
        while True:
            try:
                return await asyncio.to_thread(self._change_now, update)
            except StoreError as error:
                log.warning("a batch waits for the store", batch=self.record.id, code=error.code, message=error.message)
                await asyncio.sleep(_STORE_PAUSE_S)

    def _change_now(self, update: Update) -> BatchRecord:
        return self.store.batches.update(self.record.id, update, tenant=self.record.tenant, term=self.term)


def _options(record: BatchRecord, in_flight: int | None) -> RunOptions:
    """The options of the batch's run, without its window: outside the window the batch rests and gives up its place."""
    body = record.body
    limit = body["max_gpu_hours"]
    return RunOptions(
        tenant=record.tenant,
        batch_id=record.id,
        max_attempts=body["max_attempts"],
        document_deadline_s=body["document_timeout_s"],
        in_flight=in_flight,
        max_gpu_hours=None if limit is None else limit - record.progress.get("gpu_hours", 0.0),
        retry_failed=record.attempts > 1,
    )


def with_progress(record: BatchRecord, progress: Progress, before: BatchRecord) -> BatchRecord:
    """The record with the progress of a run that started from `before`. Elapsed time alone changes nothing.

    A resumed run revisits finished rows as reused; reported counts never decrease.
    """
    had, past = before.counts, before.progress
    counts = RequestCounts(
        total=had.total,
        completed=max(had.completed, progress.done),
        failed=progress.failed,
        reused=max(had.reused, progress.reused - (had.completed - had.reused)),
    )
    waits = progress.reason if progress.state == RunState.WAITING else ""
    if counts == record.counts and record.progress.get("waits_for", "") == waits:
        return record
    numbers = {
        "waits_for": waits,
        "pauses": past.get("pauses", 0) if counts.completed == had.completed else 0,
        **{name: max(past.get(name, 0), getattr(progress, name)) for name in SUMMED},
        "tokens_per_s": round(progress.tokens_per_s, 3),
        "elapsed_s": round(past.get("elapsed_s", 0.0) + progress.elapsed_s, 3),
        "eta_s": None if progress.eta_s is None else round(progress.eta_s, 3),
        "gpu_hours": past.get("gpu_hours", 0.0) + progress.gpu_hours,
        "workers": {
            name: share.model_dump() | {"seconds": round(share.seconds, 3)} for name, share in progress.workers.items()
        },
    }
    return record.model_copy(update={"counts": counts, "progress": numbers})


def _is_to_end(record: BatchRecord, now: float) -> bool:
    return record.state in _ENDING or now >= record.expires_at
