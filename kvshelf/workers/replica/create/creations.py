"""Creating caches: documents compressed once and stored, or found on the shelf. `Replica` hands them over to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from kvshelf.errors import QualityBelowFloor
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.quality import QUESTIONS
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS, Attempts
from kvshelf.workers.replica.calls import Threads, log_as, named_errors
from kvshelf.workers.replica.create.auto import Selection
from kvshelf.workers.replica.create.created import Created, Stored
from kvshelf.workers.replica.create.estimates import Rates, estimate
from kvshelf.workers.replica.create.negative_cache import Refusals
from kvshelf.workers.replica.create.publish import Shelving
from kvshelf.workers.replica.create.spec import Levels, encoded, wanted
from kvshelf.workers.replica.phases import Phase, in_sequence, rounded
from kvshelf.workers.replica.scheduler import Scheduler, Work
from kvshelf.workers.replica.singleflight import Flights
from kvshelf.workers.replica.ticket import Ticket

ResultT = TypeVar("ResultT")

log = structlog.get_logger("kvshelf.workers")

_HANG_S = 2.0
"""After its deadline, how long a document may take to come to the end of a layer. Less than callers wait for it."""


class Creations:
    """What one replica creates. `worker` is its name in the ledger.

    `questions` measure the quality of each new cache; 0 leaves it out, but where a request has a `min_quality`. Longer
    documents than `max_document_tokens` are refused; None: the model takes what it can.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        scheduler: Scheduler,
        threads: Threads,
        *,
        worker: str,
        questions: int = QUESTIONS,
        max_document_tokens: int | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._scheduler = scheduler
        self._threads = threads
        self._worker = worker
        self._attempts = Attempts(store.ledger, worker, threads)
        self._questions = questions
        self._max_document_tokens = max_document_tokens
        self._flights: Flights[Created] = Flights()
        self._refusals = Refusals()
        self._rates = Rates()

    async def create(
        self,
        spec: Mapping[str, Any],
        *,
        tenant: str,
        deadline_s: float | None = None,
        request_id: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        origin: str = "",
    ) -> Created:
        """Compress what `spec` describes (the fields of `CreateCache`) and store it, unless the shelf has it.

        With `request_id`, a request of the ledger, the attempt is counted there before any work, and its end recorded:
        the failure of the `max_attempts`th is final.
        """
        log_as(origin)
        if request_id is None:
            with named_errors():
                return await self._create(spec, tenant, deadline_s)
        self._scheduler.require_room()  # a full queue is no attempt
        async with self._attempts.counted(request_id, tenant, max_attempts=max_attempts) as attempt:
            with named_errors():
                created = await self._create(spec, tenant, deadline_s)
            ids = [cache.manifest["id"] for cache in created.caches]
            await self._threads.run(self._store.ledger.finish, request_id, attempt, cache_ids=ids)
            return replace(created, worker=self._worker)

    async def estimate(self, spec: Mapping[str, Any], *, origin: str = "") -> dict[str, Any]:
        """What creating this would take, see `estimates.estimate`: in seconds as this replica has measured them."""
        log_as(origin)
        with named_errors():
            document = await self._threads.run(encoded, self._engine, spec, self._max_document_tokens)
            return await self._threads.run(estimate, self._engine, self._rates, document, spec)

    async def _create(self, spec: Mapping[str, Any], tenant: str, deadline_s: float | None) -> Created:
        work = await self._threads.run(wanted, self._engine, spec, self._questions, self._max_document_tokens)
        shelving = Shelving.of(self._store, tenant, spec, work.levels)
        if isinstance(work, Selection):
            key = f"{work.min_quality!r} of {' '.join(shelving.ids)}"
            created, began = await self._flights.join(key, lambda: self._choose(work, shelving, deadline_s))
        else:
            key = " ".join(shelving.ids)
            created, began = await self._flights.join(key, lambda: self._make(work, shelving, deadline_s))
        caches = [cache if began else replace(cache, existing=True) for cache in created.caches]
        if any(cache.existing for cache in caches):
            caches = await self._threads.run(_as_asked, shelving, caches)
        return Created(tuple(caches), created.phases if began else ())

    async def _make(self, work: Levels, shelving: Shelving, deadline_s: float | None) -> Created:
        """Every level: those on the shelf as they are, the others from as few prefills as may be."""
        there = await self._threads.run(shelving.there)
        missing = [(id_, level) for id_, level in zip(shelving.ids, work.levels, strict=True) if id_ not in there]
        stored = dict(there)
        phases: tuple[Phase, ...] = ()
        if missing:
            fewer = replace(work, levels=tuple(level for _, level in missing))
            made, ticket = await self._run(fewer, shelving.tenant, deadline_s)
            for (id_, level), compression in zip(missing, made, strict=True):
                stored[id_] = await self._threads.run(shelving.put, level, compression, ticket.queue_s)
            phases = self._record([stored[id_] for id_, _ in missing], ticket)
        return Created(tuple(Stored(_plain(stored[id_]), id_ in there) for id_ in shelving.ids), phases)

    async def _choose(self, work: Selection, shelving: Shelving, deadline_s: float | None) -> Created:
        """The smallest level that is good enough, and only that."""
        there = await self._threads.run(shelving.there)
        known = shelving.known(work, there, self._refusals.of(shelving.ids))
        if known is not None:
            return Created((Stored(_plain(known), existing=True),))
        try:
            choice, ticket = await self._run(work, shelving.tenant, deadline_s)
        except QualityBelowFloor as refusal:
            self._refusals.remember(shelving.ids, refusal)
            raise
        manifest = await self._threads.run(shelving.put_choice, work, choice, ticket.queue_s)
        phases = self._record([manifest], ticket)
        return Created((Stored(_plain(manifest), manifest.id in there),), phases)

    async def _run(self, work: Work[ResultT], tenant: str, deadline_s: float | None) -> tuple[ResultT, Ticket[ResultT]]:
        """Have the model do it; it stops within a layer when its caller goes away."""
        await self._threads.run(self._store.admit, tenant)
        ticket = self._scheduler.compress(work, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(None if deadline_s is None else deadline_s + _HANG_S):
                return await asyncio.wrap_future(ticket.future), ticket
        except TimeoutError as exc:  # the scheduler itself ends what is late, between two units of work
            raise ticket.too_late() from exc
        finally:
            ticket.cancel()

    def _record(self, new: Sequence[Manifest], ticket: Ticket[Any]) -> tuple[Phase, ...]:
        """Remember how long it took, and log it; returns the phases of it."""
        prefill_s = sum({made.timings.prefill_s for made in new})  # the same to the last bit: they share it
        compress_s, store_s = (sum(getattr(made.timings, name) for made in new) for name in ("compress_s", "store_s"))
        measure_s = max(0.0, ticket.worked_s - prefill_s - compress_s)
        phases = in_sequence(
            queue=ticket.queue_s, prefill=prefill_s, compress=compress_s, measure=measure_s, store=store_s
        )
        for made in new:
            self._rates.add(made.policy, made.num_tokens, made.timings)
            about = {"tokens": made.num_tokens, "kept": made.kept_tokens, "tried": len(made.tried)}
            if made.quality is not None:
                about["agreement"] = made.quality["agreement"]
            log.info("compressed", cache_id=made.id, **about, **rounded(phases))
        return phases


def _as_asked(shelving: Shelving, caches: Sequence[Stored]) -> list[Stored]:
    return [
        replace(cache, manifest=_plain(shelving.as_asked(Manifest.model_validate(cache.manifest))))
        if cache.existing
        else cache
        for cache in caches
    ]


def _plain(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")
