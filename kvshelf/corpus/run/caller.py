"""Brings one row to its end: attempts by replicas, counted in the ledger, until there is a cache or an error."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from kvshelf.api import CreateCache
from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run.breaker import TROUBLE, Breaker
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.errors import (
    CacheError,
    CacheNotFound,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvshelfError,
    NoWorker,
    QueueFull,
    QuotaExceeded,
    RequestNotFound,
    StateConflict,
    StoreError,
    StoreUnavailable,
)
from kvshelf.store.artifact.identity import canonical_json, digest
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import RequestRecord
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.attempts import LEASE_S, Standing, give_up

log = structlog.get_logger("kvshelf.corpus")

PREFIX: Final = "row_"
"""Prefix of rows' ids in the ledger: these requests belong to a batch, and no other worker takes them up."""

_POLL_S = 0.5
_DROP_S = 3.0
_COME_AGAIN = (NoWorker, QueueFull, StateConflict, Cancelled)
"""Nothing was tried: the queue is full, no replica runs, or another worker has the row or was stopped."""
_NO_END = (Cancelled.code, QuotaExceeded.code)
"""Failures in the ledger that are retried without being asked."""


@dataclass
class _Call:
    """A row at work; its `spec` names its model. uncounted: attempts unknown to the ledger. lost: the number of an
    attempt whose end the ledger may not know. spent_s: in failed attempts."""

    row: Row
    id: str
    engine: RemoteEngine
    spec: CreateCache
    found: bool = False
    uncounted: int = 0
    lost: int | None = None
    spent_s: float = 0.0


class Caller:
    """Sends rows to the engines, `slots` at a time, on one event loop.

    Rows with a failed attempt are tried one at a time. Otherwise rows that died together would die together again, and
    a document that kills its worker would take innocent rows with it.

    began: start of the run, Unix seconds; older caches count as reused. going: set while rows may begin.
    """

    def __init__(
        self, engines: Mapping[str, RemoteEngine], store: Store, options: RunOptions, *, began: float, slots: int
    ) -> None:
        self._engines = engines
        self._store = store
        self._options = options
        self._began = began
        self._slots = asyncio.Semaphore(slots)
        self._breaker = Breaker()
        self._suspects = asyncio.Lock()
        self._begun: Counter[str] = Counter()  # by model
        self.going = asyncio.Event()

    @property
    def at_work(self) -> int:
        """Rows that have begun."""
        return self._begun.total()

    @property
    def trouble(self) -> str:
        """Why rows wait: the store is down or full, or no replica runs; "" if they do not wait."""
        if self._breaker.trouble is not None:
            return self._breaker.trouble.message
        models = sorted(+self._begun)
        if not models or any(self._engines[model].running for model in models):
            return ""
        return f"no worker of {', '.join(models)} runs; the batch goes on when one does"

    async def settle(self, row: Row) -> Row:
        """Bring a row to its end. Raises nothing but its own cancellation."""
        if row.spec is None:
            return row
        try:
            call = self._call(row, row.spec)
        except KvshelfError as error:
            return row.failed(error)
        async with self._slots:
            await self.going.wait()
            model = call.spec.model or ""
            self._begun[model] += 1
            try:
                return await self._end(call)
            except asyncio.CancelledError:
                ended = await asyncio.shield(self._drop(call))
                if ended is None:
                    raise
                return ended
            except Exception as exc:
                log.exception("a row failed unexpectedly", source=row.source, line=row.line)
                bug = InternalError(f"this is a bug of kvshelf ({type(exc).__name__}); the log has the details")
                return row.failed(bug)
            finally:
                self._begun[model] -= 1

    def _call(self, row: Row, spec: CreateCache) -> _Call:
        model = spec.model or next(iter(self._engines))
        if model not in self._engines:
            raise InvalidRequest(f"model: {model!r:.80} is not served here; there is {', '.join(self._engines)}")
        options = self._options
        # The document is part of the id: a corrected line is a new row.
        body = canonical_json(spec.model_dump(mode="json"))
        id_ = PREFIX + digest("kvshelf.row", options.tenant, options.batch_id, row.source, str(row.line), body)
        return _Call(row, id_, self._engines[model], spec.model_copy(update={"model": model}))

    async def _end(self, call: _Call) -> Row:
        while True:
            await self.going.wait()
            try:
                async with self._breaker.attempt():
                    step = await self._step(call)
            except TROUBLE as error:
                log.warning("the store keeps a row waiting", code=error.code, message=error.message)
                continue
            except StateConflict:  # another worker has it, or has just released it
                step = _POLL_S
            if isinstance(step, Row):
                self._breaker.close()
                return step
            await asyncio.sleep(step)

    async def _step(self, call: _Call) -> Row | float:
        """One step towards the end: the row as it ended, or seconds until the next step."""
        record = await asyncio.to_thread(self._record, call)
        match Standing.of(record, max_attempts=self._options.max_attempts):
            case Standing.ENDED:
                return await asyncio.to_thread(self._ended, call, record)
            case Standing.HELD:
                return _POLL_S
            case Standing.SPENT:
                await asyncio.to_thread(give_up, self._store.requests, record)
                return 0.0
            case Standing.DUE:
                return await self._attempt(call, record)

    def _record(self, call: _Call) -> RequestRecord:
        """The row's request in the ledger; opened if there is none, or if an earlier run left no valid end."""
        requests, tenant = self._store.requests, self._options.tenant
        try:
            record = requests.get(call.id, tenant=tenant)
        except RequestNotFound:
            call.found = True
            return requests.open(call.id, tenant=tenant, body=b"")
        if record.state == "running" and record.attempts == call.lost:
            return self._excused(record)
        if call.found:
            return record
        call.found = True
        code = None if record.error is None else record.error.code
        again = record.state == "failed" and (self._options.retry_failed or code in _NO_END)
        if again or (record.state == "done" and not self._manifests(record)):
            return requests.open(call.id, tenant=tenant, body=b"", again=True)
        return record

    def _excused(self, record: RequestRecord) -> RequestRecord:
        """An attempt was lost with the store: no worker has it, and it does not count."""
        requests, lost = self._store.requests, StoreUnavailable("the store was gone when this attempt ended")
        requests.fail(record.id, record.attempts, code=lost.code, message=lost.message, final=False, counted=False)
        return requests.get(record.id, tenant=record.tenant)

    def _ended(self, call: _Call, record: RequestRecord) -> Row | float:
        if record.error is not None:
            error = RowError(record.error.code, record.error.message)
            return call.row.failed(error, attempts=record.tries, seconds=call.spent_s)
        manifests = self._manifests(record)
        if not manifests:  # deleted while this row waited
            call.found = False
            return 0.0
        reused = all(manifest.created_at < self._began for manifest in manifests)
        return _made(call.row, manifests, attempts=record.tries, reused=reused)

    def _manifests(self, record: RequestRecord) -> list[Manifest]:
        """The manifests of the row's caches, empty unless all are on the shelf."""
        try:
            return [self._store.stat(cache_id, tenant=record.tenant) for cache_id in record.cache_ids]
        except (CacheNotFound, CacheError):
            return []

    async def _attempt(self, call: _Call, record: RequestRecord) -> Row | float:
        options, started = self._options, time.monotonic()
        try:
            async with self._suspects if record.tries else nullcontext():
                created = await call.engine.create(
                    call.spec,
                    tenant=options.tenant,
                    deadline_s=options.document_deadline_s,
                    request_id=call.id,
                    max_attempts=options.max_attempts,
                )
        except TROUBLE as error:
            if error.details.get("fits") is False:  # the document is to blame, and recorded so
                return 0.0
            call.lost = record.attempts + 1
            if isinstance(error, QuotaExceeded):
                call.found = False  # the ledger recorded an end
            raise
        except _COME_AGAIN as error:
            return float(error.details.get("retry_after_s", _POLL_S))
        except KvshelfError as error:
            if error.details.get("begun") is False:  # its deadline passed before it began
                return _POLL_S
            call.spent_s += time.monotonic() - started
            lost = isinstance(error, DeadlineExceeded) and "begun" not in error.details  # the replica said nothing
            now = await asyncio.to_thread(self._record, call)
            return await self._uncounted(call, error) if lost or now.tries == record.tries else 0.0
        manifests = [cache.manifest for cache in created.caches]
        worked_s = sum(phase.seconds for phase in created.phases if phase.name != "queue")
        done = _made(call.row, manifests, attempts=record.tries + 1, reused=created.existing)
        return replace(done, seconds=worked_s, worker=created.worker)

    async def _uncounted(self, call: _Call, error: KvshelfError) -> float:
        """Count an attempt that failed before the ledger knew of it; after the last one the row has failed."""
        call.uncounted += 1
        if call.uncounted < self._options.max_attempts:
            return _POLL_S
        await asyncio.to_thread(self._fail, call, error)
        return 0.0

    def _fail(self, call: _Call, error: KvshelfError, *, counted: bool = True) -> None:
        requests = self._store.requests
        attempt = requests.start(call.id, worker="batch", lease_s=LEASE_S)
        requests.fail(call.id, attempt, code=error.code, message=error.message, final=True, counted=counted)

    async def _drop(self, call: _Call) -> Row | None:
        """End a cancelled row in the ledger; its replica stops the work within a layer.

        Returns the row if it was done before that; the next run would count it as reused.
        """
        end = time.monotonic() + _DROP_S
        while time.monotonic() < end:
            try:
                record = await asyncio.to_thread(self._dropped, call)
                if record.state == "done":
                    ended = await asyncio.to_thread(self._ended, call, record)
                    return ended if isinstance(ended, Row) else None
                if Standing.of(record) is not Standing.HELD:
                    return None
            except StateConflict:
                pass  # its replica took it a moment ago
            except (StoreError, RequestNotFound):
                return None
            await asyncio.sleep(0.1)
        return None

    def _dropped(self, call: _Call) -> RequestRecord:
        """The row's request before this call, which ends it unless a replica holds it."""
        record = self._store.requests.get(call.id, tenant=self._options.tenant)
        if Standing.of(record) is Standing.DUE:
            self._fail(call, Cancelled("the batch was cancelled"), counted=False)
        return record


def _made(row: Row, manifests: Sequence[Manifest], *, attempts: int, reused: bool) -> Row:
    """The row with these caches on the shelf. Its seconds are those of the manifests, 0 if reused."""
    first = manifests[0]
    took = sum(each.timings.prefill_s + each.timings.compress_s + each.timings.store_s for each in manifests)
    return replace(
        row,
        spec=None,
        cache_id=first.id,
        document_id=first.document_id,
        tokens=first.num_tokens,
        kept=first.kept_tokens,
        bytes_full=first.bytes_full,
        bytes_stored=sum(each.bytes_stored for each in manifests),
        quality=None if first.quality is None else first.quality.model_dump(),
        attempts=attempts,
        seconds=0.0 if reused else took,
        reused=reused,
        policy=first.policy,
        levels=tuple(_level(each) for each in manifests) if len(manifests) > 1 else (),
    )


def _level(manifest: Manifest) -> dict[str, Any]:
    return {
        "cache_id": manifest.id,
        "compression_ratio": manifest.compression_ratio,
        "tokens": {"document": manifest.num_tokens, "kept": manifest.kept_tokens},
        "bytes": {"full": manifest.bytes_full, "stored": manifest.bytes_stored},
        "quality": None if manifest.quality is None else manifest.quality.model_dump(),
    }
