"""Brings the rows of a batch to their end: a cache on the shelf, an answer, or an error."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import structlog

from kvshelf import errors
from kvshelf.api import CreateCache
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.corpus.row import CHARS_PER_TOKEN, Row, RowError
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.corpus.run.runner import PAUSES, Pauses, RequestJob, Runner, refuse, stored_caches
from kvshelf.corpus.run.sampling import Sample
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestRecord
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.cluster.served import served_model
from kvshelf.workers.replica.api import Created, ReplicaApi
from kvshelf.workers.replica.attempts import Standing

log = structlog.get_logger("kvshelf.corpus")

PREFIX: Final = "row_"
"""Prefix of the request ids of rows. Only their batch runs these requests; background creations leave them alone."""

_DROP_S: Final = 3.0
_NO_END: Final = (errors.Cancelled.code, errors.QuotaExceeded.code)
"""Recorded failures that a new run retries even without `retry_failed`."""


class Shares:
    """Divides the time of replicas among the calls that they work on together. The shares add up to the time, times the
    replicas that have a call."""

    def __init__(self, replicas: float) -> None:
        """replicas: that work on these calls; a part of them, if others call them too."""
        self._replicas = replicas
        self._open = 0
        self._call_s = 0.0  # of a call that is open all the time
        self._since = 0.0

    @contextmanager
    def part(self) -> Iterator[Callable[[], float]]:
        """A call at work. Gives a function that returns its seconds so far."""
        began_s = self._advance(1)
        try:
            yield lambda: self._advance(0) - began_s
        finally:
            self._advance(-1)

    def _advance(self, opened: int) -> float:
        now = time.monotonic()
        if self._open:
            self._call_s += (now - self._since) * min(1.0, self._replicas / self._open)
        self._since = now
        self._open += opened
        return self._call_s


def request_id(batch_id: str, line: int) -> str:
    """The id under which a question is logged, and which its result names."""
    return PREFIX + digest("kvshelf.question", batch_id, str(line))


@dataclass(eq=False, kw_only=True)
class RowJob(RequestJob):
    """A row at work. Its request has no body, because the row is at hand. manifests: those of its caches, once the
    request is done. is_opened: whether this run has seen or opened it."""

    row: Row
    store: Store
    retry_failed: bool
    manifests: list[Manifest] | None = field(default=None, init=False)
    is_opened: bool = field(default=False, init=False)

    def record(self) -> RequestRecord:
        """The row's request; opened if there is none, reopened if its recorded end does not settle the row."""
        try:
            record = super().record()
        except errors.RequestNotFound:
            self.is_opened = True
            return self.requests.open(self.id, tenant=self.tenant, body=b"")
        code = None if record.error is None else record.error.code
        again = record.state == "failed" and not self.is_opened and (self.retry_failed or code in _NO_END)
        waits = record.attempts == self.lost and code == errors.QuotaExceeded.code  # a recorded end, but the row waits
        if again or waits or (record.state == "done" and not self._is_stored(record)):
            record = self.requests.open(self.id, tenant=self.tenant, body=b"", again=True)
        self.is_opened = True
        return record

    def drop(self) -> RequestRecord:
        """End the request unless a replica holds it; returns the record from before this call."""
        record = super().record()
        if Standing.of(record, self.requests.now()) is Standing.DUE:
            refuse(self.requests, self.id, errors.Cancelled("the batch was cancelled"), counted=False)
        elif record.state == "done":
            self._is_stored(record)
        return record

    def _is_stored(self, record: RequestRecord) -> bool:
        self.manifests = stored_caches(self.store, record)
        return bool(self.manifests)


@dataclass(frozen=True)
class RowAnswer:
    """The answer to a question. body: as the live route gives it. tokens: that went through the model."""

    body: Mapping[str, Any]
    tokens: int


class Asks(Protocol):
    """Asks a question. The service gives it to a run of questions; it travels to the callers' process."""

    async def __call__(
        self,
        question: ChatCompletionRequest,
        engines: Mapping[str, RemoteEngine],
        store: Store,
        *,
        tenant: str,
        deadline_s: float,
    ) -> RowAnswer: ...


@dataclass(eq=False)
class RowCaller:
    """Sends rows to the engines, `slots` at a time, on one event loop. going: set while rows may begin. asks: for a
    batch of questions. replicas: this caller's part of them, if there are several callers. pauses: of its `Runner`."""

    engines: Mapping[str, RemoteEngine]
    store: Store
    options: RunOptions
    began: float
    slots: int
    asks: Asks | None = None
    replicas: float = 1.0
    pauses: Pauses = PAUSES

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.slots)
        # Rows wait for a quota too: error rows would be of no use once there is space.
        self._runner = Runner(errors.StoreError, errors.QuotaExceeded, pauses=self.pauses)
        self._begun: Counter[str] = Counter()  # by model
        self._shares = Shares(self.replicas)
        self._sample = Sample()
        self.going = self._runner.going

    @property
    def at_work(self) -> int:
        """Rows that have begun."""
        return self._begun.total()

    @property
    def trouble(self) -> str:
        """Why rows wait: the store is down or full, or no replica runs; "" if they do not wait."""
        if self._runner.breaker.trouble is not None:
            return self._runner.breaker.trouble.message
        models = sorted(+self._begun)
        if not models or any(self.engines[model].running for model in models):
            return ""
        return f"no worker of {', '.join(models)} runs; the batch goes on when one does"

    def job(self, row: Row, spec: CreateCache) -> RowJob:
        """Raises as `served_model`."""
        model = served_model(self.engines, spec.model, spec.adapter)
        options = self.options
        # The document is part of the id: a corrected line is a new row.
        body = canonical_json(spec.model_dump(mode="json"))
        row_id = PREFIX + digest("kvshelf.row", options.tenant, options.batch_id, row.source, str(row.line), body)
        measured = not _may_be_sampled(spec) or self._sample.begins(row.length / CHARS_PER_TOKEN)
        named = spec.model_copy(update={"model": model, "adapter": None} | ({} if measured else {"quality": False}))
        return RowJob(
            id=row_id,
            tenant=options.tenant,
            requests=self.store.requests,
            spec=lambda: named,
            create=lambda spec, **about: self.engines[model].call(ReplicaApi.create, spec, **about),
            deadline_s=options.document_deadline_s,
            max_attempts=options.max_attempts,
            row=row,
            store=self.store,
            retry_failed=options.retry_failed,
        )

    async def settle(self, row: Row) -> Row:
        """Bring a row to its end. Raises nothing but its own cancellation."""
        work: Callable[[], Awaitable[Row]]
        if row.question is not None:
            model, work = row.question.adapter or row.question.model or "", partial(self._ask, row)
            if model not in self.engines:
                model = next(iter(self.engines))
        elif row.spec is not None:
            try:
                job = self.job(row, row.spec)
            except errors.KvshelfError as error:
                return row.failed(error)
            model, work = job.spec().model or "", partial(self._create, job)
        else:
            return row
        async with self._slots:
            await self.going.wait()
            self._begun[model] += 1
            try:
                return await work()
            except Exception as exc:
                log.exception("a row failed unexpectedly", source=row.source, line=row.line)
                bug = errors.InternalError(f"this is a bug of kvshelf ({type(exc).__name__}); the log has the details")
                return row.failed(bug)
            finally:
                self._begun[model] -= 1

    async def _create(self, job: RowJob) -> Row:
        try:
            row = self._ended(job, await self._runner.run(job))
            if job.row.spec is not None and _may_be_sampled(job.row.spec):
                probe_s = 0.0 if row.quality is None else row.quality["probe_s"]
                worked_s = 0.0 if row.error is not None else max(row.seconds - probe_s, 0.0)
                self._sample.ended(job.row.length / CHARS_PER_TOKEN, worked_s, probe_s if worked_s else 0.0)
            return row
        except asyncio.CancelledError:
            record = await asyncio.shield(_drop(job))
            if record is None:
                raise
            return self._ended(job, record)

    async def _ask(self, row: Row) -> Row:
        assert row.question is not None
        assert self.asks is not None  # a run that reads questions has it
        options = self.options
        question = partial(self.asks, row.question, self.engines, self.store)
        seconds: list[float] = []  # of each attempt

        async def ask() -> RowAnswer:
            with self._shares.part() as spent:
                try:
                    return await question(tenant=options.tenant, deadline_s=options.document_deadline_s)
                finally:
                    seconds.append(spent())

        with structlog.contextvars.bound_contextvars(request_id=request_id(options.batch_id, row.line)):
            end, attempts = await self._runner.tried(ask, options.max_attempts)
        if isinstance(end, errors.KvshelfError):
            return row.failed(end, attempts=attempts, seconds=sum(seconds))
        row = replace(row, question=None, answer=end.body, tokens=end.tokens)
        return replace(row, attempts=attempts, seconds=seconds[-1])

    def _ended(self, job: RowJob, end: Created | RequestRecord) -> Row:
        if isinstance(end, Created):
            worked_s = sum(phase.seconds for phase in end.phases if phase.name != "queue")
            row = _with_caches(job.row, [cache.manifest for cache in end.caches])
            return replace(row, attempts=job.attempts, seconds=worked_s, reused=end.existing, worker=end.worker)
        if end.error is not None:
            return job.row.failed(RowError(end.error.code, end.error.message), attempts=end.tries, seconds=job.spent_s)
        assert job.manifests  # else `record` would have reopened the request
        row = replace(_with_caches(job.row, job.manifests), attempts=end.tries)
        if any(manifest.created_at >= self.began for manifest in job.manifests):
            return row
        return replace(row, seconds=0.0, reused=True)


def _may_be_sampled(spec: CreateCache) -> bool:
    """Whether its batch says if the row is measured."""
    return spec.quality is None and not spec.chooses


async def _drop(job: RowJob) -> RequestRecord | None:
    """End a cancelled row in the store; its replica stops the work within a layer. Returns the record if the row was
    already done, so that this run counts it: the next run would count it as reused."""
    end = time.monotonic() + _DROP_S
    while time.monotonic() < end:
        try:
            record = await asyncio.to_thread(job.drop)
        except errors.StateConflict:
            pass  # its replica took it a moment ago
        except (errors.StoreError, errors.RequestNotFound):
            return None
        else:
            if record.state == "done":
                return record if job.manifests else None
            if Standing.of(record, job.requests.now()) is not Standing.HELD:
                return None
        await asyncio.sleep(0.1)
    return None


def _with_caches(row: Row, manifests: Sequence[Manifest]) -> Row:
    """The row with these caches on the shelf. Its seconds are those of the manifests."""
    first = manifests[0]
    return replace(
        row,
        spec=None,
        cache_id=first.id,
        document_id=first.document_id,
        tokens=first.num_tokens,
        kept=first.kept_tokens,
        bytes_full=first.bytes_full,
        bytes_full_16bit=first.bytes["full_16bit"],
        bytes_stored=sum(manifest.bytes_stored for manifest in manifests),
        quality=None if first.quality is None else first.quality.model_dump(),
        seconds=sum(map(_worked_s, manifests)),
        policy=first.policy,
        levels=tuple(_level(manifest) for manifest in manifests) if len(manifests) > 1 else (),
    )


def _worked_s(manifest: Manifest) -> float:
    """The seconds that the phases of a creation count: all but the wait."""
    times, quality = manifest.timings, manifest.quality
    return times.prefill_s + times.compress_s + times.store_s + (0.0 if quality is None else quality.probe_s)


def _level(manifest: Manifest) -> dict[str, Any]:
    return {
        "cache_id": manifest.id,
        "compression_ratio": manifest.compression_ratio,
        "tokens": {"document": manifest.num_tokens, "kept": manifest.kept_tokens},
        "bytes": manifest.bytes,
        "quality": None if manifest.quality is None else manifest.quality.model_dump(),
    }
