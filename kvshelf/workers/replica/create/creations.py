"""Creating caches: documents compressed once and stored, or found on the shelf."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import structlog

from kvshelf.api import AppendCache, CreateCache, CreationProgress, Estimate, EstimateObject, Tried
from kvshelf.api.answers import Phase, in_sequence, rounded
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.quality import How
from kvshelf.errors import CacheError, CacheNotFound, QualityBelowFloor
from kvshelf.store.base import Store
from kvshelf.store.jobs.metering import Meter
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.api import Created, Stored
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS, Attempts
from kvshelf.workers.replica.calls import Caller, ReplicaThreads, called_by, named_errors, relayed
from kvshelf.workers.replica.create.auto import AutoChoice, PolicyChoice
from kvshelf.workers.replica.create.estimates import Rates, estimate
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.create.publish import Publisher, lifetime_of
from kvshelf.workers.replica.create.recreation import finer
from kvshelf.workers.replica.create.spec import Levels, appended_level, encode, first_date, requested_levels
from kvshelf.workers.replica.create.split import joined, naming, parts_of
from kvshelf.workers.replica.create.spread import SpreadPlan
from kvshelf.workers.replica.reading import whole
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.singleflight import SingleFlight
from kvshelf.workers.replica.ticket import Ticket

log = structlog.get_logger("kvshelf.workers")

Watcher = Callable[[CreationProgress], None]
"""Gets each event, on any thread; it must not block."""

_EVERY_S: Final = 0.2
"""Least seconds between two events of one phase, except for its first and last: a layer may take a millisecond."""

_HANG_S = 2.0
"""Seconds after its deadline in which a document must reach the end of a layer; remote callers wait longer."""


class Teller:
    """Turns what the engine and the store report of one document into events for `watcher`."""

    def __init__(self, watcher: Watcher, part: str | None = None) -> None:
        self._watcher = watcher
        self._part = part
        self._phase = ""
        self._began = self._last_event = 0.0

    def __call__(self, phase: Literal["prefill", "quality", "store"], done: int, total: int) -> None:
        """See `Progress` of the engine. A phase begins with its first report, and again where `done` is 0."""
        now = time.monotonic()
        if phase != self._phase or done == 0:
            self._phase, self._began = phase, now
        elif done < total and now - self._last_event < _EVERY_S:
            return
        self._last_event = now
        seconds = round(now - self._began, 3)
        self._watcher(CreationProgress(phase=phase, done=done, total=total, seconds=seconds, part=self._part))


class NegativeCache:
    """Levels of the newest refusals, by the ids that their caches would have. So a level that missed its `min_quality`
    is not compressed again only to miss it again.

    Held in memory: a refusal stores no cache that could record it, and saving one prefill is not worth a table. Entries
    need no expiry, because an id covers everything that a quality depends on, the tenant included.
    """

    def __init__(self, capacity: int = 4096) -> None:  # each takes less than a kilobyte
        self._tried: OrderedDict[str, Tried] = OrderedDict()
        self._capacity = capacity

    def remember(self, ids: Sequence[str], refusal: QualityBelowFloor) -> None:
        """Keep the outcome of each level of a selection; `ids` are in the order of its levels."""
        # A refusal ends with the levels that were dropped before any work; they have no ids.
        for cache_id, outcome in zip(ids, refusal.details["tried"], strict=False):
            self._tried[cache_id] = Tried.model_validate(outcome)
            self._tried.move_to_end(cache_id)
        while len(self._tried) > self._capacity:
            self._tried.popitem(last=False)

    def of(self, ids: Sequence[str]) -> dict[str, Tried]:
        """The levels remembered for these ids."""
        return {cache_id: self._tried[cache_id] for cache_id in ids if cache_id in self._tried}


@dataclass(eq=False)
class Creations:
    """The creations of one replica.

    `quality`: how that of each new cache is measured, unless its request or `tenant_quality` says; False: only
    for a `min_quality`. Documents above `max_document_tokens` are refused; None leaves the limit to the model. So are
    those that `plan` has no room for, where there is one; it is set before the replica starts.
    """

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: ReplicaThreads
    attempts: Attempts
    meter: Meter
    max_document_tokens: int | None
    quality: How
    tenant_quality: Mapping[str, How]
    plan: MemoryPlan | SpreadPlan | None = field(default=None, init=False)
    flights: SingleFlight[Created] = field(default_factory=SingleFlight, init=False)
    refusals: NegativeCache = field(default_factory=NegativeCache, init=False)
    rates: Rates = field(default_factory=Rates, init=False)

    def require_room(self, job: Job) -> None:
        """As of `MemoryPlan`, for one prefill without cues, where there is a plan. Raises `DocumentTooLong`."""
        if self.plan is not None:
            self.plan.require_room(self.engine, Levels((Level(job),), False))

    async def estimate(self, spec: Estimate, *, caller: Caller) -> EstimateObject:
        """The bytes and seconds of this creation, at the speed that this replica has measured."""
        with called_by(caller):
            document = await self.threads.compute(encode, self.engine, spec, self.max_document_tokens)
            return await self.threads.compute(estimate, self.engine, self.rates, document, spec)

    def watch(self, spec: CreateCache, *, caller: Caller) -> AsyncGenerator[CreationProgress | Created, None]:
        """The progress of a creation as it goes on, then the creation. Closing the iterator cancels it."""

        async def create(events: asyncio.Queue[CreationProgress | Created | None]) -> None:
            loop = asyncio.get_running_loop()

            def put(event: CreationProgress | Created) -> None:
                loop.call_soon_threadsafe(events.put_nowait, event)

            put(await self.create(spec, caller=caller, watcher=put))

        return relayed(create)

    async def create(
        self,
        spec: CreateCache,
        *,
        caller: Caller,
        request_id: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        watcher: Watcher = lambda _: None,
    ) -> Created:
        """Compress a document and store it, unless the shelf has it. `watcher` is told how far the work is.

        With `request_id`, a request of the job table, the attempt is counted there before any work, and its end is
        recorded: the failure of the `max_attempts`th is final.
        """
        with called_by(caller):
            if request_id is None:
                return await self._created(spec, caller, watcher)
            self.scheduler.require_room()  # a full queue is no attempt
            async with self.attempts.counted(request_id, caller.tenant, max_attempts=max_attempts) as attempt:
                with named_errors():
                    created = await self._created(spec, caller, watcher)
                ids = [cache.manifest.id for cache in created.caches]
                await self.threads.run(self.store.requests.finish, request_id, attempt, cache_ids=ids)
                return replace(created, worker=self.attempts.worker)

    async def append(self, cache_id: str, spec: AppendCache, *, caller: Caller) -> Created:
        """Read more of a document behind its cache and store the cache of all, unless the shelf has it."""
        with called_by(caller):
            tenant = caller.tenant
            manifest = await self.threads.run(self.store.stat, cache_id, tenant=tenant)
            if spec.ttl_s is None and spec.expires_at is None:
                spec = spec.model_copy(update=lifetime_of(manifest))
            parent = await self.threads.run(whole, self.engine, self.store, cache_id, tenant)
            level = await self.threads.compute(appended_level, self.engine, parent, spec)
            publisher = Publisher.of(self.store, tenant, spec, [level], manifest)
            levels = Levels((level,), self.tenant_quality.get(tenant, self.quality))
            return await Creation(self, levels, publisher, caller.deadline_s).run()

    async def remake(self, manifest: Manifest, floor: float, caller: Caller) -> Created:
        """The smallest cache of a cache's document that reaches a floor. Raises `SourceNotKept`, and as `create`, and
        `CacheNotFound` where the cache was erased or deleted meanwhile: of its document nothing is stored then."""
        run, tenant = self.threads.run, manifest.tenant
        source = await run(self.store.source, manifest.id, tenant=tenant)
        created = await self.create(finer(manifest, source, floor, self.store.now()), caller=caller)
        try:  # behind the write: an erasure that did not see what was written had ended the cache before
            with suppress(CacheError):  # where it was evicted, maybe for what was written, this is all that is left
                await run(self.store.stat, manifest.id, tenant=tenant)
        except CacheNotFound:
            for cache in created.caches:
                if not cache.existing:
                    with suppress(CacheNotFound):
                        await run(self.store.delete, cache.manifest.id, tenant=tenant, cascade=True)
            raise
        return created

    async def _created(self, spec: CreateCache, caller: Caller, watcher: Watcher) -> Created:
        """The caches on the shelf, compressed if they were not there."""
        if not spec.in_parts:
            return await self._whole(spec, caller, Teller(watcher))
        end = None if caller.deadline_s is None else time.monotonic() + caller.deadline_s
        kind = "part" if spec.episodes is None else "episode"  # also the label that has the number
        created = []
        for part in await self._parts(spec, caller):
            number = part.labels[kind]
            with naming(kind, number):
                left_s = None if end is None else end - time.monotonic()
                created.append(await self._whole(part, caller.within(left_s), Teller(watcher, number)))
        return joined(created)

    async def _parts(self, spec: CreateCache, caller: Caller) -> Iterator[CreateCache]:
        """The creation of each part. The thread that looks for them ends with its caller, and at its deadline."""
        ticket: Ticket[Any] = Ticket(caller.deadline_s)
        options = {"tenant": caller.tenant, "checkpoint": ticket.check}
        limit = self.max_document_tokens
        try:
            return await self.threads.compute(parts_of, self.engine, self.store, spec, limit, **options)
        finally:
            ticket.cancel()

    async def _whole(self, spec: CreateCache, caller: Caller, teller: Teller) -> Created:
        """The caches of one document, or of one part."""
        tenant = caller.tenant
        date = await self.threads.compute(first_date, self.engine, self.store, spec, tenant)
        how, limit = self.tenant_quality.get(tenant, self.quality), self.max_document_tokens
        certificate = None
        if spec.certificate is not None:
            certificate = await self.threads.run(self.store.certificates.get, spec.certificate, tenant=tenant)
        work = await self.threads.compute(requested_levels, self.engine, spec, how, limit, date, certificate)
        if self.plan is not None and isinstance(work, PolicyChoice):
            work = await self.threads.compute(self.plan.fitting, self.engine, work)
        certified = work.target.certified if isinstance(work, PolicyChoice) else None
        by = None if certified is None else certified.by
        publisher = Publisher.of(self.store, tenant, spec, work.levels, certificate=by)
        return await Creation(self, work, publisher, caller.deadline_s, teller).run()


@dataclass(eq=False)
class Creation:
    """The caches of one document: of all levels, or of the one that a selection chooses. Those on the shelf stay as
    they are, except that what a ladder has coded smaller is made again; the others are made by whoever asks first, and
    all who ask meanwhile wait for that."""

    creations: Creations
    work: Levels | PolicyChoice
    publisher: Publisher
    deadline_s: float | None
    teller: Teller = field(default_factory=lambda: Teller(lambda _: None))

    async def run(self) -> Created:
        """Raises as the scheduler and the store do, and `QualityBelowFloor`."""
        target = f"{self.work.target!r} of " if isinstance(self.work, PolicyChoice) else ""
        key = target + " ".join(self.publisher.ids)
        created, is_first = await self.creations.flights.join(key, self._make)
        caches = [cache if is_first else replace(cache, existing=True) for cache in created.caches]
        if any(cache.existing for cache in caches):

            def change() -> list[Stored]:
                as_asked = self.publisher.as_asked
                return [Stored(as_asked(cache.manifest), True) if cache.existing else cache for cache in caches]

            caches = await self.creations.threads.run(change)
        return replace(created, caches=tuple(caches)) if is_first else Created(tuple(caches))

    async def _make(self) -> Created:
        """Make the missing caches, from as few prefills as possible."""
        run = self.creations.threads.run
        shelf = await run(self.publisher.on_shelf)
        if isinstance(self.work, PolicyChoice):
            known = self.publisher.known(self.work, shelf, self.creations.refusals.of(self.publisher.ids))
            if known is not None:
                return Created((Stored(known, existing=True),))
            missing: Levels | PolicyChoice = self.work
        else:
            pairs = zip(self.publisher.ids, self.work.levels, strict=True)
            unchanged = {cache_id for cache_id, manifest in shelf.items() if manifest.recoded is None}
            missing = replace(self.work, levels=tuple(level for cache_id, level in pairs if cache_id not in unchanged))
        stored: dict[str, Manifest] = {}
        phases: tuple[Phase, ...] = ()
        if missing.levels:
            choices, ticket = await self._compress(missing)
            for number, choice in enumerate(choices):
                self.teller("store", number, len(choices))
                manifest = await run(self.publisher.put, choice, ticket.queue_s)
                stored[manifest.id] = manifest
            self.teller("store", len(choices), len(choices))
            phases = self._record(list(stored.values()), ticket)
        ids = tuple(stored) if isinstance(self.work, PolicyChoice) else self.publisher.ids
        caches = tuple(Stored(stored.get(id_) or shelf[id_], id_ in shelf) for id_ in ids)
        return Created(caches, phases, prefilled_tokens=self.work.num_tokens if missing.levels else 0)

    async def _compress(self, work: Levels | PolicyChoice) -> tuple[list[AutoChoice], Ticket[Any]]:
        """Run work on the model; it stops within a layer when its caller leaves."""
        tenant, deadline_s, creations = self.publisher.tenant, self.deadline_s, self.creations
        if creations.plan is not None:
            await creations.threads.compute(creations.plan.require_room, creations.engine, work)
        await creations.threads.run(creations.store.admit, tenant)
        ticket: Ticket[Any] = creations.scheduler.compress(
            replace(work, progress=self.teller), tenant=tenant, deadline_s=deadline_s
        )
        try:
            async with asyncio.timeout(None if deadline_s is None else deadline_s + _HANG_S):
                result = await asyncio.wrap_future(ticket.future)
        except TimeoutError as exc:  # the scheduler itself ends what is late, between two units of work
            raise ticket.too_late() from exc
        except QualityBelowFloor as refusal:  # only after work on the model
            creations.refusals.remember(self.publisher.ids, refusal)
            creations.meter.add(tenant, prefill_tokens=work.num_tokens)
            raise
        finally:
            ticket.cancel()
        creations.meter.add(tenant, prefill_tokens=work.num_tokens)
        return [result] if isinstance(result, AutoChoice) else list(map(AutoChoice, work.levels, result)), ticket

    def _record(self, new: Sequence[Manifest], ticket: Ticket[Any]) -> tuple[Phase, ...]:
        """Note the seconds for estimates and the log; returns the phases."""
        prefill_s = sum({cache.timings.prefill_s for cache in new})  # levels of one prefill share its exact time
        compress_s = sum(cache.timings.compress_s for cache in new)
        phases = in_sequence(
            queue=ticket.queue_s,
            prefill=prefill_s,
            compress=compress_s,
            measure=max(0.0, ticket.worked_s - prefill_s - compress_s),
            store=sum(cache.timings.store_s for cache in new),
        )
        for cache in new:
            quality_s = 0.0 if cache.quality is None else cache.quality.probe_s
            self.creations.meter.add(cache.tenant, caches_created=1, quality_s=quality_s)
            self.creations.rates.add(cache.policy, cache.policy_params, cache.num_tokens, cache.timings)
            about: dict[str, float] = {"tokens": cache.num_tokens, "kept": cache.kept_tokens, "tried": len(cache.tried)}
            if cache.quality is not None and cache.quality.agreement is not None:
                about["agreement"] = cache.quality.agreement
            log.info("compressed", cache_id=cache.id, **about, **rounded(phases))
        return phases
